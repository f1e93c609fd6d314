"""``minillm estimate``: will a model fit on a machine, how fast at best, and what limits it. Needs no weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from minillm.config import KV_CACHE_DTYPES, QUANTIZATIONS
from minillm.measure import roofline
from minillm.measure.card import MachineCard
from minillm.measure.hardware import Hardware, known_hardware
from minillm.measure.report import format_bytes, format_seconds
from minillm.model.config import ModelConfig
from minillm.model.shapes import find_config

MAX_COUNT = 10**8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the machine and the load."""
    parser.add_argument("model", help="a known name (llama-3-8b ...), a folder with a config.json, or a .gguf file")
    parser.add_argument("--on", metavar="MACHINE", help="h100, h200, a100-80gb, l4, t4, rtx-4090, m4-max ... "
                        "(default: this machine, by its card)")
    parser.add_argument("--context", type=count, default=2048, help="tokens of each request in the cache (default: "
                        "2048)")
    parser.add_argument("--batch", type=count, default=1, help="requests that decode together (default: 1)")
    parser.add_argument("--prompt", type=count, help="tokens of the prompt to read (default: the context)")
    add_formats(parser)
    parser.add_argument("--json", action="store_true", help="print numbers in base units as JSON")


def add_formats(parser: argparse.ArgumentParser) -> None:
    """In what weights, keys and values are kept."""
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16; or, as the engine's "
                        "quantization, int8 or int4 (default: auto)")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto",
                        help="as LLM's option of this name (default: auto)")


def count(text: str) -> int:
    """A whole number from 1 on, of an argument."""
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        value = 0
    if not 1 <= value <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {MAX_COUNT:,}")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the answer; 0 even where the model does not fit: that is an answer too."""
    config = find_config(args.model)
    args.prompt = args.prompt or args.context
    if max(args.context, args.prompt) > config.max_position_embeddings:
        raise ValueError(f"{args.model} has positions for {config.max_position_embeddings:,} tokens; give a --context "
                         "and a --prompt up to that")
    hardware, dtype = machine_of(args.on, args.dtype)
    answer = {"model": args.model, **answer_for(
        config, hardware, args.batch, args.context, args.prompt, dtype, args.kv_cache_dtype)}
    print(json.dumps(answer, indent=1, allow_nan=False) if args.json else "\n".join(lines_of(answer)))
    return 0


def machine_of(name: str | None, dtype: str) -> tuple[Hardware, str]:
    """The hardware, and what ``dtype`` means there."""
    if name is None and (card := MachineCard.load()) is None:
        raise ValueError("this machine has not been measured: run `minillm card` first, or name one with --on: "
                         f"{', '.join(known_hardware())}")
    hardware = Hardware.of_card(card) if name is None else Hardware.named(name)
    if dtype == "auto" and hardware.is_async:  # as the engine chooses on a GPU
        dtype = "float16" if {"float16", "bfloat16"} & hardware.flops_per_s.keys() == {"float16"} else "bfloat16"
    return hardware, dtype


def in_words(dtype: str, kv_cache_dtype: str) -> str:
    """Number formats for people; what ``"auto"`` and the quantizations mean is said."""
    form, cache = roofline.FORMATS[dtype], ", int8 cache" * (kv_cache_dtype == "int8")
    if dtype not in ("auto", *QUANTIZATIONS):
        return dtype + cache
    return f"{dtype} ({8 * form.weight_bytes:g}-bit weights, {form.arithmetic} activations{cache})"


