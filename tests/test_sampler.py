"""The sampler: distributions against enumeration, batches against single rows, penalties and logprobs by hand."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm import SamplingParams
from minillm.sample import SampledToken, Sampler, SamplingRow, adjust_logits, lowest_argmax, most_likely

INF, NAN = math.inf, math.nan


def row(seed: int = 0, index: int = 0, position: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (),
        stops: tuple[int, ...] = (), **params: object) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, index, position, prompt, output, stops)


def sample(logits: Tensor | list, rows: list[SamplingRow], vocab_size: int | None = None) -> list[SampledToken]:
    logits = torch.as_tensor(logits)
    return Sampler(vocab_size or logits.shape[1])(logits, rows)


def one(logits: list[float] | Tensor, **options: object) -> int:
    """The token that one row of logits gives."""
    return sample(torch.as_tensor(logits).unsqueeze(0), [row(**options)])[0].token_id


def probabilities(logits: list[float], item: SamplingRow) -> Tensor:
    """The distribution that a row's parameters ask for, by enumeration in float64 and plain Python."""
    params, best = item.params, max(logits)
    weights = {i: math.exp((value - best) / params.temperature) for i, value in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-logits[i], i))
    order = order[:params.top_k] if params.top_k > 0 else order
    total, passed, inside = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if passed < params.top_p * total:
            inside.append(i)
        passed += weights[i]
    inside = [i for i in inside if weights[i] >= params.min_p]
    total = sum(weights[i] for i in inside)
    return torch.tensor([weights[i] / total if i in inside else 0.0 for i in range(len(logits))])


# --- greedy and temperature


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, 5e-324, 1e-320, 1e-45, 1e-38, 1e-10, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_s01_temperature_0_is_the_limit_of_tiny_temperatures(temperature, dtype):
    """S01 (a)."""
    logits = torch.tensor([2.875, 2.955, 11.0625], dtype=dtype)
    assert {one(logits, temperature=temperature, seed=seed) for seed in range(50)} == {2}


def test_s01_mixed_batch_equals_solo_and_greedy_rows_draw_nothing(monkeypatch):
    """S01 (b)."""
    import minillm.sample as module

    drawn = []
    monkeypatch.setattr(module, "draw_key", lambda *key: drawn.append(key) or (len(drawn), 7))
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    rows = [row(temperature=0.0, seed=1), row(temperature=0.8, seed=2, index=3, position=4), row(temperature=0.0)]
    greedy = sample(logits, rows)
    assert drawn == [(2, 3, 4)]
    assert [greedy[0].token_id, greedy[2].token_id] == logits[[0, 2]].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 5, 17, 100, 4096, 49_152])
def test_ties_go_to_the_lowest_id(dtype, size):
    logits = torch.randint(-2, 1, (3, size), generator=torch.Generator().manual_seed(size)).to(dtype)
    expected = [values.index(max(values)) for values in logits.tolist()]
    assert lowest_argmax(logits).tolist() == expected
    assert [token.token_id for token in sample(logits, [row(temperature=0)] * 3)] == expected


def test_zero_and_minus_zero_tie():
    assert one([-0.0, 0.0], temperature=0) == 0
    assert one([-0.0, 0.0, -1.0], top_k=1, seed=3) == 0


def test_16_bit_is_computed_in_float32_and_float64_stays():
    near = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert one(near, temperature=0) == 1 and one(near.float(), temperature=0) == 0
    logits = torch.tensor([[0.1, 3.3, -7.7, 2.5]], dtype=torch.bfloat16)
    rows = [row(logprobs=3, seed=5)]
    assert sample(logits, rows) == sample(logits.float(), rows)


# --- the distribution


LOGITS = [1.3, -0.4, 2.1, 0.9, 2.1, -3.0, 0.0]


def frequencies(rows: list[SamplingRow]) -> tuple[Tensor, Tensor]:
    """The tokens that rows of ``LOGITS`` give, int64, and each token's share of them."""
    tokens = [token.token_id for start in range(0, len(rows), 500)
              for token in sample(torch.tensor([LOGITS] * len(rows[start:start + 500])), rows[start:start + 500])]
    tokens = torch.tensor(tokens)
    return tokens, torch.bincount(tokens, minlength=len(LOGITS)) / len(tokens)


@pytest.mark.parametrize("temperature, top_k, top_p, min_p",
                         list(product([0.6, 1.7], [0, 4], [1.0, 0.83], [0.0, 0.2])))
