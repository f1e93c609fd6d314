"""``minillm bench quality``: what fewer bits change in a model's answers. (Needs torch.)

Every side reads the same passages (``data/eval/passages.json``, written for this project) as the reference does, the
model in float32, through the same path: blocks of keys and values, in chunks. For each passage, over all its tokens:

    perplexity    exp of the mean surprise at the next token; its ratio to the reference's
    KL            mean divergence of the next-token distributions from the reference's, in nats
    top-1         how often the most likely next token is the reference's
    match         tokens of a greedy answer before it leaves the reference's

Intervals are of 95 %, from 2,000 resamplings of passages (tokens of one passage are not independent). The first side
is the reference itself read in other chunks: what it differs by is the noise floor, and less means nothing.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.assemble import STORES, load_decoder
from minillm.attention.base import StepTensors
from minillm.attention.paged import PagedAttention
from minillm.cache.blocks import BlockPool
from minillm.measure.bench.compare import say_now
from minillm.measure.report import table
from minillm.measure.results import Recording, environment, shipped_file, shown_path
from minillm.model.decoder import Decoder
from minillm.model.device import resolve_device
from minillm.model.hub import resolve
from minillm.model.quantize import Scheme
from minillm.model.weights import expected_tensors
from minillm.text.tokenizer import load_tokenizer

MAX_TOKENS, CHUNK, PROMPT_TOKENS, ANSWER_TOKENS = 256, 64, 32, 64


@dataclass(frozen=True)
class Side:
    """A way to run the model: options of the engine, ``quantization`` by name or as a scheme, and how many tokens of a
    passage are read at once. A GGUF file's own 4-bit blocks are kept under the *name* ``"int4"`` alone."""

    dtype: str = "auto"
    quantization: str | Scheme | None = None
    kv_cache_dtype: str = "auto"
    chunk: int = CHUNK


def _int4(group_size: int, fit: str) -> Side:
    return Side(quantization=Scheme("int4", group_size, fit))


REFERENCE = Side("float32")
SIDES = {
    "float32, other chunks": Side("float32", chunk=MAX_TOKENS),
    "auto": Side(),
    "auto, int8 KV": Side(kv_cache_dtype="int8"),
    "bfloat16": Side("bfloat16"),
    "int8": Side(quantization="int8"),
    "int4": Side(quantization="int4"),
    "int4, int8 KV": Side(quantization="int4", kv_cache_dtype="int8"),
    "int4 g32 least-squares": _int4(32, "least-squares"),
    "int4 g32 minmax": _int4(32, "minmax"),
    "int4 g32 absmax": _int4(32, "absmax"),
    "int4 g64 least-squares": _int4(64, "least-squares"),
    "int4 g128 least-squares": _int4(128, "least-squares"),
    "int4 g128 absmax": _int4(128, "absmax"),
}


def passages() -> list[dict[str, str]]:
    """Each with its ``name``, ``kind``, ``language`` and ``text``."""
    return json.loads(shipped_file("eval/passages.json").read_text("utf-8"))


def load_side(model: str, side: Side, device: str) -> Decoder:
    """The decoder of ``side``."""
    return load_decoder(resolve(model), dtype=side.dtype, device=device, quantization=side.quantization)


