"""Who runs in the next step, and what a step's tokens mean for each request. Plain integers, no torch.

The loop that drives it is ``plan = schedule()``, one forward pass, ``commit(plan, tokens)``. There are no phases:
a plan simply computes what each running request knows and has not computed, which is its whole prompt at first
and one token from then on.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Sequence
from typing import Protocol

from minillm.request import FinishReason, Request
from minillm.schedule.plan import ScheduledRequest, StepPlan


class SchedulerProtocol(Protocol):
    """What ``LLM(scheduler=...)`` accepts."""

    waiting: list[Request]
    running: list[Request]

    def add(self, request: Request) -> None:
        """Take a validated request into the waiting queue."""

    def schedule(self) -> StepPlan:
        """The next step's plan; not empty while any request waits or runs."""

    def commit(self, plan: StepPlan, token_ids: Sequence[int]) -> None:
        """Advance the counters of a computed plan and append one token to each item of ``plan.sampling``, in order.

        Requests whose token ends them leave ``running`` with their finish reason set. A request that finished since
        the plan was made (cancelled, or its logits were not usable) gets no token.
        """

    def finish(self, request: Request, reason: FinishReason, *, stop_reason: int | str | None = None,
               error: str | None = None) -> None:
        """End a request in any state; a finished one is left as it is."""


class Scheduler:
    """First come, first served, up to ``max_num_seqs`` running at once; a free place is filled in the next step."""

    def __init__(self, *, max_num_seqs: int):
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue by (priority, arrival): a lower priority value goes first, and equals keep their order."""
        insort(self.waiting, request, key=lambda queued: (queued.priority, queued.arrival_s))

    def schedule(self) -> StepPlan:
        """Admit while there are places, then plan all that every running request has not computed yet."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.pop(0)
            request.admitted_s = time.perf_counter()
            self.running.append(request)
        return StepPlan(tuple(
            ScheduledRequest(request, start := request.num_computed_tokens, request.num_known_tokens - start)
            for request in self.running
        ))

    def commit(self, plan: StepPlan, token_ids: Sequence[int]) -> None:
        """See :class:`SchedulerProtocol`."""
        sampling = plan.sampling
        for item in plan.scheduled:
            item.request.num_computed_tokens = item.end
        for item, token_id in zip(sampling, token_ids, strict=True):
            if not item.request.is_finished:
                item.request.token_ids.append(token_id)
                self._finish_if_stopped(item.request, token_id)

    def _finish_if_stopped(self, request: Request, token_id: int) -> None:
        params = request.params
        if token_id in request.eos_token_ids and not params.ignore_eos:
            self.finish(request, "stop")
        elif token_id in params.stop_token_ids:
            self.finish(request, "stop", stop_reason=token_id)
        elif request.num_known_tokens >= request.max_total_tokens:
            self.finish(request, "length")

    def finish(self, request: Request, reason: FinishReason, *, stop_reason: int | str | None = None,
               error: str | None = None) -> None:
        """See :class:`SchedulerProtocol`."""
        for queue in (self.waiting, self.running):  # first, so that a call that was interrupted can be repeated
            if request in queue:
                queue.remove(request)
        if not request.is_finished:
            request.stop_reason, request.error, request.finished_s = stop_reason, error, time.perf_counter()
            request.finish_reason = reason
