"""Prompts read in chunks: nothing shows of it but time."""

from __future__ import annotations

import random

import pytest

from minillm import SamplingParams
from minillm.loops import generate_with_cache
from minillm.sample import Sampler, SamplingRow


def test_q05_a_middle_chunk_samples_nothing_and_sends_nothing(script_llm, monkeypatch):
    """Q05: 20 tokens as 8, 8, 4 beside a request that decodes: the first piece comes with the third chunk."""
    llm = script_llm(lambda prompt: [prompt[0]], max_prefill_chunk=8)
    sampled = []
    sample = llm.engine.runner.sampler
    monkeypatch.setattr(llm.engine.runner, "sampler", lambda logits, rows: sampled.append(
        [(row.prompt_token_ids[0], row.position) for row in rows]) or sample(logits, rows))
    params = SamplingParams(temperature=0.0, max_tokens=5)
    beside = llm.stream("A", params)
    next(beside)
    reading = llm.stream("B" * 20, params)
    for step in range(1, 4):
        assert llm.step()
        assert len(reading._submission.pieces) == (step == 3)
    assert sampled == [[(65, 0)], [(65, 1)], [(65, 2)], [(65, 3), (66, 0)]]
    assert [len(step.logit_rows) for step in llm.model.steps] == [1, 1, 1, 2]
    pieces = list(reading)
    assert [piece.text for piece in pieces] == ["B"] * 5 and [piece.token_ids for piece in pieces] == [[66]] * 5
    assert "".join(piece.text for piece in beside) == "AAAA"
    assert reading.output.metrics.num_output_tokens == 5


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_q07_chunk_sizes_change_no_token_greedy_or_seeded(tiny_llm, tiny_model, chunk):
    """K01, Q07: a batch of unequal prompts read in chunks gives the tokens of the simplest loop."""
    rng, sampler = random.Random(chunk), Sampler(261)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 24))] for _ in range(6)]
    params = [SamplingParams(temperature=(0.0, 0.9)[i % 2], seed=i, top_p=0.9, max_tokens=12) for i in range(6)]

    def simplest(prompt, own):
        def choose(logits, position):
            return [sampler(logits, [SamplingRow(own, own.seed, 0, position, prompt, ())])[0].token_id]
        return generate_with_cache(tiny_model, prompt, max_tokens=12, eos_token_ids=(257,), choose=choose)

    outputs = tiny_llm(max_prefill_chunk=chunk, max_num_seqs=4).generate(prompts, params)
    expected = [simplest(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    assert [out.outputs[0].token_ids for out in outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == 6
