"""The 4-bit quantizers of exercise 15-2, which may have a fault, and answers to what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises.faulty import Unlisted, always_none, built_with, mistaking

Rows = list[list[float]]
FAULTS = ("one scale", "first group", "toward zero", "wraps", "swapped", "none")


class Quantizer:
    """Rounds rows of weights to 4 bit: codes -8..7, a scale for each ``size`` weights of a row."""

    def __init__(self, size: int, fault: str):
        self.size, self._fault = size, fault

    def __repr__(self) -> str:
        return f"a quantizer with groups of {self.size}"

    def __call__(self, rows: Sequence[Sequence[float]]) -> Rows:
        """What ``rows``, of one even length, come back as."""
        rows = [list(map(float, row)) for row in rows]
        if not rows or len({len(row) for row in rows}) != 1 or not rows[0] or len(rows[0]) % 2:
            raise ValueError("give rows of one length, an even number of weights")
        largest = max(abs(weight) for row in rows for weight in row)
        return [self._row(row, largest) for row in rows]

    def _row(self, row: list[float], largest: float) -> list[float]:
        codes, scales = [], []
        for start in range(0, len(row), self.size):
            group = row[start:start + self.size]
            widest = max(map(abs, row[:self.size] if self._fault == "first group" else group))
            scale = (largest if self._fault == "one scale" else widest) / 8 or 1.0
            codes += [self._code(weight / scale) for weight in group]
            scales += [scale] * len(group)
        if self._fault == "swapped":
            codes[::2], codes[1::2] = codes[1::2], codes[::2]
        return [code * scale for code, scale in zip(codes, scales)]

    def _code(self, exact: float) -> int:
        code = int(exact) if self._fault == "toward zero" else round(exact)
        return (code + 8) % 16 - 8 if self._fault == "wraps" else max(-8, min(7, code))


def find_fault(quantizer: Quantizer) -> str:
    """One row of two groups shows all: a small group, then a large one with a weight between two codes."""
    empty = [0.0] * (quantizer.size - 2)
    row = quantizer([[1.0, 0.0, *empty, 8.0, 0.6, *empty]])[0]
    seen = row[0], row[quantizer.size], row[quantizer.size + 1]
    return {(0.875, 7.0, 1.0): "none", (1.0, 7.0, 1.0): "one scale", (0.875, 0.875, 0.625): "first group",
            (0.875, 7.0, 0.0): "toward zero", (-1.0, -8.0, 1.0): "wraps"}.get(seen, "swapped")


def _cut_is_a_fault(quantizer: Quantizer) -> str:
    """Takes the cut from code 8 to 7 for the fault."""
    return "wraps" if quantizer([[8.0] * (2 * quantizer.size)])[0][0] != 8.0 else find_fault(quantizer)


def _groups_of_four(quantizer: Quantizer) -> str:
    """Assumes groups of four weights."""
    row = quantizer([[1.0, 0.0, 0.0, 0.0, 8.0, 0.6, 0.0, 0.0]])[0]
    return {(0.875, 7.0, 1.0): "none", (1.0, 7.0, 1.0): "one scale", (0.875, 0.875, 0.625): "first group",
            (0.875, 7.0, 0.0): "toward zero", (-1.0, -8.0, 1.0): "wraps"}.get((row[0], row[4], row[5]), "swapped")


def _not_a_verdict(quantizer: Quantizer) -> object:
    return Unlisted(FAULTS, "one_scale")


EXERCISE = Exercise(
    "15-2", "the faulty quantizer", built_with,
    cases=tuple((Quantizer(size, fault),) for size in (4, 2, 8, 3) for fault in (*FAULTS[-1:], *FAULTS[:-1])),
    misconceptions=(
        Misconception(always_none, "one probe a fault. This one shows when a matrix has small weights in one place "
                                   "and large ones in another"),
        # Probes groups and rows of the same size of weights: every scale is then the same.
        Misconception(mistaking(find_fault, {"one scale": "none", "first group": "none"}),
                      "with weights of one size everywhere all scales are the same: put a small group beside a large"
                      " one"),
        # Compares rows of a single group each, of which the first group is the only one.
        Misconception(mistaking(find_fault, {"first group": "none"}),
                      "the first group's scale does harm only where a later group of the same row is of another size"),
        # The large group first: the first group's scale and the matrix's are then the same.
        Misconception(mistaking(find_fault, {"first group": "one scale"}),
                      "put the small group first: the first group's scale is then too small for the next, one scale "
                      "of the matrix too large for the first"),
        # Only weights that are whole multiples of the scale.
        Misconception(mistaking(find_fault, {"toward zero": "none"}),
                      "what lies on a code exactly is right under any rounding: try a weight of 0.6 scales"),
        # Its largest weight is negative, and -8 is a code.
        Misconception(mistaking(find_fault, {"wraps": "none"}),
                      "the largest weight must be positive: code -8 exists, 8 does not"),
        Misconception(mistaking(find_fault, {"swapped": "none"}),
                      "two neighbours must differ, or nobody sees that they changed places"),
        Misconception(_cut_is_a_fault, "a right quantizer cuts code 8 to 7, so 8 scales come back as 7. Look for a "
                                       "wrong sign"),
        Misconception(_groups_of_four, "groups may have another size than four: ask quantizer.size"),
        Misconception(_not_a_verdict, "return one of these, spelt so: " + ", ".join(FAULTS)),
    ))