def test_draws_follow_the_enumerated_distribution(temperature, top_k, top_p, min_p):
    """Every combination of filters: each token within 4 standard errors, total variation distance small."""
    item = row(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = probabilities(LOGITS, item)
    draws = 20_000
    _, seen = frequencies([SamplingRow(item.params, seed, 0, 0, (), ()) for seed in range(draws)])
    assert (seen[expected == 0] == 0).all()
    assert ((seen - expected).abs() <= 4 * (expected * (1 - expected) / draws).sqrt()).all()
    assert (seen - expected).abs().sum() / 2 < 0.012


@pytest.mark.parametrize("vary", ["position", "index", "seed"])
def test_positions_choices_and_seeds_each_draw_from_the_distribution(vary):
    item, draws = row(temperature=1.0), 20_000
    rows = [row(**{"seed": 11, "index": 1, "position": 5, vary: value}) for value in range(draws)]
    tokens, seen = frequencies(rows)
    expected = probabilities(LOGITS, item)
    assert ((seen - expected).abs() <= 4 * (expected * (1 - expected) / draws).sqrt()).all()
    follows = torch.zeros(7, 7).index_put((tokens[:-1], tokens[1:]), torch.tensor(1.0), accumulate=True) / (draws - 1)
    both = expected.unsqueeze(1) * expected     # a draw says nothing about the next one
    assert ((follows - both).abs() <= 5 * (both / draws).sqrt() + 1e-4).all()


def test_rare_tokens_of_a_large_vocabulary_come_at_their_rate():
    """49,152 tokens: the best has half the mass, the others share the rest evenly."""
    logits = torch.zeros(49_152)
    logits[40_000] = math.log(49_151)
    rows = [row(seed=seed) for seed in range(400)]
    tokens = [token.token_id for token in sample(logits.expand(400, -1), rows)]
    others = [token for token in tokens if token != 40_000]
    assert abs(len(others) - 200) < 4 * 10
    assert abs(sum(others) / len(others) / 49_152 - 0.5) < 4 * math.sqrt(1 / 12 / len(others))
    assert len(set(others)) > 0.97 * len(others)


# --- batches


def test_s08_choices_differ_equal_seeds_agree_and_place_does_not_matter():
    """S08: n=3 gives three different samples, the same on rerun; equal seeds agree wherever they stand in a batch."""
    logits = torch.zeros(1, 1000)

    def text(seed: int, index: int) -> list[int]:
        return [one(logits[0], seed=seed, index=index, position=position) for position in range(8)]

    choices = [text(42, index) for index in range(3)]
    assert len({tuple(choice) for choice in choices}) == 3
    assert [text(42, index) for index in range(3)] == choices
    rows = [row(seed=seed) for seed in (42, 7, 42, 9, 42)]
    tokens = [token.token_id for token in sample(logits.expand(5, -1), rows)]
    assert tokens[0] == tokens[2] == tokens[4] == choices[0][0]
    assert sample(logits.expand(5, -1), rows[::-1])[1].token_id == tokens[3]


all_params = st.builds(
    dict, temperature=st.sampled_from([0, 1e-38, 0.3, 1.0, 2.5]), top_k=st.sampled_from([0, 1, 3, 20, 10**6]),
    top_p=st.sampled_from([0.05, 0.9, 1.0]), min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]), presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]), logit_bias=st.sampled_from([None, {0: 5.0, 1: -100.0}]),
    min_tokens=st.sampled_from([0, 3]), logprobs=st.sampled_from([None, 0, 2]),
)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(st.data(), st.integers(1, 7), st.integers(2, 90),
       st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_a_row_of_any_mixed_batch_equals_itself_alone(data, num_rows, size, dtype):
    """S01 (b), S04, S08: token, logprobs and ranks, bit for bit."""
    logits = (torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size)) * 4).to(dtype)
    ids = st.lists(st.integers(0, size - 1), max_size=6)
    rows = [row(seed=data.draw(st.integers()), index=i % 2, position=data.draw(st.integers(0, 5)), stops=(0, size - 1),
                prompt=tuple(data.draw(ids)), output=tuple(data.draw(ids)), **data.draw(all_params))
            for i in range(num_rows)]
    before = logits.clone()
    together = sample(logits, rows)
    assert together == [sample(logits[i:i + 1], rows[i:i + 1])[0] for i in range(num_rows)]
    assert together[::-1] == sample(logits.flip(0), rows[::-1])
    assert torch.equal(before, logits), "the caller's logits have changed"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_real_vocabulary_gives_the_same_rows_with_any_number_of_threads(threads):
    logits = torch.randn(6, 49_152, generator=torch.Generator().manual_seed(2)) * 3
    rows = [row(seed=1, temperature=0), row(seed=2), row(seed=3, top_p=0.95), row(seed=4, top_k=50, logprobs=3),
            row(seed=5, min_p=0.05), row(seed=6, top_k=500, top_p=0.9, temperature=1.5, logprobs=0)]
    expected = [sample(logits[i:i + 1], rows[i:i + 1])[0] for i in range(6)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert sample(logits, rows) == expected
    finally:
        torch.set_num_threads(before)


# --- penalties, bias, mask


@pytest.mark.parametrize("prompt, output, penalty, expected", [
    ((0, 1), (), 2.0, [1.0, -2.0, 0.5]), ((0,), (1,), 2.0, [1.0, -2.0, 0.5]), ((), (0, 1), 2.0, [1.0, -2.0, 0.5]),
    ((0, 1), (), 1.0, [2.0, -1.0, 0.5]), ((0, 0), (0, 1), 2.0, [1.0, -2.0, 0.5]), ((), (), 2.0, [2.0, -1.0, 0.5]),
])
def test_s05_repetition_penalty_by_sign_and_once_a_token(prompt, output, penalty, expected):
    """S05."""
    adjusted = adjust_logits(torch.tensor([[2.0, -1.0, 0.5]]), [row(prompt=prompt, output=output,
                                                                    repetition_penalty=penalty)])
    assert adjusted.tolist() == [expected]


def test_s06_presence_and_frequency_count_the_output_alone_and_repetition_the_prompt_too():
    """S06."""
    history = dict(prompt=(7, 7, 7), output=(3, 3))
    adjusted = adjust_logits(torch.zeros(1, 8), [row(**history, presence_penalty=1.0, frequency_penalty=0.5)])
    assert adjusted.tolist() == [[0, 0, 0, -2.0, 0, 0, 0, 0]]
    adjusted = adjust_logits(torch.ones(1, 8), [row(**history, repetition_penalty=2.0)])
    assert adjusted.tolist() == [[1, 1, 1, 0.5, 1, 1, 1, 0.5]]


def test_penalties_bias_and_mask_add_up_row_by_row():
    logits = torch.full((3, 4), 2.0)
    rows = [row(prompt=(0,), output=(1, 1), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25,
                logit_bias={1: 10.0, 2: -3.0}),
            row(output=(1,)),
            row(stops=(3, 0), min_tokens=5, position=4, logit_bias={3: 100.0})]
    assert adjust_logits(logits, rows).tolist() == [[1.0, 10.0, -1.0, 2.0], [2.0] * 4, [-INF, 2.0, 2.0, -INF]]
    assert adjust_logits(logits, rows[1:2] * 3) is logits


@pytest.mark.parametrize("penalty", [5e-324, 1e-60, 1e60, 1e308])
def test_extreme_repetition_penalties_make_no_nan(penalty):
    logits = torch.tensor([[3.0, -2.0, 0.0, -INF, 1.0]])
    adjusted = adjust_logits(logits, [row(prompt=(0, 1, 2, 3), repetition_penalty=penalty)])
    assert not adjusted.isnan().any() and adjusted.max() < INF
    assert one(logits[0], prompt=(0, 1, 2, 3), repetition_penalty=penalty) in (0, 1, 2, 4)


def test_min_tokens_masks_every_stop_id_until_its_position():
    logits = torch.tensor([0.0, 9.0, 8.0, 1.0])
    tokens = [one(logits, temperature=0, stops=(1, 2), min_tokens=2, position=position) for position in range(4)]
    assert tokens == [3, 3, 1, 1]
    assert {one(logits, seed=seed, stops=(1, 2), min_tokens=1) for seed in range(200)} == {0, 3}


def test_logit_bias_forces_and_forbids():
    logits = torch.tensor([5.0, 0.0, 0.0])
    assert {one(logits, seed=seed, logit_bias={1: 100}) for seed in range(50)} == {1}
    assert 0 not in {one(logits, seed=seed, logit_bias={0: -100}) for seed in range(50)}


# --- vocabulary borders and unusable rows


@pytest.mark.parametrize("params", [dict(temperature=0), dict(), dict(top_k=1), dict(top_p=0.5), dict(min_p=0.5),
                                    dict(temperature=50.0), dict(logit_bias={310: 100.0}), dict(logprobs=20)], ids=str)
def test_s10_padded_rows_of_the_head_are_never_emitted(params):
    """S10: a head of 320 rows, a tokenizer of 300, the largest logit at 310."""
    logits = torch.zeros(40, 320)
    logits[:, 310] = 50.0
    tokens = sample(logits, [row(seed=seed, **params) for seed in range(40)], vocab_size=300)
    assert all(token.token_id < 300 for token in tokens)
    assert all(token_id < 300 for token in tokens for token_id in token.logprobs or ())


def test_s10_ids_out_of_range_write_into_no_neighbour():
    """S10: ids past the vocabulary, or negative, change nothing, whoever let them through."""
    rows = [row(prompt=(999_999, -1, 4), output=(5, 4), stops=(4, -1), repetition_penalty=2.0, presence_penalty=1.0,
                logit_bias={999_999: 5.0}, min_tokens=1), row()]
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2)
    assert torch.equal(adjust_logits(logits, rows), logits)


