"""Keys and values as tensors. Here: one growing buffer per sequence."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minillm.model.config import ModelConfig


class SequenceCache(Protocol):
    """The cache of one sequence, for all layers. ``ContiguousAttention(make_cache=MyCache)`` makes each as
    ``MyCache(config, capacity=..., dtype=..., device=...)``; ``capacity`` is what to have room for at first, no limit.

    ``num_tokens`` counts the tokens cached, ``num_bytes`` the bytes held for them, free space included.
    """

    num_tokens: int
    num_bytes: int

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` ``[n, num_kv_heads, head_dim]`` at positions ``start`` .. ``start + n``.

        Layers come in order, each once a step. A ``start`` below the tokens cached forgets those from ``start`` on.
        """

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """The keys and values at positions ``start`` .. ``end``, each ``[num_kv_heads, end - start, head_dim]``."""


class ContiguousCache:
    """Keys and values of one sequence, for all layers, in one buffer that doubles when it is full.

        buffer[layer, 0]   keys     head 0  [ k0 k1 k2 ... | free ]     each k: head_dim numbers
                                    head 1  [ k0 k1 k2 ... | free ]
        buffer[layer, 1]   values   head 0  [ v0 v1 v2 ... | free ]
                                             num_tokens ---^       ^--- capacity

    Heads come before tokens, so that attention reads each head's past as one run of memory. ``num_tokens`` only says
    how many are valid: lowering it forgets the rest.
    """

    def __init__(self, config: ModelConfig, *, capacity: int, dtype: torch.dtype, device: torch.device | str):
        shape = (config.num_layers, 2, config.num_kv_heads, capacity, config.head_dim)
        self.num_tokens = 0
        self._hold(torch.empty(shape, dtype=dtype, device=device))

    def _hold(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._layers = [(layer[0], layer[1]) for layer in buffer]  # made once: views cost time at each step

    @property
    def capacity(self) -> int:
        """Tokens that fit before the buffer has to grow."""
        return self.buffer.shape[3]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer, free space included."""
        return self.buffer.nbytes

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` ``[n, num_kv_heads, head_dim]`` at positions ``start`` .. ``start + n``.

        Raises:
            ValueError: when positions before ``start`` were never written.
        """
        end = start + len(key)
        if start > self.num_tokens:
            raise ValueError(f"cannot write at position {start}: only {self.num_tokens} tokens are cached")
        if end > self.capacity:
            *outer, _, head_dim = self.buffer.shape
            larger = self.buffer.new_empty(*outer, max(end, 2 * self.capacity), head_dim)
            larger[..., : self.num_tokens, :] = self.buffer[..., : self.num_tokens, :]
            self._hold(larger)
        keys, values = self._layers[layer]
        keys[:, start:end] = key.transpose(0, 1)
        values[:, start:end] = value.transpose(0, 1)
        self.num_tokens = end

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Views of the keys and values at positions ``start`` .. ``end``, each ``[num_kv_heads, n, head_dim]``."""
        keys, values = self._layers[layer]
        return keys[:, start:end], values[:, start:end]
