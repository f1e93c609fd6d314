"""Exercises of notebook 11: runs of cache slots, a pool that leaks, and the cheapest block size."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises import toy_pool

Runs = list[list[int]]
Table = Sequence[int]


def runs(table: Table, start: int, end: int, block_size: int) -> Runs:
    """The slots of positions ``start`` to before ``end`` as [first slot, how many]; neighbours in memory are one."""
    return _merged([table[p // block_size] * block_size + p % block_size for p in range(start, end)])


def _merged(slots: Sequence[int]) -> Runs:
    found: Runs = []
    for slot in slots:
        if found and slot == sum(found[-1]):
            found[-1][1] += 1
        else:
            found.append([slot, 1])
    return found


def _run_a_block(table: Table, start: int, end: int, block_size: int) -> Runs:
    found: Runs = []
    for p in range(start, end):
        if found and p % block_size:
            found[-1][1] += 1
        else:
            found.append([table[p // block_size] * block_size + p % block_size, 1])
    return found


def _end_included(table: Table, start: int, end: int, block_size: int) -> Runs:
    return runs(table, start, end + 1, block_size)


def _from_zero(table: Table, start: int, end: int, block_size: int) -> Runs:
    return runs(table, 0, end, block_size)


def _first_block_from_its_start(table: Table, start: int, end: int, block_size: int) -> Runs:
    return runs(table, start - start % block_size, end, block_size)


def _to_the_end_of_the_block(table: Table, start: int, end: int, block_size: int) -> Runs:
    return runs(table, start, -(-end // block_size) * block_size, block_size) if end > start else []


def _no_table(table: Table, start: int, end: int, block_size: int) -> Runs:
    return _merged(list(range(start, end)))


def _mixed_up(table: Table, start: int, end: int, block_size: int) -> Runs:
    return _merged([table[p % block_size] * block_size + p // block_size for p in range(start, end)])


def _blocks_for_slots(table: Table, start: int, end: int, block_size: int) -> Runs:
    return _merged([table[p // block_size] + p % block_size for p in range(start, end)])


def _in_order_of_memory(table: Table, start: int, end: int, block_size: int) -> Runs:
    return _merged(sorted(table[p // block_size] * block_size + p % block_size for p in range(start, end)))


def _first_and_last(table: Table, start: int, end: int, block_size: int) -> Runs:
    return [[first, first + count - 1] for first, count in runs(table, start, end, block_size)]


def _first_and_after(table: Table, start: int, end: int, block_size: int) -> Runs:
    return [[first, first + count] for first, count in runs(table, start, end, block_size)]


def _single_slots(table: Table, start: int, end: int, block_size: int) -> list[int]:
    return [table[p // block_size] * block_size + p % block_size for p in range(start, end)]


def _runs_of_one(table: Table, start: int, end: int, block_size: int) -> Runs:
    return [[slot, 1] for slot in _single_slots(table, start, end, block_size)]


def block_size(lengths: Sequence[int], price: int) -> int:
    """The least sum of unused slots and ``price`` a block; the largest of equals."""
    return min(range(max(lengths), 0, -1), key=lambda size: cost(lengths, price, size))


def cost(lengths: Sequence[int], price: int, size: int) -> int:
    """Slots that are held and not used, and what the blocks cost beside."""
    blocks = [-(-n // size) for n in lengths]
    return sum(blocks) * (size + price) - sum(lengths)


def _smallest_of_equals(lengths: Sequence[int], price: int) -> int:
    return min(range(1, max(lengths) + 1), key=lambda size: cost(lengths, price, size))


def _powers_of_two(lengths: Sequence[int], price: int) -> int:
    return min((2**k for k in range(12, -1, -1)), key=lambda size: cost(lengths, price, size))


def _small_powers_of_two(lengths: Sequence[int], price: int) -> int:
    """No longer than the longest; the smallest of equals."""
    return min((2**k for k in range(max(lengths).bit_length())), key=lambda size: cost(lengths, price, size))


def _always_16(lengths: Sequence[int], price: int) -> int:
    return 16


def _rounds_down(lengths: Sequence[int], price: int) -> int:
    return min(range(max(lengths), 0, -1),
               key=lambda size: sum(n % size + price * (n // size) for n in lengths))


def _full_blocks_waste(lengths: Sequence[int], price: int) -> int:
    """A length that fills its last block exactly is given one more."""
    return min(range(max(lengths), 0, -1),
               key=lambda size: sum(size - n % size + price * (n // size + 1) for n in lengths))


def _by_waste_alone(lengths: Sequence[int], price: int) -> int:
    return block_size(lengths, 0)


def _by_price_alone(lengths: Sequence[int], price: int) -> int:
    return max(lengths)


def _square_root(lengths: Sequence[int], price: int) -> int:
    return max(1, round((2 * price * sum(lengths) / len(lengths)) ** 0.5))


def _of_the_mean(lengths: Sequence[int], price: int) -> int:
    return block_size([sum(lengths) // len(lengths)], price)


def _least_cost(lengths: Sequence[int], price: int) -> int:
    return cost(lengths, price, block_size(lengths, price))


_LIVES = (700, 230, 119, 455, 304, 161, 289, 377, 94, 412, 268, 333, 205, 180, 421, 147)


EXERCISES = {task.id: task for task in (
    Exercise(
        "11-1", "runs of slots", runs,
        cases=(([2, 0], 0, 6, 4), ([2, 3], 0, 8, 4), ([5, 2, 3, 9], 5, 14, 4), ([3, 2], 1, 4, 2), ([7], 2, 3, 8),
               ([1, 2, 3, 0], 0, 4, 1), ([4, 5, 6], 8, 8, 4), ([9, 1, 2, 3], 15, 49, 16)),
        misconceptions=(
            Misconception(_run_a_block, "blocks that are neighbours in memory make one run: [2, 3], not [2, 0]"),
            Misconception(_end_included, "position `end` is not among them: they are `end - start` tokens"),
            Misconception(_from_zero, "the run begins with position `start`, which need not be 0"),
            Misconception(_first_block_from_its_start, "`start` may lie in the middle of a block: its place is "
                                                       "start % block_size"),
            Misconception(_to_the_end_of_the_block, "the last block is read only as far as position end - 1"),
            Misconception(_no_table, "a position is no slot: the table says in which block it lies"),
            Misconception(_mixed_up, "which block: position // block_size. Which place in it: position % block_size"),
            Misconception(_blocks_for_slots, "block b begins at slot b x block_size"),
            Misconception(_in_order_of_memory, "keep the order of the tokens, also where their blocks go backwards"),
            Misconception(_first_and_last, "a run is [first slot, how many], not [first, last]"),
            Misconception(_first_and_after, "a run is [first slot, how many], not where it ends"),
            Misconception(_single_slots, "put neighbours together: [8, 9, 10] is the run [8, 3]"),
            Misconception(_runs_of_one, "put neighbours together: [8, 1], [9, 1] is one run, [8, 2]"),
        )),
    toy_pool.EXERCISE,
    Exercise(
        "11-3", "the cheapest block", block_size,
        cases=(([10], 1), ([5, 6, 7], 1), ([8, 16, 24, 40], 3), ([9, 9, 9], 0), ([100, 40, 7, 61], 2), (_LIVES, 4),
               (_LIVES, 30), ([n + 13 for n in _LIVES], 4), ([30, 31], 100)),
        misconceptions=(
            Misconception(_smallest_of_equals, "of equally cheap sizes return the largest: its tables are shorter"),
            Misconception(_powers_of_two, "a block may have any number of tokens, not only a power of two"),
            Misconception(_small_powers_of_two, "try every size up to the longest, not only powers of two"),
            Misconception(_always_16, "16 is an engine's habit: what do these lengths cost in blocks of 15, or of 17?"),
            Misconception(_rounds_down, "a last block that is filled in part is a block too: round up"),
            Misconception(_full_blocks_waste, "where the last block is filled exactly nothing is wasted: -n % size"),
            Misconception(_by_waste_alone, "each block costs `price` beside its unused slots"),
            Misconception(_by_price_alone, "few large blocks cost little bookkeeping, and much room"),
            Misconception(_square_root, "the square root is where the costs balance for lengths of any kind; for these "
                                        "lengths try every size"),
            Misconception(_of_the_mean, "add up the cost of all lengths, not of their mean: each has a last block"),
            Misconception(_least_cost, "return the size, not its cost"),
        )),
)}
