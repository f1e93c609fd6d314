"""A scheduler at work without a model: requests come at given times and say what was written for them. No torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from minillm.request import FinishReason, Request
from minillm.schedule.plan import StepPlan
from minillm.schedule.scheduler import SchedulerProtocol


@dataclass(slots=True)
class Clock:
    """Simulated seconds: called, it tells ``time_s``. For ``Scheduler(clock=...)``."""

    time_s: float = 0.0

    def __call__(self) -> float:
        return self.time_s


@dataclass(slots=True, eq=False)
class Script:
    """What a request does, whoever runs beside it.

    Args:
        comes_s: when it is queued; it means nothing for a request that is in the scheduler already.
        output_token_ids: the tokens it is given, one at a time.
        reason: how it ends with the last of them, unless the scheduler ends it there or before.
        leaves_s: for one without output, when it leaves the queue; it also does where its first token would be due.
    """

    request: Request
    comes_s: float
    output_token_ids: Sequence[int]
    reason: FinishReason = "length"
    leaves_s: float = math.inf


def drive(scheduler: SchedulerProtocol, scripts: Iterable[Script], step_seconds: Callable[[StepPlan], float],
          clock: Clock, forgets_s: Iterable[float] = ()) -> Iterator[StepPlan]:
    """Run ``scheduler``, whose clock is ``clock``, until nothing is left to do; yields each plan once it is committed.

    A step takes ``step_seconds(plan)``. Who comes meanwhile waits for its end; time in which nothing runs is skipped.

    Args:
        forgets_s: when the prefix cache is emptied, by the recording scheduler that this is then.
    Raises:
        RuntimeError: the scheduler planned nothing although requests wait or run.
    """
    by_request = {script.request: script for script in scripts}
    here = {*scheduler.waiting, *scheduler.running}
    calls = [(script.comes_s, partial(scheduler.add, script.request))
             for script in by_request.values() if script.request not in here]
    calls += [(max(script.comes_s, script.leaves_s), partial(scheduler.finish, script.request, script.reason))
              for script in by_request.values() if not script.output_token_ids and script.leaves_s < math.inf]
    calls += [(time_s, scheduler.reset_prefix_cache) for time_s in forgets_s]
    due = deque(sorted(calls, key=itemgetter(0)))
    while due or scheduler.waiting or scheduler.running:
        if not (scheduler.waiting or scheduler.running):
            clock.time_s = max(clock.time_s, due[0][0])
        while due and due[0][0] <= clock.time_s:
            due.popleft()[1]()
        if scheduler.waiting or scheduler.running:
            plan = scheduler.schedule()
            if not plan.scheduled:
                raise RuntimeError("the scheduler planned nothing although requests wait or run")
            clock.time_s += step_seconds(plan)
            _commit(scheduler, plan, by_request)
            yield plan


def _commit(scheduler: SchedulerProtocol, plan: StepPlan, scripts: dict[Request, Script]) -> None:
    token_ids, last = [], []
    for item in plan.sampling:
        script, place = scripts[item.request], item.request.num_output_tokens
        if place >= len(script.output_token_ids):  # no token of it is known
            scheduler.finish(item.request, script.reason)
        token_ids.append(0 if item.request.is_finished else script.output_token_ids[place])
        if place + 1 == len(script.output_token_ids):
            last.append(script)
    scheduler.commit(plan, token_ids)
    for script in last:
        scheduler.finish(script.request, script.reason)
