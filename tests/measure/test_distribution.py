"""Percentiles, spreads and ratios."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.measure.distribution import Distribution, Spread, percentile, ratio_of_medians


def test_b06_percentiles_interpolate_linearly():
    hundred = list(range(1, 101))
    random.Random(0).shuffle(hundred)
    assert [percentile(hundred, p) for p in (50, 95, 99)] == pytest.approx([50.5, 95.05, 99.01])
    assert [percentile([40, 10, 30, 20], p) for p in (50, 95, 99)] == pytest.approx([25, 38.5, 39.7])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_b06_percentiles_equal_numpys(values, p):
    assert percentile(values, p) == pytest.approx(np.percentile(values, p), abs=1e-6)


def test_no_sample_is_none_and_one_sample_is_every_percentile():
    assert percentile([], 50) is None
    assert {percentile([3.0], p) for p in (0, 1, 50, 99, 100)} == {3.0}


@pytest.mark.parametrize("p", [-0.1, 100.1, math.nan])
def test_a_percentile_outside_0_to_100_is_refused(p):
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile([1.0], p)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_no_number_is_refused(value):
    for measure in (lambda: percentile([1.0, value], 50), lambda: Distribution.of([value]), lambda: Spread.of([value])):
        with pytest.raises(ValueError, match="finite"):
            measure()


def test_a_distribution_leaves_out_what_has_no_value():
    distribution = Distribution.of([None, 1.0, 3.0, None])
    assert (distribution.count, distribution.mean, distribution.p50) == (2, 2.0, 2.0)
    assert (distribution.min, distribution.max) == (1.0, 3.0)
    assert Distribution.of([None]) == Distribution(0, None, None, None, None, None, None)


def test_a_spread_is_the_median_and_the_middle_half():
    spread = Spread.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (spread.median, spread.low, spread.high) == (3.0, 2.0, 4.0)
    assert spread.relative == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_what_slows_both_sides_of_a_pair_drops_out_of_the_ratio():
    slow_machine = [1.0, 1.0, 0.5, 0.25, 1.0]
    ours, theirs = [4 * f for f in slow_machine], [2 * f for f in slow_machine]
    assert ratio_of_medians(ours, theirs) == Spread(2.0, 2.0, 2.0)


@pytest.mark.parametrize("ours, theirs", [([1.0], [1.0, 2.0]), ([], []), ([1.0], [0.0])])
def test_a_ratio_of_unpaired_or_empty_samples_is_refused(ours, theirs):
    with pytest.raises(ValueError):
        ratio_of_medians(ours, theirs)