@torch.inference_mode()
def log_probabilities(model: Decoder, side: Side, token_ids: Sequence[int]) -> Tensor:
    """Those of the next token after each of ``token_ids``, float64 ``[T, vocab_size]``."""
    pool = BlockPool(-(-len(token_ids) // 16), 16, caching=False)
    attention = PagedAttention(model.config, pool, dtype=model.dtype, device=model.device,
                               store=STORES[side.kv_cache_dtype])
    read = []
    for start in range(0, len(token_ids), side.chunk):
        step = StepTensors.of([token_ids[start:start + side.chunk]], [start], [0], device=model.device, logits="all",
                              block_tables=[range(pool.num_blocks)])
        read.append(model.forward(step, attention).double().log_softmax(-1))
    return torch.cat(read)


def compared(exact: Tensor, near: Tensor, token_ids: Sequence[int]) -> dict[str, float]:
    """Sums over the tokens after the first: their number, surprise in nats on both sides, divergence, agreement."""
    exact, near = exact[:-1], near[:-1]
    following = torch.tensor(token_ids[1:], device=exact.device).unsqueeze(1)
    return {
        "num_tokens": len(token_ids) - 1,
        "nll": -near.gather(1, following).sum().item(),
        "reference_nll": -exact.gather(1, following).sum().item(),
        "kl": (exact.exp() * (exact - near)).sum().item(),
        "top1": (exact.argmax(-1) == near.argmax(-1)).sum().item(),
    }


def greedy_answers(model: Decoder, side: Side, prompts: list[list[int]], tokenizer: Any) -> list[list[int]]:
    """The tokens that follow each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    with LLM(model, tokenizer=tokenizer, kv_cache_dtype=side.kv_cache_dtype) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def num_matching(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def run(model: str, device: str = "auto", sides: dict[str, Side] = SIDES, *, most: int | None = None,
        say: Callable[[str], None] = say_now) -> Recording:
    """Compare every side with the reference, on the first ``most`` passages (all)."""
    device, texts, tokenizer = resolve_device(device), passages()[:most], load_tokenizer(resolve(model))
    ids = [tokenizer.encode(passage["text"])[:MAX_TOKENS] for passage in texts]
    prompts = [own[:PROMPT_TOKENS] for own in ids]
    where, samples = environment(device=device), []
    reference = load_side(model, REFERENCE, device)
    answers = greedy_answers(reference, REFERENCE, prompts, tokenizer)
    num_weights = sum(map(math.prod, expected_tensors(reference.config).values()))
    with TemporaryDirectory() as folder:  # the reference's: gigabytes, which every side needs once
        kept = [Path(folder) / str(number) for number in range(len(ids))]
        for own, path in zip(ids, kept, strict=True):
            torch.save(log_probabilities(reference, REFERENCE, own), path)
        for name, side in sides.items():
            say(name)
            decoder = load_side(model, side, device)
            ours = greedy_answers(decoder, side, prompts, tokenizer)
            for passage, own, path, answer, theirs in zip(texts, ids, kept, ours, answers, strict=True):
                sums = compared(torch.load(path), log_probabilities(decoder, side, own), own)
                samples.append({"side": name, "passage": passage["name"], "kind": passage["kind"],
                                "language": passage["language"], "weight_bytes": decoder.num_bytes, **sums,
                                "match": num_matching(answer, theirs)})
    settings = {"model": model, "max_tokens": MAX_TOKENS, "answer_tokens": ANSWER_TOKENS, "num_weights": num_weights,
                "sides": {name: asdict(side) for name, side in sides.items()}}
    return Recording(name=f"quality-{datetime.now(UTC):%Y-%m-%d-%H%M%S}", samples=samples, settings=settings,
                     environment=where)


def interval(samples: Sequence[dict[str, float]], statistic: Callable[[dict[str, float]], float],
             resamplings: int = 2000) -> tuple[float, float, float]:
    """``statistic`` of the samples' sums, and the ends of its 95 % interval by resampling whole samples."""
    keys = ("num_tokens", "nll", "reference_nll", "kl", "top1", "match")
    values = np.array([[sample[key] for key in keys] for sample in samples])
    of = lambda sums: statistic(dict(zip(keys, sums)) | {"num_samples": len(samples)})  # noqa: E731
    rows = np.random.default_rng(0).integers(0, len(values), (resamplings, len(values)))
    drawn = sorted(of(values[row].sum(0)) for row in rows)
    return of(values.sum(0)), drawn[int(0.025 * resamplings)], drawn[int(0.975 * resamplings)]


STATISTICS: dict[str, Callable[[dict[str, float]], float]] = {
    "perplexity": lambda sums: math.exp(sums["nll"] / sums["num_tokens"]),
    "perplexity ratio": lambda sums: math.exp((sums["nll"] - sums["reference_nll"]) / sums["num_tokens"]),
    "KL": lambda sums: sums["kl"] / sums["num_tokens"],
    "top-1": lambda sums: sums["top1"] / sums["num_tokens"],
    "match": lambda sums: sums["match"] / sums["num_samples"],
}


def format_quality(recording: Recording) -> str:
    """A line for each side: bits a weight, then each statistic with its interval."""
    rows = [["", "bits a weight", *STATISTICS]]
    for side in recording.settings["sides"]:
        own = [sample for sample in recording.samples if sample["side"] == side]
        bits = 8 * own[0]["weight_bytes"] / recording.settings["num_weights"]
        cells = [interval(own, statistic) for statistic in STATISTICS.values()]
        rows.append([side, f"{bits:.1f}", *(f"{value:.3g} ({low:.3g} to {high:.3g})" for value, low, high in cells)])
    tokens = sum(sample["num_tokens"] for sample in recording.samples) // len(recording.settings["sides"])
    return "\n".join([f"{recording.settings['model']} against float32, {tokens} tokens of passages, greedy answers of "
                      f"{recording.settings['answer_tokens']}; 95 % intervals over passages", table(rows)])


def main(args: argparse.Namespace) -> int:
    """Run ``minillm bench quality``."""
    recording = run(args.model, args.device)
    if args.out:
        recording = replace(recording, name=args.out.stem)
    path = recording.save(args.out)
    print("", format_quality(recording), "", f"every sample: {shown_path(path)}", sep="\n")
    return 0
