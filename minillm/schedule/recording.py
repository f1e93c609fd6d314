"""A scheduler that writes down what another one does. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from minillm.request import FinishReason, Request
from minillm.schedule import history as record
from minillm.schedule.plan import StepPlan
from minillm.schedule.scheduler import SchedulerProtocol


class RecordingScheduler:
    """Meets :class:`~minillm.schedule.scheduler.SchedulerProtocol` by asking ``scheduler``, and keeps a ``history``.

        recorder = RecordingScheduler(Scheduler(BlockPool(64)))
        LLM(scheduler=recorder).generate(...)
        recorder.history.save("run.jsonl")

    Whatever else is asked of it (``pool``, ``why_never``, ``max_num_seqs`` ...) is the inner scheduler's. Settings that
    a scheduler of another kind does not have are ``None`` in the history.

    Args:
        history: one to go on with, of whose requests ``scheduler`` holds those that are not finished.
    Raises:
        ValueError: without ``history``, something waits, runs or is cached already, which none would tell.
    """

    def __init__(self, scheduler: SchedulerProtocol, history: record.History | None = None):
        here = [*scheduler.waiting, *scheduler.running]
        if history is None and (here or getattr(getattr(scheduler, "pool", None), "num_cached", 0)):
            raise ValueError("no history tells what this scheduler did before: record a new scheduler over a new pool")
        self.scheduler = scheduler
        self.history = record.History(settings_of(scheduler)) if history is None else history
        # By the names in the history; None: it has ended.
        self._requests = {event.request: None for event in self.history.events if isinstance(event, record.Added)}
        self._requests |= {name_of(request): request for request in here}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)

    @property
    def clock(self) -> Callable[[], float]:
        """What tells the seconds: the inner scheduler's clock."""
        return getattr(self.scheduler, "clock", time.perf_counter)

    @clock.setter
    def clock(self, clock: Callable[[], float]) -> None:
        """Give the inner scheduler another."""
        self.scheduler.clock = clock

    def add(self, request: Request) -> None:
        """Queue; ``ValueError`` when a request of this name is in the history already."""
        if (name := name_of(request)) in self._requests:
            raise ValueError(f"this history has a request {name} already: record each engine with its own")
        event = record.Added(
            time_s=self.clock(), request=name, request_id=request.request_id, index=request.index,
            prompt_token_ids=list(request.prompt_token_ids), max_total_tokens=request.max_total_tokens,
            priority=request.priority, arrival_s=request.arrival_s,
            eos_token_ids=[] if request.params.ignore_eos else list(request.eos_token_ids),
            stop_token_ids=list(request.params.stop_token_ids))
        self.scheduler.add(request)
        self._requests[name] = request
        self.history.events.append(event)

    def schedule(self) -> StepPlan:
        """The inner scheduler's plan; an empty one while there is nobody is no step."""
        time_s, ran = self.clock(), list(self.scheduler.running)
        plan = self.scheduler.schedule()
        before, runs = set(ran), set(self.scheduler.running)
        if plan.scheduled or self.scheduler.waiting or runs:
            self.history.events.append(record.Planned(
                time_s=time_s, items=items_of(plan),
                admitted=[name_of(request) for request in self.scheduler.running if request not in before],
                preempted=[name_of(request) for request in ran if request not in runs]))
        return plan

    def commit(self, plan: StepPlan, token_ids: Sequence[int]) -> None:
        """Commit, and note who got a token and whom it ended."""
        takers = {item.request: token_id for item, token_id in zip(plan.sampling, token_ids, strict=True)
                  if not item.request.is_finished}
        time_s = self.clock()
        self.scheduler.commit(plan, token_ids)
        self.history.events.append(record.Committed(
            time_s=time_s, token_ids={name_of(request): token_id for request, token_id in takers.items()}))
        for request in takers:
            if request.is_finished:
                self._note_end(request, by_token=True)

    def finish(self, request: Request, reason: FinishReason, *, stop_reason: int | str | None = None,
               error: str | None = None) -> None:
        """End a request; one that has ended already, or was refused by :meth:`add`, is not noted."""
        self.scheduler.finish(request, reason, stop_reason=stop_reason, error=error)
        if self._requests.get(name_of(request)) is request:
            self._note_end(request, by_token=False)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache of the inner scheduler's pool, where it has one."""
        getattr(getattr(self.scheduler, "pool", None), "forget", lambda: None)()
        self.history.events.append(record.Forgotten(time_s=self.clock()))

    def _note_end(self, request: Request, by_token: bool) -> None:
        self._requests[name_of(request)] = None
        self.history.events.append(record.Finished(time_s=self.clock(), request=name_of(request),
                                            reason=request.finish_reason, by_token=by_token))


def name_of(request: Request) -> str:
    """What a history calls ``request``: ``"req-3"``, and ``"req-3.1"`` for its choice 1."""
    return request.request_id + (f".{request.index}" if request.index else "")


def items_of(plan: StepPlan) -> list[record.Item]:
    """A plan as the plain values of a history."""
    return [record.Item(name_of(item.request), item.start, item.num_tokens, item.stage) for item in plan.scheduled]


def settings_of(scheduler: SchedulerProtocol) -> dict[str, Any]:
    """The settings of a scheduler and its pool, by the names that their constructors have, as these were given them."""
    pool = getattr(scheduler, "pool", None)
    settings = {name: getattr(pool, name, None) for name in record.POOL_SETTINGS}
    settings |= {name: getattr(scheduler, name, None) for name in record.SCHEDULER_SETTINGS}
    settings["chunked"] = getattr(scheduler, "max_whole_prompt", None) is None
    return settings | getattr(scheduler, "given", {})
