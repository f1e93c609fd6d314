"""What a step costs beside the model: its parts, how they grow with load, and whether they stay over 10,000 requests.

Every function measures in this process and returns cases, ``{"case": name, "step_s": seconds, ...}``; times are
medians or means over many steps. (Needs torch.)
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from minillm import LLM, SamplingParams
from minillm.attention.base import StepTensors
from minillm.attention.paged import PagedAttention
from minillm.cache.blocks import BlockPool
from minillm.measure.bench.batch_peers import greedy, stretch, text_ids
from minillm.measure.bench.machine import time_repeated
from minillm.measure.distribution import percentile
from minillm.measure.report import kv_bytes_read
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.weights import expected_tensors
from minillm.request import Request
from minillm.sample import Sampler, SamplingRow
from minillm.schedule.scheduler import Scheduler
from minillm.text.tokenizer import byte_tokenizer

Case = dict[str, Any]
BLOCK_SIZE = 16


class Stopwatch:
    """Sums the seconds that calls of what it wraps take, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """From now on, time every call of ``owner.attribute`` under ``name``."""
        setattr(owner, attribute, _Timed(getattr(owner, attribute), name, self.seconds))


class _Timed:
    """Calls as ``inner`` does, and is otherwise like it."""

    def __init__(self, inner: Any, name: str, seconds: dict[str, float]):
        self._inner, self._name, self._seconds = inner, name, seconds

    def __call__(self, *args: Any, **options: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return self._inner(*args, **options)
        finally:
            self._seconds[self._name] = self._seconds.get(self._name, 0.0) + time.perf_counter() - start_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def step_parts(model: str, device: str, batch: int = 32, num_steps: int = 40) -> list[Case]:
    """The parts of a greedy decode step of ``batch`` requests, with about 150 tokens each, and the whole.

    ``share`` is of the whole step. Nothing but requests that decode is in the steps that are timed.
    """
    llm, text = LLM(model, device=device, max_num_seqs=batch, max_model_len=512), text_ids(model)
    streams = [llm.stream(stretch(text, 128, 3 * i), greedy(num_steps + 64)) for i in range(batch)]
    while any(not stream.output.outputs[0].token_ids for stream in streams):
        llm.step()
    for _ in range(5):
        llm.step()
    known = [128 + len(stream.output.outputs[0].token_ids) for stream in streams]
    watch = Stopwatch()
    for owner, attribute, name in (
            (llm.engine.scheduler, "schedule", "schedule"), (llm.engine.runner, "tensors_of", "build tensors"),
            (llm.model, "forward", "model"), (llm.engine.runner, "sampler", "sample"),
            (llm.engine.scheduler, "commit", "commit"), (llm.engine, "_deliver", "detokenize and deliver"),
            (llm, "step", "whole step")):
        watch.wrap(owner, attribute, name)
    for _ in range(num_steps):
        llm.step()
    if llm.stats().num_running != batch:
        raise RuntimeError(f"{llm.stats().num_running} of {batch} requests ran to the end of the measurement")
    parts = {name: seconds / num_steps for name, seconds in watch.seconds.items()}
    whole = parts.pop("whole step")
    parts |= {"the rest": whole - sum(parts.values()), "all but the model": whole - parts["model"], "whole step": whole}
    kv = [kv_bytes_read(llm.model.config, tokens + num_steps / 2, llm.model.dtype.itemsize) for tokens in known]
    read = llm.model.bytes_read_per_step + sum(kv)
    return [{"case": name, "step_s": seconds, "share": seconds / whole,
             "read_bytes_per_s": read / seconds if name in ("model", "whole step") else None}
            for name, seconds in parts.items()]


def sampler_by_vocabulary(device: str, sizes: Sequence[int] = (1024, 4096, 16_384, 49_152, 131_072),
                          seconds: float = 0.3) -> list[Case]:
    """The sampler alone on 32 rows of normal logits, greedy and with top-p, by size of the vocabulary."""
    cases, generator = [], torch.Generator().manual_seed(0)
    for name, params in (("greedy", greedy(8)), ("top_p 0.9", SamplingParams(top_p=0.9, max_tokens=8))):
        rows = [SamplingRow(params, seed, 0, 4, (1, 2), (3, 4, 5, 6)) for seed in range(32)]
        for size in sizes:
            logits = (2.5 * torch.randn(32, size, generator=generator)).to(device)
            samples = time_repeated(lambda: Sampler(size)(logits, rows), device, seconds)  # noqa: B023
            cases.append({"case": f"sampler, {name}, vocabulary {size}", "step_s": percentile(samples, 50)})
    return cases


def decode_by_load(model: str, device: str, *, batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
                   contexts: Sequence[int] = (128, 512, 2048), most_tokens: int = 65_536,
                   seconds: float = 0.5) -> list[Case]:
    """A decode step over paged keys and values by batch and context, as far as ``most_tokens`` are cached in all.

    Each sequence has blocks of its own, drawn in random order: the worst case of a pool that has been in use.
    """
    decoder = LLM(model, device=device, max_num_seqs=1, max_model_len=64).model
    config = decoder.config
    pool = BlockPool(most_tokens // BLOCK_SIZE + max(batches), BLOCK_SIZE, caching=False)
    attention = PagedAttention(config, pool, dtype=decoder.dtype, device=decoder.device)
    attention.store.buffer.normal_()
    blocks = random.Random(0).sample(range(pool.num_blocks), pool.num_blocks)
    cases = []
    for context, batch in ((c, b) for c in contexts for b in batches if b * c <= most_tokens):
        size = context // BLOCK_SIZE + 1
        step = {"token_ids": [[1]] * batch, "starts": [context] * batch, "sequences": range(batch),
                "block_tables": [blocks[i * size:(i + 1) * size] for i in range(batch)], "device": decoder.device}
        samples = time_repeated(lambda: decoder.forward(StepTensors.of(**step), attention),  # noqa: B023
                                device, seconds, min_rounds=3, warmup=1)
        step_s = percentile(samples, 50)
        read = decoder.bytes_read_per_step + batch * kv_bytes_read(config, context + 1, decoder.dtype.itemsize)
        cases.append({"case": f"step, batch {batch}, context {context}", "step_s": step_s,
                      "output_tokens_per_s": batch / step_s, "read_bytes_per_s": read / step_s})
    return cases


def scheduler_by_queue(shapes: Sequence[tuple[int, int]] = (
        (8, 10), (8, 100), (8, 1000), (8, 10_000), (1, 0), (4, 0), (16, 0), (64, 0), (256, 0))) -> list[Case]:
    """``schedule`` and ``commit`` by ``(running, waiting)``, all running ones decoding. No tensors."""
    return [{"case": f"scheduler, {running} running, {waiting} waiting",
             "step_s": _scheduler_step_s(running, waiting)} for running, waiting in shapes]


def _scheduler_step_s(num_running: int, num_waiting: int, num_steps: int = 200) -> float:
    scheduler = Scheduler(BlockPool(num_running * 64, BLOCK_SIZE), max_num_seqs=num_running,
                          max_num_batched_tokens=num_running * 64 + 1)
    for number in range(num_running + num_waiting):
        scheduler.add(Request(
            request_id=str(number), prompt_token_ids=tuple(range(number, number + 64)), params=greedy(900), seed=0,
            max_total_tokens=964, arrival_s=float(number)))
    times_s, num_warmup = [], 8  # the first steps read the prompts
    for _ in range(num_steps + num_warmup):
        start_s = time.perf_counter()
        plan = scheduler.schedule()
        scheduler.commit(plan, [5] * len(plan.sampling))
        times_s.append(time.perf_counter() - start_s)
    if (len(scheduler.running), len(scheduler.waiting), len(plan.sampling)) != (num_running, num_waiting, num_running):
        raise RuntimeError(f"{len(scheduler.running)} run and {len(scheduler.waiting)} wait")
    return percentile(times_s[num_warmup:], 50)


def tiny_llm(**options: Any) -> LLM:
    """An engine over a random model of two small layers, with a byte tokenizer."""
    tokenizer = byte_tokenizer()
    config = ModelConfig(model_type="llama", vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=64,
                         num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position_embeddings=512)
    generator = torch.Generator().manual_seed(0)
    weights = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in expected_tensors(config).items()}
    return LLM(Decoder.from_weights(config, weights), tokenizer=tokenizer, device="cpu", **options)


def endurance(num_requests: int = 10_000, num_stages: int = 10) -> list[Case]:
    """Requests in a row through one engine over a tiny model: what each stage (a tenth of them) leaves behind.

    16 at a time, prompts of 8 to 71 tokens of which a third begin alike, 8 to 15 new tokens each, greedy; the pool is
    small enough that cached blocks are evicted all the time. ``step_s`` is the mean of the stage's steps.
    """
    llm, rng = tiny_llm(max_num_seqs=16, num_kv_blocks=128), random.Random(0)
    cases, at_once = [], 16
    prompts = [[rng.randrange(256) for _ in range(rng.randint(8, 71))] for _ in range(num_requests)]
    for index in range(0, num_requests, 3):
        prompts[index][:32] = range(32)
    for stage in range(num_stages):
        start_s, before = time.perf_counter(), llm.stats().num_steps
        mine = prompts[stage * num_requests // num_stages:(stage + 1) * num_requests // num_stages]
        for first in range(0, len(mine), at_once):
            some = mine[first:first + at_once]
            llm.generate(some, [greedy(8 + len(prompt) % 8) for prompt in some])
        steps, stats, pool = llm.stats().num_steps - before, llm.stats(), llm.engine.scheduler.pool
        cases.append({"case": f"requests, stage {stage + 1} of {num_stages}",
                      "step_s": (time.perf_counter() - start_s) / steps, "resident_bytes": resident_bytes(),
                      "num_left": stats.num_waiting + stats.num_running + pool.num_blocks - pool.num_available})
    return cases


def resident_bytes() -> int | None:
    """Memory of this process that is in RAM now; ``None`` where the system does not tell."""
    try:
        return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) * 1024
    except (OSError, AttributeError):
        return None
