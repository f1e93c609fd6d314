"""Keys and values of all sequences, in blocks of slots: as they come, or in 8 bit.

    slot = block x block_size + place in the block; each holds the keys and the values of one token in one layer
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from minillm.model.config import ModelConfig


class BlockStore:
    """Room for ``num_blocks`` blocks in every layer, unwritten.

    ``buffer``: ``[num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim]``.

    Args:
        dtype: of what is written and read, and here of what is kept.
    Raises:
        ValueError: memory cannot hold so many blocks.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, *, dtype: torch.dtype,
                 device: torch.device | str):
        self.dtype = dtype
        self.buffer = self._room(config, num_blocks, block_size, self.kept_dtype(dtype), device)
        self._kept = _views(self.buffer)

    @staticmethod
    def kept_dtype(dtype: torch.dtype) -> torch.dtype:
        """The type of ``buffer``."""
        return dtype

    @classmethod
    def bytes_per_token(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes that a token takes in all layers."""
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * cls.kept_dtype(dtype).itemsize

    def _room(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype,
              device: torch.device | str, head_dim: int | None = None) -> Tensor:
        shape = (config.num_layers, num_blocks, block_size, 2, config.num_kv_heads, head_dim or config.head_dim)
        try:
            return torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, TypeError) as error:  # too many bytes; a size that is no 64-bit number
            raise ValueError(f"a KV cache of {num_blocks} blocks of {block_size} tokens does not fit into memory: "
                             f"lower num_kv_blocks or kv_cache_memory_bytes ({error})") from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks, free ones included."""
        return self.buffer.nbytes

    def scratch(self, num_blocks: int) -> Tensor:
        """Room to gather so many blocks of one layer into: ``[num_blocks, block_size, 2, kv_heads, head_dim]``."""
        return self.buffer.new_empty(num_blocks, *self.buffer.shape[2:], dtype=self.dtype)

    def begin(self, blocks: Tensor) -> None:
        """Clear ``blocks``, which are about to be written in part: what a former owner left there may be no numbers,
        and 0 x NaN is NaN."""
        self.buffer.index_fill_(1, blocks, 0)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put ``key`` and ``value`` ``[T, kv_heads, head_dim]`` into ``slots`` ``[T]``."""
        self._kept[layer][0].index_copy_(0, slots, torch.stack((key, value), 1))

    def read(self, layer: int, where: slice | Tensor) -> Tensor:
        """``[tokens, 2, kv_heads, head_dim]`` from a slice of slots (in place where they can be), or from blocks."""
        return _picked(self._kept[layer], where)

    def gather(self, layer: int, blocks: Tensor, out: Tensor) -> None:
        """Copy ``blocks`` ``[N]`` of a layer into ``out``, a part of a :meth:`scratch`."""
        torch.index_select(self._kept[layer][1], 0, blocks, out=out)


class Int8BlockStore(BlockStore):
    """A head's keys of a token, and its values, as whole numbers -127..127 and one bfloat16 scale: 66 bytes for 64.

    A scale comes from the row that it is written with, so a row's bits are the same whatever lies beside it.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, *, dtype: torch.dtype,
                 device: torch.device | str):
        super().__init__(config, num_blocks, block_size, dtype=dtype, device=device)
        self.scales = self._room(config, num_blocks, block_size, torch.bfloat16, device, head_dim=1)
        self._scales = _views(self.scales)
        self._largest = min(torch.finfo(dtype).max, 1e38) / 128
        self._wide = torch.float32 if dtype == torch.float16 else dtype  # float16 has no room for small scales

    @staticmethod
    def kept_dtype(dtype: torch.dtype) -> torch.dtype:
        return torch.int8

    @classmethod
    def bytes_per_token(cls, config: ModelConfig, dtype: torch.dtype) -> int:
        return super().bytes_per_token(config, dtype) + 2 * config.num_layers * config.num_kv_heads * 2

    @property
    def num_bytes(self) -> int:
        return self.buffer.nbytes + self.scales.nbytes

    def begin(self, blocks: Tensor) -> None:
        self.scales.index_fill_(1, blocks, 0)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        rows = torch.stack((key, value), 1)
        # A little more than needed, as rounding to bfloat16 may take that much; and 127 times it must be a number.
        scales = vector_norm(rows, torch.inf, -1, True).float().mul_((1 + 2**-8) / 127)
        scales = scales.clamp_(1e-30, self._largest).bfloat16()
        codes = (rows / scales.float()).round_().clamp_(-127, 127)
        self._kept[layer][0].index_copy_(0, slots, codes.to(torch.int8))
        self._scales[layer][0].index_copy_(0, slots, scales)

    def read(self, layer: int, where: slice | Tensor) -> Tensor:
        scales = _picked(self._scales[layer], where)
        return _picked(self._kept[layer], where).to(self._wide).mul_(scales).to(self.dtype)

    def gather(self, layer: int, blocks: Tensor, out: Tensor) -> None:
        codes = self._kept[layer][1][blocks].to(self._wide)  # float16 alone needs more room for the product
        out.copy_(codes.mul_(self._scales[layer][1][blocks]))


_Views = tuple[Tensor, Tensor]  # of one layer: by slot, by block


def _views(buffer: Tensor) -> list[_Views]:
    """Those of each layer, made once: a view costs time at each step."""
    return [(layer.flatten(0, 1), layer) for layer in buffer]


def _picked(views: _Views, where: slice | Tensor) -> Tensor:
    """Slots, or blocks one after another, of one layer."""
    by_slot, by_block = views
    return by_slot[where] if isinstance(where, slice) else by_block[where].flatten(0, 1)
