"""Every state of a recorded run again: for a reader's eyes, a widget, or a trace viewer. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from minillm.cache.blocks import BlockPool
from minillm.measure.trace import Trace
from minillm.request import FinishReason, Request, SamplingParams
from minillm.schedule.drive import Clock
from minillm.schedule.history import (
    SCHEDULER_SETTINGS,
    Added,
    Changed,
    Committed,
    Event,
    Finished,
    History,
    Item,
    Planned,
)
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
    ``num_hit_tokens`` (of prompts, found in the cache), ``num_preempted``, ``num_evicted``.
    """

    step: int
    start_s: float
    end_s: float
    items: tuple[Item, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    finished: tuple[tuple[str, FinishReason], ...]
    added: tuple[str, ...]
    waiting: tuple[RequestState, ...]
    running: tuple[RequestState, ...]
    blocks: tuple[Block, ...]
    num_computed_tokens: int
    num_hit_tokens: int
    num_preempted: int
    num_evicted: int

    def num_blocks(self, state: str) -> int:
        """Blocks that are ``"free"``, ``"cached"`` or ``"held"``."""
        return sum(block.state == state for block in self.blocks)


def replay(history: History) -> Iterator[Snapshot]:
    """Run a new :class:`~minillm.schedule.scheduler.Scheduler` through ``history``; a snapshot after each step.

    Raises:
        ValueError: it was not recorded from such a scheduler, or this one plans otherwise (another version did it).
    """
    player, step = Player(history.settings), []
    for event in history.events:
        if isinstance(event, Planned) and any(isinstance(before, Planned) for before in step):
            yield player.snapshot(step)
            step = []
        player.apply(event)
        step.append(event)
    if any(isinstance(event, Planned) for event in step):
        yield player.snapshot(step)


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
    blocks = ", ".join(f"{snapshot.num_blocks(state)} {state}" for state in ("held", "cached", "free"))
    return f"step {snapshot.step}: {'; '.join(parts)} | {', '.join(queues) or 'idle'} | {blocks}"


def _work(item: Item) -> str:
    last = item.start + item.num_tokens - 1
    positions = f"{item.start}-{last}" if last > item.start else f"{last}"
    return f"{item.request} {'decodes' if item.stage == 'decode' else 'reads'} {positions}"


def trace_of(history: History) -> Trace:
    """The run as a trace, a row a request: queue, chunks, decodes, preempted; with counters of requests and blocks."""
    trace, since, named = Trace(), {}, {}
    for event in history.events:
        if isinstance(event, Added):
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
        trace.count(snapshot.end_s, "blocks", **{state: snapshot.num_blocks(state)
                                                 for state in ("held", "cached", "free")})
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
        self.scheduler = Scheduler(pool, clock=self.clock, **{name: settings[name] for name in SCHEDULER_SETTINGS})

    def apply(self, event: Event) -> None:
        """Make the call of ``event``; ``ValueError`` when the scheduler does otherwise than the record says."""
        self.clock.time_s = event.time_s
        match event:
            case Added():
                self.requests[event.request] = request_of(event)
                self.scheduler.add(self.requests[event.request])
            case Planned():
                self.plan = self.scheduler.schedule()
                if (items := items_of(self.plan)) != event.items:
                    raise ValueError(f"step {self.num_steps} was {_words(event.items)}, and is {_words(items)} now: "
                                     "another scheduler, or another version, was recorded")
                self.num_steps += 1
            case Committed():
                self.num_computed_tokens += self.plan.num_tokens
                self.scheduler.commit(self.plan, [event.token_ids.get(name_of(item.request), 0)
                                                  for item in self.plan.sampling])
            case Finished() if not event.by_token:
                self.scheduler.finish(self.requests[event.request], event.reason)
            case Changed():
                self.change(event.settings)

    def change(self, settings: dict[str, Any]) -> None:
        """Go on with a scheduler of other ``settings``; who no longer has a place among the running is preempted."""
        old, pool = self.scheduler, self.scheduler.pool
        kept = {name: value for name, value in settings_of(old).items() if name in SCHEDULER_SETTINGS}
        self.scheduler = new = Scheduler(pool, clock=self.clock, **kept | settings)
        new.num_preempted = old.num_preempted
        new.waiting, new.running = (sorted(queue, key=new._place) for queue in (old.waiting, old.running))
        while len(new.running) > new.max_num_seqs:
            new._preempt(new.running[-1])

    def snapshot(self, step: Sequence[Event]) -> Snapshot:
        """How things stand after ``step``, the events of the last step."""
        planned = next(event for event in step if isinstance(event, Planned))
        ended = next((event.time_s for event in step if isinstance(event, Committed)), planned.time_s)
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Snapshot(
            step=self.num_steps - 1, start_s=planned.time_s, end_s=ended, items=tuple(planned.items),
            admitted=tuple(planned.admitted), preempted=tuple(planned.preempted),
            finished=tuple((event.request, event.reason) for event in step if isinstance(event, Finished)),
            added=tuple(event.request for event in step if isinstance(event, Added)),
            waiting=tuple(map(_state_of, scheduler.waiting)), running=tuple(map(_state_of, scheduler.running)),
            blocks=_blocks_of(pool, scheduler.running), num_computed_tokens=self.num_computed_tokens,
            num_hit_tokens=sum(request.num_cached_tokens for request in self.requests.values()),
            num_preempted=scheduler.num_preempted, num_evicted=pool.num_evicted)


def request_of(event: Added) -> Request:
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


def _words(items: Sequence[Item]) -> str:
    return ", ".join(f"{item.request} {item.start}+{item.num_tokens}" for item in items) or "nothing"
