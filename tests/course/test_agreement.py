"""``agree`` proves equality exactly where it must, within one table elsewhere, and shows the smallest failing case."""

import math
from dataclasses import dataclass

import numpy
import pytest
import torch

from minillm.course import agree
from minillm.course.agreement import TOLERANCES, Disagreement, difference


def test_says_how_many_cases_agree(capsys):
    agree(lambda a, b: a + b, lambda a, b: b + a, [(1, 2), (3, 4)])
    assert capsys.readouterr().out == "agree: 2 cases, no difference\n"


def test_shows_the_smallest_failing_case():
    with pytest.raises(Disagreement) as caught:
        agree(lambda text: text.upper(), lambda text: text, ["ABC", "a longer text", "xy", "the longest of the texts"])
    message = str(caught.value)
    assert "3 of 4 cases differ" in message
    assert "input    'xy'" in message and "mine     'XY'" in message and "theirs   'xy'" in message


def test_no_case_proves_nothing():
    with pytest.raises(ValueError, match="at least one case"):
        agree(len, len, [])


def test_a_function_that_changes_its_argument_does_not_spoil_the_other():
    agree(lambda values: values.pop(), lambda values: values[-1], [([1, 2, 3],)])


@pytest.mark.parametrize(("mine", "theirs"), [
    (1, 2), (True, 1), (1, True), ("a", "b"), ([1, 2], [1, 3]), ([1], [1, 2]), ({"a": 1}, {"b": 1}),
    ({"a": 1}, {"a": 2}),
    (None, 0), (1.0, 1.001), (math.inf, 1.0), (math.nan, 1.0), (numpy.array([1, 2]), numpy.array([1, 3])),
    (torch.tensor([1, 2]), torch.tensor([2, 1])), (torch.ones(2), torch.ones(3)),
    (torch.tensor([True]), torch.tensor([False])),
    (torch.ones(2), torch.ones(2) + 1e-3), ([1.0, [2.0]], [1.0, [2.1]]), ("12", 12),
])
def test_finds_a_difference(mine, theirs):
    assert difference(mine, theirs)


@pytest.mark.parametrize(("mine", "theirs"), [
    (1, 1), ([1, (2, 3)], (1, [2, 3])), (1.0, 1.0 + 1e-12), (math.nan, math.nan), (math.inf, math.inf), (None, None),
    (2, 2.0),
    (torch.ones(2), torch.ones(2) + 1e-6), (torch.ones(2, dtype=torch.bfloat16), torch.ones(2) + 0.01),
    (numpy.ones(2), torch.ones(2, dtype=torch.float64)), (torch.empty(0), torch.empty(0)),
])
def test_accepts_the_same(mine, theirs):
    assert difference(mine, theirs) == ""


def test_names_the_place():
    assert difference({"ids": [1, 2, 3]}, {"ids": [1, 2, 4]}) == "result['ids'][2] is 3, expected 4"
    assert "result[1][0] is 5, expected 2 (1 of 4 differ)" in difference(torch.tensor([[1, 1], [5, 1]]),
                                                                        torch.tensor([[1, 1], [2, 1]]))


def test_coarser_formats_are_allowed_more():
    widths = [TOLERANCES[name][0] for name in ("float64", "float32", "float16", "bfloat16")]
    assert widths == sorted(widths)
    assert difference(torch.ones(1), torch.ones(1) + 1e-3, dtype="float16") == ""


def test_compares_dataclasses_by_field():
    @dataclass
    class Pair:
        a: int
        b: float
    assert difference(Pair(1, 2.0), Pair(1, 2.0)) == ""
    assert "result['b']" in difference(Pair(1, 2.0), Pair(1, 2.5))
