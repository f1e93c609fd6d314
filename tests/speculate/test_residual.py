"""X02: with drafts checked by accept or residual, tokens are draws from the target's distribution, whatever guessed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import UncachedAttention
from minillm.model.decoder import Decoder
from minillm.model.weights import expected_tensors
from minillm.sample import Sampler, SamplingRow
from minillm.speculate.propose import Controller
from minillm.speculate.residual import IndependentDraftProposer, ResidualSampler, residual

P, Q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.5, 0.3])
DRAWS = 20_000


def checked(target: torch.Tensor, drafts: torch.Tensor, drawn_from: torch.Tensor | None,
            **settings: float) -> torch.Tensor:
    """A token for each draft, by the real sampler with its settings."""
    params = SamplingParams(**settings)
    rows = [SamplingRow(params, seed, 0, 3, (), (), (), (draft, drawn_from))
            for seed, draft in enumerate(drafts.tolist())]
    tokens = ResidualSampler(len(target))(target.log().expand(len(rows), -1), rows)
    return torch.tensor([token.token_id for token in tokens])


def drafts_from(distribution: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(distribution, DRAWS, replacement=True, generator=torch.Generator().manual_seed(1))


def shares(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=3) / len(tokens)


def within_3_sigma(tokens: torch.Tensor, distribution: torch.Tensor) -> bool:
    sigma = (distribution * (1 - distribution) / len(tokens)).sqrt()
    return bool(((shares(tokens) - distribution).abs() <= 3 * sigma + 1e-9).all())


def test_x02_the_output_is_the_targets_and_the_acceptance_is_the_overlap():
    drafts = drafts_from(Q)
    tokens = checked(P, drafts, Q)
    accepted = tokens == drafts
    assert within_3_sigma(tokens, P)
    assert accepted.float().mean() == pytest.approx(0.6, abs=3 * math.sqrt(0.24 / DRAWS))  # sum of min(p, q)
    assert torch.equal(residual(P, Q), torch.tensor([1.0, 0.0, 0.0]))
    assert (tokens[~accepted] == 0).all()


def test_x02_a_certain_draft_is_accepted_as_often_as_the_target_would_draw_it():
    """N-grams: accept 0.3 of token 1, else the rest of p in its own proportions."""
    drafts = torch.ones(DRAWS, dtype=torch.int64)
    tokens = checked(P, drafts, None)
    assert within_3_sigma(tokens, P)
    assert within_3_sigma(tokens[tokens != 1], torch.tensor([6 / 7, 0.0, 1 / 7]))


def test_x02_a_draft_that_thinks_as_the_target_is_always_accepted():
    drafts = drafts_from(P)
    assert torch.equal(checked(P, drafts, P), drafts)


def test_x02_the_target_is_what_it_is_after_all_filters():
    """Top-p 0.6 leaves token 0 alone; temperature 0.5 squares p. The draft was drawn without either."""
    drafts = drafts_from(Q)
    assert (checked(P, drafts, Q, top_p=0.6) == 0).all()
    squared = P.square() / P.square().sum()
    assert within_3_sigma(checked(P, drafts, Q, temperature=0.5), squared)


def test_x02_the_fault_of_a_draft_drawn_otherwise_than_told_is_seen():
    """A greedy draft (always 1) under the ratio of q gives [.4, .6, 0]: these checks would find it."""
    tokens = checked(P, torch.ones(DRAWS, dtype=torch.int64), Q)
    assert not within_3_sigma(tokens, P)
    assert within_3_sigma(tokens, torch.tensor([0.4, 0.6, 0.0]))


def test_a_greedy_row_accepts_what_it_would_choose():
    rows = [SamplingRow(SamplingParams(temperature=0.0), 1, 0, 0, (), (), (), (draft, None)) for draft in (0, 1)]
    assert [token.token_id for token in ResidualSampler(3)(P.log().expand(2, -1), rows)] == [0, 0]


class Always(Controller):
    def num_drafts(self, num_requests: int) -> int:
        return self.most


def test_x02_through_the_engine_tokens_follow_the_target(tiny_model, byte_tok):
    """4,000 choices with another model as draft: a chi-squared test over their first three tokens."""
    config, generator = tiny_model.config, torch.Generator().manual_seed(9)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in expected_tensors(config).items()}
    weights |= {name: torch.ones(len(weight)) for name, weight in weights.items() if name.endswith("norm.weight")}
    draft = Decoder.from_weights(config, weights, dtype="float64")
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, n=1000,
                            logit_bias={token: 40.0 for token in (65, 66, 67)})
    proposer = IndependentDraftProposer(draft, Sampler(261))
    with LLM(tiny_model, tokenizer=byte_tok, sampler=ResidualSampler(261), proposer=proposer, max_num_seqs=64) as llm:
        llm.engine.speculation.controller = Always(3)
        seen = Counter()
        for seed in range(4):
            (out,) = llm.generate([[1, 2, 3]], replace(params, seed=seed))
            seen.update(tuple(choice.token_ids[:3]) for choice in out.outputs)
        assert 0.2 < llm.engine.speculation.num_accepted / llm.engine.speculation.num_checked < 0.95
    expected = enumerated(tiny_model, [1, 2, 3], (65, 66, 67), 3)
    assert sum(expected.values()) == pytest.approx(1)
    rare = sum(share for share in expected.values() if share * 4000 < 5)
    statistic = sum((seen[path] - 4000 * share) ** 2 / (4000 * share) for path, share in expected.items()
                    if share * 4000 >= 5)
    cells = sum(share * 4000 >= 5 for share in expected.values())
    assert rare < 0.02 and statistic < cells - 1 + 4 * math.sqrt(2 * (cells - 1)), (statistic, cells)


def enumerated(model: Decoder, prompt: list[int], allowed: tuple[int, ...],
               length: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of ``length`` tokens, by asking the model after each beginning."""
    paths = {(): 1.0}
    for _ in range(length):
        longer = {}
        for path, share in paths.items():
            step = StepTensors.of([[*prompt, *path]], [0], [0])
            shares = model.forward(step, UncachedAttention(model.config))[0, list(allowed)].softmax(-1).tolist()
            longer |= {(*path, token): share * own for token, own in zip(allowed, shares, strict=True)}
        paths = longer
    return paths
