"""The prefix cache with a fault of exercise 12-2, and answers to what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises.faulty import Unlisted, always_none, built_with, mistaking


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))


class Cache:
    """A prefix cache of ``num_blocks`` blocks of ``block_size`` tokens that serves prompts one after another."""

    def __init__(self, num_blocks: int, block_size: int, fault: str):
        self.num_blocks, self.block_size, self._fault = num_blocks, block_size, fault
        self._kept: dict[tuple[int, ...], None] = {}  # from the least recently used to the most
        self._unfilled: list[tuple[int, ...]] = []

    def __repr__(self) -> str:
        return f"a cache of {self.num_blocks} blocks of {self.block_size} tokens"

    def serve(self, ids: Sequence[int]) -> int:
        """Serve a prompt to its end; the number of its tokens that were found."""
        size, ids = self.block_size, list(ids)
        if not ids or len(ids) > self.num_blocks * size:
            raise ValueError(f"this cache serves 1 to {self.num_blocks * size} tokens, got {len(ids)}")
        names = [self._name(ids, end) for end in range(size, len(ids) + 1, size)]
        most = (len(ids) - (self._fault != "matches the last token")) // size
        found = list(takewhile(self._kept.__contains__, names[:most]))
        for name in found:
            del self._kept[name]
        held = -(-len(ids) // size)
        while len(self._kept) + held > self.num_blocks:
            del self._kept[next(iter(self._kept))]
        for name in names if self._fault == "heads first" else reversed(names):
            self._kept.pop(name, None)
            self._kept[name] = None
        hits = len(found) * size
        if self._fault == "shares unfilled blocks":
            hits = max([hits, *(common(kept, ids[:-1]) for kept in self._unfilled
                                if common(kept, ids) - hits in range(size) and len(kept) - hits in range(1, size))])
            self._unfilled.append(tuple(ids))
        return hits

    def _name(self, ids: Sequence[int], end: int) -> tuple[int, ...]:
        return tuple(ids[end - self.block_size if self._fault == "no parent" else 0:end])


FAULTS = ("no parent", "matches the last token", "shares unfilled blocks", "heads first", "none")


def find_fault(cache: Cache) -> str:
    """One probe a fault, each with tokens of its own. Two blocks are room enough for each."""
    size, room = cache.block_size, cache.num_blocks
    probe = [1] * size
    cache.serve(probe)
    if cache.serve(probe):
        return "matches the last token"
    half = [2] * (2 * size - 1)
    cache.serve(half)
    if cache.serve([*half, 3]) % size:
        return "shares unfilled blocks"
    head, tail = [4] * size, [5] * size
    cache.serve([*head, *tail])
    if cache.serve([*tail, 6]):
        return "no parent"
    long = list(range(10, 10 + room * size))
    cache.serve(long)
    cache.serve([9] * size)  # one block is evicted: the tail of `long`, or its head
    return "none" if cache.serve(long) else "heads first"


def _never_full(cache: Cache) -> str:
    """Its probe of eviction assumes a pool of six blocks of four tokens."""
    found = find_fault(cache)
    return found if found != "heads first" or cache.num_blocks == 6 else "none"


def _no_room_for_the_probe(cache: Cache) -> str:
    """Looks for a missing parent with a third prompt, when four blocks have given up the first one's tail."""
    found = find_fault(cache)
    if found != "no parent":
        return found
    a, b, x, y = ([token] * cache.block_size for token in (44, 45, 46, 47))
    cache.serve([*a, *x, 48])
    cache.serve([*b, *y, 48])
    return found if cache.serve([*b, *x, 48]) > cache.block_size else "none"


def _blocks_of_four(cache: Cache) -> str:
    """Assumes blocks of four tokens."""
    probe = [1] * 4
    cache.serve(probe)
    return "matches the last token" if cache.serve(probe) else find_fault(cache)


def _any_hit_is_a_fault(cache: Cache) -> str:
    """Takes a hit on the whole blocks before the last token for the fault."""
    probe = [1] * (cache.block_size + 1)
    cache.serve(probe)
    return "matches the last token" if cache.serve(probe) else find_fault(cache)


def _same_tokens_again(cache: Cache) -> str:
    """All probes with the same token: what one left behind is found by the next."""
    size = cache.block_size
    cache.serve([1] * size)
    if cache.serve([1] * size):
        return "matches the last token"
    return "no parent" if cache.serve([1] * (size + 1)) else find_fault(cache)


def _not_a_verdict(cache: Cache) -> object:
    return Unlisted(FAULTS, "no parents")


# ---- 12-3: the order of a prompt's parts -----------------------------------------------------------------------------


EXERCISE = Exercise(
    "12-2", "the faulty prefix cache", built_with,
    cases=tuple((Cache(blocks, size, fault),) for blocks, size in ((6, 4), (4, 3), (9, 2)) for fault in FAULTS),
    misconceptions=(
        Misconception(always_none, "put one probe to each fault. This one shows when a block of an earlier prompt "
                                   "comes again behind another beginning"),
        # Asks for the second block of one prompt as the second of another, whose first is not found.
        Misconception(mistaking(find_fault, {"no parent": "none"}),
                      "the second block is asked for only if the first is found. Without a parent, does a name tell "
                      "at which place of a prompt its block stands?"),
        Misconception(_no_room_for_the_probe, "a probe evicts too: count the blocks that its prompts need against "
                                              "cache.num_blocks"),
        Misconception(_blocks_of_four, "blocks may have another size than four: ask cache.block_size"),
        Misconception(_any_hit_is_a_fault, "with one token more than a block, the block may be found: use a prompt "
                                           "of exactly one block"),
        Misconception(mistaking(find_fault, {"heads first": "none"}),
                      "fill the cache with one long prompt, push out one block, and ask for the long prompt again"),
        Misconception(_never_full, "the cache may have another number of blocks than six: ask cache.num_blocks"),
        # Takes heads that survive for the fault.
        Misconception(mistaking(find_fault, {"heads first": "none", "none": "heads first"}),
                      "the tail must go first: then the head of the prompt is still found"),
        Misconception(_same_tokens_again, "what one probe leaves behind is found by the next: use other tokens"),
        Misconception(_not_a_verdict, "return one of these, spelt so: " + ", ".join(FAULTS)),
    ))
