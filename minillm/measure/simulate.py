"""Thousands of requests in a second: the real scheduler on simulated time, without a model. No torch.

A discrete-event simulation: the scheduler plans, a function says how long such a step takes, the clock goes on by so
much. Which requests share a step, who waits and who is preempted is therefore exactly what the engine would do; only
the seconds are estimated, by default with the cost model of :mod:`minillm.measure.roofline`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from minillm.measure.distribution import percentile
from minillm.measure.hardware import Hardware
from minillm.measure.metrics import RequestMetrics, Slo, Summary, summarize
from minillm.measure.roofline import estimate, mixed_step_cost
from minillm.measure.workload import Arrival
from minillm.model.config import ModelConfig
from minillm.request import Request, SamplingParams
from minillm.schedule.drive import Clock, Script, drive
from minillm.schedule.fork import fork
from minillm.schedule.history import Added, Committed, Finished, History, Planned
from minillm.schedule.plan import StepPlan
from minillm.schedule.replay import Player
from minillm.schedule.scheduler import SchedulerProtocol


@dataclass(frozen=True)
class CostModel:
    """Seconds that a step takes at least, from its plan: ``CostModel(config, Hardware.named("h100"))(plan)``.

    Args:
        dtype, kv_cache_dtype: as for :func:`~minillm.measure.roofline.step_cost`.
        overhead_s: added to each step, for what the cost model does not count (scheduler, sampler, text).
    """

    config: ModelConfig
    hardware: Hardware
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    overhead_s: float = 0.0

    def __call__(self, plan: StepPlan) -> float:
        """Seconds of one step."""
        sequences = Counter((item.num_tokens, item.start) for item in plan.scheduled)
        formats = {"dtype": self.dtype, "kv_cache_dtype": self.kv_cache_dtype}
        cost = mixed_step_cost(self.config, sequences, logit_rows=len(plan.sampling), paged=True, **formats)
        return estimate(cost, self.hardware).time_s + self.overhead_s


@dataclass(slots=True, kw_only=True)
class Simulation:
    """What came of a workload; ``requests[i]`` are the times of ``arrivals[i]``, and a refused one failed.

    Args:
        busy_s: seconds in which a step was computed.
        num_tokens: computed, prompts and decodes; those computed again after a preemption count again.
        num_hit_tokens: of prompts, found in the prefix cache and not computed.
    """

    arrivals: Sequence[Arrival]
    requests: list[RequestMetrics]
    num_steps: int = 0
    busy_s: float = 0.0
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0

    def summary(self, slo: Slo | None = None, *, group: str | None = None) -> Summary:
        """All requests together, or those of one ``group``; see :func:`~minillm.measure.metrics.summarize`."""
        pairs = zip(self.arrivals, self.requests, strict=True)
        return summarize([own for arrival, own in pairs if group in (None, arrival.group)], slo)


def simulate(arrivals: Iterable[Arrival], scheduler: SchedulerProtocol,
             step_seconds: Callable[[StepPlan], float]) -> Simulation:
    """Run a workload through ``scheduler``, which is new and whose ``clock`` is set to the simulated one.

    Open loop: requests come at their time, however many wait. One that can never run is refused, and a failure of the
    summary. Any scheduler that the engine takes will do; wrapped in a
    :class:`~minillm.schedule.recording.RecordingScheduler`, the run can be replayed and forked.
    """
    arrivals, clock = list(arrivals), Clock()
    scheduler.clock = clock
    why_never = getattr(scheduler, "why_never", lambda num_tokens: "")
    metrics = {request: RequestMetrics(request.arrival_s, num_prompt_tokens=len(request.prompt_token_ids))
               for request in map(_request_of, arrivals, range(len(arrivals)))}
    result = Simulation(arrivals=arrivals, requests=list(metrics.values()))

    def timed(plan: StepPlan) -> float:
        seconds = step_seconds(plan)
        result.busy_s += seconds
        return seconds

    for own in metrics.values():
        own.failure = "refused" if why_never(own.num_prompt_tokens) else None
    scripts = [Script(request, arrival.arrival_s, range(arrival.num_output_tokens))
               for (request, own), arrival in zip(metrics.items(), arrivals, strict=True) if own.failure is None]
    for plan in drive(scheduler, scripts, timed, clock):
        result.num_steps += 1
        result.num_tokens += plan.num_tokens
        for item in plan.sampling:
            metrics[item.request].token_times_s.append(clock.time_s)
    for request, own in metrics.items():
        for name in ("admitted_s", "finished_s", "num_cached_tokens", "num_preemptions"):
            setattr(own, name, getattr(request, name))
        result.num_hit_tokens += request.num_cached_tokens
        result.num_preemptions += request.num_preemptions
    return result


def metrics_of(history: History) -> dict[str, RequestMetrics]:
    """The times of each request of a recorded run, by its name in the history; a token exists once it is committed."""
    metrics: dict[str, RequestMetrics] = {}
    for event in history.events:
        match event:
            case Added():
                metrics[event.request] = RequestMetrics(event.arrival_s, num_prompt_tokens=len(event.prompt_token_ids))
            case Planned():
                for name in event.admitted:
                    if metrics[name].admitted_s is None:
                        metrics[name].admitted_s = event.time_s
                for name in event.preempted:
                    metrics[name].num_preemptions += 1
            case Committed():
                for name in event.token_ids:
                    metrics[name].token_times_s.append(event.time_s)
            case Finished():
                metrics[event.request].finished_s = event.time_s
                metrics[event.request].failure = event.reason if event.reason in ("cancelled", "error") else None
    return metrics


def compare(history: History, step_seconds: Callable[[StepPlan], float]) -> dict[str, dict[str, float | None]]:
    """How well ``step_seconds`` predicts a recorded run of the engine, by quantity.

    ``step_s``: the same plans, one by one, from plan to commit. ``ttft_s``, ``tpot_s``, ``e2e_s``: the same requests in
    a simulation of its own (a fork at step 0), whose steps come out as they may. Of each, the medians ``measured`` and
    ``predicted``, their ``ratio``, and ``median_error``: how far predicted / measured is from 1, the median of pairs.
    """
    player, pairs, predicted_s, planned_s = Player(history.settings), [], 0.0, 0.0
    for event in history.events:
        player.apply(event)
        if isinstance(event, Planned):
            planned_s, predicted_s = event.time_s, step_seconds(player.plan)
        elif isinstance(event, Committed):
            pairs.append((event.time_s - planned_s, predicted_s))
    rows, measured = {"step_s": _row(pairs)}, metrics_of(history)
    predicted = metrics_of(fork(history, 0, step_seconds=step_seconds))
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        rows[name] = _row([(getattr(own, name), getattr(predicted[request], name))
                           for request, own in measured.items() if getattr(own, name)])
    return rows


def _row(pairs: Sequence[tuple[float, float]]) -> dict[str, float | None]:
    if not pairs:
        return dict.fromkeys(("measured", "predicted", "ratio", "median_error"))
    measured, predicted = (percentile(side, 50) for side in zip(*pairs, strict=True))
    return {"measured": measured, "predicted": predicted, "ratio": predicted / measured,
            "median_error": percentile([abs(guess / real - 1) for real, guess in pairs], 50)}


def _request_of(arrival: Arrival, number: int) -> Request:
    return Request(request_id=f"req-{number}", prompt_token_ids=arrival.prompt_token_ids(number), seed=0,
                   max_total_tokens=arrival.num_prompt_tokens + arrival.num_output_tokens, priority=arrival.priority,
                   params=_PARAMS, arrival_s=arrival.arrival_s, queued_s=arrival.arrival_s)


_PARAMS = SamplingParams(ignore_eos=True)
