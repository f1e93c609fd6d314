"""The noise is what it claims: a pure function, uniform, and unrelated between draws."""

from __future__ import annotations

import math
from hashlib import blake2b

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.randomness import draw_key, gumbel_noise, uniform_noise

MASK = 0xFFFFFFFF
GOLDEN = [0.581011, 0.62333, 0.769672, 0.122638]


def mix_in_python(word: int, key: int) -> int:
    """The documented mixing, in plain Python integers."""
    word ^= word >> 16
    word = word * 0x85EBCA6B + key & MASK
    word ^= word >> 13
    word = word * 0xC2B2AE35 & MASK
    return word ^ word >> 16


def uniform_in_python(seed: int, index: int, position: int, token: int) -> float:
    """The documented uniform number of one token, without torch."""
    digest = blake2b(f"{seed}/{index}/{position}".encode(), digest_size=8).digest()
    first, second = int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
    bits = mix_in_python(mix_in_python(token * 0x9E3779B9 & MASK, 0) ^ first, second)
    return ((bits >> 1) + 0.5) / 2**31


def chi_square_z(counts: torch.Tensor) -> float:
    """Standard score of Pearson's statistic against equal expected counts (normal approximation)."""
    expected = counts.double().mean()
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = counts.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def uniforms(keys: list[tuple[int, int, int]], vocab_size: int) -> torch.Tensor:
    """Float64 uniform numbers, a row for each (seed, index, position)."""
    return uniform_noise([draw_key(*key) for key in keys], vocab_size).double()


@settings(deadline=None, derandomize=True)
@given(st.integers(), st.integers(0, 50), st.integers(0, 10**6), st.integers(0, 299))
def test_noise_is_the_documented_function_for_any_seed(seed, index, position, token):
    got = uniforms([(seed, index, position)], 300)[0, token].item()
    assert got == pytest.approx(uniform_in_python(seed, index, position, token), rel=2**-23)


def test_seed_42_has_golden_noise():
    got = [round(value, 6) for value in uniforms([(42, 0, 0)], 4)[0].tolist()]
    assert got == [round(uniform_in_python(42, 0, 0, token), 6) for token in range(4)] == GOLDEN


def test_huge_and_negative_seeds_are_all_different_draws():
    seeds = [0, 1, -1, 2**32, 2**63, 2**64, 2**64 + 1, -(2**64), 10**40]
    assert len({draw_key(seed, 0, 0) for seed in seeds}) == len(seeds)


def test_seed_index_and_position_never_run_into_each_other():
    keys = [draw_key(s, i, t) for s in range(-12, 12) for i in range(12) for t in range(12)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("keys", [
    [(7, 0, t) for t in range(400)], [(s, 0, 0) for s in range(400)], [(7, i, 0) for i in range(400)],
], ids=["positions", "seeds", "indices"])
def test_noise_is_uniform_in_every_row_column_and_as_a_whole(keys):
    draws = uniforms(keys, 1000)
    bins = (draws * 64).long()
    assert abs(chi_square_z(torch.bincount(bins.flatten(), minlength=64))) < 4
    per_row = torch.zeros(400, 64).scatter_add_(1, bins, torch.ones_like(draws, dtype=torch.float))
    per_column = torch.zeros(1000, 64).scatter_add_(1, bins.T, torch.ones(1000, 400))
    for table in (per_row, per_column):
        scores = [chi_square_z(row) for row in table]
        assert max(scores) < 6 and abs(sum(scores) / len(scores)) < 0.3


@pytest.mark.parametrize("first, second", [
    ((5, 0, 0), (6, 0, 0)), ((5, 0, 0), (5, 1, 0)), ((5, 0, 0), (5, 0, 1)), ((5, 0, 1), (5, 1, 0)),
    ((0, 0, 0), (2**32, 0, 0)), ((0, 0, 0), (2**64, 0, 0)), ((3, 0, 0), (-3, 0, 0)),
])
def test_neighbouring_draws_are_uncorrelated(first, second):
    a, b = uniforms([first, second], 100_000) - 0.5
    for shift in (0, 1, 2, 64, 4096):
        correlation = torch.corrcoef(torch.stack([a, b.roll(shift)]))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(len(a)), shift
    pairs = ((a + 0.5) * 16).long() * 16 + ((b + 0.5) * 16).long()
    assert abs(chi_square_z(torch.bincount(pairs, minlength=256))) < 4


def test_neighbouring_tokens_are_uncorrelated():
    draws = uniforms([(s, 0, t) for s in range(20) for t in range(20)], 1024) - 0.5
    for shift in (1, 2, 3, 16, 256, 512):
        a, b = draws[:, shift:].flatten(), draws[:, :-shift].flatten()
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 4 / math.sqrt(a.numel()), shift


def test_any_two_tokens_are_uncorrelated_over_draws():
    draws = uniforms([(s, 0, 0) for s in range(4000)], 64)
    correlations = torch.corrcoef(draws.T)[*torch.triu_indices(64, 64, 1)] * math.sqrt(4000)
    assert correlations.abs().max() < 5 and 0.9 < correlations.std() < 1.1


def test_the_end_that_decides_is_fine_grained():
    smallest = torch.stack([uniform_noise([draw_key(s, 0, 0)], 50_000).min() for s in range(200)]) * 50_000
    assert 0.8 < smallest.mean() < 1.2        # the minimum of V uniforms is about exponential with mean 1 / V
    assert len(set(smallest.tolist())) == 200


def test_no_bit_pattern_gives_0_or_1_or_infinite_noise(monkeypatch):
    import minillm.randomness as randomness

    extremes = torch.tensor([0, 1, 2, 2**31 - 1, -1, -2, -(2**31), 2**30], dtype=torch.int32)
    monkeypatch.setattr(randomness, "_mix", lambda words, key: extremes.clone().unsqueeze(0))
    draws = uniform_noise([(0, 0)], 8)
    assert (draws > 0).all() and (draws < 1).all()
    assert gumbel_noise([(0, 0)], 8).isfinite().all()


def test_gumbel_noise_has_its_mean_variance_and_tail():
    noise = gumbel_noise([draw_key(s, 0, 0) for s in range(200)], 5000).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    beyond = (noise > 9).double().mean().item()
    assert beyond == pytest.approx(1 - math.exp(-math.exp(-9)), rel=0.3)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=9), st.integers(1, 700))
def test_a_row_of_noise_is_the_same_alone_and_in_any_batch(seeds, vocab_size):
    keys = [draw_key(seed, 0, 3) for seed in seeds]
    together = gumbel_noise(keys, vocab_size)
    for key, row in zip(keys, together):
        assert torch.equal(gumbel_noise([key], vocab_size)[0], row)


def test_a_token_has_the_same_noise_in_any_vocabulary():
    keys = [draw_key(1, 0, 0)]
    wide = gumbel_noise(keys, 49_152)[0]
    for size in (1, 7, 1000, 49_151):
        assert torch.equal(gumbel_noise(keys, size)[0], wide[:size])


def test_noise_touches_no_generator():
    before = torch.random.get_rng_state()
    gumbel_noise([draw_key(1, 2, 3)], 100)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_and_cpu_make_the_same_integers():
    keys = [draw_key(s, 0, 0) for s in range(64)]
    assert torch.equal(uniform_noise(keys, 49_152), uniform_noise(keys, 49_152, "cuda").cpu())
