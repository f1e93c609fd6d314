"""A traced request as plain numbers, ready for a figure, a table and a recorded file."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from minillm.measure.distribution import percentile
from minillm.measure.trace import Trace
from minillm.request import RequestOutput

Record = dict[str, Any]


def request_record(output: RequestOutput, trace: Trace, since_s: float | None = None, load_s: float = 0.0) -> Record:
    """One request's stages and four numbers, in seconds since ``since_s`` (default: its arrival).

    Args:
        since_s: when the caller asked, on the same clock; earlier than arrival when something had to be loaded first.
        load_s: how long loading took, from ``since_s`` on; it becomes a span of its own.
    """
    metrics = output.metrics
    start_s = metrics.arrival_s if since_s is None else since_s
    spans: list[list[Any]] = [["load", 0.0, round(load_s, 6)]] if load_s else []
    spans += [[span.stage, round(span.start_s - start_s, 6), round(span.end_s - start_s, 6)] for span in trace.spans
              if span.request_id == output.request_id and span.duration_s > 0]
    return {"spans": spans, "num_prompt_tokens": metrics.num_prompt_tokens,
            "num_output_tokens": metrics.num_output_tokens,
            "first_token_s": metrics.first_token_s - start_s, "ttft_s": metrics.ttft_s, "tpot_s": metrics.tpot_s,
            "itl_s": metrics.itl_s, "e2e_s": metrics.e2e_s}


def repeats(times: int) -> int:
    """How often a cell measures the same: ``times``, and once where ``MINILLM_BRIEF`` is set, as tests do."""
    return 1 if os.environ.get("MINILLM_BRIEF") else times


def median_seconds(work: Callable[[], Any], *, device: str = "cpu", seconds: float = 0.2, rounds: int = 5) -> float:
    """Median seconds a call of ``work``: once to warm up, then repeated for about ``seconds`` and at least ``rounds``
    times, each waited for on the device; timed once where :func:`repeats` says so."""
    from minillm.measure.bench.machine import time_repeated

    if repeats(2) == 1:
        seconds, rounds = 0.0, 1
    return statistics.median(time_repeated(work, device, seconds, min_rounds=rounds, warmup=1))


def seconds_of(work: Callable[[], Any]) -> float:
    """Seconds of one call: for work of seconds, where repeating would take too long."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def median_request(records: Sequence[Record]) -> Record:
    """The record whose end-to-end time is the median: one that really happened, not a mixture of several."""
    ordered = sorted(records, key=lambda record: record["e2e_s"])
    return ordered[(len(ordered) - 1) // 2]


def spread(records: Sequence[Record], number: str) -> tuple[float, float, float]:
    """Least, median and most of a number over repeated requests."""
    values = [record[number] for record in records]
    return min(values), statistics.median(values), max(values)


def slow_steps(name: str, cold: Record, warm: Record, times: float = 3.0) -> str:
    """A sentence on the decode steps of a cold request that took more than ``times`` the warm request's median gap."""
    usual_s = statistics.median(warm["itl_s"])
    slow = [gap_s for gap_s in cold["itl_s"] if gap_s > times * usual_s]
    if not slow:
        return f"{name}: once loaded, no cold decode step took over {times:.0f} times the warm median."
    return (f"{name}: even after loading, {len(slow)} of {len(cold['itl_s'])} cold decode steps took over "
            f"{times:.0f} times the warm\n  median of {usual_s * 1e3:.1f} ms (the slowest {max(slow) * 1e3:,.0f} ms): "
            "first use, or other work on the machine.")


def four_numbers(record: Record) -> dict[str, float]:
    """The four numbers of a record in milliseconds, for a table; ITL by its percentiles."""
    return {
        "TTFT (ms)": record["ttft_s"] * 1e3, "TPOT (ms)": record["tpot_s"] * 1e3,
        **{f"ITL p{q} (ms)": percentile(record["itl_s"], q) * 1e3 for q in (50, 95, 99)},
        "end to end (ms)": record["e2e_s"] * 1e3,
    }
