"""A pool of equal blocks of KV cache, shared by all requests, and the prefix cache over it. No torch.

A block is a number: the place, in the tensors that hold K and V, of ``block_size`` tokens. At any time it is

    free      holds nothing of use
    held      by one table or more: its reference count
    cached    by none, and full of keys and values that a later prompt may begin with: free as soon as room is needed

        free ── allocate ──► held ── release ──► cached (when published), else free
          ▲                   ▲                     │
          └──── evict ────────│─────────────────────┤
                              └─────── match ───────┘

Paged blocks: Kwon et al. 2023, arXiv:2309.06180. Finding a prefix block by block, through what came before it: Zheng
et al. 2023 (RadixAttention, arXiv:2312.07104) does it in a tree; here a block's name is its parent's and its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

# What a published block holds: the number of the chain before it (0: nothing), and its own tokens.
Name = tuple[int, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one request in the order of its tokens; it grows, or is cleared by :meth:`BlockPool.release`.

    ``chains[i]`` numbers all tokens up to the end of block i, for as many blocks as are known to be published.
    """

    blocks: list[int] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)
    claim: Name | None = None


class PoolProtocol(Protocol):
    """What a scheduler and paged attention ask of a pool, :class:`BlockPool`'s or your own.

    Without a prefix cache ``caching`` is False, ``match`` finds nothing (0 tokens), ``may_write`` is always True and
    ``publish`` does nothing.
    """

    num_blocks: int
    block_size: int
    caching: bool
    num_available: int

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """See :meth:`BlockPool.num_missing`."""

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """See :meth:`BlockPool.match`."""

    def may_write(self, table: BlockTable, token_ids: Sequence[int]) -> bool:
        """See :meth:`BlockPool.may_write`."""

    def allocate(self, table: BlockTable, num_tokens: int) -> bool:
        """See :meth:`BlockPool.allocate`."""

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_written: int) -> None:
        """See :meth:`BlockPool.publish`."""

    def release(self, table: BlockTable) -> None:
        """See :meth:`BlockPool.release`."""


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Without ``caching`` nothing is published, so nothing matches.

    A name is compared whole: tokens and the chain before them, not a hash of them alone. One pool belongs to one
    model and one type of keys and values. Lines that move a block call nothing (``+= [block]``, no ``append``): Ctrl-C,
    for which CPython looks after calls and at loops, comes before such lines or after them, never in between.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, *, caching: bool = True):
        if min(num_blocks, block_size) < 1:
            raise ValueError(f"a pool needs at least 1 block of at least 1 token, got {num_blocks} of {block_size}")
        self.num_blocks, self.block_size, self.caching = num_blocks, block_size, caching
        self.num_evicted = 0
        self._free = list(range(num_blocks))[::-1]
        self._cached: dict[int, None] = {}  # from the least recently used to the most
        self._references = [0] * num_blocks
        self._names: dict[int, tuple[Name, int]] = {}  # by published block: its name, and its chain's number
        self._published: dict[Name, int] = {}
        self._claims: dict[Name, BlockTable] = {}
        self._num_chains = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and a prompt may match."""
        return len(self._cached)

    def is_cached(self, block: int) -> bool:
        """Whether nobody holds ``block`` and a prompt may match it."""
        return block in self._cached

    def num_missing(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that ``table`` lacks to hold ``num_tokens`` in all."""
        return max(0, -(-num_tokens // self.block_size) - len(table.blocks))

    def match(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """Append the published blocks that continue ``table`` with these tokens; the number of tokens it then has.

        The last token is never matched: something must be left to compute. A table whose last block is not published
        yet (its request is writing) stays as it is.
        """
        while len(table.chains) == len(table.blocks):
            if (block := self._published.get(self._next_name(table, token_ids))) is None:
                break
            if block in self._cached:
                del self._cached[block]
            self._references[block] += 1
            table.blocks += [block]
            table.chains += [self._names[block][1]]
        return len(table.blocks) * self.block_size

    def may_write(self, table: BlockTable, token_ids: Sequence[int]) -> bool:
        """Whether nobody else is writing the block that ``table`` needs next; from now on, ``table`` is.

        Who gets False waits, and matches the block once it is published. The claim ends with :meth:`publish` or
        :meth:`release`, so one that waits for a request which goes away goes on by itself. Nobody waits for a block
        with its own last token, which it must compute in any case.
        """
        name = self._next_name(table, token_ids, to_compute=0) if self.caching else None
        if name is None or table.claim == name:
            return True
        if name in self._claims:
            return (len(table.chains) + 1) * self.block_size == len(token_ids)
        self._drop_claim(table)
        table.claim, self._claims[name] = name, table
        return True

    def allocate(self, table: BlockTable, num_tokens: int) -> bool:
        """Give ``table`` room for ``num_tokens`` in all; False, and nothing changes, when there are too few blocks."""
        count = self.num_missing(table, num_tokens)
        if count > self.num_available:
            return False
        for _ in range(count):
            if not self._free:
                self._evict()
            block = self._free[-1]
            del self._free[-1]
            self._references[block] = 1
            table.blocks += [block]
        return True

    def publish(self, table: BlockTable, token_ids: Sequence[int], num_written: int) -> None:
        """Let prompts match the full blocks among the first ``num_written`` tokens, whose K and V are written now.

        Where another table has published the same meanwhile, that block stays the one to match.
        """
        if not self.caching:
            return
        for index in range(len(table.chains), num_written // self.block_size):
            name, block = self._name(table, token_ids, index), table.blocks[index]
            if name not in self._published:
                self._num_chains += 1
                self._published[name], self._names[block] = block, (name, self._num_chains)
            table.chains.append(self._names[self._published[name]][1])
        self._drop_claim(table)

    def release(self, table: BlockTable) -> None:
        """Clear ``table``: each block that no other table holds is cached if published, else free.

        Tails come first, so that a prefix outlives what follows it. What Ctrl-C interrupts, another call completes.
        """
        self._drop_claim(table)
        table.chains.clear()
        while table.blocks:
            block = table.blocks[-1]
            del table.blocks[-1]
            self._references[block] -= 1
            if not self._references[block]:
                if block in self._names:
                    self._cached[block] = None
                else:
                    self._free += [block]

    def forget(self) -> None:
        """Free all cached blocks, so that no later prompt matches them."""
        while self._cached:
            self._evict()

    def _evict(self) -> None:
        block = next(iter(self._cached))
        del self._published[self._names[block][0]], self._names[block], self._cached[block]
        self._free += [block]
        self.num_evicted += 1

    def _drop_claim(self, table: BlockTable) -> None:
        if table.claim is not None and self._claims.get(table.claim) is table:
            del self._claims[table.claim]  # a call interrupted here finds no claim of its own when it is repeated
        table.claim = None

    def _next_name(self, table: BlockTable, token_ids: Sequence[int], to_compute: int = 1) -> Name | None:
        """The name of the block after those known to be published; None when the tokens don't fill it and leave
        ``to_compute``."""
        index = len(table.chains)
        full = (index + 1) * self.block_size + to_compute <= len(token_ids)
        return self._name(table, token_ids, index) if full else None

    def _name(self, table: BlockTable, token_ids: Sequence[int], index: int) -> Name:
        start = index * self.block_size
        return (table.chains[index - 1] if index else 0), tuple(token_ids[start:start + self.block_size])
