"""What real kernels reach on this machine, and the cost model beside measured steps of the decoder. (Imports torch.)

The roofline's straight lines come from two ideal kernels, a stream and a large square matmul. A linear layer of few
rows, and attention, stay below them. :func:`measure_kernels` measures both with shapes of its own, :func:`check_grid`
then times real steps over a grid of batch and context. Nothing measured on the grid goes into its estimates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import torch

from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import ContiguousAttention, causal_attention
from minillm.cache.kv import ContiguousCache
from minillm.measure.bench.machine import time_repeated
from minillm.measure.card import MachineCard
from minillm.measure.distribution import Spread
from minillm.measure.hardware import Hardware, KernelRates
from minillm.measure.roofline import engine_options, estimate, step_cost
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.linear import activation_dtype, make_linear
from minillm.model.quantize import SCHEMES, quantize
from minillm.model.quantized import make_quantized_linear
from minillm.model.weights import expected_tensors

ROWS = (1, 2, 4, 8, 16, 64, 256)
SIZE = 1024  # of the square weights: between the layers of a 135M and of an 8B model
KV_HEADS, GROUP, HEAD_DIM, CONTEXT = 8, 4, 64, 1024


def with_kernels(card: MachineCard, dtypes: Sequence[str]) -> MachineCard:
    """``card`` with those of the kernels of ``dtypes`` measured that it lacks."""
    # Twice the last cache is enough: each pass over the pool pushes out what the next one needs.
    rates = {dtype: asdict(measure_kernels(dtype, card.device, card.buffer_bytes // 2))
             for dtype in dtypes if dtype not in card.kernels}
    return replace(card, kernels=card.kernels | rates) if rates else card


def measure_kernels(dtype: str = "auto", device: str = "cpu", buffer_bytes: int = 2**28,
                    seconds: float = 6.0) -> KernelRates:
    """The rates of this device's kernels under the engine's option ``dtype``, or ``quantization``.

    ``buffer_bytes`` of weights, and of K and V, are gone through in turn, so that each call finds its operands in
    memory; several times the last cache, as on the machine card.
    """
    kernel_dtype = activation_dtype(engine_options(dtype)["dtype"], torch.device(device),
                                    quantized=dtype in SCHEMES)
    linear = tuple(_measure_linear(dtype, kernel_dtype, device, buffer_bytes, seconds * 0.6))
    return KernelRates(
        linear=linear, kv_bytes_per_s=_measure_kv(kernel_dtype, device, buffer_bytes, seconds * 0.2),
        attention_flops_per_s=_measure_attention(kernel_dtype, device, seconds * 0.15),
        call_s=_measure_calls(dtype, device, seconds * 0.05))


def _measure_linear(dtype: str, kernel_dtype: torch.dtype, device: str, buffer_bytes: int,
                    seconds: float) -> Iterator[tuple[int, float]]:
    """``(rows, seconds per byte of weights)``."""
    weight, where = torch.randn(SIZE, SIZE), torch.device(device)
    if dtype in SCHEMES:
        quantized = quantize(weight, SCHEMES[dtype])
        copies = (make_quantized_linear(quantized.map(torch.clone), None, dtype=kernel_dtype, device=where)
                  for _ in itertools.count())
    else:
        copies = (make_linear(weight.clone(), dtype=dtype, device=where) for _ in itertools.count())
    first = next(copies)
    turn = itertools.cycle([first, *itertools.islice(copies, max(7, buffer_bytes // first.bytes_read))])
    for rows in ROWS:
        x = torch.ones(rows, SIZE, dtype=kernel_dtype, device=device)

        def some(x: torch.Tensor = x) -> None:
            for _ in range(8):
                next(turn)(x)

        yield rows, Spread.of(time_repeated(some, device, seconds / len(ROWS))).median / (8 * first.bytes_read)


def _measure_kv(dtype: torch.dtype, device: str, buffer_bytes: int, seconds: float) -> float:
    """Bytes of K and V per second, with one query for each."""
    shape = (2, KV_HEADS, CONTEXT, HEAD_DIM)
    one = torch.randn(shape, device=device).to(dtype)
    turn = itertools.cycle([one.clone() for _ in range(max(8, buffer_bytes // one.nbytes))])
    query = torch.randn(1, KV_HEADS * GROUP, HEAD_DIM, device=device).to(dtype)

    def some() -> None:
        for _ in range(8):
            causal_attention(query, *next(turn))

    return 8 * one.nbytes / Spread.of(time_repeated(some, device, seconds)).median


def _measure_attention(dtype: torch.dtype, device: str, seconds: float) -> float:
    """FLOPs per second of a whole prompt's attention, those under the causal mask alone."""
    keys, values = (torch.randn(KV_HEADS, CONTEXT, HEAD_DIM, device=device).to(dtype) for _ in range(2))
    query = torch.randn(CONTEXT, KV_HEADS * GROUP, HEAD_DIM, device=device).to(dtype)
    spread = Spread.of(time_repeated(partial(causal_attention, query, keys, values), device, seconds))
    return 4 * KV_HEADS * GROUP * HEAD_DIM * CONTEXT * (CONTEXT + 1) / 2 / spread.median


