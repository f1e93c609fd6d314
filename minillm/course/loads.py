"""Small loads for a scheduler without a model: scripts by hand or drawn, and what came of them. No torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from minillm.cache.blocks import BlockPool
from minillm.measure.workload import Arrival, Lognormal, random_arrivals
from minillm.request import Request, SamplingParams
from minillm.schedule.drive import Clock, Script, drive
from minillm.schedule.history import History
from minillm.schedule.plan import StepPlan
from minillm.schedule.recording import RecordingScheduler
from minillm.schedule.scheduler import Scheduler, SchedulerProtocol


def script(number: int, prompt: int, output: int, most: int | None = None, *, at_s: float = 0.0,
           priority: int = 0) -> Script:
    """A request named by its number: ``prompt`` tokens, ``output`` answered though up to ``most`` are allowed. No two
    numbers have a token in common."""
    ids = tuple(range(10_000 * (number + 1), 10_000 * (number + 1) + prompt))
    request = Request(request_id=str(number), prompt_token_ids=ids, params=SamplingParams(), seed=0, arrival_s=at_s,
                      queued_s=at_s, max_total_tokens=prompt + (most or output), priority=priority)
    return Script(request, at_s, range(500, 500 + output), "stop")


def drive_steps(scheduler: SchedulerProtocol, scripts: Sequence[Script]) -> Iterator[StepPlan]:
    """Run to the end, a second a step; yields each plan once it is committed."""
    clock = Clock()
    scheduler.clock = clock
    return drive(scheduler, scripts, lambda plan: 1.0, clock)


def all_at_once(num_requests: int, mean: float, *, most: int = 256, prompts: tuple[int, int] = (16, 128),
                seed: int = 1) -> list[Script]:
    """Requests that come together; answers are exponential with ``mean`` tokens, cut at ``most``, which is what each
    may have."""
    draw = random.Random(seed)
    return [script(number, draw.randint(*prompts), min(most, max(1, round(draw.expovariate(1 / mean)))), most)
            for number in range(num_requests)]


@dataclass(frozen=True, slots=True)
class Work:
    """What scripts took: ``computed`` tokens, of which ``needed`` would have been enough; ``running[i]`` requests had a
    share in step i."""

    steps: int
    preempted: int
    needed: int
    computed: int
    running: list[int]

    @property
    def again(self) -> int:
        """Tokens computed more than once."""
        return self.computed - self.needed

    def seconds(self, step_s: float, token_s: float) -> float:
        """On a machine whose steps take so long, and so much more a token."""
        return self.steps * step_s + self.computed * token_s


def work_of(scheduler: SchedulerProtocol, scripts: Sequence[Script]) -> Work:
    """Run ``scripts``, of which no two share tokens, through a new ``scheduler``."""
    plans = list(drive_steps(scheduler, scripts))
    needed = sum(len(own.request.prompt_token_ids) + len(own.output_token_ids) - 1 for own in scripts)
    return Work(len(plans), scheduler.num_preempted, needed, sum(plan.num_tokens for plan in plans),
                [len(plan.scheduled) for plan in plans])


def chats_and_jobs(rate: float, num_requests: int = 400) -> list[Arrival]:
    """Three chats to one batch job, which is longer and of priority 1; so many a second in all."""
    chats = random_arrivals(num_requests * 3 // 4, rate=rate * 0.75, seed=1, group="chat",
                            prompt=Lognormal(40, high=200), output=Lognormal(30, high=120))
    jobs = random_arrivals(num_requests // 4, rate=rate * 0.25, seed=2, group="job", priority=1,
                           prompt=Lognormal(150, high=400), output=Lognormal(80, high=250))
    return sorted(chats + jobs, key=lambda arrival: arrival.arrival_s)


def cramped_history() -> History:
    """Nine requests, one every two steps, in a pool far too small for them: 16 blocks of 4, no watermark. Every third
    has a higher priority, which the recorded policy does not heed."""
    draw = random.Random(3)
    scripts = [script(number, draw.randint(4, 12), draw.randint(8, 22), at_s=2.0 * number,
                      priority=-(number % 3 == 2)) for number in range(9)]
    recorder = RecordingScheduler(Scheduler(BlockPool(16, 4), max_num_seqs=5, max_num_batched_tokens=16,
                                            max_prefill_chunk=8, watermark=0))
    for _ in drive_steps(recorder, scripts):
        pass
    return recorder.history
