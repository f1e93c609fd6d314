"""Exercises of notebook 11: runs of cache slots, a pool that leaks, and the cheapest block size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.course.checking import Exercise, Misconception

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


@dataclass
class ToyPool:
    """Blocks for tables that are plain lists, with at most one fault. ``only`` says when the fault shows: always, when
    a table ``grows``, when its last block is ``part filled``, or ``late``: not in a table's first four blocks."""

    name: str
    fault: str = "none"
    num_blocks: int = 40
    block_size: int = 4
    only: str = "always"
    free: list[int] = field(default_factory=list, repr=False)
    tokens: dict[int, int] = field(default_factory=dict, repr=False)  # by id of table

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))[::-1]

    def __repr__(self) -> str:
        return f"pool {self.name}"

    @property
    def num_available(self) -> int:
        """What the pool takes for free."""
        return len(self.free)

    def allocate(self, table: list[int], num_tokens: int) -> bool:
        """Room for ``num_tokens`` in all; False, and nothing changes, where too few blocks are free."""
        needed = -(-num_tokens // self.block_size)
        if needed - len(table) > len(self.free):
            return False
        shows = {"grows": bool(table), "late": needed > 4, "on release": False}.get(self.only, True)
        exact = num_tokens % self.block_size == 0
        if self.fault == "one too many" and exact and shows and needed - len(table) < len(self.free):
            needed = max(needed + 1, len(table))
        while len(table) < needed:
            table.append(self.free.pop())
            if self.fault == "gives a block twice" and shows:
                self.free.insert(-1 if self.only == "always" else 0, table[-1])
                shows = False
        self.tokens[id(table)] = num_tokens
        return True

    def release(self, table: list[int]) -> None:
        """Take all blocks of a table back."""
        part_filled = self.tokens.pop(id(table), 0) % self.block_size != 0
        kept = 0
        if self.fault == "forgets the last block" and table:
            kept = {"part filled": part_filled, "late": len(table) > 4}.get(self.only, True)
        if self.fault == "gives a block twice" and self.only == "on release" and len(table) > 1:
            self.free.insert(0, table[0])
        self.free += table[:len(table) - kept][::-1]
        table.clear()


def find_fault(pool: ToyPool) -> str:
    """Two tables grow by turns, a token at a time, to half of the pool each; then both leave."""
    tables, size = ([], []), pool.block_size
    for count in range(1, pool.num_blocks // 2 * size + 1):
        for table in tables:
            if not pool.allocate(table, count):
                return "one too many"
            if len(table) > -(-count // size):
                return "one too many"
    if len({*tables[0], *tables[1]}) < len(tables[0]) + len(tables[1]):
        return "gives a block twice"
    for table, tokens in zip(tables, (6 * size, 6 * size - 1), strict=True):
        pool.release(table)
        pool.allocate(table, tokens)
    for table in tables:
        pool.release(table)
    if pool.num_available == pool.num_blocks:
        return "none"
    return "forgets the last block" if pool.num_available < pool.num_blocks else "gives a block twice"


def _never_releases(pool: ToyPool) -> str:
    tables = [], []
    for count in range(1, pool.num_blocks // 2 * pool.block_size + 1):
        for table in tables:
            if not pool.allocate(table, count) or len(table) > -(-count // pool.block_size):
                return "one too many"
    return "gives a block twice" if {*tables[0]} & {*tables[1]} else "none"


def _counts_at_the_end(pool: ToyPool) -> str:
    """Allocates and releases once and looks at what is free alone."""
    table: list[int] = []
    pool.allocate(table, 3 * pool.block_size - 1)
    pool.allocate(table, 6 * pool.block_size)
    pool.release(table)
    free, all_blocks = pool.num_available, pool.num_blocks
    return "none" if free == all_blocks else "forgets the last block" if free < all_blocks else "gives a block twice"


def _whole_blocks(pool: ToyPool) -> str:
    """Only ever asks for whole blocks: a last block that is filled in part never comes up."""
    tables, size = ([], []), pool.block_size
    for count in range(size, pool.num_blocks // 2 * size + 1, size):
        for table in tables:
            if not pool.allocate(table, count) or len(table) > count // size:
                return "one too many"
    if len({*tables[0], *tables[1]}) < len(tables[0]) + len(tables[1]):
        return "gives a block twice"
    for table in tables:
        pool.release(table)
    free = pool.num_available
    return "none" if free == pool.num_blocks else (
        "forgets the last block" if free < pool.num_blocks else "gives a block twice")


def _one_allocation(pool: ToyPool) -> str:
    """Never lets a table grow."""
    tables, size = ([], []), pool.block_size
    for table in tables:
        pool.allocate(table, 2 * size)
        if len(table) > 2:
            return "one too many"
    if {*tables[0]} & {*tables[1]}:
        return "gives a block twice"
    for table in tables:
        pool.release(table)
    pool.allocate(tables[0], 1)
    pool.release(tables[0])
    free = pool.num_available
    return "none" if free == pool.num_blocks else (
        "forgets the last block" if free < pool.num_blocks else "gives a block twice")


def _small(pool: ToyPool) -> str:
    """Probes well, with tables of three blocks at most."""
    toy, size = pool, pool.block_size
    tables: tuple[list[int], list[int]] = ([], [])
    for count in range(1, 3 * size + 1):
        for table in tables:
            toy.allocate(table, count)
            if len(table) > -(-count // size):
                return "one too many"
    if {*tables[0]} & {*tables[1]}:
        return "gives a block twice"
    for table, tokens in zip(tables, (3 * size, 3 * size - 1), strict=True):
        toy.release(table)
        toy.allocate(table, tokens)
    for table in tables:
        toy.release(table)
    free = toy.num_available
    return "none" if free == toy.num_blocks else (
        "forgets the last block" if free < toy.num_blocks else "gives a block twice")


def _too_many_is_forgotten(pool: ToyPool) -> str:
    """Takes any number of free blocks that is too high for no fault."""
    found = find_fault(pool)
    return "none" if found == "gives a block twice" else found


def _no_exact_fit(pool: ToyPool) -> str:
    found = find_fault(pool)
    return "none" if found == "one too many" else found


def _another_spelling(pool: ToyPool) -> str:
    return find_fault(pool).replace(" ", "_")


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
    Exercise(
        "11-2", "the pool that leaks", find_fault,
        cases=((ToyPool("A"),), (ToyPool("B", "forgets the last block"),), (ToyPool("C", "one too many"),),
               (ToyPool("D", "gives a block twice"),), (ToyPool("E", "gives a block twice", only="on release"),),
               (ToyPool("F", "forgets the last block", block_size=16, only="part filled"),),
               (ToyPool("G", "one too many", block_size=7, only="grows"),),
               (ToyPool("H", "gives a block twice", num_blocks=64, only="grows"),),
               (ToyPool("I", "forgets the last block", only="late"),), (ToyPool("J", "one too many", only="late"),),
               (ToyPool("K", "gives a block twice", only="late"),), (ToyPool("L", num_blocks=20, block_size=5),)),
        misconceptions=(
            Misconception(_never_releases, "let tables leave too: are all blocks free then, and no more than all?"),
            Misconception(_counts_at_the_end, "count a table's blocks after each allocation, and compare two tables: "
                                              "what is free at the end is not all"),
            Misconception(_whole_blocks, "let a table leave whose last block is filled in part"),
            Misconception(_one_allocation, "let a table grow, token by token, over several blocks"),
            Misconception(_small, "let tables become longer than four blocks"),
            Misconception(_too_many_is_forgotten, "more free blocks than there are: one came back twice"),
            Misconception(_no_exact_fit, "ask for exactly block_size tokens, and twice that: how many blocks come?"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
        )),
    Exercise(
        "11-3", "the cheapest block", block_size,
        cases=(([10], 1), ([5, 6, 7], 1), ([8, 16, 24, 40], 3), ([9, 9, 9], 0), ([100, 40, 7, 61], 2), (_LIVES, 4),
               (_LIVES, 30), ([n + 13 for n in _LIVES], 4), ([30, 31], 100)),
        misconceptions=(
            Misconception(_smallest_of_equals, "of equally cheap sizes return the largest: its tables are shorter"),
            Misconception(_powers_of_two, "a block may have any number of tokens, not only a power of two"),
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
