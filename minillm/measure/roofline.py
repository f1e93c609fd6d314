"""The cost model: bytes, FLOPs and operator calls of one step of a decoder, and the least time they take. No torch.

A step computes ``num_new`` tokens of each of ``batch`` sequences that have ``context`` tokens cached: with ``num_new``
1 a decode step, with ``context`` 0 a prefill. Roofline (Williams, Waterman and Patterson 2009, "Roofline: an insightful
visual performance model for multicore architectures"): a kernel reads and multiplies at the same time, so it takes the
*longer* of bytes / bandwidth and FLOPs / FLOP rate; kernels follow one another, so their times *add*.

Counted: weights that are really read, K and V, matmuls. Ignored: activations (norms, SiLU, softmax and residuals read
and write a few rows), the sampler, the scheduler. So an estimate is a least time, not a promise.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from minillm.attention import FEW
from minillm.config import KV_CACHE_DTYPES, QUANTIZATIONS
from minillm.measure.hardware import Hardware
from minillm.model.config import ModelConfig


class Format(NamedTuple):
    """Bytes of a weight of a layer, of one of the head and the embedding, and of a number of K or V; ``arithmetic``
    names the dtype that is multiplied in."""

    weight_bytes: float
    head_bytes: int
    kv_bytes: int
    arithmetic: str


# By the engine's option ``dtype`` or ``quantization``. "auto" is what it means on an x86 CPU; on CUDA it is bfloat16
# (before 2020 float16). 4 bit: a scale and a middle, 4 bytes, for 32 weights; the scale of a row in 8 bit, a few
# thousandths, is left out.
FORMATS = {
    "auto": Format(2, 2, 4, "float32"), "float32": Format(4, 4, 4, "float32"), "float64": Format(8, 8, 8, "float64"),
    "bfloat16": Format(2, 2, 2, "bfloat16"), "float16": Format(2, 2, 2, "float16"),
    "int8": Format(1, 1, 2, "bfloat16"), "int4": Format(0.5 + 4 / 32, 1, 2, "bfloat16"),
}
KV_SCALE_BYTES = 2  # under ``kv_cache_dtype="int8"``, for each head's keys, and values, of a token
MAX_CROSSOVER = 2**20  # no machine holds more requests


class Part(NamedTuple):
    """Kernels of one kind in a step. ``rows``: how many each weight that is read is multiplied with."""

    num_bytes: float
    flops: float
    rows: float


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What one step reads, writes, multiplies and calls.

    Args:
        parts: by name, in order: ``embedding``, ``norms``, ``qkv``, ``attention``, ``output``, ``mlp`` (router and
            experts too) and ``head``.
        kv_bytes_read: K and V of the cached tokens (sliding windows respected).
        operators: calls that the eager decoder issues with minillm's own attention, views included: each costs the
            overhead of a call, whatever it computes.
    """

    dtype: str
    parts: Mapping[str, Part]
    kv_bytes_read: float
    operators: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights read: of the input embedding one row a token, of the experts those that are woken."""
        return sum(part.num_bytes for name, part in self.parts.items() if name != "attention")

    @property
    def num_bytes(self) -> float:
        """All bytes read and written."""
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def flops(self) -> float:
        """All FLOPs, a multiply and an add counted as two."""
        return sum(part.flops for part in self.parts.values())

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte."""
        return self.flops / self.num_bytes


def parameters(config: ModelConfig) -> dict[str, int]:
    """Numbers in the weights by part; their sum is the model's size. A tied ``head`` has none of its own."""
    hidden, head = config.hidden_size, config.vocab_size * config.hidden_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "embedding": head,
        "norms": config.num_layers * (2 * hidden + config.qk_norm * 2 * config.head_dim) + hidden,
        "qkv": config.num_layers * (query + 2 * key) * (hidden + config.qkv_bias),
        "output": config.num_layers * hidden * (query + config.o_bias),
        "mlp": round(_mlp_weights(config, config.num_experts)),
        "head": 0 if config.tie_word_embeddings else head,
    }


