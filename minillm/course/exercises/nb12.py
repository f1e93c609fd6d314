"""Exercises of notebook 12: what a second prompt finds, a faulty prefix cache, and the order of a prompt's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from minillm.course.checking import Exercise, Misconception

Parts = Mapping[str, tuple[int, float]]


# ---- 12-1: what the second prompt finds ------------------------------------------------------------------------------


def hits(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    """Tokens of ``second`` in whole blocks of a common beginning, its last token not among them."""
    return min(_common(first, second), len(second) - 1) // block_size * block_size


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))


def _single_tokens(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    return min(_common(first, second), len(second) - 1)


def _last_too(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    return _common(first, second) // block_size * block_size


def _rounds_up(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    return -(-_single_tokens(first, second, block_size) // block_size) * block_size


def _last_block_never(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    return min(_common(first, second) // block_size, max(0, len(second) // block_size - 1)) * block_size


def _any_equal_block(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    """Blocks at the same place, wherever they are equal."""
    most = (len(second) - 1) // block_size
    return block_size * sum(
        list(first[i * block_size:(i + 1) * block_size]) == list(second[i * block_size:(i + 1) * block_size])
        for i in range(most))


def _blocks_anywhere(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    """Blocks of the second that stand in the first, at whatever place."""
    blocks = [tuple(first[i:i + block_size]) for i in range(0, len(first) - block_size + 1, block_size)]
    return block_size * sum(tuple(second[i * block_size:(i + 1) * block_size]) in blocks
                            for i in range((len(second) - 1) // block_size))


def _equal_tokens(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    same = sum(a == b for a, b in zip(first, second))
    return min(same, len(second) - 1) // block_size * block_size


def _number_of_blocks(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    return hits(first, second, block_size) // block_size


def _last_of_the_first(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    """Takes the first prompt's last token for one without K and V."""
    return hits(first[:-1], second, block_size)


