"""The field's latency numbers, each defined once, here. Engine, server, benchmark and notebooks read these. No torch.

    arrival      admitted        first token   token   token         last token = finished (or a little later)
       |---queue---|----prefill------|--gap--|---gap---|---- ... ----|
       |-------------TTFT------------|----------- (N - 1) x TPOT ----|
       |-------------------------- end to end -----------------------|

A time only means something beside its clock: the *engine* knows when a token existed, the *server* when it was sent,
the *client* when it came. A chunk on the wire is not a token, and the first byte is not the first token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from minillm.measure.distribution import PERCENTILE_METHOD, Distribution


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request on one clock (seconds), and what follows from them. ``None``: has not happened, or has no
    meaning for this request. No property raises on a request that is not done.

    Args:
        arrival_s: when the request came in; for a load generator, when it was *scheduled* to be sent.
        token_times_s: entry i is when output token i existed; tokens of one arrival share a time. Never decreasing.
        clock: whose clock it is: ``"engine"``, ``"server"`` or ``"client"``.
        failure: what ended the request instead of a whole answer ("timeout", "429", ...); ``None`` when it was served.
        reported_output_tokens: the engine's own count (``usage``), where this clock saw chunks and not tokens.
    """

    arrival_s: float
    admitted_s: float | None = None
    finished_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    clock: str = "engine"
    failure: str | None = None
    reported_output_tokens: int | None = None

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens as the engine counted them, the end-of-sequence token among them."""
        return len(self.token_times_s) if self.reported_output_tokens is None else self.reported_output_tokens

    @property
    def first_token_s(self) -> float | None:
        """When the first token existed."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: arrival to first generated token."""
        return _between(self.arrival_s, self.first_token_s)

    @property
    def queue_s(self) -> float | None:
        """Arrival to the first admission into a step."""
        return _between(self.arrival_s, self.admitted_s)

    @property
    def e2e_s(self) -> float | None:
        """End to end: arrival to the end of the request."""
        return _between(self.arrival_s, self.finished_s)

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (N - 1). A mean; ``None`` for N below 2."""
        if self.num_output_tokens < 2 or not self.token_times_s:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_output_tokens - 1)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """1 / TPOT: the speed of the decode loop, without prefill. ``None`` when all tokens came at once."""
        return 1 / self.tpot_s if self.tpot_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies, N - 1 entries. k tokens that arrive together after a gap g are k entries of g/k;
        those that came with the first token add zeros. Empty where the tokens of each chunk are not known."""
        if len(self.token_times_s) != self.num_output_tokens:
            return []
        arrivals = list(Counter(self.token_times_s).items())
        gaps = [0.0] * (arrivals[0][1] - 1) if arrivals else []
        for (before_s, _), (time_s, count) in zip(arrivals, arrivals[1:]):
            gaps += [(time_s - before_s) / count] * count
        return gaps


