"""Top-k, top-p and min-p against the rule itself, walked token by token over a sort."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minillm import SamplingParams
from minillm.filters import filtered_scores, keep_min_p, keep_top_k, keep_top_p, keep_while_below, scale_by_temperature
from minillm.sample import Sampler, SamplingRow

INF = math.inf


def log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def survivors(logits: Tensor, **params: object) -> list[int]:
    """Ids that a row's filters leave."""
    return (filtered_scores(logits, [SamplingParams(**params)])[0] > -INF).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("temperature", [1e-38, 1e-4, 1.0, 1e30, 1e300])
@pytest.mark.parametrize("logits", [[3e38, -3e38, 0], [-3e38, -3.3e38, -INF], [0, 0, 0], [1e-40, 0, -1e-40]])
def test_scores_are_never_nan_and_the_best_is_0(temperature, logits):
    """S01: no overflow, no NaN, whatever the temperature."""
    scores = scale_by_temperature(torch.tensor([logits], dtype=torch.float32), [temperature])
    assert not scores.isnan().any() and scores.max() == 0


@pytest.mark.parametrize("probabilities, top_p, expected", [
    ([0.5, 0.41, 0.09], 0.9, [0, 1]), ([0.5, 0.35, 0.10, 0.05], 0.9, [0, 1, 2]), ([0.3, 0.1, 0.1, 0.5], 0.8, [0, 3]),
    ([0.5, 0.5], 0.5, [0]), ([0.5, 0.5], 0.51, [0, 1]), ([0.25] * 4, 0.5, [0, 1]), ([0.25] * 4, 0.75, [0, 1, 2]),
    ([0.1] * 10, 0.3, [0, 1, 2]), ([0.1, 0.9], 1e-9, [1]), ([0.1, 0.9], 5e-324, [1]), ([0.2, 0.7, 0.1], 1.0, [0, 1, 2]),
    ([0.0, 1.0, 0.0], 0.999, [1]),
])
def test_s02_top_p_keeps_a_token_while_the_mass_before_it_is_below(probabilities, top_p, expected):
    """S02."""
    assert survivors(log(*probabilities), top_p=top_p) == expected
    assert survivors(log(*probabilities).double(), top_p=top_p) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_moves_no_border(dtype):
    """S02: a mass that is exactly top_p, or a token exactly min_p times as likely, whatever the logits' offset."""
    for parts in range(2, 60):
        even = torch.full((1, parts), 1 / parts, dtype=dtype).log()
        for inside in range(1, parts):
            assert survivors(even, top_p=inside / parts) == list(range(inside))
        unequal = torch.tensor([[0.7, 0.7 / parts, 0.01 / parts]], dtype=dtype).log()
        assert survivors(unequal + 3.3 * parts % 7, min_p=1 / parts) == [0, 1]


@pytest.mark.parametrize("top_k, expected", [
    (0, 5), (-1, 5), (1, 1), (4, 4), (5, 5), (6, 5), (1_000_000, 5), (10**30, 5),
])
def test_s04_top_k_off_one_all_and_beyond(top_k, expected):
    """S04."""
    logits = torch.tensor([[0.3, 2.0, -1.0, 2.0, 0.0]])
    order = [1, 3, 0, 4, 2]
    assert survivors(logits, top_k=top_k) == sorted(order[:expected])


def test_s04_rows_with_different_k_equal_solo():
    """S04: a batch whose rows use different k."""
    logits = torch.randn(8, 5, generator=torch.Generator().manual_seed(3))
    for seed in range(20):
        rows = [SamplingRow(SamplingParams(top_k=k), seed, 0, 0, (), ()) for k in (0, -1, 1, 2, 4, 5, 6, 1_000_000)]
        solo = [Sampler(5)(logits[i:i + 1], rows[i:i + 1])[0] for i in range(8)]
        assert Sampler(5)(logits, rows) == solo


@pytest.mark.parametrize("min_p, expected", [(0, [0, 1, 2, 3]), (0.1, [0, 1, 2]), (0.2, [0, 1, 2]), (0.21, [0, 1]),
                                             (0.6, [0, 1]), (0.601, [0]), (1, [0])])
def test_min_p_keeps_what_is_at_least_that_share_of_the_best(min_p, expected):
    assert survivors(log(0.5, 0.3, 0.1, 0.04), min_p=min_p) == expected


def test_filters_apply_in_the_documented_order():
    """top_p is a share of what temperature and top_k leave; min_p compares with the best."""
    probabilities = log(0.4, 0.3, 0.2, 0.1)
    assert survivors(probabilities, top_p=0.5) == [0, 1]
    assert survivors(probabilities, top_k=2, top_p=0.57) == [0]         # 0.4 / 0.7 = 0.571 has passed 0.57
    assert survivors(probabilities, temperature=0.5, top_p=0.5) == [0]  # squared: 0.16 / 0.30
    assert survivors(probabilities, temperature=0.5, min_p=0.5) == [0, 1]   # 0.09 / 0.16 = 0.56


