"""The chart of slots: who holds which, and what the figure refuses."""

import pytest

from minillm.course.curves import curves
from minillm.course.gantt import Hold, gantt, holds

CONTINUOUS = [{"a": 4, "b": 3}, {"a": 1, "b": 1}, {"b": 1, "c": 6}, {"b": 1, "c": 1}, {"b": 1}]


def test_a_newcomer_takes_the_lowest_free_slot_and_keeps_it():
    assert holds(CONTINUOUS, 2) == [Hold(0, "a", 0, 2), Hold(1, "b", 0, 5), Hold(0, "c", 2, 4)]


def test_who_was_out_of_a_step_comes_anew_and_who_computes_nothing_stays():
    assert holds([{"a": 1}, {"b": 1}, {"b": 0, "a": 1}], 2) == [
        Hold(0, "a", 0, 1), Hold(0, "b", 1, 3), Hold(1, "a", 2, 3)]


def test_more_requests_than_slots_are_refused():
    with pytest.raises(ValueError, match="step 1 has 2 requests"):
        holds([{"a": 1}, {"a": 1, "b": 1}], 1)


def test_the_chart_has_every_hold_as_a_row_on_steps_or_seconds():
    for edges in (None, {"mine": [0, 0.3, 0.4, 0.9, 1.0, 1.1]}):
        shown = gantt({"mine": CONTINUOUS}, slots=2, edges=edges, finding="Three requests share two slots in 5 steps.")
        assert shown.rows == (("mine", 0, "a", 0, 2), ("mine", 1, "b", 0, 5), ("mine", 0, "c", 2, 4))


def test_curves_show_the_whole_table():
    table = {"run": ["recorded"] * 2 + ["yours"] * 2, "x": [1, 2, 1, 3], "y": [1, 2, 1, 2], "law": [1, 2, 1, 3]}
    shown = curves(table, x="x", panels={"one": ("y", "law"), "two": ("law", None)}, y_label="times",
                   finding="Twice the requests bring twice the tokens.")
    assert shown.header == tuple(table) and len(shown.rows) == 4
