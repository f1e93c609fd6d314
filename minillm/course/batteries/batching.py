"""Cases for a scheduler without blocks, and for a pool of blocks under minillm's own scheduler. No tensors, no model:
the oracle is the simplest loop, for one request at a time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from minillm.cache.blocks import BlockPool, BlockTable, PoolProtocol
from minillm.course.batteries import Case, differs
from minillm.course.batteries.scheduler import EOS, VOCAB, Replay, Workload, alone, follow
from minillm.parts import check_part
from minillm.request import Request, SamplingParams
from minillm.schedule.plan import StepPlan
from minillm.schedule.scheduler import SchedulerProtocol

MakeScheduler = Callable[[int], SchedulerProtocol]
MakePool = Callable[[int, int], PoolProtocol]
STOP = 1  # a stop_token_id of every third request
TWINS = 1, 2**61  # Python gives them one hash


# ---- schedulers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """Requests as (step of arrival, prompt, most output tokens, step at which its caller leaves or None)."""

    places: int
    requests: tuple[tuple[int, tuple[int, ...], int, int | None], ...]

    @classmethod
    def random(cls, seed: int) -> Load:
        """A few requests of odd lengths; one caller in five leaves early."""
        draw = random.Random(seed)
        return cls(draw.randint(1, 4), tuple(sorted(
            ((draw.choice((0, 0, 0, draw.randint(0, 9))), _prompt(draw, draw.randint(1, 9)), draw.randint(1, 8),
              draw.randint(0, 12) if draw.random() < 0.2 else None) for _ in range(draw.randint(1, 7))),
            key=lambda request: request[0])))

    def __str__(self) -> str:
        rows = (f"prompt {list(prompt)} at step {arrives}, at most {most} tokens"
                + ("", f", stop_token_ids {[STOP]}", ", ignore_eos")[number % 3]
                + ("" if leaves is None else f", cancelled {'in' if leaves % 2 else 'before'} step {leaves}")
                for number, (arrives, prompt, most, leaves) in enumerate(self.requests))
        return f"max_num_seqs {self.places}; " + "; ".join(rows)


def _prompt(draw: random.Random, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(1, VOCAB) for _ in range(length))


# From the smallest to the oddest.
_EDGES = (
    Load(1, ((0, (5,), 1, None),)), Load(1, ((0, (5,), 3, None),)), Load(2, ((0, (5, 6, 7), 4, None),)),
    Load(2, ((0, (5,), 3, None), (0, (6, 7), 2, None))), Load(1, ((0, (5,), 2, None), (0, (6,), 2, None))),
    Load(2, ((0, (5,), 6, None), (0, (6,), 1, None), (0, (7,), 2, None))),
    Load(2, ((0, (5,), 6, None), (3, (6, 9, 9, 9), 3, None))), Load(1, ((0, (5,), 4, 2), (0, (6,), 2, None))),
    Load(1, ((0, (5,), 4, None), (0, (6,), 2, 1))))


def scheduler_cases(make_scheduler: MakeScheduler) -> Iterator[Case]:
    """Every case of :func:`~minillm.course.batteries.prove_scheduler`."""
    for load in (*_EDGES, *(Load.random(seed) for seed in range(150))):
        size = sum(len(prompt) + most + 10 for _, prompt, most, _ in load.requests)
        yield Case(str(load), size, lambda load=load: _Run(load, make_scheduler).fault())


class _Run:
    """One load on one scheduler, beside a machine that keeps one number for each computed token of a request."""

    def __init__(self, load: Load, make_scheduler: MakeScheduler):
        self.load, self.scheduler = load, make_scheduler(load.places)
        check_part("what make_scheduler makes", self.scheduler, SchedulerProtocol)
        self.requests = [Request(
            request_id=f"req-{number}", prompt_token_ids=prompt, seed=0,
            params=SamplingParams(ignore_eos=number % 3 == 2, stop_token_ids=[STOP] if number % 3 == 1 else []),
            max_total_tokens=len(prompt) + most, eos_token_ids=(EOS,), arrival_s=float(number),
        ) for number, (_, prompt, most, _) in enumerate(load.requests)]
        self.ended: dict[Request, tuple[str, int]] = {}  # with its reason, after so many tokens
        self.contexts: dict[Request, list[int]] = {request: [] for request in self.requests}
        self.begun: list[Request] = []

    def fault(self) -> str:
        """Why the load does not run as it should, or ``""``."""
        for step in range(400):
            for request, (arrives, *_) in zip(self.requests, self.load.requests, strict=True):
                if arrives == step:
                    self.scheduler.add(request)
            leaving = [request for request, (arrives, _, _, leaves) in zip(self.requests, self.load.requests)
                       if leaves is not None and max(leaves, arrives + 1) == step]
            self._leave(request for request in leaving if step % 2 == 0)
            if self.scheduler.waiting or self.scheduler.running:
                if why := self._step([request for request in leaving if step % 2]):
                    return f"step {step}: {why}"
            elif step > max(arrives for arrives, *_ in self.load.requests):
                break
        return next(filter(None, map(self._end_fault, self.requests)), "")

    def _leave(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.ended.setdefault(request, ("cancelled", len(request.output_token_ids)))
            self.scheduler.finish(request, "cancelled", error="gone")
            self.scheduler.finish(request, "error", error="late")  # it has ended, so this changes nothing

    def _step(self, leaving: Sequence[Request]) -> str:
        behind = [r for r in self.scheduler.running if r.num_missing_tokens == 1]
        plan = self.scheduler.schedule()
        if why := self._plan_fault(plan, behind):
            return why
        for item in plan.scheduled:
            contexts = self.contexts[item.request]
            for token_id in item.token_ids:
                contexts.append(follow(contexts[-1] if contexts else 0, token_id))
        self._leave(leaving)  # in the middle of the step
        self.scheduler.commit(plan, [self.contexts[item.request][-1] % VOCAB for item in plan.sampling])
        for request in filter(lambda request: request.is_finished, self.requests):
            self.ended.setdefault(request, (request.finish_reason, len(request.output_token_ids)))
        return self._queue_fault()

    def _plan_fault(self, plan: StepPlan, behind: Sequence[Request]) -> str:
        items, places = plan.scheduled, self.load.places
        planned = [item.request for item in items]
        if not items:
            return "the plan is empty although a request waits or runs"
        if len(self.scheduler.running) > places:
            return f"{len(self.scheduler.running)} requests run at once; max_num_seqs is {places}"
        if len(set(planned)) < len(planned) or not set(planned) <= set(self.scheduler.running):
            return "the plan holds a request twice, or one that is not in running"
        for item in items:
            if item.num_tokens < 1 or item.start != len(self.contexts[item.request]):
                return (f"{item.request.request_id} computes {item.num_tokens} tokens from position {item.start}; "
                        f"{len(self.contexts[item.request])} are computed")
        if late := [r.request_id for r in behind if r in self.scheduler.running and r not in planned]:
            return f"{late[0]} lacks one token and is not in the plan: it waits for its next token"
        self.begun += [request for request in planned if request not in self.begun]
        if self.begun != sorted(self.begun, key=self.requests.index):
            return f"{self.begun[-1].request_id} began after one that came later: first come, first served"
        idle = places - len(self.scheduler.running)
        if idle and self.scheduler.waiting and all(request in behind for request in planned):
            return f"{idle} of {places} places are free, {len(self.scheduler.waiting)} wait, and none was admitted"
        return ""

    def _queue_fault(self) -> str:
        for name, queue in (("waiting", self.scheduler.waiting), ("running", self.scheduler.running)):
            if ended := [request.request_id for request in queue if request.is_finished]:
                return f"{ended[0]} is finished and still in {name}"
        return ""

    def _end_fault(self, request: Request) -> str:
        most = request.max_total_tokens - len(request.prompt_token_ids)
        name, output = request.request_id, request.output_token_ids
        ends = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else (EOS,))}
        expected = alone(request.prompt_token_ids, most, ends)
        if not request.is_finished:
            return f"{name} has no finish_reason at the end"
        reason, count = self.ended[request]
        if reason == "cancelled":
            return (differs(f"tokens of {name}, cancelled after {count}", len(output), count)
                    or differs(f"finish_reason and error of {name}", (request.finish_reason, request.error),
                               (reason, "gone"))
                    or differs(f"the output of {name}", output, expected[:count]))
        natural = "stop" if expected[-1] in ends else "length", STOP if expected[-1] == STOP in ends else None
        return (differs(f"the output of {name}", output, expected)
                or differs(f"finish_reason and stop_reason of {name}", (request.finish_reason, request.stop_reason),
                           natural))


# ---- pools ---------------------------------------------------------------------------------------------------------


def pool_cases(make_pool: MakePool, caching: bool) -> Iterator[Case]:
    """Every case of :func:`~minillm.course.batteries.prove_pool`."""
    for num_blocks, block_size in ((1, 1), (2, 3), (5, 4), (8, 16)):
        yield Case(f"one table over {num_blocks} blocks of {block_size}, from 1 token to all and back",
                   num_blocks * block_size, lambda b=num_blocks, s=block_size: _fill(_made(make_pool, b, s)))
    for seed in range(300):
        workload = Workload.random(seed)
        blocks, size = workload.pool["num_blocks"], workload.pool["block_size"]
        workload.pool = {"num_blocks": blocks, "block_size": size, "caching": caching}
        what = "; ".join(f"prompt {list(prompt)} at step {step}, at most {most} tokens"
                         for step, prompt, most, _ in workload.arrivals)
        tokens = sum(len(prompt) + most for _, prompt, most, _ in workload.arrivals)
        yield Case(f"{blocks} blocks of {size}, minillm's Scheduler, max_num_seqs "
                   f"{workload.options['max_num_seqs']}: {what}", 200 + tokens,
                   lambda workload=workload: _replayed(workload, make_pool))
    if caching:
        yield Case(f"equal hashes are not equal tokens: {TWINS[0]} and {TWINS[1]}", 100, lambda: _confused(make_pool))
        for seed in range(40):
            yield Case(f"hits in a pool with room for all, workload {seed}", 1000 + seed,
                       lambda seed=seed: _hits_differ(seed, make_pool))


def _confused(make_pool: MakePool) -> str:
    pool = _made(make_pool, 8, 2)
    for twin in TWINS:
        table = BlockTable()
        if found := pool.match(table, (twin, twin, 5)):
            return f"{found} tokens of one were taken for the other's"
        pool.allocate(table, 3)
        pool.publish(table, (twin, twin, 5), 3)
        pool.release(table)
    return ""


def _made(make_pool: MakePool, num_blocks: int, block_size: int) -> PoolProtocol:
    pool = make_pool(num_blocks, block_size)
    check_part("what make_pool makes", pool, PoolProtocol)
    return pool


def _fill(pool: PoolProtocol) -> str:
    table, size = BlockTable(), pool.block_size
    most = pool.num_blocks * size
    if pool.allocate(table, most + 1) is not False or table.blocks or pool.num_available < pool.num_blocks:
        return f"allocate must say False and change nothing when {most + 1} tokens do not fit"
    for count in range(1, most + 1):
        needed = -(-count // size)
        if why := differs(f"num_missing of {count} tokens with {len(table.blocks)} blocks",
                          pool.num_missing(table, count), needed - len(table.blocks)):
            return why
        free = pool.num_available
        if (said := pool.allocate(table, count)) is not True:
            return f"allocate said {said!r} to {count} tokens, although {free} blocks were free; expected True"
        if why := differs(f"blocks held for {count} tokens", len(table.blocks), needed) or tables_fault(pool, [table]):
            return why
    pool.release(table)
    return differs("the blocks of a released table", table.blocks, []) or tables_fault(pool, [table])


def tables_fault(pool: PoolProtocol, tables: Sequence[BlockTable]) -> str:
    """What is wrong between a pool and all tables over it, from what both show; ``""`` when nothing is."""
    held = Counter(block for table in tables for block in table.blocks)
    if any(len(set(table.blocks)) < len(table.blocks) for table in tables):
        return "a table holds a block twice"
    if strange := [block for block in held if not 0 <= block < pool.num_blocks]:
        return f"block {strange[0]} does not exist"
    if not pool.caching and (shared := [block for block, count in held.items() if count > 1]):
        return f"block {shared[0]} is in two tables"
    return differs("num_available", pool.num_available, pool.num_blocks - len(held))


def _check_tables(pool: PoolProtocol, tables: Sequence[BlockTable]) -> None:
    if why := tables_fault(pool, tables):
        raise AssertionError(why)


def _replayed(workload: Workload, make_pool: MakePool) -> str:
    try:
        Replay(workload).run(make_pool=_without_caching_option(make_pool), check=_check_tables)
    except AssertionError as error:
        return str(error)
    return ""


def _without_caching_option(make_pool: MakePool) -> Callable[..., PoolProtocol]:
    return lambda num_blocks, block_size, caching: _made(make_pool, num_blocks, block_size)


def _hits_differ(seed: int, make_pool: MakePool) -> str:
    counts = []
    for make in (_without_caching_option(make_pool), BlockPool):
        workload = Workload.random(seed)
        workload.pool |= {"num_blocks": 400, "caching": True}
        workload.failures = workload.cancels = 0.0
        counts.append(Replay(workload).run(make_pool=make, check=_check_tables)["cached tokens"])
    return differs("the number of prompt tokens found in the cache", *counts)
