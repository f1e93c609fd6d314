"""Exercises of notebook 12: what a second prompt finds, a faulty prefix cache, and the order of a prompt's parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises import faulty_cache

Parts = Mapping[str, tuple[int, float]]


# ---- 12-1: what the second prompt finds ------------------------------------------------------------------------------


def hits(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    """Tokens of ``second`` in whole blocks of a common beginning, its last token not among them."""
    return min(faulty_cache.common(first, second), len(second) - 1) // block_size * block_size


def _single_tokens(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    return min(faulty_cache.common(first, second), len(second) - 1)


def _last_too(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    return faulty_cache.common(first, second) // block_size * block_size


def _rounds_up(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    return -(-_single_tokens(first, second, block_size) // block_size) * block_size


def _last_block_never(first: Sequence[int], second: Sequence[int], block_size: int) -> int:
    return min(faulty_cache.common(first, second) // block_size, max(0, len(second) // block_size - 1)) * block_size


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
    faulty_cache.EXERCISE,
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