@pytest.mark.parametrize("params", [dict(top_p=1e-9), dict(min_p=1), dict(top_k=1), dict(temperature=1e-30, top_p=0.1)])
def test_at_least_the_most_likely_survives(params):
    assert survivors(torch.tensor([[-5.0, 3.0, 1.0]]), **params) == [1]


def brute_keep(logits: list[float], weights: list[int], limit: int) -> list[bool]:
    """The rule itself: walk the tokens in order, keep while what has passed is below the limit."""
    passed, keep = 0, [False] * len(logits)
    for token in sorted(range(len(logits)), key=lambda i: (-logits[i], i)):
        keep[token] = passed < limit
        passed += weights[token]
    return keep


values = st.one_of(st.floats(-40, 40, width=32), st.integers(-3, 3).map(float),
                   st.sampled_from([-INF, -1e30, 1e-40, -0.0]))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.data(), st.integers(1, 4), st.integers(1, 40), st.sampled_from([torch.float32, torch.float64]))
def test_keep_while_below_equals_the_sorted_walk(data, num_rows, size, dtype):
    logits = [data.draw(st.lists(values, min_size=size, max_size=size)) for _ in range(num_rows)]
    weights = [data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)) for _ in range(num_rows)]
    limits = [data.draw(st.integers(1, 60)) for _ in range(num_rows)]
    for one_row in logits:
        one_row[-1] = 0.0 if max(one_row) == -INF else one_row[-1]
    got = keep_while_below(torch.tensor(logits, dtype=dtype), torch.tensor(weights), torch.tensor(limits).unsqueeze(1))
    assert got.tolist() == [brute_keep(*case) for case in zip(logits, weights, limits)]


def brute_survivors(logits: list[float], params: SamplingParams) -> list[bool]:
    """All filters in float64 and plain Python, with the documented slack at the borders."""
    size = len(logits)
    best = max(logits)
    weights = [math.exp((value - best) / params.temperature) for value in logits]
    keep = brute_keep(logits, [1] * size, params.top_k if 0 < params.top_k < size else size)
    weights = [weight * one_kept for weight, one_kept in zip(weights, keep)]
    if params.top_p < 1:
        inside = brute_keep(logits, weights, params.top_p * (1 - 1e-6) * sum(weights))
        keep = [a and b and weight > 2**-40 for a, b, weight in zip(keep, inside, weights)]
    if params.min_p > 0:
        keep = [a and math.exp((value - best) / params.temperature) >= params.min_p * (1 - 1e-6)
                for a, value in zip(keep, logits)]
    keep[logits.index(best)] = True
    return keep


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.one_of(st.integers(-5, 5).map(float), st.floats(-8, 8, width=32)), min_size=1, max_size=40),
       st.sampled_from([0.25, 0.7, 1.0, 3.0]), st.sampled_from([0, 1, 2, 7, 30]),
       st.sampled_from([1e-6, 0.1, 0.4999, 0.9, 0.987, 1.0]), st.sampled_from([0.0, 0.011, 0.3, 0.93]))
def test_every_combination_of_filters_equals_brute_force(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = filtered_scores(torch.tensor([logits], dtype=torch.float64), [params])[0] > -INF
    assert got.tolist() == brute_survivors(logits, params)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
def test_filters_equal_brute_force_on_a_real_vocabulary(spread):
    logits = torch.randn(2, 49_152, generator=torch.Generator().manual_seed(7)) * spread
    logits[1] = logits[1].round()      # thousands of ties
    for k in (1, 50, 20_000):
        expected = [brute_keep(one_row, [1] * len(one_row), k) for one_row in logits.tolist()]
        assert keep_top_k(logits, [k, k]).tolist() == expected
    scores = scale_by_temperature(logits, [1.0, 1.0])
    mass = scores.exp().mul(2.0**40).long()
    for top_p in (0.1, 0.95):
        expected = [brute_keep(one_row, weights, math.ceil(sum(weights) * (top_p * (1 - 1e-6))))
                    for one_row, weights in zip(logits.tolist(), mass.tolist())]
        assert keep_top_p(logits, scores, [top_p, top_p]).tolist() == expected


def test_a_filter_that_is_off_for_a_row_leaves_that_row_whole():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 20
    scores = scale_by_temperature(logits, [1.0] * 3)
    assert keep_top_k(logits, [0, 2, 40]).sum(1).tolist() == [40, 2, 40]
    assert keep_top_p(logits, scores, [1.0, 0.5, 1.0]).sum(1).tolist()[::2] == [40, 40]
    assert keep_min_p(scores, [0, 1, 0]).sum(1).tolist() == [40, 1, 40]