def _mlp_weights(config: ModelConfig, experts: float) -> float:
    """Weights of all layers' MLPs, where so many ``experts`` of each sparse layer count; routers whole."""
    hidden, inner, sparse = config.hidden_size, config.intermediate_size, sum(config.sparse_layers)
    dense = 3 * hidden * inner + config.mlp_bias * (2 * inner + hidden)
    router, expert = config.num_experts * hidden, 3 * hidden * config.moe_intermediate_size
    return (config.num_layers - sparse) * dense + sparse * (router + experts * expert)


def weight_bytes_held(config: ModelConfig, dtype: str = "bfloat16") -> int:
    """Memory that the weights take as stored; kernels that pack them hold a little more."""
    form, sizes = format_of(dtype), parameters(config)
    tables = sizes.pop("embedding") + sizes.pop("head")
    return round(tables * form.head_bytes + sum(sizes.values()) * form.weight_bytes)


def kv_bytes_per_token(config: ModelConfig, dtype: str = "bfloat16", kv_cache_dtype: str = "auto") -> int:
    """Cache that one token of one sequence takes: 2 (K and V) x layers x KV heads x head dimension x bytes; with
    ``kv_cache_dtype`` ``"int8"`` one byte a number, and a scale for each head."""
    return 2 * config.num_layers * config.num_kv_heads * _head_bytes(config, dtype, kv_cache_dtype)


def _head_bytes(config: ModelConfig, dtype: str, kv_cache_dtype: str) -> int:
    """Of the keys, or values, that one head keeps of a token in a layer."""
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"unknown kv_cache_dtype {kv_cache_dtype!r}; known: {', '.join(KV_CACHE_DTYPES)}")
    if kv_cache_dtype == "int8":
        return config.head_dim + KV_SCALE_BYTES
    return config.head_dim * format_of(dtype).kv_bytes


def format_of(dtype: str) -> Format:
    """The bytes behind an option ``dtype`` or ``quantization``; ``ValueError`` names those there are."""
    if dtype not in FORMATS:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(FORMATS)}")
    return FORMATS[dtype]


def engine_options(dtype: str) -> dict[str, str]:
    """The engine's options that a row of :data:`FORMATS` stands for."""
    return {"dtype": "auto", "quantization": dtype} if dtype in QUANTIZATIONS else {"dtype": dtype}


def experts_woken(num_experts: int, per_token: int, rows: int) -> float:
    """Expected number of distinct experts that ``rows`` tokens visit in a layer, were each choice equally likely."""
    return num_experts * (1 - (1 - per_token / num_experts) ** rows) if num_experts else 0.0


def attended_pairs(num_new: int, context: int, window: int | None = None) -> int:
    """Pairs of a query and a key that a causal mask keeps: of T new tokens alone, T (T + 1) / 2."""
    growing = num_new if window is None else min(num_new, max(0, window - context))  # queries that see all before them
    pairs = growing * context + growing * (growing + 1) // 2
    return pairs if window is None else pairs + (num_new - growing) * window


def step_cost(config: ModelConfig, *, batch: int = 1, num_new: int = 1, context: int = 0, dtype: str = "bfloat16",
              kv_cache_dtype: str = "auto", logits: str = "last") -> StepCost:
    """The cost of a step whose sequences are all alike (see the module), each in a buffer of its own. ``logits``: of
    the ``"last"`` row of each sequence, of ``"all"`` or ``"none"``. ``dtype`` names a row of :data:`FORMATS`.

    Raises:
        ValueError: ``batch`` or ``num_new`` below 1, ``context`` below 0, or an unknown ``dtype`` or ``logits``.
    """
    logit_rows = {"last": batch, "all": batch * num_new, "none": 0}.get(logits)
    if min(batch, num_new) < 1 or context < 0 or logit_rows is None:
        raise ValueError("a step needs batch and num_new of at least 1, context of at least 0, and logits 'last', "
                         f"'all' or 'none', got {batch}, {num_new}, {context} and {logits!r}")
    return mixed_step_cost(config, {(num_new, context): batch}, logit_rows=logit_rows, dtype=dtype,
                           kv_cache_dtype=kv_cache_dtype)


