"""The pool of exercise 11-2, which may lose blocks, and answers to what is wrong with it."""

from __future__ import annotations

from minillm.course.checking import Exercise, Misconception

# By the pool's name: its fault, and when that shows (it stands here, so that no attribute of a pool tells).
_FAULTS = {
    "B": ("forgets the last block", "always"), "C": ("one too many", "always"), "D": ("gives a block twice", "always"),
    "E": ("gives a block twice", "on release"), "F": ("forgets the last block", "part filled"),
    "G": ("one too many", "grows"), "H": ("gives a block twice", "grows"), "I": ("forgets the last block", "late"),
    "J": ("one too many", "late"), "K": ("gives a block twice", "late"),
    "M": ("gives a block twice", "beside another"), "N": ("gives a block twice", "two tables"),
    "O": ("gives a block twice", "two tables, late"),
}


class ToyPool:
    """Blocks for tables that are plain lists, with at most one fault, by its name. The fault shows always, when a table
    ``grows``, when its last block is ``part filled``, ``late``: not in a table's first four blocks, ``on release``,
    ``beside another`` table that holds blocks, or while ``two tables`` do: then the pool gives the other's last block
    and loses the one that it should give, so that the number of free blocks stays right."""

    def __init__(self, name: str, num_blocks: int = 40, block_size: int = 4):
        self.name, self.num_blocks, self.block_size = name, num_blocks, block_size
        self._free = list(range(num_blocks))[::-1]
        self._held: list[tuple[list[int], int]] = []  # each table and its tokens

    def __repr__(self) -> str:
        return f"pool {self.name}"

    @property
    def num_available(self) -> int:
        """What the pool takes for free."""
        return len(self._free)

    def _others(self, table: list[int]) -> list[tuple[list[int], int]]:
        return [held for held in self._held if held[0] is not table]

    def allocate(self, table: list[int], num_tokens: int) -> bool:
        """Room for ``num_tokens`` in all; False, and nothing changes, where too few blocks are free."""
        fault, only = _FAULTS.get(self.name, ("none", "always"))
        needed = -(-num_tokens // self.block_size)
        if needed - len(table) > len(self._free):
            return False
        others = self._others(table)
        shows = {"grows": bool(table), "late": needed > 4, "on release": False, "beside another": bool(others),
                 "two tables": bool(others), "two tables, late": bool(others) and needed > 4}.get(only, True)
        exact = num_tokens % self.block_size == 0
        if fault == "one too many" and exact and shows and needed - len(table) < len(self._free):
            needed = max(needed + 1, len(table))
        while len(table) < needed:
            table.append(self._free.pop())
            if fault == "gives a block twice" and shows:
                if only.startswith("two tables"):
                    table[-1] = others[-1][0][-1]
                else:
                    self._free.insert(-1 if only == "always" else 0, table[-1])
                shows = False
        self._held = [*others, *([(table, num_tokens)] if table else [])]
        return True

    def release(self, table: list[int]) -> None:
        """Take all blocks of a table back."""
        fault, only = _FAULTS.get(self.name, ("none", "always"))
        num_tokens = next((tokens for held, tokens in self._held if held is table), 0)
        self._held = self._others(table)
        kept = 0
        if fault == "forgets the last block" and table:
            kept = {"part filled": num_tokens % self.block_size != 0, "late": len(table) > 4}.get(only, True)
        if fault == "gives a block twice" and only == "on release" and len(table) > 1:
            self._free.insert(0, table[0])
        self._free += table[:len(table) - kept][::-1]
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


def _one_table(pool: ToyPool) -> str:
    """All that one table can show."""
    table: list[int] = []
    for tokens in (8 * pool.block_size, 6 * pool.block_size - 1):
        for count in range(1, tokens + 1):
            pool.allocate(table, count)
            if len(table) > -(-count // pool.block_size):
                return "one too many"
        if len({*table}) < len(table):
            return "gives a block twice"
        pool.release(table)
    return _by_count(pool.num_available, pool.num_blocks)


def _numbers_not_compared(pool: ToyPool) -> str:
    """Two tables at once, and only how many blocks there are."""
    tables, size = ([], []), pool.block_size
    for last in (8 * size, 6 * size - 1):
        for count in range(1, last + 1):
            for table in tables:
                pool.allocate(table, count)
                if len(table) > -(-count // size):
                    return "one too many"
        for table in tables:
            pool.release(table)
    return _by_count(pool.num_available, pool.num_blocks)


def _by_count(free: int, num_blocks: int) -> str:
    return "none" if free == num_blocks else "forgets the last block" if free < num_blocks else "gives a block twice"


def _any_difference_is_forgotten(pool: ToyPool) -> str:
    """Takes any number of free blocks but all for a forgotten one."""
    found = _numbers_not_compared(pool)
    return "forgets the last block" if found == "gives a block twice" else found


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
    cases=((ToyPool("A"),), (ToyPool("B"),), (ToyPool("C"),), (ToyPool("D"),), (ToyPool("E"),),
           (ToyPool("F", block_size=16),), (ToyPool("G", block_size=7),), (ToyPool("H", num_blocks=64),),
           (ToyPool("I"),), (ToyPool("J"),), (ToyPool("K"),), (ToyPool("L", num_blocks=20, block_size=5),),
           (ToyPool("M"),), (ToyPool("N"),), (ToyPool("O", num_blocks=32, block_size=3),)),
    misconceptions=(
        Misconception(_never_releases, "let tables leave too: are all blocks free then, and no more than all?"),
        Misconception(_counts_at_the_end, "count a table's blocks after each allocation, and compare two tables: "
                                          "what is free at the end is not all"),
        Misconception(_whole_blocks, "let a table leave whose last block is filled in part"),
        Misconception(_one_allocation, "let a table grow, token by token, over several blocks"),
        Misconception(_small, "let tables become longer than four blocks"),
        Misconception(_one_table, "hold two tables at once, and look for a number that stands in both"),
        Misconception(_numbers_not_compared, "how many are free may be right, and a number still stand in two tables "
                                             "that are held together: compare the numbers"),
        Misconception(_any_difference_is_forgotten, "are fewer blocks free than there are, or more? And does the same "
                                                    "number stand in two tables that are held together?"),
        Misconception(_too_many_is_forgotten, "more free blocks than there are: one came back twice"),
        Misconception(_no_exact_fit, "ask for exactly block_size tokens, and twice that: how many blocks come?"),
        Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
    ))
