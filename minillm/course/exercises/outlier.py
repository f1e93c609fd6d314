"""Exercise 15-3: factors that move an outlier column's size out of the weights, and answers that do not do it.

``x @ W.T`` stays the same if column j of W is divided by a factor and column j of x is multiplied with it; the factor
of x goes into the norm before it. SmoothQuant (Xiao et al. 2022, arXiv:2211.10438) and AWQ (Lin et al. 2023,
arXiv:2306.00978) choose such factors.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from minillm.course.checking import Exercise, Misconception

Rows = Sequence[Sequence[float]]


def output_error(weight: Rows, inputs: Rows, factors: Sequence[float]) -> float:
    """Squared error of ``inputs @ weight.T``, over all outputs, when ``weight / factors`` is rounded to 4 bit.

    A scale a row (absmax, codes -7..7). ``ValueError``: not as many factors as columns, or one that is not above 0.
    """
    if len(factors) != len(weight[0]) or not all(0 < factor < float("inf") for factor in factors):
        raise ValueError(f"{len(weight[0])} factors are needed, each a number above 0")
    error = 0.0
    for row in weight:
        narrow = [w / factor for w, factor in zip(row, factors)]
        scale = max(map(abs, narrow)) / 7 or 1.0
        wrong = [round(w / scale) * scale * factor - exact for w, factor, exact in zip(narrow, factors, row)]
        error += sum(sum(x * off for x, off in zip(own, wrong)) ** 2 for own in inputs)
    return error


def plain_error(weight: Rows, inputs: Rows) -> float:
    """:func:`output_error` with every factor 1."""
    return output_error(weight, inputs, [1.0] * len(weight[0]))


class Factors:
    """Factors that are good enough; equal to all others that keep the error as low as is asked for."""

    def __init__(self, values: Sequence[float], weight: Rows, inputs: Rows, most: float):
        self._values, self._layer, self._most = list(values), (weight, inputs), most

    def __iter__(self) -> Iterator[float]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, place: int) -> float:
        return self._values[place]

    def __eq__(self, other: object) -> bool:
        try:
            return output_error(*self._layer, list(other)) <= self._most * plain_error(*self._layer)  # type: ignore
        except (TypeError, ValueError, OverflowError):
            return False

    def __array__(self, *_: object, **__: object) -> object:
        """One number, so that an answer that is an array is refused, whatever its values."""
        import numpy

        return numpy.array(numpy.nan)

    def __repr__(self) -> str:
        share = output_error(*self._layer, self._values) / plain_error(*self._layer)
        return f"factors with an error of at most {self._most:.0%} (these: {share:.0%})"


def widest(rows: Rows) -> list[float]:
    """The largest absolute value of each column."""
    return [max(map(abs, column)) for column in zip(*rows)]


def _powers(weight: Rows, inputs: Rows, own: float, other: float) -> list[float]:
    """Largest weight of a column to one power, over its largest input to another; 1 for a column of zeros."""
    return [(w or 1.0) ** own / (x or 1.0) ** other for w, x in zip(widest(weight), widest(inputs))]


def _best(weight: Rows, inputs: Rows, grid: Sequence[tuple[float, float]]) -> list[float]:
    return min((_powers(weight, inputs, *powers) for powers in grid),
               key=lambda factors: output_error(weight, inputs, factors))


def factors_of(weight: Rows, inputs: Rows, most: float) -> Factors:
    """The best of a small grid of powers."""
    grid = [(own / 8, other / 8) for own in range(9) for other in range(9)]
    return Factors(_best(weight, inputs, grid), weight, inputs, most)


def _all_ones(weight: Rows, inputs: Rows, most: float) -> list[float]:
    return [1.0] * len(weight[0])


def _upside_down(weight: Rows, inputs: Rows, most: float) -> list[float]:
    return [1 / factor for factor in _powers(weight, inputs, 1, 0)]


def _weights_alone(weight: Rows, inputs: Rows, most: float) -> list[float]:
    return _powers(weight, inputs, 1, 0)


def _inputs_alone(weight: Rows, inputs: Rows, most: float) -> list[float]:
    return _powers(weight, inputs, 0, 0.5)


def _half_and_half(weight: Rows, inputs: Rows, most: float) -> list[float]:
    return _powers(weight, inputs, 0.5, 0.5)


def _divides_by_zero(weight: Rows, inputs: Rows, most: float) -> list[float]:
    """Factors of columns that are all zero come out as zero."""
    found = list(factors_of(weight, inputs, most))
    return [factor if w else w for factor, w in zip(found, widest(weight))]


def _one_for_each_row(weight: Rows, inputs: Rows, most: float) -> list[float]:
    return [max(map(abs, row)) for row in weight]


def _as_a_tensor(weight: Rows, inputs: Rows, most: float) -> object:
    import numpy

    return numpy.array(list(factors_of(weight, inputs, most)))


def layer(seed: int, outputs: int = 12, columns: int = 16, *, weights: dict[int, float] | None = None,
          channels: dict[int, float] | None = None) -> tuple[Rows, Rows]:
    """Normal weights and inputs, of which some columns are so many times as large."""
    draw: Callable[[], float] = lambda: round(rng.gauss(0, 1), 3)  # noqa: E731
    rng, weights, channels = random.Random(seed), weights or {}, channels or {}
    rows = [[draw() * weights.get(j, 1) for j in range(columns)] for _ in range(outputs)]
    inputs = [[draw() * channels.get(j, 1) for j in range(columns)] for _ in range(24)]
    return rows, inputs


def _case(seed: int, most: float, **sizes: dict[int, float]) -> tuple[Rows, Rows, float]:
    return *layer(seed, **sizes), most


EXERCISE = Exercise(
    "15-3", "the outlier column", factors_of,
    cases=(_case(2, 0.15, weights={3: 20}), _case(2, 0.09, channels={5: 20}),
           _case(1, 0.024, weights={3: 20}, channels={9: 15}), _case(2, 0.15, weights={3: 20, 7: 0}),
           _case(2, 0.65, weights={3: 10}, channels={3: 10})),
    misconceptions=(
        Misconception(_all_ones, "with factors of 1 nothing changes: divide the outlier column by more"),
        Misconception(_upside_down, "a factor divides the weights: the outlier column needs one above 1"),
        Misconception(_weights_alone, "a factor as large as the outlier makes its inputs as large, and their error "
                                      "too: less is better, try powers of it"),
        Misconception(_half_and_half, "half of each is a good start: try other powers, and keep the best by "
                                      "output_error"),
        Misconception(_inputs_alone, "here the weights have an outlier: look at both"),
        Misconception(_divides_by_zero, "a column of zeros needs a factor above 0 as well: 1, for example"),
        Misconception(_one_for_each_row, "a factor for each column, an input of the layer, not for each row"),
        Misconception(_as_a_tensor, "return a plain list: `.tolist()`"),
    ))
