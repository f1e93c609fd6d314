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

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import causal_attention
from minillm.cache.blocks import PoolProtocol
from minillm.model.config import ModelConfig


class _Batch(NamedTuple):
    """The sequences of a step that compute one token each: their flat rows, blocks and the keys that each sees.

    ``blocks``: int64 ``[B, most blocks]``, padded with its first. ``seen``: bool ``[B, 1, 1, keys]`` by sliding window.
    """

    rows: Tensor
    blocks: Tensor
    seen: dict[int | None, Tensor]


class _Layout(NamedTuple):
    """Where a step's tokens go and where its queries read; made once a step, for all layers."""

    slots: Tensor
    begun: Tensor
    batch: _Batch | None
    alone: list[tuple[int, int, int, slice | Tensor]]  # first and last row, keys, slots or blocks


class PagedAttention:
    """An :class:`~minillm.attention.base.AttentionBackend` over the blocks of ``pool``, which a scheduler hands out.

    It needs ``StepTensors.block_tables`` and knows no sequence: who gives a block back has freed what was in it.

    Args:
        dtype, device: of keys and values; ``num_bytes`` says how much they take.
    Raises:
        ValueError: memory cannot hold so many blocks, or some hold what was written elsewhere.
    """

    def __init__(self, config: ModelConfig, pool: PoolProtocol, *, dtype: torch.dtype, device: torch.device | str):
        if pool.num_available < pool.num_blocks or getattr(pool, "num_cached", 0):
            raise ValueError("this pool has blocks that another backend has written: make a new BlockPool")
        self.pool, self.windows = pool, config.windows
        shape = (config.num_layers, pool.num_blocks, pool.block_size, 2, config.num_kv_heads, config.head_dim)
        try:
            self.buffer = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            raise ValueError(f"a KV cache of {pool.num_blocks} blocks of {pool.block_size} tokens does not fit into "
                             f"memory: lower num_kv_blocks or kv_cache_memory_bytes ({error})") from error
        self._layers = [(layer.flatten(0, 1), layer) for layer in self.buffer]  # by slot, by block
        self._step: StepTensors | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens for which blocks are held."""
        return (self.pool.num_blocks - self.pool.num_available) * self.pool.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, free ones included."""
        return self.buffer.nbytes

    def write(self, layer: int, key: Tensor, value: Tensor, step: StepTensors) -> None:
        """Store the step's keys and values, ``[T, num_kv_heads, head_dim]``, in the slots of their tokens."""
        if step is not self._step:
            self._layout, self._step = self._laid_out(step), step
        by_slot, by_block = self._layers[layer]
        if len(self._layout.begun):  # what a former owner left there may be no numbers, and 0 x NaN is NaN
            by_block.index_fill_(0, self._layout.begun, 0)
        by_slot.index_copy_(0, self._layout.slots, torch.stack((key, value), 1))

    def attend(self, layer: int, query: Tensor, step: StepTensors) -> Tensor:
        """``query`` ``[T, num_heads, head_dim]`` to the attention output, the same shape and dtype."""
        batch, alone = self._layout.batch, self._layout.alone
        window = self.windows[layer]
        if batch is None and len(alone) == 1:
            return self._alone(layer, query, alone[0], window)
        out = torch.empty_like(query)
        for item in alone:
            out[item[0]:item[1]] = self._alone(layer, query[item[0]:item[1]], item, window)
        if batch is not None:
            out[batch.rows] = self._together(self._layers[layer][1], query[batch.rows], batch, window)
        return out

    def _alone(self, layer: int, query: Tensor, item: tuple[int, int, int, slice | Tensor],
               window: int | None) -> Tensor:
        by_slot, by_block = self._layers[layer]
        _, _, num_keys, where = item
        cached = by_slot[where] if isinstance(where, slice) else by_block[where].flatten(0, 1)[:num_keys]
        keys, values = cached.permute(1, 2, 0, 3).unbind()  # [KV heads, keys, dim]
        return causal_attention(query, keys, values, window)

    def _together(self, by_block: Tensor, query: Tensor, batch: _Batch, window: int | None) -> Tensor:
        """One query of each of B sequences, ``[B, num_heads, head_dim]``, over its own keys."""
        size, most = batch.blocks.shape
        cached = by_block.index_select(0, batch.blocks.view(-1)).view(size, -1, *by_block.shape[2:])
        keys, values = cached.permute(2, 0, 3, 1, 4).unbind()  # [B, KV heads, keys, dim]
        grouped = query.unflatten(1, (keys.shape[1], -1))      # [B, KV heads, group, dim]
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.seen[window]).flatten(1, 2)

    def free(self, sequence: object) -> None:
        """Nothing: its blocks are the scheduler's."""

    # ---- once a step -------------------------------------------------------------------------------------------

    def _laid_out(self, step: StepTensors) -> _Layout:
        if len(step.block_tables) != len(step.sequences):
            raise ValueError("paged attention needs a block table for each sequence: StepTensors.of(block_tables=...)")
        size, device = self.pool.block_size, step.positions.device
        slots, begun, single, alone = [], [], [], []
        for index, (table, num_keys) in enumerate(zip(step.block_tables, step.context_lengths, strict=True)):
            first, last = step.query_starts[index], step.query_starts[index + 1]
            for position in range(num_keys - (last - first), num_keys):
                slots.append(table[position // size] * size + position % size)
            if num_keys % size and num_keys - num_keys % size >= num_keys - (last - first):
                begun.append(table[num_keys // size])  # its first slot is written now, and not its last
            if last - first == 1:
                single.append(index)
            else:
                alone.append((first, last, num_keys, self._where(table, num_keys, device)))
        if len(single) == 1:  # nothing to pad, and perhaps nothing to gather
            index, = single
            first, num_keys = step.query_starts[index], step.context_lengths[index]
            alone.append((first, first + 1, num_keys, self._where(step.block_tables[index], num_keys, device)))
            single = []
        slots, begun = (torch.tensor(ids, dtype=torch.int64, device=device) for ids in (slots, begun))
        return _Layout(slots, begun, self._batch_of(step, single, device) if single else None, alone)

    def _where(self, table: Sequence[int], num_keys: int, device: torch.device) -> slice | Tensor:
        """The blocks of ``num_keys`` tokens; where they follow one another, a slice of slots, which is read in place."""
        blocks = table[:-(-num_keys // self.pool.block_size)]
        if all(block == blocks[0] + place for place, block in enumerate(blocks)):
            first = blocks[0] * self.pool.block_size
            return slice(first, first + num_keys)
        return torch.tensor(blocks, dtype=torch.int64, device=device)

    def _batch_of(self, step: StepTensors, indices: Sequence[int], device: torch.device) -> _Batch:
        size = self.pool.block_size
        lengths = [step.context_lengths[index] for index in indices]
        most = -(-max(lengths) // size)
        tables = [step.block_tables[index][:-(-step.context_lengths[index] // size)] for index in indices]
        padded = [[*table, *table[:1] * (most - len(table))] for table in tables]
        count = torch.tensor(lengths, device=device)[:, None, None, None]
        key = torch.arange(most * size, device=device)
        seen = {window: (key < count) & (key >= count - (window or most * size)) for window in set(self.windows)}
        rows = torch.tensor([step.query_starts[index] for index in indices], dtype=torch.int64, device=device)
        return _Batch(rows, torch.tensor(padded, dtype=torch.int64, device=device), seen)
