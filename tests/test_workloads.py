"""The engine under random workloads in float64: always the tokens of the simplest loop."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from minillm import LLM, InvalidRequest, QueueFull, SamplingParams
from minillm.attention.torch_backend import ContiguousAttention
from minillm.cache.kv import ContiguousCache
from minillm.course.batteries.scheduler import check_pool

WORKLOADS = int(os.environ.get("MINILLM_WORKLOADS", "400"))
# What a hundred workloads contain at least, or the suite would prove less than it says.
LEAST = {"refused": 100, "turned away": 30, "preempted": 25, "evicted": 800, "hits": 60, "stood still": 10,
         "mixed steps": 100, "chunks": 700, "cancelled": 60, "length": 150, "stop": 40, "cut": 50, "contiguous": 10,
         "int8": 20, "accepted drafts": 300, "rejected drafts": 100, "dropped drafts": 20}


@pytest.fixture(autouse=True)
def one_thread():
    """A tiny model is quicker without handing its tensors to other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options_of(draw: random.Random) -> dict[str, Any]:
    block_size, max_num_seqs = draw.choice((1, 2, 4)), draw.randint(1, 5)
    return {"block_size": block_size, "num_kv_blocks": draw.randint(10, 34) // block_size + 1,
            "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_seqs + draw.choice((1, 3, 8, 24)),
            "max_prefill_chunk": draw.choice((1, 3, 8, 24)), "enable_chunked_prefill": draw.random() < 0.8,
            "enable_prefix_caching": draw.random() < 0.8, "scheduling_policy": draw.choice(("fcfs", "priority")),
            "max_waiting": draw.choice((None, None, 1))}


class Guesser:
    """A proposer that knows the answers, and guesses each token right or not; and its own controller."""

    def __init__(self, draw: random.Random, answer: Callable[..., list[int]]):
        self.draw, self.answer, self.answers = draw, answer, {}

    def propose(self, requests, num_tokens):
        return [[token if self.draw.random() < 0.7 else (token + 1) % 256
                 for token in self.following(request)[:num_tokens]] for request in requests]

    def following(self, request):
        if request not in self.answers:
            self.answers[request] = self.answer(list(request.prompt_token_ids), request.params)
        return self.answers[request][request.num_output_tokens:]

    def free(self, request):
        self.answers.pop(request, None)

    def num_drafts(self, num_requests):
        return self.draw.randint(0, 4)

    def asked(self, *_):
        pass

    def saw(self, *_):
        pass


def engine_of(draw: random.Random, tiny_llm: Callable[..., LLM], counts: Counter[str],
              answer: Callable[..., list[int]]) -> LLM:
    """An engine over a small pool whose blocks lie in any order; one in six over contiguous caches, one in four with
    keys and values in 8 bit, every other one with drafts."""
    options = options_of(draw)
    if draw.random() < 1 / 6:
        del options["enable_prefix_caching"]
        model = tiny_llm().model
        options["attention_backend"] = ContiguousAttention(model.config, dtype=model.dtype, device="cpu")
        counts["contiguous"] += 1
    elif draw.random() < 0.3:
        options["kv_cache_dtype"] = "int8"
        counts["int8"] += 1
    guesser = Guesser(draw, partial(answer, int8="kv_cache_dtype" in options)) if draw.random() < 0.5 else None
    llm = tiny_llm(proposer=guesser, **options)
    if guesser is not None:
        llm.engine.speculation.controller = guesser
    draw.shuffle(llm.engine.scheduler.pool._free)
    return llm


