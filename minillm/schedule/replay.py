"""Every state of a recorded run again: for a reader's eyes, a widget, or a trace viewer. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from minillm.cache.blocks import BlockPool
from minillm.measure.trace import Trace
from minillm.request import FinishReason, Request, SamplingParams
from minillm.schedule import history as record
from minillm.schedule.drive import Clock
from minillm.schedule.plan import StepPlan
from minillm.schedule.recording import items_of, name_of, settings_of
from minillm.schedule.scheduler import Scheduler


class RequestState(NamedTuple):
    """A request that waits or runs, in tokens: known and computed ones, those of prompt and output; its preemptions."""

    request: str
    num_known: int
    num_computed: int
    num_prompt: int
    num_output: int
    num_preemptions: int


class Block(NamedTuple):
    """A block of the pool; ``holders`` are the requests in whose tables it is."""

    state: Literal["free", "cached", "held"]
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One step, and how things stood when it was over and the next had not been planned: who came meanwhile waits.

    ``step`` counts from 0; the step took from ``start_s`` to ``end_s``, of the record's clock. ``items``, ``admitted``
    and ``preempted`` are those of its plan, ``finished`` who ended in or after it, ``added`` who came since the step
    before was planned. Counts run from the beginning: ``num_computed_tokens`` (those computed twice count twice),
    ``num_hit_tokens`` (of prompts, found in the cache), ``num_preempted``, ``num_evicted``. ``blocks`` are all of the
    pool where they were asked for, else none.
    """

    step: int
    start_s: float
    end_s: float
    items: tuple[record.Item, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    finished: tuple[tuple[str, FinishReason], ...]
    added: tuple[str, ...]
    waiting: tuple[RequestState, ...]
    running: tuple[RequestState, ...]
    num_held: int
    num_cached: int
    num_free: int
    blocks: tuple[Block, ...]
    num_computed_tokens: int
    num_hit_tokens: int
    num_preempted: int
    num_evicted: int


def replay(history: record.History, *, blocks: bool = False) -> Iterator[Snapshot]:
    """Run a new :class:`~minillm.schedule.scheduler.Scheduler` through ``history``; a snapshot after each step, with
    every block of the pool where ``blocks`` says so.

    Raises:
        ValueError: it was not recorded from such a scheduler, or this one plans otherwise (another version did it).
    """
    player, step = Player(history.settings), []
    for event in history.events:
        if isinstance(event, record.Planned) and any(isinstance(before, record.Planned) for before in step):
            yield player.snapshot(step, blocks)
            step = []
        player.apply(event)
        step.append(event)
    if any(isinstance(event, record.Planned) for event in step):
        yield player.snapshot(step, blocks)


def describe(snapshot: Snapshot) -> str:
    """One line on what a step did, and on what stands then.

    ``"step 3: a decodes 9; b reads 4-7; admits b with 4 cached; preempts c | runs a b, waits c | 5 held, 1 cached, 2
    free"``: positions count from 0, and after the bars stand the queues and the blocks.
    """
    starts = {item.request: item.start for item in snapshot.items}
    parts = [_work(item) for item in snapshot.items]
    parts += [f"admits {name}" + (f" with {starts[name]} cached" if starts.get(name) else "")
              for name in snapshot.admitted]
    parts += [f"preempts {name}" for name in snapshot.preempted]
    parts += [f"{name} ends ({reason})" for name, reason in snapshot.finished]
    queues = [f"{verb} {' '.join(state.request for state in states)}"
              for verb, states in (("runs", snapshot.running), ("waits", snapshot.waiting)) if states]
    blocks = f"{snapshot.num_held} held, {snapshot.num_cached} cached, {snapshot.num_free} free"
    return f"step {snapshot.step}: {'; '.join(parts)} | {', '.join(queues) or 'idle'} | {blocks}"


def _work(item: record.Item) -> str:
    last = item.start + item.num_tokens - 1
    positions = f"{item.start}-{last}" if last > item.start else f"{last}"
    return f"{item.request} {'decodes' if item.stage == 'decode' else 'reads'} {positions}"


def trace_of(history: record.History) -> Trace:
    """The run as a trace, a row a request: queue, chunks, decodes, preempted; with counters of requests and blocks."""
    trace, since, named = Trace(), {}, {}
    for event in history.events:
        if isinstance(event, record.Added):
            since[event.request] = "queue", event.arrival_s
            named[event.request] = {"request_id": event.request_id, "index": event.index}
    for snapshot in replay(history):
        for name in snapshot.admitted:
            stage, start_s = since.pop(name, ("preempted", snapshot.start_s))
            trace.add(stage, min(start_s, snapshot.start_s), snapshot.start_s, **named[name])
        for item in snapshot.items:
            trace.add(item.stage, snapshot.start_s, snapshot.end_s, **named[item.request], num_tokens=item.num_tokens,
                      position=item.start)
        since |= dict.fromkeys(snapshot.preempted, ("preempted", snapshot.start_s))
        trace.count(snapshot.end_s, "requests", running=len(snapshot.running), waiting=len(snapshot.waiting))
        trace.count(snapshot.end_s, "blocks", held=snapshot.num_held, cached=snapshot.num_cached,
                    free=snapshot.num_free)
    return trace


class Player:
    """A :class:`~minillm.schedule.scheduler.Scheduler` to which recorded calls are made again, on the record's clock.

    Raises:
        ValueError: the settings are not those of such a scheduler.
    """

    def __init__(self, settings: dict[str, Any]):
        missing = sorted(name for name, value in settings.items() if value is None and name != "watermark")
        if missing:
            raise ValueError(f"this was recorded from a scheduler without {', '.join(missing)}: only what minillm's "
                             "own Scheduler did can be done again")
        self.clock, self.requests, self.plan = Clock(), dict[str, Request](), StepPlan(())
        self.num_steps = self.num_computed_tokens = 0
        pool = BlockPool(settings["num_blocks"], settings["block_size"], caching=settings["caching"])
        self.scheduler = Scheduler(pool, clock=self.clock, **{own: settings[own] for own in record.SCHEDULER_SETTINGS})

    def apply(self, event: record.Event) -> None:
        """Make the call of ``event``; ``ValueError`` when the scheduler does otherwise than the record says."""
        self.clock.time_s = event.time_s
        match event:
            case record.Added():
                self.requests[event.request] = request_of(event)
                self.scheduler.add(self.requests[event.request])
            case record.Planned():
                self.plan = self.scheduler.schedule()
                if (items := items_of(self.plan)) != event.items:
                    raise ValueError(f"step {self.num_steps} was {_words(event.items)}, and is {_words(items)} now: "
                                     "another scheduler, or another version, was recorded")
                self.num_steps += 1
            case record.Committed():
                self.num_computed_tokens += self.plan.num_tokens
                self.scheduler.commit(self.plan, [event.token_ids.get(name_of(item.request), 0)
                                                  for item in self.plan.sampling])
            case record.Finished() if not event.by_token:
                self.scheduler.finish(self.requests[event.request], event.reason)
            case record.Forgotten():
                self.scheduler.pool.forget()
            case record.Changed():
                self.change(event.settings)

    def change(self, settings: dict[str, Any]) -> None:
        """Go on with a scheduler of other ``settings``; who no longer has a place among the running is preempted."""
        old, pool = self.scheduler, self.scheduler.pool
        kept = {name: value for name, value in settings_of(old).items() if name in record.SCHEDULER_SETTINGS}
        self.scheduler = new = Scheduler(pool, clock=self.clock, **kept | settings)
        new.num_preempted, new._again = old.num_preempted, old._again
        new.waiting, new.running = (sorted(queue, key=new._place) for queue in (old.waiting, old.running))
        while len(new.running) > new.max_num_seqs:
            new._preempt(new.running[-1])

    def snapshot(self, step: Sequence[record.Event], blocks: bool = False) -> Snapshot:
        """How things stand after ``step``, the events of the last step; ``blocks``: of each block too."""
        planned = next(event for event in step if isinstance(event, record.Planned))
        ended = next((event.time_s for event in step if isinstance(event, record.Committed)), planned.time_s)
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Snapshot(
            step=self.num_steps - 1, start_s=planned.time_s, end_s=ended, items=tuple(planned.items),
            admitted=tuple(planned.admitted), preempted=tuple(planned.preempted),
            finished=tuple((event.request, event.reason) for event in step if isinstance(event, record.Finished)),
            added=tuple(event.request for event in step if isinstance(event, record.Added)),
            waiting=tuple(map(_state_of, scheduler.waiting)), running=tuple(map(_state_of, scheduler.running)),
            num_held=pool.num_blocks - pool.num_available, num_cached=pool.num_cached,
            num_free=pool.num_available - pool.num_cached,
            blocks=_blocks_of(pool, scheduler.running) if blocks else (), num_computed_tokens=self.num_computed_tokens,
            num_hit_tokens=sum(request.num_cached_tokens for request in self.requests.values()),
            num_preempted=scheduler.num_preempted, num_evicted=pool.num_evicted)


def request_of(event: record.Added) -> Request:
    """A new request as the one that was added; it stops at the same tokens."""
    return Request(
        request_id=event.request_id, index=event.index, prompt_token_ids=tuple(event.prompt_token_ids), seed=0,
        params=SamplingParams(stop_token_ids=event.stop_token_ids), max_total_tokens=event.max_total_tokens,
        eos_token_ids=tuple(event.eos_token_ids), priority=event.priority, arrival_s=event.arrival_s,
        queued_s=event.time_s)


def _state_of(request: Request) -> RequestState:
    return RequestState(name_of(request), request.num_known_tokens, request.num_computed_tokens,
                        len(request.prompt_token_ids), request.num_output_tokens, request.num_preemptions)


def _blocks_of(pool: BlockPool, requests: Sequence[Request]) -> tuple[Block, ...]:
    holders: dict[int, list[str]] = {}
    for request in requests:
        for block in request.table.blocks:
            holders.setdefault(block, []).append(name_of(request))
    return tuple(
        Block("held", tuple(holders[block])) if block in holders else
        Block("cached" if pool.is_cached(block) else "free", ()) for block in range(pool.num_blocks))


def _words(items: Sequence[record.Item]) -> str:
    return ", ".join(f"{item.request} {item.start}+{item.num_tokens}" for item in items) or "nothing"
