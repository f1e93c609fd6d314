"""Where a request's time went: spans by stage, and their export for Chrome's and Perfetto's trace viewers. No torch.

    arrive   the request is checked and given its place
    tokenize prompt text (and chat template) to token ids
    queue    ready, waiting to be admitted into a step
    prefill  forward pass over prompt tokens (a chunk of them is a span of its own), and sampling from its logits
    decode   forward pass over one token that was generated before, and sampling the next; one span a step
    detokenize  token ids to text, stop strings looked for
    deliver  the piece of text is handed to the caller, until the caller has taken it
    preempted back in the queue, its blocks given away, until it is admitted again (recorded schedules alone show it)

Spans of one request don't overlap, so their seconds add up; what is missing to its end-to-end time is the engine's own
bookkeeping. In a batch, one step is a span of every request in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAGES = ("arrive", "tokenize", "queue", "prefill", "decode", "detokenize", "deliver", "preempted")


@dataclass(frozen=True, slots=True)
class Span:
    """One stage of one choice of one request, in seconds of the engine's clock (``time.perf_counter()``)."""

    stage: str
    start_s: float
    end_s: float
    request_id: str
    index: int
    args: dict[str, Any]

    @property
    def duration_s(self) -> float:
        """Length of the span."""
        return self.end_s - self.start_s


class Trace:
    """A growing list of spans. ``add`` may be called from several threads (a list's append is atomic).

    ``counts``: ``(time_s, name, values)``, what was counted when; the viewer draws a track a name.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = list(spans)
        self.counts: list[tuple[float, str, dict[str, float]]] = []

    def add(self, stage: str, start_s: float, end_s: float, *, request_id: str, index: int = 0, **args: Any) -> None:
        """Record a span; ``args`` (JSON values, such as ``num_tokens=12``) are shown by the viewer.

        Raises:
            ValueError: a stage that is not one of :data:`STAGES`, or an end before the start.
        """
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}; the stages are {', '.join(STAGES)}")
        if not end_s >= start_s:
            raise ValueError(f"a span must not end before it starts, got {start_s!r} to {end_s!r}")
        self.spans.append(Span(stage, start_s, end_s, request_id, index, args))

    def count(self, time_s: float, name: str, **values: float) -> None:
        """Note that from ``time_s`` on there were so many of each of ``values``; ``name`` is what they are of."""
        self.counts.append((time_s, name, values))

    def of(self, request_id: str, index: int = 0) -> Trace:
        """The spans of one choice of one request, as a trace of its own."""
        return Trace(span for span in self.spans if (span.request_id, span.index) == (request_id, index))

    @property
    def duration_s(self) -> float:
        """Seconds from the first start to the last end; 0 without spans."""
        return max((s.end_s for s in self.spans), default=0.0) - min((s.start_s for s in self.spans), default=0.0)

    def by_stage(self) -> dict[str, float]:
        """Seconds in each stage that occurred, in the order of :data:`STAGES`."""
        totals: dict[str, float] = {}
        for span in sorted(self.spans, key=lambda span: STAGES.index(span.stage)):
            totals[span.stage] = totals.get(span.stage, 0.0) + span.duration_s
        return totals

    def to_chrome(self) -> dict[str, Any]:
        """The trace in Chrome's JSON format: a complete event ("X") a span, microseconds from the first span on, one
        row (thread) a choice of a request, and a counter event ("C") a count. Source: "Trace Event Format" of the
        Chromium project."""
        origin_s = min((span.start_s for span in self.spans), default=0.0)
        rows: dict[tuple[str, int], int] = {}
        spans = [{"name": span.stage, "cat": "request", "ph": "X", "pid": 1, "args": span.args,
                  "tid": rows.setdefault((span.request_id, span.index), len(rows) + 1),
                  "ts": (span.start_s - origin_s) * 1e6, "dur": span.duration_s * 1e6} for span in self.spans]
        names = [{"name": "thread_name", "ph": "M", "pid": 1, "tid": row,
                  "args": {"name": f"request {request_id}" + (f" choice {index}" if index else "")}}
                 for (request_id, index), row in rows.items()]
        counts = [{"name": name, "ph": "C", "pid": 1, "ts": (time_s - origin_s) * 1e6, "args": values}
                  for time_s, name, values in self.counts]
        return {"traceEvents": [*names, *spans, *counts], "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> Path:
        """Write :meth:`to_chrome` as JSON to ``path``; open it at ui.perfetto.dev or chrome://tracing."""
        path = Path(path)
        path.write_text(json.dumps(self.to_chrome(), allow_nan=False), encoding="utf-8")
        return path
