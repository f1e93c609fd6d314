"""The latency numbers: what each means on hand-made event logs."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.measure.distribution import percentile
from minillm.measure.metrics import RequestMetrics, Slo, StreamEvent, metrics_from_events, summarize


def request(*times: float, arrival: float = 0.0, finished: float | None = None, **more) -> RequestMetrics:
    return RequestMetrics(arrival, token_times_s=list(times), finished_s=finished, **more)


def of_ttft_e2e(ttft: float, e2e: float, n: int, **more) -> RequestMetrics:
    gap = (e2e - ttft) / (n - 1) if n > 1 else 0.0
    return request(*(ttft + i * gap for i in range(n)), finished=e2e, **more)


def test_b01_tpot_of_fewer_than_two_tokens_is_none_and_left_out_of_the_aggregate():
    one, none, four = of_ttft_e2e(0.4, 1.0, 1), of_ttft_e2e(0.4, 1.0, 0), of_ttft_e2e(0.4, 1.0, 4)
    assert one.tpot_s is None and none.tpot_s is None
    assert four.tpot_s == pytest.approx(0.2)
    summary = summarize([one, none, four])
    assert summary.tpot_s.count == 1 and summary.tpot_s.mean == pytest.approx(0.2)
    assert summarize([one, none]).tpot_s.mean is None


def test_b02_tpot_divides_by_the_tokens_that_came_not_by_those_asked_for():
    ten = of_ttft_e2e(0.1, 1.0, 10)
    assert ten.tpot_s == pytest.approx(0.9 / 9)


def test_b02_tpot_counts_whitespace_tokens_by_usage_not_by_encoding_the_text_again():
    events = [StreamEvent(0.1 * (i + 1), text=" ") for i in range(15)] + [StreamEvent(1.6, total_tokens=15)]
    metrics = metrics_from_events(0.0, events)
    assert metrics.num_output_tokens == 15
    assert metrics.tpot_s == pytest.approx(1.4 / 14)


def test_b03_ttft_ends_at_the_first_token_not_at_role_comment_or_usage():
    events = [StreamEvent(0.05), StreamEvent(0.10), StreamEvent(0.40, text="Hi"), StreamEvent(0.90, total_tokens=1)]
    metrics = metrics_from_events(0.0, events)
    assert metrics.ttft_s == 0.40
    assert (metrics.num_output_tokens, metrics.e2e_s, metrics.clock) == (1, 0.90, "client")


def test_b03_a_stream_without_content_has_no_ttft():
    metrics = metrics_from_events(0.0, [StreamEvent(0.05), StreamEvent(0.10)])
    assert metrics.ttft_s is None and metrics.tpot_s is None and metrics.itl_s == []
    assert metrics_from_events(0.0, []).e2e_s is None


def test_b03_a_first_token_at_exactly_zero_is_kept():
    metrics = metrics_from_events(0.0, [StreamEvent(0.0, text="a"), StreamEvent(0.3, text="b")])
    assert metrics.first_token_s == 0.0 and metrics.ttft_s == 0.0
    assert metrics.tpot_s == pytest.approx(0.3)


def test_a_running_total_or_token_count_tells_the_tokens_of_each_chunk():
    totals = [StreamEvent(0.1, text="a", total_tokens=1), StreamEvent(0.4, text="bcd", total_tokens=4)]
    counts = [StreamEvent(0.1, text="a", num_tokens=1), StreamEvent(0.4, text="", num_tokens=3)]
    for events in (totals, counts):
        metrics = metrics_from_events(0.0, events)
        assert metrics.num_output_tokens == 4
        assert metrics.itl_s == pytest.approx([0.1, 0.1, 0.1])


def test_itl_is_unknown_when_the_count_differs_from_the_chunks_but_tpot_is_not():
    events = [StreamEvent(0.1, text="a"), StreamEvent(0.5, text="bc"), StreamEvent(0.6, total_tokens=3)]
    metrics = metrics_from_events(0.0, events)
    assert metrics.itl_s == []
    assert metrics.tpot_s == pytest.approx(0.2)


def test_itl_spreads_a_gap_over_the_tokens_that_came_together():
    assert request(1.0, 1.0, 1.6, 1.6, 1.6, 1.7).itl_s == pytest.approx([0.0, 0.2, 0.2, 0.2, 0.1])
    assert request(1.0).itl_s == [] and request().itl_s == []


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 4)), min_size=1, max_size=20))
def test_itl_has_n_minus_one_entries_that_sum_to_last_minus_first(arrivals):
    times, now = [], 0.0
    for gap, count in arrivals:
        now += gap
        times += [now] * count
    metrics = request(*times)
    assert len(metrics.itl_s) == len(times) - 1
    assert math.fsum(metrics.itl_s) == pytest.approx(times[-1] - times[0], abs=1e-9)
    if len(times) > 1:
        assert metrics.tpot_s == pytest.approx(math.fsum(metrics.itl_s) / (len(times) - 1), abs=1e-9)


def test_nothing_raises_before_the_request_is_done():
    metrics = request(arrival=5.0)
    assert (metrics.ttft_s, metrics.queue_s, metrics.e2e_s, metrics.decode_tokens_per_s) == (None,) * 4
    assert request(1.0, 1.0).decode_tokens_per_s is None
    assert request(1.0, 1.5, 2.0).decode_tokens_per_s == 2.0
    assert RequestMetrics(1.0, admitted_s=1.25).queue_s == 0.25


def ten_sent() -> list[RequestMetrics]:
    """4 refused or timed out; 6 served, 5 of them within TTFT 0.5 and TPOT 0.05."""
    failed = [request(arrival=0.0, failure=why, finished=0.01) for why in ("429", "429", "timeout", "timeout")]
    good = [of_ttft_e2e(0.3, 0.3 + 0.04 * 9, 10) for _ in range(5)]
    return failed + good + [of_ttft_e2e(0.9, 2.0, 10)]


def test_b07_failures_stand_beside_latency_and_count_against_goodput():
    summary = summarize(ten_sent(), Slo(ttft_s=0.5, tpot_s=0.05))
    assert summary.failure_rate == 0.4
    assert summary.failures == {"429": 2, "timeout": 2}
    assert summary.goodput == 0.5
    assert summary.duration_s == 2.0 and summary.goodput_per_s == 2.5
    assert summary.ttft_s.count == 6


def test_b07_an_error_event_in_a_stream_is_a_failure():
    events = [StreamEvent(0.1, text="Hi"), StreamEvent(0.2, error="engine failed")]
    metrics = metrics_from_events(0.0, events)
    assert metrics.failure == "engine failed"
    assert summarize([metrics], Slo(ttft_s=0.5)).goodput == 0.0


def test_b07_a_time_out_that_no_event_tells_is_a_failure():
    assert metrics_from_events(0.0, [StreamEvent(0.1, text="Hi")], failure="timeout").failure == "timeout"


def test_b07_an_objective_that_cannot_be_evaluated_is_not_a_pass():
    slo = Slo(ttft_s=0.5, tpot_s=0.05)
    one_token = of_ttft_e2e(0.3, 0.3, 1)
    summary = summarize([one_token], slo)
    assert summary.goodput is None and summary.goodput_per_s is None
    assert (summary.num_slo_met, summary.num_slo_not_applicable) == (0, 1)
    assert slo.met_by(of_ttft_e2e(0.7, 0.7, 1)) is False, "the limit that can be evaluated is missed"
    assert slo.met_by(request(finished=1.0)) is False, "no token at all is never good"
    mixed = summarize([one_token, of_ttft_e2e(0.3, 0.3, 1, failure="timeout")], slo)
    assert mixed.goodput == 0.0


def test_goodput_without_an_objective_is_not_applicable():
    summary = summarize(ten_sent())
    assert summary.goodput is None and summary.num_slo_met is None


@pytest.mark.parametrize("limits", [{}, {"ttft_s": 0.0}, {"ttft_s": 0.5, "tpot_s": float("nan")}])
def test_an_objective_without_a_usable_limit_is_refused(limits):
    with pytest.raises(ValueError, match="at least one limit"):
        Slo(**limits)


def test_nothing_sent_gives_none_everywhere():
    summary = summarize([], Slo(ttft_s=1.0))
    assert (summary.failure_rate, summary.duration_s, summary.goodput, summary.clock) == (None,) * 4
    assert summary.ttft_s.p50 is None
    json.dumps(summary.to_dict(), allow_nan=False)


def test_times_of_different_clocks_are_not_put_together():
    with pytest.raises(ValueError, match="client, engine"):
        summarize([RequestMetrics(0.0), RequestMetrics(0.0, clock="client")])


def test_the_report_names_its_percentile_method_and_its_clock():
    summary = summarize(ten_sent())
    assert summary.percentiles == "linear interpolation" and summary.clock == "engine"
    assert percentile([1.0], 99) == 1.0
