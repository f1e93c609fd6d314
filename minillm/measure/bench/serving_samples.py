"""One sample of a part of the serving benchmark, in a process of its own. (Needs torch.)

``python -m minillm.measure.bench.serving_samples JSON`` takes a :class:`ServingSpec` and prints, as its last line, a
list of cases: ``{"case": name, "step_s": 0.012, ...}``. :mod:`~minillm.measure.bench.serving` repeats and reports them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from minillm import LLM, SamplingParams
from minillm.attention.torch_backend import ContiguousAttention
from minillm.llm import Stream
from minillm.measure.bench import step_costs
from minillm.measure.bench.batch_peers import BatchJob, batch_workload, greedy, load_batch_engine, stretch, text_ids
from minillm.measure.bench.quality import passages
from minillm.measure.distribution import percentile
from minillm.measure.report import decode_bytes_per_token
from minillm.measure.roofline import engine_options
from minillm.model.device import resolve_device

Case = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServingSpec:
    """What to measure: a ``part``, one of its sides, the model; ``batch_size`` is the batch part's alone."""

    part: str
    side: str
    model: str = "smollm2-135m"
    device: str = "auto"
    batch_size: int = 32


def take_batch(spec: ServingSpec) -> list[Case]:
    """Output tokens per second of 32 requests at once; ``answers`` names each answer's tokens."""
    engine, text = load_batch_engine(spec.side, spec.model, spec.device, spec.batch_size), text_ids(spec.model)
    engine.run([BatchJob(stretch(text[::-1], 32, start), 8) for start in range(4)])
    jobs, before = batch_workload(text), engine.weight_bytes
    start_s = time.perf_counter()
    answers = engine.run(jobs)
    seconds = time.perf_counter() - start_s
    engine.close()
    if [len(answer) for answer in answers] != [job.num_new_tokens for job in jobs]:
        raise RuntimeError(f"{spec.side} did not make the numbers of tokens that were asked for")
    read = None if before is None else (engine.weight_bytes - before) / seconds
    return [{"case": spec.side, "batch_size": spec.batch_size, "seconds": seconds,
             "output_tokens_per_s": sum(map(len, answers)) / seconds, "read_bytes_per_s": read,
             "answers": [hashlib.sha256(json.dumps(answer).encode()).hexdigest()[:12] for answer in answers]}]


def take_formats(spec: ServingSpec) -> list[Case]:
    """Tokens per second in the number format of ``spec.side``: decoding, by what more tokens take, and prefill."""
    text, starts = text_ids(spec.model), itertools.count(1)

    def seconds(batch: int, num_prompt: int, num_new: int) -> float:
        jobs = [BatchJob(stretch(text, num_prompt, next(starts)), num_new) for _ in range(batch)]
        start_s = time.perf_counter()
        engine.run(jobs)
        return time.perf_counter() - start_s

    cases = []
    for batch, name, num_more in ((1, "one request", 96), (32, "32 at once", 32)):
        engine = load_batch_engine(spec.side, spec.model, spec.device, batch)
        seconds(batch, 64, 8)
        if batch > 1:
            seconds(1, 256, 1)
            cases.append({"case": f"prompt, {spec.side}",
                          "output_tokens_per_s": 256 / percentile([seconds(1, 256, 1) for _ in range(3)], 50)})
        decoding = seconds(batch, 128, 1 + num_more) - seconds(batch, 128, 1)
        cases.append({"case": f"{name}, {spec.side}", "output_tokens_per_s": batch * num_more / decoding})
        engine.close()
    return cases


def take_paged(spec: ServingSpec) -> list[Case]:
    """Decode of one request, 128 tokens after 128, over blocks or over one buffer (``spec.side``)."""
    llm, text = LLM(spec.model, device=spec.device, max_model_len=512), text_ids(spec.model)
    if spec.side == "contiguous":
        options = {"dtype": llm.model.dtype, "device": llm.model.device}
        attention = ContiguousAttention(llm.model.config, **options)
        llm = LLM(llm.model, tokenizer=llm.tokenizer, attention_backend=attention, max_model_len=512)
    llm.generate([stretch(text[::-1], 128, 0)], greedy(16))
    speed = llm.generate([stretch(text, 128, 0)], greedy(128))[0].metrics.decode_tokens_per_s
    read = decode_bytes_per_token(llm.model, 128, 128) * speed
    return [{"case": spec.side, "output_tokens_per_s": speed, "read_bytes_per_s": read}]


def take_prefix(spec: ServingSpec) -> list[Case]:
    """TTFT of a prompt of 1,020 tokens after one that shares its first 1,000 (``"warm"``) or none (``"cold"``)."""
    llm, text = LLM(spec.model, device=spec.device, max_model_len=2048), text_ids(spec.model)
    shared, other = stretch(text, 1000, 0), stretch(text, 1000, 7)
    llm.generate([(shared if spec.side == "warm" else other) + stretch(text, 20, 31)], greedy(4))
    metrics = llm.generate([shared + stretch(text, 20, 77)], greedy(4))[0].metrics
    return [{"case": spec.side, "ttft_s": metrics.ttft_s, "num_cached_tokens": metrics.num_cached_tokens}]