def _measure_calls(dtype: str, device: str, seconds: float) -> float:
    """Seconds a call in a decode step of a decoder of 64 numbers: with next to nothing to compute, it is all calls."""
    config = ModelConfig(model_type="llama", vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=8,
                         num_heads=4, num_kv_heads=1, head_dim=16, max_position_embeddings=64)
    weights = {name: torch.zeros(shape) for name, shape in expected_tensors(config).items()}
    model = Decoder.from_weights(config, weights, device=device, **engine_options(dtype))
    samples = time_step(model, 1, 1, 16, seconds=seconds)
    return Spread.of(samples).median / step_cost(config, context=16, dtype=dtype).operators


class GridPoint(NamedTuple):
    """One step, measured and estimated. ``ratio`` is measured over estimated.

    ``ideal_s`` is the estimate with the roofline's straight lines alone; ``spread`` the measured interquartile range
    over the median.
    """

    phase: str
    dtype: str
    batch: int
    num_new: int
    context: int
    measured_s: float
    estimated_s: float
    ideal_s: float
    ratio: float
    spread: float
    limit: str


def check_grid(model: Decoder, hardware: Hardware, dtype: str, *, batches: Sequence[int] = (1, 4, 8, 16),
               contexts: Sequence[int] = (64, 512, 2048), prompts: Sequence[int] = (64, 256, 1024),
               seconds: float = 0.5) -> list[GridPoint]:
    """Decode steps of every batch and context, then a prefill of each prompt, each timed for about ``seconds``.

    Caches are filled with random values: a step's time does not depend on what they say. ``dtype`` is the option that
    ``model`` was made with. The points are timed twice, forwards and backwards, so that a slow minute of the machine
    does not fall on one end of the grid.
    """
    shapes = [(batch, 1, context) for context in contexts for batch in batches] + [(1, n, 0) for n in prompts]
    samples: dict[tuple[int, int, int], list[float]] = {shape: [] for shape in shapes}
    for shape in [*shapes, *reversed(shapes)]:
        samples[shape] += time_step(model, *shape, seconds=seconds / 2)
    return [_point(model, hardware, dtype, shape, Spread.of(times)) for shape, times in samples.items()]


def _point(model: Decoder, hardware: Hardware, dtype: str, shape: tuple[int, int, int], times: Spread) -> GridPoint:
    batch, num_new, context = shape
    cost = step_cost(model.config, batch=batch, num_new=num_new, context=context, dtype=dtype)
    best = estimate(cost, hardware)
    return GridPoint(
        "prefill" if num_new > 1 else "decode", dtype, batch, num_new, context, times.median, best.time_s,
        estimate(cost, hardware, ideal=True).time_s, times.median / best.time_s, times.relative, best.limit)


def time_step(model: Decoder, batch: int, num_new: int, context: int, seconds: float = 0.25) -> list[float]:
    """Seconds of a step, repeated: each of ``batch`` sequences with ``context`` cached tokens computes ``num_new``."""
    attention = ContiguousAttention(model.config, dtype=model.dtype, device=model.device)
    for sequence in range(batch):
        cache = ContiguousCache(model.config, capacity=context + num_new, dtype=model.dtype, device=model.device)
        cache.buffer.normal_()
        cache.num_tokens = context
        attention.caches[sequence] = cache
    step = StepTensors.of([[1] * num_new] * batch, [context] * batch, range(batch), device=model.device)
    return time_repeated(partial(model.forward, step, attention), str(model.device), seconds, min_rounds=3, warmup=1)


def median_error(points: Sequence[GridPoint]) -> float:
    """The median of ``|estimated / measured - 1|``."""
    return Spread.of(abs(point.estimated_s / point.measured_s - 1) for point in points).median