def test_nan_in_the_padding_harms_nobody():
    logits = torch.zeros(1, 8)
    logits[0, 6:] = NAN
    assert sample(logits, [row(temperature=0)], vocab_size=6)[0] == SampledToken(0)


@pytest.mark.parametrize("bad, why", [([NAN, 1, 2, 3], "NaN"), ([0, 1, 2, NAN], "NaN"), ([NAN] * 4, "NaN"),
                                      ([INF, NAN, 0, 0], "NaN"), ([INF, 0, 0, 0], "infinity"), ([INF] * 4, "infinity"),
                                      ([-INF] * 4, "no token")])
@pytest.mark.parametrize("params", [dict(temperature=0), dict(), dict(top_p=0.5, top_k=3, min_p=0.1),
                                    dict(repetition_penalty=1.5, logprobs=2)], ids=str)
def test_s11_an_unusable_row_fails_alone(bad, why, params):
    """S11: the row becomes an error, its neighbours are what they are alone."""
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], bad, [2.0, 0.0, 1.0, 0.5]])
    rows = [row(seed=1, prompt=(1,), **params), row(seed=2, prompt=(2,), **params), row(seed=3, prompt=(3,), **params)]
    first, failed, last = sample(logits, rows)
    assert failed.token_id == -1 and why in failed.error and failed.logprobs is None
    assert [first, last] == [sample(logits[i:i + 1], rows[i:i + 1])[0] for i in (0, 2)]
    assert first.error is None and first.token_id >= 0