def submitted(draw: random.Random, llm: LLM, counts: Counter[str]) -> list[tuple]:
    """Up to nine streams, some that begin alike; a few steps between them."""
    streams, stems = [], [[draw.randrange(256) for _ in range(20)] for _ in range(2)]
    priorities = (0, 0, 1, -1) if llm.config.scheduling_policy == "priority" else (0,)
    for index in range(draw.randint(2, 9)):
        prompt = draw.choice(stems)[:draw.randint(0, 20)] + [draw.randrange(256) for _ in range(draw.randint(1, 6))]
        params = SamplingParams(
            temperature=draw.choice((0.0, 0.9)), top_p=0.9, seed=index, max_tokens=draw.randint(1, 20),
            stop_token_ids=[draw.randrange(256) for _ in range(draw.choice((0, 0, 40)))])
        try:
            streams.append((prompt, params, llm.stream(prompt, params, priority=draw.choice(priorities))))
        except InvalidRequest:
            counts["refused"] += 1
        except QueueFull:
            counts["turned away"] += 1
        for _ in range(draw.choice((0, 0, 1, 3))):
            checked_step(llm, counts)
    return streams


def checked_step(llm: LLM, counts: Counter[str]) -> bool:
    """One step, what it held, and every invariant of the pool after it."""
    scheduler, plans = llm.engine.scheduler, []
    schedule = type(scheduler).schedule

    def planned_within_its_bounds():
        plans.append(plan := schedule(scheduler))
        assert plan.num_tokens <= scheduler.max_num_batched_tokens
        assert all(item.end + len(item.draft_token_ids) < item.request.max_total_tokens for item in plan.scheduled)
        return plan

    scheduler.schedule = planned_within_its_bounds
    stepped = llm.step()
    for plan in plans:
        counts["mixed steps"] += len({item.stage for item in plan.scheduled}) == 2
        counts["chunks"] += sum(not item.samples for item in plan.scheduled)
        counts["dropped drafts"] += sum(len(item.request.draft_token_ids) - len(item.draft_token_ids)
                                        for item in plan.scheduled)
        planned = {item.request for item in plan.scheduled}
        counts["stood still"] += plan.num_tokens < scheduler.max_num_batched_tokens and any(
            request not in planned and request.num_missing_tokens > 1 for request in scheduler.running)
    with llm.engine.turns.lock:  # a client may be going away
        check_pool(scheduler.pool, [request.table for request in llm.engine._in_flight])
    return stepped


def run(seed: int, tiny_llm: Callable[..., LLM], answer: Callable[..., list[int]], counts: Counter[str]) -> None:
    draw = random.Random(seed)
    llm = engine_of(draw, tiny_llm, counts, answer)
    pool, streams = llm.engine.scheduler.pool, submitted(draw, llm, counts)
    leaving = [stream for _, _, stream in streams if draw.random() < 0.3]
    client = threading.Thread(target=lambda: [stream.close() for stream in leaving])
    starts = draw.randint(0, 12)
    for step in range(2000):
        if step == starts:
            client.start()
        if not checked_step(llm, counts) and step >= starts:
            break
    client.join()
    for prompt, params, stream in streams:
        list(stream)
        output, metrics = stream.output.outputs[0], stream.output.metrics
        most = pool.num_blocks * pool.block_size + 1 - len(prompt)
        expected = answer(prompt, params, most, int8=llm.config.kv_cache_dtype == "int8")
        if output.finish_reason == "cancelled":
            expected = expected[:len(output.token_ids)]
        assert output.token_ids == expected, (seed, prompt)
        counts[output.finish_reason] += 1
        counts["preempted"] += metrics.num_preemptions
        counts["hits"] += metrics.num_cached_tokens > 0
        counts["cut"] += output.finish_reason == "length" and len(output.token_ids) < params.max_tokens
    counts["evicted"] += pool.num_evicted
    if (speculation := llm.engine.speculation) is not None:
        counts["accepted drafts"] += speculation.num_accepted
        counts["rejected drafts"] += speculation.num_checked - speculation.num_accepted
    stats = llm.stats()
    assert (stats.num_waiting, stats.num_running, llm.attention.num_tokens) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks and not any(pool._references)


