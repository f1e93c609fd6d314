"""Workloads for a scheduler over a pool of blocks, without tensors: thousands in a minute.

The machine that runs a plan keeps, for each slot of each block, one number that stands for keys and values: it follows
from the token and from the number in the slot *before* it, read through the request's block table. So a slot that was
overwritten, never written, or taken over from another context gives other tokens than the simplest loop, which has one
number and no blocks. Every promise to the pool and to those who wait is checked after every step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from minillm.cache.blocks import BlockPool, BlockTable
from minillm.request import Request, SamplingParams
from minillm.schedule.plan import StepPlan
from minillm.schedule.scheduler import Scheduler

VOCAB, EOS = 30, 0


def follow(context: int, token_id: int) -> int:
    """What stands for the keys and values of ``token_id`` after a ``context``."""
    return hash((context, token_id))


def alone(prompt: tuple[int, ...], num_tokens: int, ends: Collection[int] = (EOS,)) -> list[int]:
    """The simplest loop: at most ``num_tokens`` greedy tokens of a prompt; one of ``ends`` is the last."""
    context, output = 0, []
    for token_id in prompt:
        context = follow(context, token_id)
    while len(output) < num_tokens:
        output.append(context % VOCAB)
        if output[-1] in ends:
            break
        context = follow(context, output[-1])
    return output


class Machine:
    """Runs plans over blocks; ``run`` gives a token for each item of ``plan.sampling``, as a runner does."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self.slots: dict[tuple[int, int], int] = {}

    def run(self, plan: StepPlan) -> list[int]:
        """Write the slots of the plan's tokens, then read the last of each sampled item."""
        for item in plan.scheduled:
            for position, token_id in enumerate(item.token_ids, item.start):
                context = self.slots[self._slot(item.request, position - 1)] if position else 0
                self.slots[self._slot(item.request, position)] = follow(context, token_id)
        return [self.slots[self._slot(item.request, item.end - 1)] % VOCAB for item in plan.sampling]

    def _slot(self, request: Request, position: int) -> tuple[int, int]:
        return request.table.blocks[position // self.block_size], position % self.block_size


@dataclass(slots=True)
class Workload:
    """Requests with the step each arrives at, what goes wrong meanwhile, and the options of pool and scheduler."""

    pool: dict[str, Any]
    options: dict[str, Any]
    arrivals: list[tuple[int, tuple[int, ...], int, int]]  # step, prompt, output tokens, priority
    trouble: random.Random
    cancels: float = 0.0
    failures: float = 0.0

    @classmethod
    def random(cls, seed: int) -> Workload:
        """A small one in which blocks are short, prompts begin alike, and something is cancelled now and then."""
        draw = random.Random(seed)
        block_size, num_blocks = draw.choice((1, 2, 2, 3, 4)), draw.randint(2, 14)
        max_num_seqs = draw.randint(1, 5)
        budget = max_num_seqs + draw.choice((1, 2, 4, 8, 30))
        longest = min(block_size * num_blocks + 3, 24) // draw.choice((1, 1, 2, 4)) or 1
        stems = [tuple(draw.randrange(1, 4) for _ in range(24)) for _ in range(2)]
        arrivals = []
        for _ in range(draw.randint(1, 8)):
            length = draw.randint(1, longest)
            shared = draw.randint(0, length) if draw.random() < 0.7 else 0
            prompt = draw.choice(stems)[:shared] + tuple(draw.randrange(1, VOCAB) for _ in range(length - shared))
            arrivals.append((draw.randint(0, 6), prompt, draw.randint(1, 20), draw.choice((0, 0, 0, 1, -1))))
        return cls(
            {"num_blocks": num_blocks, "block_size": block_size, "caching": draw.random() < 0.8},
            {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget,
             "max_prefill_chunk": draw.choice((1, 2, 3, 8, 30)), "chunked": draw.random() < 0.8,
             "watermark": draw.choice((None, 0, 2)), "policy": draw.choice(("fcfs", "priority", "priority"))},
            sorted(arrivals), draw, draw.choice((0.0, 0.0, 0.1)), draw.choice((0.0, 0.0, 0.05)))


@dataclass(slots=True)
class Replay:
    """One workload on one scheduler. ``counts`` says what really happened in it."""

    workload: Workload
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, make_scheduler: Any = Scheduler, most_steps: int = 3000, *, make_pool: Any = BlockPool,
            check: Callable[..., None] | None = None) -> Counter[str]:
        """Run to the end; ``AssertionError`` names the promise that was broken. ``check(pool, tables)`` is called after
        each step; :func:`check_pool` looks into minillm's own pool."""
        pool, check = make_pool(**self.workload.pool), check or check_pool
        scheduler = make_scheduler(pool, **self.workload.options)
        machine, requests, waiting = Machine(pool.block_size), [], list(self.workload.arrivals)
        for step in range(most_steps):
            while waiting and waiting[0][0] <= step:
                if (request := self._request(scheduler, len(requests), *waiting.pop(0))) is not None:
                    requests.append(request)
                    scheduler.add(request)
            if scheduler.waiting or scheduler.running:
                self._step(scheduler, machine, requests)
                check(pool, [request.table for request in requests])
                for request in requests:
                    assert not (request.is_finished and request.table.blocks), "a finished request holds blocks"
                    room = len(request.table.blocks) * pool.block_size
                    assert request.is_finished or request.num_computed_tokens <= room, "computed, and no room for it"
            elif not waiting:
                break
        assert not (waiting or scheduler.waiting or scheduler.running), "it never ends"
        assert pool.num_available == pool.num_blocks, "idle, and blocks are not all free"
        for request in requests:
            self._check_end(request)
        self.counts["evictions"] += getattr(pool, "num_evicted", 0)
        self.counts["preemptions"] += sum(request.num_preemptions for request in requests)
        self.counts["preempted twice"] += sum(request.num_preemptions > 1 for request in requests)
        self.counts["cached tokens"] += sum(request.num_cached_tokens for request in requests)
        self.counts["hits"] += sum(request.num_cached_tokens > 0 for request in requests)
        return self.counts

    def _request(self, scheduler: Scheduler, number: int, _step: int, prompt: tuple[int, ...], num_tokens: int,
                 priority: int) -> Request | None:
        if scheduler.why_never(len(prompt)):
            self.counts["refusals"] += 1
            return None
        return Request(request_id=f"req-{number}", prompt_token_ids=prompt, params=SamplingParams(), seed=0,
                       max_total_tokens=len(prompt) + num_tokens,
                       eos_token_ids=(EOS,), priority=priority, arrival_s=float(number))

    def _step(self, scheduler: Scheduler, machine: Machine, requests: list[Request]) -> None:
        draw, decoding = self.workload.trouble, {r for r in scheduler.running if r.num_missing_tokens == 1}
        before = {request: request.num_preemptions for request in scheduler.running}
        plan = scheduler.schedule()
        self._check_order(scheduler, before)
        self._check_plan(scheduler, plan, decoding)
        if draw.random() < self.workload.failures:
            self.counts["interrupted"] += 1
            return  # nothing was committed: the next step does it again
        sampled = machine.run(plan)
        for item in plan.scheduled:
            if draw.random() < self.workload.failures:
                scheduler.finish(item.request, "error", error="unusable logits")
        scheduler.commit(plan, sampled)
        for request in requests:
            if draw.random() < self.workload.cancels / 4:
                scheduler.finish(request, "cancelled")
                scheduler.finish(request, "cancelled")

    def _check_order(self, scheduler: Scheduler, before: dict[Request, int]) -> None:
        for queue in (scheduler.waiting, scheduler.running):
            heeded = scheduler.policy == "priority"
            assert queue == sorted(queue, key=lambda r: (r.priority * heeded, r.arrival_s)), "out of order"
        assert set(list(before)[:1]) <= set(scheduler.running), "the first was preempted"
        victims = {request for request, count in before.items() if request.num_preemptions > count}
        assert victims <= set(scheduler.waiting), "preempted and admitted in one step"
        assert not victims or set(scheduler.running) <= set(before), "one was preempted and another admitted"

    def _check_plan(self, scheduler: Scheduler, plan: StepPlan, decoding: set[Request]) -> None:
        items = {item.request: item for item in plan.scheduled}
        assert plan.scheduled, "an empty plan while requests wait or run"
        assert len(items) == len(plan.scheduled) and set(items) <= set(scheduler.running), "planned, and not running"
        assert len(scheduler.running) <= scheduler.max_num_seqs, "too many run"
        assert plan.num_tokens <= scheduler.max_num_batched_tokens, "over the token budget"
        for item in plan.scheduled:
            assert item.start == item.request.num_computed_tokens and item.num_tokens > 0, "nothing left to compute"
            assert item.num_tokens <= scheduler.max_prefill_chunk, "a chunk is too long"
            assert len(item.request.table.blocks) * scheduler.pool.block_size >= item.end, "no room for its tokens"
        if scheduler.pool.caching:
            size = scheduler.pool.block_size
            written = [tuple(item.request.token_ids[:(item.start // size + 1) * size]) for item in plan.scheduled
                       if (item.start // size + 1) * size < item.request.num_known_tokens]
            assert len(set(written)) == len(written), "two requests compute the same block"
        for request in decoding & set(scheduler.running):
            assert request in items, "one token behind, and not in the step"
        stages = {"decode" if request in decoding else "prefill" for request in items}
        self.counts["mixed steps"] += len(stages) == 2
        self.counts["chunks"] += sum(not item.samples for item in plan.scheduled)
        self.counts["waited for a block"] += sum(
            request not in items and request.num_missing_tokens > 1 for request in scheduler.running
        ) * (plan.num_tokens < scheduler.max_num_batched_tokens)
        self.counts["steps"] += 1

    def _check_end(self, request: Request) -> None:
        expected = alone(request.prompt_token_ids, request.max_total_tokens - len(request.prompt_token_ids))
        output = request.output_token_ids
        if request.finish_reason in ("cancelled", "error"):
            expected = expected[:len(output)]
        assert output == expected, f"{request.prompt_token_ids} gave {output}, alone {expected}"
        self.counts[request.finish_reason or "none"] += 1


def check_pool(pool: BlockPool, tables: Sequence[BlockTable]) -> None:
    """Every invariant of the pool, from its own records and from all tables alone; ``AssertionError`` names it."""
    held = Counter(block for table in tables for block in table.blocks)
    assert all(len(set(table.blocks)) == len(table.blocks) for table in tables), "a table holds a block twice"
    assert [held[block] for block in range(pool.num_blocks)] == pool._references, "a reference count is wrong"
    assert sorted((*pool._free, *pool._cached, *held)) == list(range(pool.num_blocks)), "blocks leak"
    assert {block: name for name, block in pool._published.items()} == {b: n for b, (n, _) in pool._names.items()}
    assert not set(pool._free) & set(pool._names), "a free block is published"
    assert set(pool._cached) <= set(pool._names), "a cached block is not published"
    assert all(table.claim == name for name, table in pool._claims.items()), "a claim without its owner"
