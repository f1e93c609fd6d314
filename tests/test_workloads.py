"""The engine under random workloads in float64: always the tokens of the simplest loop."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from minillm import InvalidRequest, SamplingParams


def options_of(draw: random.Random) -> dict:
    block_size, max_num_seqs = draw.choice((1, 2, 4)), draw.randint(1, 5)
    return {"block_size": block_size, "num_kv_blocks": draw.randint(10, 30) // block_size + 1,
            "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_seqs + draw.choice((1, 3, 8, 24)),
            "max_prefill_chunk": draw.choice((1, 3, 8, 24)), "enable_chunked_prefill": draw.random() < 0.8}


def test_hundreds_of_workloads_give_the_tokens_of_the_simplest_loop(tiny_llm, simplest):
    """Pools so small that preemption and refusal happen all the time; one client in three goes away, from a thread."""
    counts: Counter[str] = Counter()
    for seed in range(250):
        draw = random.Random(seed)
        options = options_of(draw)
        llm, capacity = tiny_llm(**options), options["block_size"] * options["num_kv_blocks"]
        stem = [draw.randrange(256) for _ in range(20)]
        streams = []
        for index in range(draw.randint(2, 7)):
            prompt = stem[:draw.randint(0, 12)] + [draw.randrange(256) for _ in range(draw.randint(1, 8))]
            params = SamplingParams(temperature=draw.choice((0.0, 0.9)), top_p=0.9, seed=index,
                                    max_tokens=draw.randint(1, 20))
            try:
                streams.append((prompt, params, llm.stream(prompt, params)))
            except InvalidRequest:
                counts["refused"] += 1
        leaving = [stream for _, _, stream in streams if draw.random() < 0.3]
        client = threading.Thread(target=lambda leaving=leaving: [stream.close() for stream in leaving])
        starts = draw.randint(0, 12)
        for step in range(2000):
            if step == starts:
                client.start()
            if not llm.step() and step >= starts:
                break
        client.join()
        for prompt, params, stream in streams:
            list(stream)
            output, metrics = stream.output.outputs[0], stream.output.metrics
            expected = simplest(prompt, params, capacity + 1 - len(prompt))
            if output.finish_reason == "cancelled":
                expected = expected[:len(output.token_ids)]
            assert output.token_ids == expected, (seed, prompt)
            counts[output.finish_reason] += 1
            counts["preempted"] += metrics.num_preemptions
            counts["cut"] += output.finish_reason == "length" and len(output.token_ids) < params.max_tokens
        stats = llm.stats()
        assert (stats.num_waiting, stats.num_running, llm.attention.num_tokens) == (0, 0, 0)
        pool = llm.engine.scheduler.pool
        assert pool.num_available == pool.num_blocks
    least = {"refused": 100, "preempted": 40, "cancelled": 100, "length": 300, "stop": 3, "cut": 100}
    assert all(counts[what] >= number for what, number in least.items()), counts


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