def mixed_step_cost(config: ModelConfig, sequences: Mapping[tuple[int, int], int], *, logit_rows: int,
                    dtype: str = "bfloat16", kv_cache_dtype: str = "auto", paged: bool = False) -> StepCost:
    """The cost of a step of any sequences: chunks of prompts beside decodes.

    Args:
        sequences: by ``(num_new, context)``, how many there are (a ``Counter`` of such pairs); at least one.
        logit_rows: rows of which logits are computed.
        paged: operators as ``PagedAttention`` calls them, together for the same few tokens; or ``ContiguousAttention``.
    """
    form, sizes = format_of(dtype), parameters(config)
    rows = sum(num_new * count for (num_new, _), count in sequences.items())
    cached, pairs = _attended(config, sequences)
    read = 2 * config.num_kv_heads * _head_bytes(config, dtype, kv_cache_dtype) * cached
    woken = experts_woken(config.num_experts, config.num_experts_per_token, rows)
    mlp, mlp_flops = _mlp_weights(config, woken), 2 * rows * _mlp_weights(config, config.num_experts_per_token)
    pair_flops = 4 * config.num_heads * config.head_dim  # two products of a query and a key, or value
    parts = {
        "embedding": Part(rows * config.hidden_size * form.head_bytes, 0, rows),
        "norms": Part(sizes["norms"] * max(4, form.kv_bytes), 0, rows),  # kept in float32 or wider
        "qkv": _linear(sizes["qkv"], form.weight_bytes, rows),
        "attention": Part(read + rows * kv_bytes_per_token(config, dtype, kv_cache_dtype), pairs * pair_flops, 0),
        "output": _linear(sizes["output"], form.weight_bytes, rows),
        "mlp": Part(mlp * form.weight_bytes, mlp_flops, mlp_flops / (2 * mlp)),
        "head": _linear(sizes["embedding"] if logit_rows else 0, form.head_bytes, logit_rows),
    }
    return StepCost(dtype=dtype, parts=parts, kv_bytes_read=read,
                    operators=_operators(config, sequences, woken, paged))


def _attended(config: ModelConfig, sequences: Mapping[tuple[int, int], int]) -> tuple[int, int]:
    """Over all layers and sequences: cached tokens that are read, and pairs of query and key."""
    cached = pairs = 0
    for window, num_layers in Counter(config.windows).items():
        for (num_new, context), count in sequences.items():
            cached += num_layers * count * (context if window is None else min(window, context))
            pairs += num_layers * count * attended_pairs(num_new, context, window)
    return cached, pairs


def _linear(num_weights: int, weight_bytes: float, rows: int) -> Part:
    return Part(num_weights * weight_bytes, 2 * num_weights * rows, rows)


