"""The engine gives exactly the tokens of the simplest loop, greedy and seeded, whatever else is in the batch.

Small models in float64, where reduction order does not decide anything.
"""

from __future__ import annotations

import random
import threading

import pytest

from minillm import SamplingParams
from minillm.loops import generate_with_cache, generate_without_cache


def prompts_of(seed: int, count: int = 8) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, 20))] for _ in range(count)]


def expected(model, prompt, max_tokens):
    return generate_with_cache(model, prompt, max_tokens=max_tokens, eos_token_ids=model.config.eos_token_ids)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_q07_greedy_tokens_are_those_of_the_loop_in_any_batch(tiny_llm, tiny_model, seed, max_num_seqs):
    """Q07: unequal prompts and lengths, shuffled, with few or many places."""
    prompts, rng = prompts_of(seed), random.Random(seed)
    lengths = [rng.randrange(1, 25) for _ in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=length) for length in lengths]
    outputs = tiny_llm(max_num_seqs=max_num_seqs).generate(prompts, params)
    assert [out.outputs[0].token_ids for out in outputs] == [
        expected(tiny_model, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]


def test_the_loops_agree_with_each_other(tiny_model):
    """With and without a cache, the same tokens; the outputs vary, so that agreement means something."""
    outputs = []
    for prompt in prompts_of(9, 4):
        outputs.append(generate_without_cache(tiny_model, prompt, max_tokens=20, eos_token_ids=(257,)))
        assert outputs[-1] == expected(tiny_model, prompt, 20)
    assert len({tuple(tokens) for tokens in outputs}) == 4 and len({t for tokens in outputs for t in tokens}) > 12


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_seeded_tokens_do_not_depend_on_the_company(tiny_llm, temperature):
    """Alone, in any batch, in any order: equal seeds and prompts give equal tokens."""
    prompts = prompts_of(3)
    params = [SamplingParams(temperature=temperature, top_p=0.9, seed=index, max_tokens=16) for index in range(8)]
    alone = [tiny_llm().generate([p], s)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)]
    order = random.Random(1).sample(range(8), 8)
    outputs = tiny_llm(max_num_seqs=5).generate([prompts[i] for i in order], [params[i] for i in order])
    assert [out.outputs[0].token_ids for out in outputs] == [alone[i] for i in order]
    assert len({tuple(tokens) for tokens in alone}) == 8


def test_s01_greedy_and_random_rows_share_a_batch(tiny_llm):
    """S01 (b): temperatures 0, 0.8, 0 in one batch give what each gives alone."""
    prompts = prompts_of(5, 3)
    params = [SamplingParams(temperature=t, seed=7, max_tokens=12) for t in (0.0, 0.8, 0.0)]
    alone = [tiny_llm().generate([p], s)[0].outputs[0].token_ids for p, s in zip(prompts, params, strict=True)]
    together = tiny_llm().generate(prompts, params)
    assert [out.outputs[0].token_ids for out in together] == alone


def test_k02_a_cancelled_run_leaves_nothing_behind(tiny_llm, tiny_model):
    """K02: call twice, cancel half-way, call again: always the tokens of a fresh run; positions are 0..5, 6, 7, ..."""
    llm, prompt, params = tiny_llm(), prompts_of(2)[0], SamplingParams(temperature=0.0, max_tokens=12)
    fresh = expected(tiny_model, prompt, 12)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == fresh
    with llm.stream(prompt, params) as stream:
        next(stream), next(stream)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == fresh
    assert llm.attention.num_tokens == 0


def test_staggered_arrivals_from_threads_change_no_token(tiny_llm, tiny_model):
    """Requests that join a running batch from other threads get the tokens of the loop."""
    llm, prompts, got = tiny_llm(max_num_seqs=4), prompts_of(6, 12), {}

    def work(index: int) -> None:
        pieces = llm.stream(prompts[index], SamplingParams(temperature=0.0, max_tokens=10 + index))
        got[index] = [token for piece in pieces for token in piece.token_ids]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {index: expected(tiny_model, prompts[index], 10 + index) for index in range(12)}


def test_score_is_the_log_probability_of_each_token(tiny_llm, tiny_model):
    """Equal to a log-softmax over one whole forward pass, in chunks or not; the first token has none."""
    import torch

    from minillm.attention.base import StepTensors
    from minillm.attention.torch_backend import UncachedAttention

    llm, ids = tiny_llm(), prompts_of(4)[0] + prompts_of(4)[1]
    step = StepTensors.of([ids], [0], ["s"], logits="all")
    with torch.inference_mode():
        logits = tiny_model.forward(step, UncachedAttention(tiny_model.config)).log_softmax(-1)
    want = [logits[i, token].item() for i, token in enumerate(ids[1:])]
    (score,) = llm.score(ids)
    assert score.token_ids == ids and score.logprobs[0] is None
    assert score.logprobs[1:] == pytest.approx(want, abs=1e-9)
    assert llm.engine.runner.score(ids, chunk_tokens=3) == pytest.approx(want, abs=1e-9)
    assert llm.score([[65]])[0].logprobs == [None] and llm.attention.num_tokens == 0