def test_hundreds_of_workloads_give_the_tokens_of_the_simplest_loop(tiny_llm, simplest, int8_cache):
    """Pools so small that preemption, eviction, waiting for a shared block and refusal happen all the time; prompts
    that begin alike, chunks, priorities, stops; keys and values in 8 bit, drafts right and wrong; one client in three
    goes away, from a thread."""
    counts: Counter[str] = Counter()

    def answer(prompt: list[int], params: SamplingParams, most: int = 64, *, int8: bool) -> list[int]:
        return simplest(prompt, params, most, int8_cache if int8 else ContiguousCache)

    for seed in range(WORKLOADS):
        run(seed, tiny_llm, answer, counts)
    assert all(counts[what] >= number * WORKLOADS // 100 for what, number in LEAST.items()), counts


def test_q03_preemption_is_invisible_apart_from_time(tiny_llm):
    """Q03: POOL(4, 6), two requests of 6 + 10 tokens, greedy and seeded: each token is delivered once."""
    prompts = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]]
    params = [SamplingParams(temperature=t, seed=3, max_tokens=10, ignore_eos=True) for t in (0.0, 0.9)]
    roomy = tiny_llm().generate(prompts, params)
    llm = tiny_llm(block_size=4, num_kv_blocks=6)
    streams = [llm.stream(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    pieces = [list(stream) for stream in streams]
    for stream, own, expected in zip(streams, pieces, roomy, strict=True):
        assert [token for piece in own for token in piece.token_ids] == expected.outputs[0].token_ids
        assert "".join(piece.text for piece in own) == expected.outputs[0].text
        assert stream.output.metrics.num_output_tokens == 10
    assert streams[1].output.metrics.num_preemptions == 1 and streams[0].output.metrics.num_preemptions == 0


def test_q01_what_can_never_fit_is_refused_and_the_rest_goes_on(tiny_llm):
    """Q01: POOL(4, 10): 41 tokens are refused by name, 20 + 30 end with ``length`` when it is full, 4 + 4 complete."""
    llm = tiny_llm(block_size=4, num_kv_blocks=10)
    with pytest.raises(InvalidRequest, match="has 41 tokens; the KV cache holds 10 blocks of 4. .* num_kv_blocks"):
        llm.generate([[1] * 41])
    params = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for most in (30, 4)]
    long, short = llm.generate([list(range(20)), [1, 2, 3, 4]], params)
    assert (long.outputs[0].finish_reason, len(long.outputs[0].token_ids)) == ("length", 21)
    assert len(short.outputs[0].token_ids) == 4
    assert len(llm.generate([[1] * 40], SamplingParams(max_tokens=9))[0].outputs[0].token_ids) == 1


def test_without_chunks_a_prompt_larger_than_a_step_is_refused_by_name(tiny_llm):
    llm = tiny_llm(enable_chunked_prefill=False, max_num_seqs=2, max_num_batched_tokens=12)
    with pytest.raises(InvalidRequest, match="has 11 tokens; at most 10 fit one step .* raise max_num_batched_tokens"):
        llm.generate([[1] * 11])
    assert llm.generate([[1] * 10], SamplingParams(max_tokens=1))[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize(("options", "words"), [
    ({"max_num_batched_tokens": 8}, r"max_num_batched_tokens \(8\) must be above max_num_seqs \(8\)"),
    ({"num_kv_blocks": 0}, "num_kv_blocks must be a whole number of at least 1"),
    ({"block_size": 1.5}, "block_size must be"), ({"max_prefill_chunk": True}, "max_prefill_chunk must be"),
    ({"enable_chunked_prefill": 1}, "enable_chunked_prefill must be true or false"),
])
def test_options_that_cannot_work_are_refused_by_name(tiny_llm, options, words):
    with pytest.raises(ValueError, match=words):
        tiny_llm(**options)


def test_a_prompt_is_counted_and_its_queue_traced_once_however_often_it_is_read(tiny_llm):
    llm = tiny_llm(block_size=4, num_kv_blocks=6, max_prefill_chunk=4)
    with llm.tracing() as trace:
        outputs = llm.generate([[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]],
                               SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    assert sum(out.metrics.num_preemptions for out in outputs) > 0
    assert llm.stats().num_prompt_tokens == 12 and llm.stats().num_output_tokens == 20
    assert sum(span.stage == "queue" for span in trace.spans) == 2