def _operators(config: ModelConfig, sequences: Mapping[tuple[int, int], int], woken: float, paged: bool) -> int:
    """As the decoder issues them; a test counts the real one's calls."""
    by_length = Counter(num_new for (num_new, _), count in sequences.items() for _ in range(count))
    batch, single = by_length.total(), by_length[1]
    layer, outside = 26 + 5 * config.qk_norm, 24  # norms, linears, RoPE, SwiGLU, residuals
    if paged:
        groups = [count for num_new, count in by_length.items() if count > 1 and num_new <= FEW]
        alone, together, several = batch - sum(groups), len(groups), len(groups) - (single > 1)
        layer += 2 + 12 * alone - 3 * (single == 1) + 4 * together + 5 * several  # one write for all, then attend
        layer += 1 + 3 * alone + 2 * together if together + alone > 1 else 0  # outputs are put together
        outside += 4 + 17 * together + 7 * several  # slots, and the block tables of those that are taken together
    else:
        layer += (batch > 1) + 17 * single + 20 * (batch - single)  # write, read and attend, a sequence at a time
        outside += (2 + 2 * config.num_layers) * sum(count for (_, context), count in sequences.items() if not context)
    return round(outside + config.num_layers * layer + sum(config.sparse_layers) * (3 + 12 * woken))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Least seconds of a step on a machine.

    Args:
        time_s: the estimate, from ``parts_s`` and ``operators_s``.
        bytes_s, flops_s, operators_s: what each ceiling alone would take; ``flops_s`` is ``None`` where no FLOP rate is
            known for the dtype, and ``time_s`` then too low for a prompt.
        limit: the highest of the three, ``"bytes"``, ``"flops"`` or ``"operators"``.
        parts_s: by part, what its kernels take.
    """

    time_s: float
    bytes_s: float
    flops_s: float | None
    operators_s: float
    limit: str
    parts_s: Mapping[str, float]


def estimate(cost: StepCost, hardware: Hardware, *, ideal: bool = False) -> Estimate:
    """The least time of ``cost`` on ``hardware``; where its kernels were measured, the time of such kernels.

    ``ideal`` keeps to the straight lines of the roofline even then.
    """
    rate = hardware.flops_per_s.get(format_of(cost.dtype).arithmetic)
    rates = None if ideal else hardware.kernels.get(cost.dtype)

    def seconds(name: str, part: Part) -> float:
        if rates and name == "attention":
            return max(part.num_bytes / rates.kv_bytes_per_s, part.flops / rates.attention_flops_per_s)
        if rates and part.flops:
            return part.num_bytes * rates.linear_seconds_per_byte(part.rows)
        return max(part.num_bytes / hardware.read_bytes_per_s, part.flops / rate if rate else 0.0)

    parts_s = {name: seconds(name, part) for name, part in cost.parts.items()}
    call_s = (rates and rates.call_s) or hardware.operator_overhead_s
    work_s, operators_s = sum(parts_s.values()), cost.operators * call_s
    bytes_s, flops_s = cost.num_bytes / hardware.read_bytes_per_s, cost.flops / rate if rate else None
    ceilings = {"bytes": bytes_s, "flops": flops_s or 0.0, "operators": operators_s}
    return Estimate(
        time_s=max(work_s, operators_s) if hardware.is_async else work_s + operators_s, bytes_s=bytes_s,
        flops_s=flops_s, operators_s=operators_s, limit=max(ceilings, key=ceilings.get), parts_s=parts_s)


def crossover_batch(config: ModelConfig, hardware: Hardware, *, dtype: str = "bfloat16",
                    context: int = 0) -> int | None:
    """The smallest batch whose decode step multiplies for as long as it reads: more requests then cost time.

    ``None``: there is none (each request takes longer to read than to multiply), or no FLOP rate is known.
    """
    ridge = hardware.flops_per_s.get(format_of(dtype).arithmetic, float("inf")) / hardware.read_bytes_per_s
    found = 1 + bisect_left(range(1, MAX_CROSSOVER), ridge, key=lambda batch: step_cost(  # it never falls as they grow
        config, batch=batch, context=context, dtype=dtype).intensity)
    return found if found < MAX_CROSSOVER else None


def max_requests(config: ModelConfig, hardware: Hardware, *, context: int, dtype: str = "bfloat16",
                 kv_cache_dtype: str = "auto") -> int:
    """How many requests of ``context`` tokens fit beside the weights; 0 when not even one does."""
    free = hardware.memory_bytes - weight_bytes_held(config, dtype)
    return max(0, int(free // (kv_bytes_per_token(config, dtype, kv_cache_dtype) * max(1, context))))
