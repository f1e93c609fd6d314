"""Attention in plain torch: right on every device, and the oracle of every other backend.

The three backends differ in where keys and values live; the arithmetic is one function, :func:`causal_attention`
(Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023, arXiv:2305.13245; sliding window:
Jiang et al. 2023, arXiv:2310.06825).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minillm.attention.base import StepTensors
from minillm.cache.kv import ContiguousCache, SequenceCache
from minillm.model.config import ModelConfig
from minillm.parts import check_part


@lru_cache(maxsize=4)
def causal_mask(num_queries: int, num_keys: int, window: int | None, device: torch.device | str = "cpu") -> Tensor:
    """Which key each query sees: bool ``[num_queries, num_keys]``; the last query is the token of the last key.

        3 queries, 5 keys     1 1 1 0 0      window 2     0 1 1 0 0
                              1 1 1 1 0                   0 0 1 1 0
                              1 1 1 1 1                   0 0 0 1 1
    """
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key = torch.arange(num_keys, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, window: int | None = None) -> Tensor:
    """Attention of one sequence's newest tokens over all its keys.

    Args:
        query: ``[n, num_heads, head_dim]``, of the last n tokens.
        keys, values: ``[num_kv_heads, num_keys, head_dim]``, with ``num_keys >= n``.
        window: see only the last so many keys.

    Returns:
        ``[n, num_heads, head_dim]``. Query head h reads KV head ``h // group``: heads are viewed as
        ``[num_kv_heads, group]`` and a KV head is broadcast over its group, never copied.
    """
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    grouped = query.view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if num_queries == 1:  # the newest token sees all: no mask, and the heads of a group are the rows of one matrix
        if window is not None and window < num_keys:
            keys, values = keys[:, -window:], values[:, -window:]
        out = scaled_dot_product_attention(grouped.transpose(0, 1), keys.unsqueeze(1), values.unsqueeze(1))
        return out.reshape(1, num_heads, head_dim)
    grouped = grouped.permute(1, 2, 0, 3)
    keys, values = (x.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (keys, values))
    if num_queries == num_keys and (window is None or window >= num_keys):
        out = scaled_dot_product_attention(grouped, keys, values, is_causal=True)
    else:
        mask = causal_mask(num_queries, num_keys, window, query.device)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim)


class ContiguousAttention:
    """An :class:`~minillm.attention.base.AttentionBackend` with one growing buffer per sequence.

    Args:
        capacity: tokens that a new sequence's buffer has room for before it grows.
        make_cache: makes the cache of one sequence, in place of minillm's own.
    Raises:
        TypeError: what ``make_cache`` makes is no :class:`~minillm.cache.kv.SequenceCache`; a cache that later gives
            back other than what was asked for raises ``ValueError`` in :meth:`attend`.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str, capacity: int = 256,
                 make_cache: Callable[..., SequenceCache] = ContiguousCache):
        self.config, self.capacity = config, capacity
        self.make_cache = lambda **options: make_cache(config, dtype=dtype, device=device, **options)
        check_part("what make_cache makes", self.make_cache(capacity=1), SequenceCache)
        self.windows = config.windows
        self.caches: dict[object, SequenceCache] = {}

    def write(self, layer: int, key: Tensor, value: Tensor, step: StepTensors) -> None:
        """Store the step's keys and values, ``[T, num_kv_heads, head_dim]``, behind those of each row's sequence."""
        for index, sequence in enumerate(step.sequences):
            start, end = step.query_starts[index], step.query_starts[index + 1]
            if sequence not in self.caches:
                self.caches[sequence] = self.make_cache(capacity=max(self.capacity, step.context_lengths[index]))
            position = step.context_lengths[index] - (end - start)
            self.caches[sequence].write(layer, position, key[start:end], value[start:end])

    def attend(self, layer: int, query: Tensor, step: StepTensors) -> Tensor:
        """``query`` ``[T, num_heads, head_dim]`` to the attention output, the same shape and dtype."""
        outputs = []
        for index, sequence in enumerate(step.sequences):
            rows = query[step.query_starts[index] : step.query_starts[index + 1]]
            shape = self.config.num_kv_heads, step.context_lengths[index], self.config.head_dim
            keys, values = self.caches[sequence].read(layer, 0, shape[1])
            if not keys.shape == values.shape == shape:
                raise ValueError(f"a cache gave keys {[*keys.shape]} and values {[*values.shape]}, not {[*shape]}")
            outputs.append(causal_attention(rows, keys, values, self.windows[layer]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def free(self, sequence: object) -> None:
        """Forget ``sequence``; unknown ones are no error."""
        self.caches.pop(sequence, None)

    @property
    def num_tokens(self) -> int:
        """Tokens cached, over all sequences."""
        return sum(cache.num_tokens for cache in self.caches.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, free space included."""
        return sum(cache.num_bytes for cache in self.caches.values())


class UncachedAttention:
    """Keeps nothing: each step brings whole sequences, from position 0. (For the loop without a cache.)"""

    def __init__(self, config: ModelConfig):
        self.windows = config.windows

    def write(self, layer: int, key: Tensor, value: Tensor, step: StepTensors) -> None:
        """Hold ``key`` and ``value`` ``[T, num_kv_heads, head_dim]`` until this layer's ``attend``."""
        self._keys, self._values = key.transpose(0, 1), value.transpose(0, 1)

    def attend(self, layer: int, query: Tensor, step: StepTensors) -> Tensor:
        """``query`` ``[T, num_heads, head_dim]`` to the attention output over the keys of this step alone.

        Raises:
            ValueError: when a sequence does not start at position 0.
        """
        outputs = []
        for start, end, length in zip(step.query_starts, step.query_starts[1:], step.context_lengths):
            if length != end - start:
                raise ValueError("attention without a cache needs whole sequences, from position 0")
            keys, values = self._keys[:, start:end], self._values[:, start:end]
            outputs.append(causal_attention(query[start:end], keys, values, self.windows[layer]))
        return torch.cat(outputs)

    def free(self, sequence: object) -> None:
        """Nothing is kept, so nothing to forget."""


class PaddedAttention:
    """A static batch: B sequences side by side in one buffer, short prompts padded on the left.

        num_padding 0   [ a0 a1 a2 a3 a4 | a5 ...        column = num_padding[b] + position
        num_padding 3   [  .  .  . b0 b1 | b2 ...        padding columns are never seen

    Each step computes the same number of columns for every sequence, B x W rows in all; its ``context_lengths``
    count columns, padding included. A query in a padding column sees nothing and gives zeros.
    """

    def __init__(self, config: ModelConfig, num_padding: Sequence[int], *, max_columns: int, dtype: torch.dtype,
                 device: torch.device | str):
        shape = (config.num_layers, 2, len(num_padding), config.num_kv_heads, max_columns, config.head_dim)
        self.buffer = torch.empty(shape, dtype=dtype, device=device)
        self.windows = config.windows
        first = torch.tensor(num_padding, device=device).unsqueeze(1)
        self.is_token = torch.arange(max_columns, device=device) >= first  # [B, max_columns]

    def write(self, layer: int, key: Tensor, value: Tensor, step: StepTensors) -> None:
        """Store ``key`` and ``value`` ``[B * W, num_kv_heads, head_dim]`` in the W newest columns."""
        end, width = step.context_lengths[0], step.query_starts[1]
        for cached, new in zip(self.buffer[layer], (key, value), strict=True):
            cached[:, :, end - width : end] = new.unflatten(0, (-1, width)).transpose(1, 2)

    def attend(self, layer: int, query: Tensor, step: StepTensors) -> Tensor:
        """``query`` ``[B * W, num_heads, head_dim]`` to the attention output; zeros in padding columns."""
        end, width = step.context_lengths[0], step.query_starts[1]
        keys, values = self.buffer[layer, :, :, :, :end]
        group = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
        mask = causal_mask(width, end, self.windows[layer], query.device) & self.is_token[:, None, :end]
        mask = mask.unsqueeze(1)  # [B, 1, W, end]
        out = scaled_dot_product_attention(query.unflatten(0, (-1, width)).transpose(1, 2), keys, values, mask)
        out = torch.where(mask.any(-1, keepdim=True), out, 0.0)  # some kernels give NaN where nothing is seen
        return out.transpose(1, 2).flatten(0, 1)

    def free(self, sequence: object) -> None:
        """Nothing: a static batch holds its whole buffer until its last sequence has ended."""
