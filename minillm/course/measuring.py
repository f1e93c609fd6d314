"""Which model a measuring cell runs: the default one on a CPU, on a GPU one large enough that its bytes show; and how
the memory of the one before is given back."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from typing import TYPE_CHECKING

from minillm.measure.card import MachineCard

if TYPE_CHECKING:
    from minillm.model.config import ModelConfig
    from minillm.model.decoder import Decoder
    from minillm.model.quantize import Scheme

GPU_SHAPES = ("smollm2-135m", "llama-3.2-1b", "llama-3-8b")
LEAST_READING, MOST_MEMORY = 5.0, 0.6
"""Reading the weights takes this many times the calls' overhead; in float32 they fit in this share of the memory."""


def shape_for(card: MachineCard) -> str:
    """The smallest of :data:`GPU_SHAPES` whose weights, in 16 bit, take at least 5 times as long to read as the calls
    of a decode step take to issue; where none does, the largest that fits in float32."""
    from minillm.measure.roofline import step_cost, weight_bytes_held
    from minillm.model.shapes import find_config

    fitting = []
    for name in GPU_SHAPES:
        config = find_config(name)
        if weight_bytes_held(config, "float32") > MOST_MEMORY * card.memory_bytes:
            continue
        cost = step_cost(config, dtype="bfloat16")
        fitting.append(name)
        if cost.weight_bytes / card.read_bytes_per_s >= LEAST_READING * cost.operators * card.operator_overhead_s:
            break
    return fitting[-1] if fitting else GPU_SHAPES[0]


def give_memory_back() -> None:
    """What was let go of goes back to the system, where the C library (glibc) would keep it: models that follow one
    another in a measurement then need the memory of one."""
    gc.collect()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def random_decoder(config: ModelConfig, *, device: str = "cpu", dtype: str = "auto", seed: int = 0,
                   quantization: str | Scheme | None = None) -> Decoder:
    """A decoder with random weights, made on ``device``: for timing alone, never for acceptance or quality.

    Each tensor is made as it is taken, so that memory holds one model and not two.
    """
    import torch

    from minillm.model.decoder import Decoder
    from minillm.model.weights import expected_tensors

    generator, kind = torch.Generator(device).manual_seed(seed), torch.bfloat16 if "cuda" in device else torch.float32

    class RandomWeights(dict[str, tuple[int, ...]]):
        def pop(self, name: str) -> torch.Tensor:  # type: ignore[override]
            shape = super().pop(name)
            if name.endswith("norm.weight"):
                return torch.ones(shape, device=device, dtype=kind)
            return torch.empty(shape, device=device, dtype=kind).normal_(0, 0.02, generator=generator)

    return Decoder.from_weights(config, RandomWeights(expected_tensors(config)), dtype=dtype, device=device,
                                quantization=quantization)