def answer_for(config: ModelConfig, hardware: Hardware, batch: int, context: int, prompt: int,
               dtype: str, kv_cache_dtype: str = "auto") -> dict[str, Any]:
    """What the command says of one model on one machine, in bytes, tokens and seconds.

    ``ttft``: reading ``prompt`` tokens, alone. ``step``: one decode step of ``batch`` requests with ``context`` tokens
    each (both as :class:`~minillm.measure.roofline.Estimate`). ``kv_share``: the part of that step's bytes that is
    cache. ``crossover_batch``: at that context, and ``..._of_weights`` with empty caches. ``None``: cannot be known.
    """
    formats = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    cost = roofline.step_cost(config, batch=batch, context=context, **formats)
    step, memory = roofline.estimate(cost, hardware), hardware.memory_bytes or None
    weights, per_token = roofline.weight_bytes_held(config, dtype), roofline.kv_bytes_per_token(config, **formats)
    kv_bytes = batch * context * per_token
    return {
        "machine": hardware.name, "source": hardware.source, **formats, "batch": batch, "context": context,
        "prompt": prompt, "memory_bytes": memory, "weight_bytes": weights, "kv_bytes_per_token": per_token,
        "kv_bytes": kv_bytes, "fits": weights + kv_bytes <= memory if memory else None,
        "max_requests": roofline.max_requests(config, hardware, context=context, **formats) if memory else None,
        "ttft": asdict(roofline.estimate(roofline.step_cost(config, num_new=prompt, **formats), hardware)),
        "step": asdict(step), "tokens_per_s": batch / step.time_s, "kv_share": cost.kv_bytes_read / cost.num_bytes,
        "crossover_batch": roofline.crossover_batch(config, hardware, dtype=dtype, context=context),
        "crossover_batch_of_weights": roofline.crossover_batch(config, hardware, dtype=dtype),
    }


def lines_of(answer: dict[str, Any]) -> list[str]:
    """The answer for people."""
    a, step, known = SimpleNamespace(**answer), answer["step"], answer["step"]["flops_s"] is not None
    ttft = f"at least {format_seconds(a.ttft['time_s'])} ({_limits(a.ttft)})" if known else _UNKNOWN
    crossover = f"multiplying limits a step {_from(a.crossover_batch)}; with empty caches " \
        f"{_from(a.crossover_batch_of_weights)}" if known else _UNKNOWN
    return [
        f"{a.model} in {in_words(a.dtype, a.kv_cache_dtype)} on {a.machine}",
        f"  memory      weights {format_bytes(a.weight_bytes)} + cache {format_bytes(a.kv_bytes)} ({a.batch:,} x "
        f"{a.context:,} tokens x {a.kv_bytes_per_token / 2**10:g} KiB)\n              {_fit(a)}",
        f"  TTFT        {a.prompt:,} prompt tokens: {ttft}",
        f"  TPOT        at least {format_seconds(step['time_s'])} ({_limits(step)})",
        f"  throughput  at most {1 / step['time_s']:,.1f} tokens/s a request, {a.tokens_per_s:,.1f} in all; the cache "
        f"is {a.kv_share:.0%} of the bytes",
        f"  crossover   {crossover}",
        "  These are floors: no activations, scheduler or sampler. Parts of a step follow one another, and each takes",
        f"  the longer of its reading and multiplying: the whole may exceed both. Source: {a.source}",
    ]


_UNKNOWN = "unknown (no FLOP rate is known for this number type)"


def _from(batch: int | None) -> str:
    return f"from {batch:,} requests on" if batch else "at no batch (each request reads for longer than it multiplies)"


def _fit(a: SimpleNamespace) -> str:
    if a.memory_bytes is None:
        return "this machine's memory is unknown: run `minillm card` again"
    left = a.memory_bytes - a.weight_bytes - a.kv_bytes
    verdict = f"fits: {format_bytes(left)} left" if a.fits else f"does not fit: {format_bytes(-left)} too much"
    most = f"at most {a.max_requests:,} such requests fit" if a.max_requests else "not even one such request fits"
    return f"{verdict} of {format_bytes(a.memory_bytes)}; {most}" + \
        ("" if a.fits else " (times below: as if it did)")


def _limits(step: dict[str, Any]) -> str:
    """What the whole step takes of each, from the longest down."""
    words = {"reading memory": step["bytes_s"], "multiplying": step["flops_s"], "operators": step["operators_s"]}
    ordered = sorted((name for name in words if words[name]), key=words.get, reverse=True)
    return "in all " + ", ".join(f"{name} {format_seconds(words[name])}" for name in ordered)