def _between(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - start_s


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a token stream as a client saw it. A role chunk, an empty delta and a comment hold nothing.

    Args:
        time_s: when it came, on the client's clock.
        text: the text it added.
        num_tokens: tokens it delivered, where the server says so (token ids, log-probabilities).
        total_tokens: output tokens so far by the server's count (``usage``), where the event tells.
        error: message of an error event; the request failed, whatever its HTTP status was.
    """

    time_s: float
    text: str = ""
    num_tokens: int | None = None
    total_tokens: int | None = None
    error: str | None = None


def metrics_from_events(arrival_s: float, events: Iterable[StreamEvent], *,
                        failure: str | None = None) -> RequestMetrics:
    """The metrics of a stream on the client's clock; ``failure`` is one that no event tells, such as a time-out.

    An event delivers as many tokens as it says, or as the running total grew by; an event that says neither delivers
    one if it has text and none otherwise. The last total wins as the count; where it differs from the tokens seen
    (hidden tokens, several in a chunk), TPOT divides by the count and ITL stays empty, as it can't be known.
    """
    metrics = RequestMetrics(arrival_s, clock="client", failure=failure)
    for event in events:
        metrics.finished_s = event.time_s
        metrics.failure = metrics.failure or event.error
        count = event.num_tokens
        if count is None and event.text:
            count = 1 if event.total_tokens is None else event.total_tokens - len(metrics.token_times_s)
        metrics.token_times_s += [event.time_s] * max(count or 0, 0)
        if event.total_tokens is not None:
            metrics.reported_output_tokens = event.total_tokens
    return metrics


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objective: upper limits in seconds that a good request keeps, all of those that are set.

    Raises:
        ValueError: no limit at all, or one that is not above 0.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        limits = self._limits()
        if not limits or not all(limit > 0 for limit in limits.values()):
            raise ValueError(f"an objective needs at least one limit, each above 0 seconds; got {self}")

    def _limits(self) -> dict[str, float]:
        return {name: limit for name, limit in asdict(self).items() if limit is not None}

    def met_by(self, request: RequestMetrics) -> bool | None:
        """True or False; ``None`` ("n/a") where a limit has no meaning for this request, such as TPOT of one token.
        A failed request and one without a single token never meet it."""
        if request.failure is not None or request.num_output_tokens == 0:
            return False
        pairs = [(getattr(request, name), limit) for name, limit in self._limits().items()]
        if any(value is not None and value > limit for value, limit in pairs):
            return False
        return None if any(value is None for value, _ in pairs) else True


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Many requests in one report. Latencies are of the served requests; so they stand beside ``failure_rate``.

    ``goodput`` is the share of requests that met the objective, failures counting against it and requests it has no
    meaning for left out (``num_slo_not_applicable``); ``goodput_per_s`` is those that met it over the duration.
    Both are ``None`` ("n/a") without an objective, or when it could be evaluated for none.
    """

    num_requests: int
    num_failed: int
    failures: dict[str, int]
    failure_rate: float | None
    duration_s: float | None
    num_output_tokens: int
    output_tokens_per_s: float | None
    ttft_s: Distribution
    tpot_s: Distribution
    itl_s: Distribution
    e2e_s: Distribution
    queue_s: Distribution
    num_slo_met: int | None
    num_slo_not_applicable: int | None
    goodput: float | None
    goodput_per_s: float | None
    clock: str | None
    percentiles: str = PERCENTILE_METHOD

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return asdict(self)


def summarize(requests: Sequence[RequestMetrics], slo: Slo | None = None) -> Summary:
    """Summary of requests on one clock; its ``duration_s`` is from the first arrival until the last end.

    Raises:
        ValueError: requests of different clocks, whose times cannot be put together.
    """
    clocks = {request.clock for request in requests}
    if len(clocks) > 1:
        raise ValueError(f"requests of different clocks cannot be summarized together: {', '.join(sorted(clocks))}")
    served = [request for request in requests if request.failure is None]
    failures = Counter(request.failure for request in requests if request.failure is not None)
    ends = [request.finished_s for request in requests if request.finished_s is not None]
    duration_s = max(ends) - min(request.arrival_s for request in requests) if ends else None
    verdicts = [slo.met_by(request) for request in requests] if slo else []
    met, unknown = verdicts.count(True), verdicts.count(None)
    judged = len(verdicts) - unknown
    num_tokens = sum(request.num_output_tokens for request in served)
    return Summary(
        num_requests=len(requests), num_failed=failures.total(), failures=dict(failures),
        failure_rate=_over(failures.total(), len(requests)), duration_s=duration_s,
        num_output_tokens=num_tokens, output_tokens_per_s=_over(num_tokens, duration_s),
        itl_s=Distribution.of(gap for request in served for gap in request.itl_s),
        **{name: Distribution.of(getattr(request, name) for request in served)
           for name in ("ttft_s", "tpot_s", "e2e_s", "queue_s")},
        num_slo_met=met if slo else None, num_slo_not_applicable=unknown if slo else None,
        goodput=_over(met, judged), goodput_per_s=_over(met, duration_s) if judged else None,
        clock=next(iter(clocks), None))


def _over(count: float, total: float | None) -> float | None:
    return count / total if total else None


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """An engine's counts since it began, and what it holds now.

    ``num_cached_tokens``: of ``num_prompt_tokens``, those found in the prefix cache. ``num_blocks`` of KV cache, of
    which ``num_free_blocks`` are free or may be evicted; ``None`` where nothing counts blocks.
    """

    num_waiting: int = 0
    num_running: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_blocks: int | None = None
    num_free_blocks: int | None = None
    num_finished: dict[str, int]
