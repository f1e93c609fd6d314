"""Percentiles, spreads and ratios of measured values. No torch.

A percentile interpolates linearly between the two nearest ranks (method 7 of Hyndman and Fan, "Sample Quantiles in
Statistical Packages", 1996; NumPy's default). No sample gives ``None``: not NaN and not 0. One sample is every
percentile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PERCENTILE_METHOD = "linear interpolation"


def percentile(values: Iterable[float], p: float) -> float | None:
    """The ``p``-th percentile (0 to 100) of ``values`` in any order; ``None`` when there are none.

    Raises:
        ValueError: ``p`` outside [0, 100], or a value that is NaN or infinite.
    """
    if not 0 <= p <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, got {p!r}")
    ordered = sorted(finite(values))
    if not ordered:
        return None
    rank = p / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def finite(values: Iterable[float]) -> list[float]:
    """The values as a list; one that is NaN or infinite raises ``ValueError``: it would poison every statistic."""
    result = list(values)
    for value in result:
        if not math.isfinite(value):
            raise ValueError(f"measured values must be finite numbers, got {value!r}; leave a missing sample out")
    return result


@dataclass(frozen=True, slots=True)
class Distribution:
    """A set of samples in seven numbers, in the samples' unit; all ``None`` when ``count`` is 0."""

    count: int
    mean: float | None
    min: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        """The distribution of the values that exist: ``None`` is no sample, and neither a 0 nor a failure."""
        samples = finite(value for value in values if value is not None)
        mean = math.fsum(samples) / len(samples) if samples else None
        return cls(len(samples), mean, *(percentile(samples, p) for p in (0, 50, 95, 99, 100)))


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the middle half around it: the 25th and the 75th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one sample; none raises ``ValueError``."""
        samples = finite(values)
        if not samples:
            raise ValueError("a spread needs at least one sample")
        return cls(*(percentile(samples, p) for p in (50, 25, 75)))

    @property
    def relative(self) -> float:
        """Interquartile range over the median: 0.05 says that the middle half lies within 5 % of it."""
        return (self.high - self.low) / abs(self.median) if self.median else 0.0


def ratio_of_medians(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """How many times larger one side's median is. ``low`` and ``high`` are quartiles of the ratios taken pair by pair.

    Sample i of both sides must come from the same round: what slows a machine for a minute then slows both sides of a
    pair, and drops out of its ratio. So the median may lie a little outside the quartiles.

    Raises:
        ValueError: unequal or no samples, or a denominator that is not above 0.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"paired samples expected, got {len(numerators)} and {len(denominators)}")
    top, bottom = Spread.of(numerators), Spread.of(denominators)
    if min(denominators) <= 0:
        raise ValueError("a ratio needs denominators above 0")
    pairs = Spread.of(a / b for a, b in zip(numerators, denominators))
    return Spread(top.median / bottom.median, pairs.low, pairs.high)
