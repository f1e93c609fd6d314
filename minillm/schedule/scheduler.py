"""Who runs in the next step, how many tokens each, and which blocks hold them. Plain integers, no torch.

The loop that drives it is ``plan = schedule()``, one forward pass, ``commit(plan, tokens)``. There are no phases: in
each step every running request computes some of the tokens that it knows and has not computed (vLLM's V1 scheduler).

        add ──► waiting ── admit: blocks for all it knows ──► running ── finish ──► blocks released
                   ▲                                             │
                   └──────── preempt: blocks released, ──────────┘
                             its tokens kept, computed again
"""

from __future__ import annotations

import time
from bisect import insort_left, insort_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, get_args

from minillm.cache.blocks import PoolProtocol
from minillm.config import SchedulingPolicy
from minillm.request import FinishReason, Request
from minillm.schedule.plan import ScheduledRequest, StepPlan


class SchedulerProtocol(Protocol):
    """What ``LLM(scheduler=...)`` accepts. Requests are plain data: the scheduler moves their counters, appends their
    tokens and sets ``finish_reason``; where it leaves ``admitted_s`` and ``finished_s``, the engine notes them. One
    whose class has ``plans_drafts = True`` may put ``Request.draft_token_ids`` into its plan: a step whose drafts were
    right is committed as the plans of one token each that it stands for.

    :func:`minillm.course.prove_scheduler` proves one that is first come, first served and hands out no blocks.
    """

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
    """One order by arrival, or by (priority, arrival), one token budget a step, blocks from one pool.

    A step is planned in passes. First a token for every running request that is one behind, so that no prompt holds up
    an answer; then a chunk of at most ``max_prefill_chunk`` for those further behind, so that no prompt takes the whole
    budget from the others. Waiting requests are admitted in order while there is a place, some budget and blocks for
    all they know, those still promised to running ones and a small ``watermark`` left aside. Drafts get what is left.

    When a running request lacks a block, the *last* of the order is preempted. The first is never a victim, so the
    plan is not empty while a request waits or runs, provided that each prompt can run at all (:meth:`why_never`).

    Args:
        pool: the blocks; requests keep theirs in ``Request.table``.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of a step, above ``max_num_seqs``.
        max_prefill_chunk: most tokens of one request in a step.
        chunked: whether a prompt may be read in several steps. Else ``max_prefill_chunk`` means nothing, and a prompt
            must fit the budget beside ``max_num_seqs`` tokens (``max_whole_prompt``).
        watermark: blocks that admission leaves free while anything runs; default 1 % of the pool, at least one.
        policy: ``"priority"`` heeds ``Request.priority``, lower values first; ``"fcfs"`` does not.
        clock: tells the seconds of ``Request.admitted_s`` and ``finished_s``; a simulation has its own.
    Raises:
        ValueError: a budget that leaves no token for prompts, a size out of range, an unknown policy.
    """

    plans_drafts = True  # what speculation asks of a scheduler

    def __init__(self, pool: PoolProtocol, *, max_num_seqs: int = 8, max_num_batched_tokens: int = 2048,
                 max_prefill_chunk: int = 512, chunked: bool = True, watermark: int | None = None,
                 policy: SchedulingPolicy = "fcfs", clock: Callable[[], float] = time.perf_counter):
        if max_num_batched_tokens <= max_num_seqs or min(max_num_seqs, max_prefill_chunk, 1 + (watermark or 0)) < 1:
            raise ValueError(f"max_num_batched_tokens ({max_num_batched_tokens}) must be above max_num_seqs "
                             f"({max_num_seqs}), or no prompt advances while others decode; both and max_prefill_chunk "
                             f"({max_prefill_chunk}) at least 1, and watermark ({watermark}) at least 0")
        if policy not in get_args(SchedulingPolicy):
            raise ValueError(f"policy must be 'fcfs' or 'priority', got {policy!r}")
        self.policy, self.clock = policy, clock
        self.pool, self.max_num_seqs, self.max_num_batched_tokens = pool, max_num_seqs, max_num_batched_tokens
        self.max_whole_prompt = None if chunked else max_num_batched_tokens - max_num_seqs
        self.max_prefill_chunk = max_prefill_chunk if chunked else max_num_batched_tokens
        self.watermark = max(1, pool.num_blocks // 100) if watermark is None else watermark
        self.given = {"max_prefill_chunk": max_prefill_chunk, "watermark": watermark}  # from which those follow
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preempted = 0
        self._planned: dict[Request, ScheduledRequest] = {}
        self._victims: set[Request] = set()  # preempted in this step
        self._again: set[Request] = set()  # preempted after they had computed something
        self._budget = 0

    def why_never(self, num_tokens: int) -> str:
        """Why a prompt of so many tokens can never run, and what to do; ``""`` when it can."""
        pool, whole = self.pool, self.max_whole_prompt
        if num_tokens > pool.num_blocks * pool.block_size:
            return (f"the KV cache holds {pool.num_blocks} blocks of {pool.block_size}. Shorten it or raise "
                    "num_kv_blocks")
        if whole is not None and num_tokens > whole:
            return (f"at most {whole} fit one step beside max_num_seqs tokens of others. Shorten it, raise "
                    "max_num_batched_tokens or leave enable_chunked_prefill on")
        return ""

    def add(self, request: Request) -> None:
        """Queue by the policy; equals keep their order.

        It may grow to one token more than the pool holds: the newest needs no room until it is computed.
        """
        request.max_total_tokens = min(request.max_total_tokens, self.pool.num_blocks * self.pool.block_size + 1)
        insort_right(self.waiting, request, key=self._place)

    def schedule(self) -> StepPlan:
        """See :class:`SchedulerProtocol`."""
        self._planned, self._victims, self._budget = {}, set(), self.max_num_batched_tokens
        for request in list(self.running):
            if request.num_missing_tokens == 1 and request not in self._victims and self._makes_room(request, 1):
                if request.num_known_tokens % self.pool.block_size == 0:  # others may begin with the block it fills
                    self.pool.may_write(request.table, request.token_ids)
                self._plan(request, 1)
        for request in list(self.running):
            if request not in self._planned:
                self._plan_chunk(request)
        if not self._victims:
            self._admit()
        for item in list(self._planned.values()):
            if item.samples and item.request.draft_token_ids:
                self._plan_drafts(item)
        return StepPlan(tuple(self._planned.values()))

    def _plan(self, request: Request, num_tokens: int) -> None:
        self._planned[request] = ScheduledRequest(request, request.num_computed_tokens, num_tokens)
        self._budget -= num_tokens

    def _plan_chunk(self, request: Request) -> None:
        """Plan what ``request`` may read in this step, unless it was preempted; perhaps nothing."""
        if request in self._victims or not self._budget:
            return
        self._match(request)
        size = min(request.num_missing_tokens, self.max_prefill_chunk, self._budget)
        if self.max_whole_prompt is not None and size < request.num_missing_tokens <= self.max_whole_prompt:
            return  # whole, in a later step
        if self.pool.may_write(request.table, request.token_ids) and self._makes_room(request, size):
            self._plan(request, size)

    def _plan_drafts(self, item: ScheduledRequest) -> None:
        """Add to ``item`` as many drafts as budget, the request's limit and blocks that nobody holds have room for.

        The last token sampled needs no room, but one place below the limit.
        """
        request = item.request
        slots = (len(request.table.blocks) + self.pool.num_available) * self.pool.block_size - item.end
        room = max(0, min(self._budget, slots, request.max_total_tokens - request.num_known_tokens - 1))
        drafts = tuple(request.draft_token_ids[:room])
        self.pool.allocate(request.table, item.end + len(drafts))
        self._planned[request] = replace(item, draft_token_ids=drafts)
        self._budget -= len(drafts)

    def _match(self, request: Request) -> None:
        """Take over what others have computed of ``request``'s tokens since it was looked at last."""
        if len(request.table.chains) == len(request.table.blocks):  # it isn't in the middle of a block
            num_cached = self.pool.match(request.table, request.token_ids)
            hits = request.num_cached_tokens + num_cached - request.num_computed_tokens
            # Found again after a preemption, what was a hit is one; what it had computed itself is none.
            request.num_cached_tokens = min(request.num_cached_tokens, num_cached) if request in self._again else hits
            request.num_computed_tokens = num_cached

    def _makes_room(self, request: Request, num_tokens: int) -> bool:
        """Give ``request`` blocks for ``num_tokens`` more, preempting the last while too few; False: itself."""
        while not self.pool.allocate(request.table, request.num_computed_tokens + num_tokens):
            self._preempt(self.running[-1])
            if request in self._victims:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._victims.add(request)
        self._planned.pop(request, None)
        self.pool.release(request.table)
        if request.num_computed_tokens > request.num_cached_tokens:
            self._again.add(request)
        elif request not in self._again:  # what it finds next time is all that it found
            request.num_cached_tokens = 0
        request.num_computed_tokens, request.draft_token_ids = 0, ()
        request.num_preemptions += 1
        self.num_preempted += 1
        insort_left(self.waiting, request, key=self._place)  # before its equals: it came earlier than they

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs and self._budget:
            request, num_cached = self.waiting[0], self.waiting[0].num_cached_tokens
            self._match(request)
            lacking = sum(self.pool.num_missing(other.table, other.num_known_tokens)
                          for other in (request, *self.running))
            if lacking + (self.watermark if self.running else 0) > self.pool.num_available:
                self.pool.release(request.table)
                request.num_computed_tokens, request.num_cached_tokens = 0, num_cached
                return
            del self.waiting[0]
            if request.admitted_s is None:
                request.admitted_s = self.clock()
            insort_right(self.running, request, key=self._place)
            self._plan_chunk(request)

    def commit(self, plan: StepPlan, token_ids: Sequence[int]) -> None:
        """See :class:`SchedulerProtocol`."""
        for item in plan.scheduled:
            if not item.request.is_finished:
                item.request.num_computed_tokens = item.end
                self.pool.publish(item.request.table, item.request.token_ids, item.end)
        for item, token_id in zip(plan.sampling, token_ids, strict=True):
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
        queue = self.running if request in self.running else self.waiting
        if request in queue:  # first, so that a call that was interrupted can be repeated
            queue.remove(request)
        self.pool.release(request.table)
        self._again.discard(request)
        if not request.is_finished:
            request.stop_reason, request.error, request.finished_s = stop_reason, error, self.clock()
            request.finish_reason = reason

    def _place(self, request: Request) -> tuple[int, float]:
        return request.priority if self.policy == "priority" else 0, request.arrival_s
