"""The pool of exercise 11-2, which may lose blocks, and answers to what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.course.checking import Exercise, Misconception


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


EXERCISE = Exercise(
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
    ))