def test_a_row_whose_every_token_is_masked_is_an_error():
    tokens = sample(torch.zeros(2, 2), [row(stops=(0, 1), min_tokens=1), row(temperature=0)])
    assert tokens[0].token_id == -1 and "min_tokens" in tokens[0].error and tokens[1].token_id == 0


def test_a_masked_token_is_never_drawn():
    logits = torch.full((300, 50), -INF)
    logits[:, 17] = -1e30
    assert {token.token_id for token in sample(logits, [row(seed=s, temperature=5.0) for s in range(300)])} == {17}


def test_wrong_shapes_are_refused_and_no_rows_give_no_tokens():
    assert Sampler(5)(torch.zeros(0, 5), []) == []
    for logits in (torch.zeros(2, 5), torch.zeros(5)):
        with pytest.raises(ValueError, match="a row for each request"):
            Sampler(5)(logits, [row()])


# --- logprobs


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=30), st.integers(0, 100), st.integers(0, 9))
def test_logprobs_are_the_raw_log_softmax_with_ranks(values, count, seed):
    """Whatever penalties and filters say: the chosen token first, then the most likely; ties rank by id."""
    logits = torch.tensor([values])
    token = sample(logits, [row(seed=seed, logprobs=count, temperature=3.0, prompt=(0,), repetition_penalty=3.0,
                                top_p=0.9, logit_bias={0: 4.0})])[0]
    raw = logits.double().log_softmax(-1)[0].tolist()
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert set(token.logprobs) == {token.token_id, *order[:count]}
    assert list(token.logprobs)[0] == token.token_id
    for token_id, (logprob, rank) in token.logprobs.items():
        assert logprob == pytest.approx(raw[token_id], abs=1e-5) and order[rank - 1] == token_id


def test_logprobs_come_to_the_rows_that_asked():
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    none, chosen, two = sample(logits, [row(), row(logprobs=0), row(logprobs=2, temperature=0)])
    assert none.logprobs is None and list(chosen.logprobs) == [chosen.token_id]
    assert list(two.logprobs) == most_likely(logits[2:], 2)[0].tolist()
    assert [rank for _, rank in two.logprobs.values()] == [1, 2]


def test_a_masked_token_has_logprob_minus_infinity():
    token = sample(torch.tensor([[0.0, -INF]]), [row(logprobs=2)])[0]
    assert token.logprobs == {0: (0.0, 1), 1: (-INF, 2)}


def test_no_global_random_state_is_used():
    before = torch.random.get_rng_state()
    sample(torch.zeros(3, 10), [row(seed=1), row(temperature=0), row(top_p=0.5)])
    assert torch.equal(before, torch.random.get_rng_state())


def test_sampling_works_inside_and_outside_inference_mode_alike():
    logits = torch.randn(1, 777, generator=torch.Generator().manual_seed(0))
    rows = [row(seed=4, top_p=0.9, logprobs=2)]
    with torch.inference_mode():
        inside = sample(logits, rows)
    assert sample(logits, rows) == inside == sample(logits.clone().requires_grad_(), rows)
