"""A second model as draft: the tokens are those without it, all accepted where it thinks as the target (X04, X05)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import ModelError
from minillm.model.decoder import Decoder
from minillm.model.weights import expected_tensors
from minillm.sample import Sampler
from minillm.speculate.draft import DraftModelProposer, check_same_tokens
from minillm.speculate.propose import Controller
from minillm.text.tokenizer import Tokenizer, byte_tokenizer

PROMPTS = [[1, 2, 3], [9] * 17, [200, 100]]
PARAMS = [SamplingParams(temperature=temperature, seed=4, top_p=0.9, max_tokens=14, ignore_eos=True)
          for temperature in (0.0, 1.0, 1.5)]


class Always(Controller):
    def num_drafts(self, num_requests: int) -> int:
        return self.most


def answers(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS)]


def drafted(tiny_llm, draft: Decoder, **options) -> tuple[list[list[int]], float, LLM]:
    """Tokens, and the share of checked drafts that were accepted."""
    with tiny_llm(proposer=DraftModelProposer(draft, Sampler(261)), **options) as llm:
        llm.engine.speculation.controller = Always(4)
        made = answers(llm)
        return made, llm.engine.speculation.num_accepted / llm.engine.speculation.num_checked, llm


def test_the_target_as_its_own_draft_is_always_right_at_any_temperature(tiny_llm, tiny_model):
    """Same noise: where draft and target think alike they choose alike, greedy or not, in a batch and in chunks."""
    expected = answers(tiny_llm())
    for options in ({}, {"max_num_batched_tokens": 12, "max_prefill_chunk": 5}, {"max_num_seqs": 1}):
        made, accepted, llm = drafted(tiny_llm, tiny_model, **options)
        assert made == expected and accepted == 1.0
        assert not llm.engine.speculation.proposer._read and not llm.engine.speculation.proposer.attention.caches


@pytest.fixture(scope="module")
def other_model(tiny_model):
    """Of another seed, and made for shorter texts than the target."""
    config, generator = replace(tiny_model.config, max_position_embeddings=20), torch.Generator().manual_seed(9)
    weights = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in expected_tensors(config).items()}
    weights |= {name: torch.ones(len(weight)) for name, weight in weights.items() if name.endswith("norm.weight")}
    return Decoder.from_weights(config, weights, dtype="float64")


def test_another_model_is_often_wrong_and_changes_nothing(tiny_llm, other_model, monkeypatch):
    """It is never asked beyond its longest text, and reads again only what was a wrong draft."""
    steps, forward = [], other_model.forward
    monkeypatch.setattr(other_model, "forward", lambda step, attention: steps.append(step) or forward(step, attention))
    made, accepted, _ = drafted(tiny_llm, other_model)
    assert made == answers(tiny_llm()) and accepted < 0.5
    assert max(int(step.positions.max()) for step in steps) == 19
    rows, known = sum(len(step.token_ids) for step in steps), sum(map(len, PROMPTS)) + sum(map(len, made))
    assert rows < known + 2 * sum(len(step.sequences) for step in steps)


def test_x04_a_head_with_padding_beyond_the_tokens_is_allowed_and_never_guesses_it(tiny_llm, tiny_model):
    """A model of zeros and ones, whose three rows beyond the tokens would win each argmax."""
    config = replace(tiny_model.config, vocab_size=264, tie_word_embeddings=False)
    weights = {name: torch.zeros(shape) for name, shape in expected_tensors(config).items()}
    weights["lm_head.weight"][261:] = 9.0
    weights |= {name: torch.ones(len(weight)) for name, weight in weights.items() if name.endswith("norm.weight")}
    weights["embed_tokens.weight"] += 1.0
    made, _, _ = drafted(tiny_llm, Decoder.from_weights(config, weights, dtype="float64"))
    assert made == answers(tiny_llm())


def test_x04_a_draft_of_other_tokens_is_refused_by_size_or_by_the_first_id_that_differs():
    target = byte_tokenizer()
    check_same_tokens(byte_tokenizer(), target)
    longer = Tokenizer([*(target.token_bytes(i) for i in range(target.vocab_size)), b"more"], target.encoder)
    with pytest.raises(ModelError, match=f"{target.vocab_size + 1} ids, the target's {target.vocab_size}"):
        check_same_tokens(longer, target)
    other = [target.token_bytes(i) for i in range(target.vocab_size)]
    other[5] = b"five"
    with pytest.raises(ModelError, match="id 5 is b'five' to it"):
        check_same_tokens(Tokenizer(other, target.encoder), target)


def test_a_draft_model_is_loaded_by_name(tiny_llama):
    """Through ``speculative_config`` alone: n-grams, the target itself, the target in 8 bit."""
    prompts, own = [[1, 2, 3, 1, 2, 3, 1], [7, 8]], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with LLM(tiny_llama, dtype="float64") as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, own)]
    for asked in ({}, {"method": "draft", "model": tiny_llama},
                  {"method": "draft", "model": tiny_llama, "quantization": "int8"}):
        with LLM(tiny_llama, dtype="float64", speculative_config=asked) as llm:
            llm.engine.speculation.controller = Always(4)
            assert [out.outputs[0].token_ids for out in llm.generate(prompts, own)] == expected
            assert llm.engine.speculation.num_checked > 0
