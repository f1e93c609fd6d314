"""Attention over blocks: keys and values of all sequences lie in one buffer, wherever their block tables say.

    block table of a      [2, 0]                     slot = block x block_size + place in the block
    slots (block_size 4)  0 1 2 3 | 4 5 6 7 | 8 9 10 11
                          a4 a5   |         | a0 a1 a2 a3

Paged attention: Kwon et al. 2023, arXiv:2309.06180. Here in plain torch: the blocks of a sequence are gathered into
one run of memory, or, where they already lie behind one another, read in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minillm.attention import FEW
from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import causal_attention
from minillm.cache.blocks import PoolProtocol
from minillm.cache.store import BlockStore
from minillm.model.config import ModelConfig

# What is gathered at once: little enough on a CPU to be still in its cache when attention reads it.
GATHER_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
_LIVING: WeakSet[PagedAttention] = WeakSet()  # a block says nothing of whose buffer it is in: a pool has one


class _Group(NamedTuple):
    """Sequences of a step that compute the same few tokens each, n, and that are gathered together.

    ``rows``: their flat rows, int64 ``[B x n]``; None where they are all of the step, in order. ``blocks``: int64
    ``[B x most]``, each table padded with its first. ``seen``: which keys each query sees, bool
    ``[B, 1, n x heads of a KV head, keys]`` (or 1 for all heads of one query), by sliding window. ``gathered``,
    ``keys``, ``values``: views of the buffer that the blocks of a layer are copied to.
    """

    rows: Tensor | None
    blocks: Tensor
    seen: dict[int | None, Tensor]
    gathered: Tensor
    keys: Tensor
    values: Tensor


# A sequence by itself: first and last row, number of keys, and its blocks; where these follow one another, a slice of
# slots, to be read in place.
_Item = tuple[int, int, int, slice | Tensor]


class PagedAttention:
    """An :class:`~minillm.attention.base.AttentionBackend` over the blocks of ``pool``, which a scheduler hands out.

    It needs ``StepTensors.block_tables`` and knows no sequence: who gives a block back has freed what was in it.

    Args:
        dtype, device: of keys and values.
        store: where they are kept, :class:`~minillm.cache.store.BlockStore` or a kind of it.
    Raises:
        ValueError: memory cannot hold so many blocks, or another backend writes them, or has written some.
    """

    def __init__(self, config: ModelConfig, pool: PoolProtocol, *, dtype: torch.dtype, device: torch.device | str,
                 store: type[BlockStore] = BlockStore):
        used = pool.num_available < pool.num_blocks or getattr(pool, "num_cached", 0)
        if used or any(other.pool is pool for other in _LIVING):
            raise ValueError("this pool has blocks that another backend has written, or will: make a new BlockPool")
        self.pool, self.windows, self._heads = pool, config.windows, config.num_heads // config.num_kv_heads
        self.store = store(config, pool.num_blocks, pool.block_size, dtype=dtype, device=device)
        _LIVING.add(self)
        self._gathered = self.store.scratch(0)
        self._most = GATHER_BYTES.get(torch.device(device).type, GATHER_BYTES["cpu"]) // self.store.scratch(1).nbytes
        self._step: StepTensors | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens for which blocks are held."""
        return (self.pool.num_blocks - self.pool.num_available) * self.pool.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, free ones included."""
        return self.store.num_bytes

    def write(self, layer: int, key: Tensor, value: Tensor, step: StepTensors) -> None:
        """Store the step's keys and values, ``[T, num_kv_heads, head_dim]``, in the slots of their tokens."""
        if step is not self._step:
            self._layout, self._step = self._laid_out(step), step
        self.store.write(layer, self._layout[0], key, value)

    def attend(self, layer: int, query: Tensor, step: StepTensors) -> Tensor:
        """``query`` ``[T, num_heads, head_dim]`` to the attention output, the same shape and dtype."""
        (_, groups, alone), window = self._layout, self.windows[layer]
        if not groups and len(alone) == 1:
            return self._alone(layer, query, alone[0], window)
        if groups and groups[0].rows is None:
            return self._together(layer, query, groups[0], window)
        out = torch.empty_like(query)
        for item in alone:
            out[item[0]:item[1]] = self._alone(layer, query[item[0]:item[1]], item, window)
        for group in groups:
            out[group.rows] = self._together(layer, query[group.rows], group, window)
        return out

    def _alone(self, layer: int, query: Tensor, item: _Item, window: int | None) -> Tensor:
        _, _, num_keys, where = item
        cached = self.store.read(layer, where)
        if not isinstance(where, slice):
            cached = cached[:num_keys]
        keys, values = cached.permute(1, 2, 0, 3).unbind()  # [KV heads, keys, dim]
        return causal_attention(query, keys, values, window)

    def _together(self, layer: int, query: Tensor, group: _Group, window: int | None) -> Tensor:
        """The queries of B sequences, ``[B x n, num_heads, head_dim]``, each over its sequence's keys."""
        self.store.gather(layer, group.blocks, group.gathered)
        batch = len(group.keys)
        by_head = query.unflatten(1, (group.keys.shape[1], -1))  # [B x n, KV heads, group, dim]
        if len(query) > batch:  # a sequence's queries are rows of one matrix, as the heads of a group are
            by_head = by_head.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
        out = scaled_dot_product_attention(by_head, group.keys, group.values, attn_mask=group.seen[window])
        if len(query) > batch:
            out = out.unflatten(2, (-1, self._heads)).transpose(1, 2).flatten(0, 1)
        return out.flatten(1, 2)

    def free(self, sequence: object) -> None:
        """Nothing: its blocks are the scheduler's."""

    # ---- once a step -------------------------------------------------------------------------------------------

    def _laid_out(self, step: StepTensors) -> tuple[Tensor, list[_Group], list[_Item]]:
        """The slots where the step's tokens go, and where its queries read; made once, for all layers."""
        if len(step.block_tables) != len(step.sequences):
            raise ValueError("paged attention needs a block table for each sequence: StepTensors.of(block_tables=...)")
        size, device = self.pool.block_size, step.positions.device
        slots, begun, alone = [], [], []
        few: dict[int, list[int]] = {}  # by number of tokens
        for index, (table, num_keys) in enumerate(zip(step.block_tables, step.context_lengths, strict=True)):
            first, last = step.query_starts[index], step.query_starts[index + 1]
            start = num_keys - (last - first)
            slots += [table[position // size] * size + position % size for position in range(start, num_keys)]
            if num_keys % size and num_keys - num_keys % size >= start:
                begun.append(table[num_keys // size])  # its first slot is written now, and not its last
            (few.setdefault(last - first, []) if last - first <= FEW else alone).append(index)
        slots, begun = (torch.tensor(ids, dtype=torch.int64, device=device) for ids in (slots, begun))
        if len(begun):
            self.store.begin(begun)
        packed = [indices for own in few.values() for indices in self._packed(step, own)]
        alone += [indices[0] for indices in packed if len(indices) == 1]  # nothing to pad, and perhaps to gather
        several = [indices for indices in packed if len(indices) > 1]
        # One buffer for what is gathered, in all layers: a new one each time is slow to come by.
        sizes = [len(indices) * self._num_blocks(step.context_lengths[indices[-1]]) for indices in several]
        if (needed := max(sizes, default=0)) > len(self._gathered):
            self._gathered = self.store.scratch(needed)
        return (slots, [self._group_of(step, indices, device) for indices in several],
                [self._item_of(step, index, device) for index in alone])

    def _packed(self, step: StepTensors, few: Sequence[int]) -> list[list[int]]:
        """``few`` by length, so that little is padded, in groups of which each fits :data:`GATHER_BYTES`."""
        packed: list[list[int]] = []
        for index in sorted(few, key=lambda index: step.context_lengths[index]):
            if packed and (len(packed[-1]) + 1) * self._num_blocks(step.context_lengths[index]) <= self._most:
                packed[-1].append(index)
            else:
                packed.append([index])
        return packed

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _item_of(self, step: StepTensors, index: int, device: torch.device) -> _Item:
        num_keys = step.context_lengths[index]
        blocks = step.block_tables[index][:self._num_blocks(num_keys)]
        if all(block == blocks[0] + place for place, block in enumerate(blocks)):
            where = slice(blocks[0] * self.pool.block_size, blocks[0] * self.pool.block_size + num_keys)
        else:
            where = torch.tensor(blocks, dtype=torch.int64, device=device)
        return step.query_starts[index], step.query_starts[index + 1], num_keys, where

    def _group_of(self, step: StepTensors, indices: list[int], device: torch.device) -> _Group:
        if len(indices) == len(step.sequences):
            indices = sorted(indices)
        lengths = [step.context_lengths[index] for index in indices]
        size, most = self.pool.block_size, self._num_blocks(max(lengths))
        blocks = []
        for index, length in zip(indices, lengths, strict=True):
            table = step.block_tables[index][:self._num_blocks(length)]
            blocks += [*table, *[table[0]] * (most - len(table))]
        rows = [range(step.query_starts[index], step.query_starts[index + 1]) for index in indices]
        count = torch.tensor([length + 1 - place for length, own in zip(lengths, rows, strict=True)
                              for place in range(len(own), 0, -1)], device=device).view(len(indices), 1, -1, 1)
        if count.shape[2] > 1:  # a query is as many rows as there are heads to a KV head
            count = count.repeat_interleave(self._heads, 2)
        key = torch.arange(most * size, device=device)
        seen = {window: (key < count) & (key >= count - (window or most * size)) for window in set(self.windows)}
        gathered = self._gathered[:len(blocks)]
        keys, values = gathered.view(len(indices), -1, *gathered.shape[2:]).permute(2, 0, 3, 1, 4).unbind()
        rows = None if len(indices) == len(step.sequences) else torch.tensor(
            [row for own in rows for row in own], dtype=torch.int64, device=device)
        return _Group(rows, torch.tensor(blocks, dtype=torch.int64, device=device), seen, gathered, keys, values)