def take_chunked(spec: ServingSpec) -> list[Case]:
    """A prompt of 2,000 tokens arrives among 8 decoding streams. ``spec.side`` is ``"unchunked"``, or the most tokens
    of a prompt in a step and of a whole step: ``"128 of 2048"``.

    The work after the arrival is the same on every side: 96 tokens for each stream, 32 for the newcomer.
    """
    chunk, _, budget = spec.side.partition(" of ")
    options = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2304} if spec.side == "unchunked" else \
        {"max_prefill_chunk": int(chunk), "max_num_batched_tokens": int(budget)}
    llm = LLM(spec.model, device=spec.device, max_num_seqs=16, max_model_len=2304, **options)
    text = text_ids(spec.model)
    llm.generate([stretch(text[::-1], 300, 0)], greedy(4))
    streams = [llm.stream(stretch(text, 32, 5 * i), greedy(96 + 16)) for i in range(8)]
    while min(len(_made(stream)) for stream in streams) < 16:
        llm.step()
    num_tokens = 8 * (96 + 16) - sum(len(_made(stream)) for stream in streams) + 32
    arrival_s = time.perf_counter()
    newcomer = llm.stream(stretch(text, 2000, 111), greedy(32))
    while llm.step():
        pass
    seconds = time.perf_counter() - arrival_s
    gaps = [gap for stream in streams for gap in gaps_after(stream.output.metrics.token_times_s, arrival_s)]
    return [{"case": spec.side, "worst_gap_s": max(gaps), "median_gap_s": percentile(gaps, 50),
             "ttft_s": newcomer.output.metrics.ttft_s, "output_tokens_per_s": num_tokens / seconds}]


def _made(stream: Stream) -> list[int]:
    return stream.output.outputs[0].token_ids


def gaps_after(times_s: Sequence[float], from_s: float) -> list[float]:
    """The gaps between neighbours of ``times_s`` that end after ``from_s``."""
    return [end - start for start, end in zip(times_s, times_s[1:]) if end > from_s]


def take_overhead(spec: ServingSpec) -> list[Case]:
    """See :func:`~minillm.measure.bench.step_costs.step_parts` and ``sampler_by_vocabulary``."""
    if spec.side == "sampler":
        return step_costs.sampler_by_vocabulary(spec.device)
    return step_costs.step_parts(spec.model, spec.device)


EDITS = ("Copy this text word for word, but write every number in words:\n\n{}",
         "Quote the three most important sentences of this text, each on a line of its own:\n\n{}")
STORIES = ("Write a short story about a lighthouse keeper.", "Explain how a bicycle stays upright.",
           "What should a beginner know about growing tomatoes?", "Describe a market in a small town in the morning.")


def take_speculation(spec: ServingSpec) -> list[Case]:
    """``spec.side`` is a number format, and ``"plain"``, ``"ngram"``, ``"table"`` or ``"mlp"``. Greedy answers to
    their own end: one by one to prompts that ask for what they contain (two kinds of prompt, of a text and a program)
    and to prompts that do not, and 32 at once."""
    kind, how = spec.side.split()
    asked = {"plain": None, "ngram": {"method": "ngram"}, "table": {"method": "ngram", "table": spec.model},
             "mlp": {"method": "mlp_speculator", "model": spec.model}}[how]
    llm = LLM(spec.model, device=spec.device, max_num_seqs=32, enable_prefix_caching=False,
              speculative_config=asked, **engine_options(kind))
    texts = [" ".join(passage["text"].split(" ")[:130]) for passage in passages() if passage["language"] == "en"]
    copies = [form.format(text) for form in EDITS for text in (texts[0], texts[9])]
    ask = lambda prompts: llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts],  # noqa: E731
                                   SamplingParams(temperature=0.0, max_tokens=80))
    ask(STORIES)
    cases = []
    for name, prompts in (("copies", copies), ("stories", STORIES)):
        metrics = [ask([prompt])[0].metrics for prompt in prompts]
        steps = [(own.num_output_tokens - 1, own.e2e_s - own.ttft_s) for own in metrics]
        num_tokens, seconds = map(sum, zip(*steps))
        cases.append({"case": f"{name}, {spec.side}", "output_tokens_per_s": num_tokens / seconds})
    start_s = time.perf_counter()
    outputs = ask([f"{story} ({number})" for number in range(8) for story in STORIES])
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    speed = num_tokens / (time.perf_counter() - start_s)
    return [*cases, {"case": f"32 at once, {spec.side}", "output_tokens_per_s": speed}]


def take_growth(spec: ServingSpec) -> list[Case]:
    """See :func:`~minillm.measure.bench.step_costs.decode_by_load` and ``scheduler_by_queue``."""
    if spec.side == "scheduler":
        return step_costs.scheduler_by_queue()
    return step_costs.decode_by_load(spec.model, spec.device)


TAKERS: dict[str, Callable[[ServingSpec], list[Case]]] = {
    "batch": take_batch, "formats": take_formats, "paged": take_paged, "overhead": take_overhead, "prefix": take_prefix,
    "chunked": take_chunked, "speculation": take_speculation, "growth": take_growth,
    "endurance": lambda spec: step_costs.endurance(),
}


def take(spec: ServingSpec) -> list[Case]:
    """The cases of ``spec``, each with the device and the number of threads; an unknown part raises ``KeyError``."""
    device = resolve_device(spec.device)
    cases = TAKERS[spec.part](replace(spec, device=device))
    return [case | {"device": device, "num_threads": torch.get_num_threads()} for case in cases]


if __name__ == "__main__":
    print(json.dumps(take(ServingSpec(**json.loads(sys.argv[1]))), allow_nan=False))