def _past_the_shorter(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    """Walks the second prompt and asks the first for tokens that it does not have."""
    count = 0
    while count < len(second) - 1 and first[count] == second[count]:
        count += 1
    return count // block_size * block_size


# ---- 12-2: a prefix cache with a fault -------------------------------------------------------------------------------


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
            hits = max([hits, *(_common(kept, ids[:-1]) for kept in self._unfilled
                                if _common(kept, ids) - hits in range(size) and len(kept) - hits in range(1, size))])
            self._unfilled.append(tuple(ids))
        return hits

    def _name(self, ids: Sequence[int], end: int) -> tuple[int, ...]:
        return tuple(ids[end - self.block_size if self._fault == "no parent" else 0:end])


FAULTS = ("no parent", "matches the last token", "shares unfilled blocks", "heads first", "none")


class _Unlisted:
    """Equal to whatever is not one of the five names: it stands for every misspelt verdict, and for none at all."""

    def __eq__(self, other: object) -> bool:
        return other not in FAULTS

    def __repr__(self) -> str:
        return "'no parents'"


def built_with(cache: Cache) -> str:
    """The fault that the cache was made with: what is expected comes from no probe, which could be wrong itself."""
    return cache._fault


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


def _two_prompts(cache: Cache) -> str:
    """Asks for the second block of one prompt as the second of another, whose first is not found."""
    found = find_fault(cache)
    return "none" if found == "no parent" else found


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


def _never_evicts(cache: Cache) -> str:
    found = find_fault(cache)
    return "none" if found == "heads first" else found


def _swapped(cache: Cache) -> str:
    """Takes heads that survive for the fault."""
    found = find_fault(cache)
    return {"heads first": "none", "none": "heads first"}.get(found, found)


def _same_tokens_again(cache: Cache) -> str:
    """All probes with the same token: what one left behind is found by the next."""
    size = cache.block_size
    cache.serve([1] * size)
    if cache.serve([1] * size):
        return "matches the last token"
    return "no parent" if cache.serve([1] * (size + 1)) else find_fault(cache)


def _not_a_verdict(cache: Cache) -> object:
    return _Unlisted()


def _always_none(cache: Cache) -> str:
    return "none"


# ---- 12-3: the order of a prompt's parts -----------------------------------------------------------------------------


def order(parts: Parts) -> list[str]:
    """Of two neighbours, a goes first if that finds more: tokens x (1 - change) / change, the largest first."""
    return sorted(parts, key=lambda name: -_worth(*parts[name]))


def _worth(tokens: int, change: float) -> float:
    return tokens * (1 - change) / change if change else float("inf")


def _rarest_first(parts: Parts) -> list[str]:
    return sorted(parts, key=lambda name: parts[name][1])


def _longest_first(parts: Parts) -> list[str]:
    return sorted(parts, key=lambda name: -parts[name][0])


def _kept_tokens(parts: Parts) -> list[str]:
    return sorted(parts, key=lambda name: -parts[name][0] * (1 - parts[name][1]))


def _tokens_over_change(parts: Parts) -> list[str]:
    return sorted(parts, key=lambda name: -parts[name][0] / parts[name][1] if parts[name][1] else -float("inf"))


def _as_given(parts: Parts) -> list[str]:
    return list(parts)


def _worst_first(parts: Parts) -> list[str]:
    return order(parts)[::-1]


def _divides_by_zero(parts: Parts) -> list[str]:
    return sorted(parts, key=lambda name: -parts[name][0] * (1 - parts[name][1]) / parts[name][1])


def _pairs(parts: Parts) -> list[tuple[str, tuple[int, float]]]:
    return [(name, parts[name]) for name in order(parts)]


_MANY = {f"part {i}": (100 + (i * 7919) % 1900, 0.04 + (i * 31 % 23) / 25) for i in range(14)}

EXERCISES = {task.id: task for task in (
    Exercise(
        "12-1", "what the second finds", hits,
        cases=(([1, 2, 3, 4, 5], [1, 2, 3, 4, 9], 2), ([1, 2, 3, 9, 5], [1, 2, 3, 8, 5, 7], 2),
               ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 5, 6, 7], 2), ([1, 2, 3, 4], [1, 2, 3, 4], 2),
               ([1, 2, 3, 4], [1, 2, 3, 4], 4), ([1, 2, 3, 4], [1, 2, 3, 4, 5], 4),
               ([9, 9, 1, 2, 3], [8, 8, 1, 2, 3], 2), ([1, 1, 2, 2, 3], [2, 2, 1, 1, 3], 2), ([5], [5], 1),
               (list(range(40)), list(range(25)), 8), (list(range(25)), list(range(40)), 8), ([1, 2], [1, 3], 16),
               ([7] * 32, [7] * 33, 16)),
        misconceptions=(
            Misconception(_single_tokens, "only whole blocks are found"),
            Misconception(_last_too, "the last token must be computed: nobody kept its logits"),
            Misconception(_rounds_up, "a block that is equal in part is not found: round down"),
            Misconception(_last_block_never, "only the last token must be computed; a whole block before it is found"),
            Misconception(_any_equal_block, "after the first difference nothing is found: K and V of all later tokens "
                                            "differ"),
            Misconception(_blocks_anywhere, "the same tokens after another beginning have other K and V"),
            Misconception(_equal_tokens, "count equal tokens only up to the first difference"),
            Misconception(_number_of_blocks, "return tokens, not blocks"),
            Misconception(_last_of_the_first, "the first prompt was computed to its end: its last token has K and V "
                                              "too"),
            Misconception(_past_the_shorter, "the first prompt may be the shorter one"),
        )),
    Exercise(
        "12-2", "the faulty prefix cache", built_with,
        cases=tuple((Cache(blocks, size, fault),) for blocks, size in ((6, 4), (4, 3), (9, 2)) for fault in FAULTS),
        misconceptions=(
            Misconception(_always_none, "put one probe to each fault. This one shows when a block of an earlier prompt "
                                        "comes again behind another beginning"),
            Misconception(_two_prompts, "the second block is asked for only if the first is found. Without a parent, "
                                        "does a name tell at which place of a prompt its block stands?"),
            Misconception(_no_room_for_the_probe, "a probe evicts too: count the blocks that its prompts need against "
                                                  "cache.num_blocks"),
            Misconception(_blocks_of_four, "blocks may have another size than four: ask cache.block_size"),
            Misconception(_any_hit_is_a_fault, "with one token more than a block, the block may be found: use a prompt "
                                               "of exactly one block"),
            Misconception(_never_evicts, "fill the cache with one long prompt, push out one block, and ask for the "
                                         "long prompt again"),
            Misconception(_never_full, "the cache may have another number of blocks than six: ask cache.num_blocks"),
            Misconception(_swapped, "the tail must go first: then the head of the prompt is still found"),
            Misconception(_same_tokens_again, "what one probe leaves behind is found by the next: use other tokens"),
            Misconception(_not_a_verdict, "return one of these, spelt so: " + ", ".join(FAULTS)),
        )),
    Exercise(
        "12-3", "the best order", order,
        cases=tuple((parts,) for parts in (
            {"question": (50, 1.0), "system": (500, 0.1)}, {"time": (10, 1.0), "rules": (300, 0.0), "user": (80, 0.5)},
            {"system": (100, 0.05), "documents": (3000, 0.25), "question": (40, 1.0)},
            {"a": (100, 0.1), "b": (250, 0.3), "c": (900, 0.8)}, {"a": (200, 0.5), "b": (900, 0.9), "c": (30, 0.02)},
            {"a": (100, 0.5), "b": (300, 0.8), "c": (60, 0.35)}, _MANY)),
        misconceptions=(
            Misconception(_rarest_first, "a long part that changes now and then may be worth more in front than a "
                                         "short one that hardly ever does"),
            Misconception(_longest_first, "a long part that changes each time in front ruins all that follows"),
            Misconception(_kept_tokens, "compare the two orders of two parts: a part in front is also what can ruin "
                                        "the one behind it"),
            Misconception(_tokens_over_change, "for two parts a, b write down the tokens found with a first and with b "
                                               "first, and subtract: a factor is missing"),
            Misconception(_as_given, "the order is yours to choose"),
            Misconception(_worst_first, "this is the worst order: turn it round"),
            Misconception(_pairs, "return the names alone, without their tokens and chances"),
            Misconception(_divides_by_zero, "a part that never changes has a chance of 0: it goes first"),
        )),
)}
