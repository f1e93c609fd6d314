"""Traces: stages, totals, export."""

from __future__ import annotations

import json

import pytest

from minillm.measure.trace import STAGES, Trace


def small_trace() -> Trace:
    trace = Trace()
    trace.add("decode", 10.3, 10.4, request_id="a", num_tokens=1)
    trace.add("prefill", 10.1, 10.3, request_id="a", num_tokens=12)
    trace.add("decode", 10.4, 10.5, request_id="a", num_tokens=1)
    trace.add("prefill", 10.2, 10.5, request_id="b", index=1)
    return trace


def test_seconds_are_summed_by_stage_in_the_order_of_a_request():
    assert list(small_trace().by_stage()) == ["prefill", "decode"]
    assert small_trace().by_stage() == pytest.approx({"prefill": 0.5, "decode": 0.2})
    only_a = small_trace().of("a")
    assert only_a.by_stage() == pytest.approx({"prefill": 0.2, "decode": 0.2})
    assert only_a.duration_s == pytest.approx(0.4)
    assert len(small_trace().of("b", 1).spans) == 1 and small_trace().of("b").spans == []
    assert Trace().by_stage() == {} and Trace().duration_s == 0.0


def test_every_stage_is_documented_and_no_other_is_taken():
    import minillm.measure.trace as module
    for stage in STAGES:
        assert f"\n    {stage} " in module.__doc__
    with pytest.raises(ValueError, match="unknown stage 'sampel'"):
        Trace().add("sampel", 0.0, 1.0, request_id="a")


@pytest.mark.parametrize("end", [0.5, float("nan")])
def test_a_span_that_ends_before_it_starts_is_refused(end):
    with pytest.raises(ValueError, match="must not end before"):
        Trace().add("decode", 1.0, end, request_id="a")


def test_the_export_is_chromes_format_with_a_row_a_choice(tmp_path):
    chrome = json.loads(small_trace().save(tmp_path / "trace.json").read_text())
    spans = [event for event in chrome["traceEvents"] if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in chrome["traceEvents"] if event["ph"] == "M"}
    assert names == {1: "request a", 2: "request b choice 1"}
    assert [span["tid"] for span in spans] == [1, 1, 1, 2]
    assert min(span["ts"] for span in spans) == 0.0
    prefill = next(span for span in spans if span["name"] == "prefill")
    assert prefill["dur"] == pytest.approx(0.2e6) and prefill["args"] == {"num_tokens": 12}


def test_the_export_of_an_empty_trace_is_valid():
    assert Trace().to_chrome()["traceEvents"] == []
