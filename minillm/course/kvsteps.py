"""Decode steps, timed, over keys and values that are kept in one format or another. (Needs torch.)"""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.attention.base import StepTensors
from minillm.attention.paged import PagedAttention
from minillm.cache.blocks import BlockPool
from minillm.cache.store import BlockStore
from minillm.course.measuring import give_memory_back
from minillm.course.timing import median_seconds
from minillm.model.decoder import Decoder

_BLOCK = 16


class Bfloat16Store(BlockStore):
    """Keys and values in bfloat16, whatever the activations are: widened when they are read."""

    @staticmethod
    def kept_dtype(dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        super().write(layer, slots, key.bfloat16(), value.bfloat16())

    def read(self, layer: int, where: slice | Tensor) -> Tensor:
        return super().read(layer, where).to(self.dtype)

    def gather(self, layer: int, blocks: Tensor, out: Tensor) -> None:
        out.copy_(self.buffer[layer][blocks])


@torch.inference_mode()
def decode_step_s(model: Decoder, context: int, batch: int, store: type[BlockStore] = BlockStore) -> float:
    """Median seconds of a step in which ``batch`` requests compute one token each behind ``context`` others.

    Keys and values are random. The requests' blocks lie between one another's, as in a pool that has been in use.
    """
    give_memory_back()  # of the step before
    config, options = model.config, {"dtype": model.dtype, "device": model.device}
    pool = BlockPool(batch * (context // _BLOCK + 1), _BLOCK, caching=False)
    attention = PagedAttention(config, pool, store=store, **options)
    slots = torch.arange(pool.num_blocks * _BLOCK, device=model.device)
    for layer in range(config.num_layers):
        rows = torch.randn(2, len(slots), config.num_kv_heads, config.head_dim, **options)
        attention.store.write(layer, slots, *rows)
    tables = [list(range(i, pool.num_blocks, batch)) for i in range(batch)]

    def step() -> Tensor:
        tensors = StepTensors.of([[7]] * batch, [context] * batch, range(batch), device=model.device,
                                 block_tables=tables)
        return model.forward(tensors, attention)

    return median_seconds(step, device=str(model.device), seconds=0.15, rounds=3)
