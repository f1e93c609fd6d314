"""Exercises of notebook 14: how many get in, a scheduler with a fault, and a service to tune."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from minillm.cache.blocks import BlockPool
from minillm.course.checking import Exercise, Misconception
from minillm.course.loads import chats_and_jobs
from minillm.measure.metrics import Slo
from minillm.measure.simulate import simulate
from minillm.request import Request
from minillm.schedule.scheduler import Scheduler

State = dict[str, Any]
Settings = tuple[int, int, int]


# ---- 14-1: how many get in -------------------------------------------------------------------------------------------


def admitted(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    """All blocks of the worst case, or those of the prompt and a watermark beside others who run."""
    if reserve:
        return num_blocks // _blocks(prompt + most_output - 1, size)
    each = _blocks(prompt, size)
    return max(int(each <= num_blocks), (num_blocks - watermark) // each)


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _last_token_too(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    return admitted(num_blocks, size, prompt, most_output + reserve, watermark, reserve)


def _rounds_down(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    tokens = prompt + most_output - 1 if reserve else prompt
    return (num_blocks - (0 if reserve else watermark)) // max(1, tokens // size)


def _in_tokens(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    tokens = prompt + most_output - 1 if reserve else prompt
    return max(0, num_blocks - (0 if reserve else watermark)) * size // tokens


def _watermark_always(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    """Also where it means nothing: for the first."""
    if reserve:
        return admitted(num_blocks, size, prompt, most_output, 0, True)
    return max(0, num_blocks - watermark) // _blocks(prompt, size)


def _watermark_in_reserve(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int,
                          reserve: bool) -> int:
    return admitted(num_blocks - (watermark if reserve else 0), size, prompt, most_output, watermark, reserve)


def _no_watermark(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    return admitted(num_blocks, size, prompt, most_output, 0, reserve)


def _one_at_least(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    return max(1, admitted(num_blocks, size, prompt, most_output, watermark, reserve))


def _output_apart(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    """Blocks of the prompt and blocks of the answer, each rounded up."""
    if not reserve:
        return admitted(num_blocks, size, prompt, most_output, watermark, False)
    return num_blocks // (_blocks(prompt, size) + _blocks(most_output - 1, size))


def _room_for_the_next(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    """Counts the first token of the answer as known."""
    return admitted(num_blocks, size, prompt + (not reserve), most_output, watermark, reserve)


def _negative(num_blocks: int, size: int, prompt: int, most_output: int, watermark: int, reserve: bool) -> int:
    if reserve:
        return admitted(num_blocks, size, prompt, most_output, watermark, True)
    return (num_blocks - watermark) // _blocks(prompt, size)


# ---- 14-2: the faulty scheduler --------------------------------------------------------------------------------------

FAULTS = ("preempts the first", "admits while it preempts", "drops its tokens", "ignores the watermark", "none")


def states(requests: Sequence[tuple[int, int]], num_blocks: int, watermark: int, fault: str, *, size: int = 2,
           most: int = 40) -> list[State]:
    """A toy that reads prompts whole: ``requests`` (prompt, output) come at once and are named a, b, c ..."""
    names = [chr(ord("a") + number) for number in range(len(requests))]
    prompts, ends = (dict(zip(names, column)) for column in zip(*((p, p + out) for p, out in requests)))
    waiting, running, known, held, steps = list(names), [], dict(prompts), dict.fromkeys(names, 0), []

    def lacks(name: str) -> int:
        return _blocks(known[name], size) - held[name]

    def free() -> int:
        return num_blocks - sum(held.values())

    while (waiting or running) and len(steps) < most:
        victims, admitted_now = [], []
        for name in list(running):
            while name in running and lacks(name) > free():
                victims.append(victim := running.pop(0 if fault == FAULTS[0] else -1))
                held[victim] = 0
                known[victim] = prompts[victim] if fault == FAULTS[2] else known[victim]
            if name in running:
                held[name] += lacks(name)
        for name in sorted({*waiting, *victims}):
            kept = watermark if running and fault != FAULTS[3] else 0
            if (victims and fault != FAULTS[1]) or lacks(name) + kept > free():
                if victims and fault == FAULTS[1]:
                    continue  # perhaps the next one fits
                break
            if name not in victims:
                insort(running, name)
                admitted_now.append(name)
                held[name] = lacks(name)
        waiting = sorted({*waiting, *victims} - {*running})
        steps.append({"admitted": admitted_now, "preempted": victims, "running": list(running), "free": free(),
                      "known": {name: known[name] for name in names if name in running or name in waiting}})
        for name in list(running):
            known[name] += 1
            if known[name] == ends[name]:
                running.remove(name)
                held[name] = 0
    return steps


def find_fault(steps: Sequence[State], watermark: int) -> str:
    """Each rule on each step and the one before it."""
    for before, now in pairwise([{"running": [], "known": {}}, *steps]):
        stay = [name for name in before["running"] if name in now["running"]]
        if any(before["running"].index(victim) < before["running"].index(other)
               for victim in now["preempted"] for other in stay):
            return "preempts the first"
        if now["preempted"] and now["admitted"]:
            return "admits while it preempts"
        if any(now["known"][victim] < before["known"][victim] for victim in now["preempted"]):
            return "drops its tokens"
        if now["admitted"] and len(now["running"]) > 1 and now["free"] < watermark:
            return "ignores the watermark"
    return "none"


def _any_dip(steps: Sequence[State], watermark: int) -> str:
    found = find_fault(steps, watermark)
    return "ignores the watermark" if found == "none" and any(now["free"] < watermark for now in steps) else found


def _alone_too(steps: Sequence[State], watermark: int) -> str:
    found = find_fault(steps, watermark)
    dips = any(now["admitted"] and now["free"] < watermark for now in steps)
    return "ignores the watermark" if found == "none" and dips else found


def _only_the_last(steps: Sequence[State], watermark: int) -> str:
    """Every victim must be the very last who ran: of two victims one is not."""
    for before, now in pairwise(steps):
        if any(victim != before["running"][-1] for victim in now["preempted"]):
            return "preempts the first"
    return find_fault(steps, watermark)


def _literally_the_first(steps: Sequence[State], watermark: int) -> str:
    """A victim is wrong if it was the first who ran, also where nobody stays."""
    for before, now in pairwise(steps):
        if before["running"] and before["running"][0] in now["preempted"]:
            return "preempts the first"
    found = find_fault(steps, watermark)
    return "none" if found == "preempts the first" else found


def _against_running_now(steps: Sequence[State], watermark: int) -> str:
    """Compares victims with all who run after planning, by name, newcomers among them."""
    for now in steps:
        if any(victim < other for victim in now["preempted"] for other in now["running"]):
            return "preempts the first"
    return find_fault(steps, watermark)


def _first_two(steps: Sequence[State], watermark: int) -> str:
    return find_fault(steps[:2], watermark)


def _tokens_of_running(steps: Sequence[State], watermark: int) -> str:
    """Looks at the tokens of those who run, and a victim doesn't."""
    found = find_fault(steps, watermark)
    return "none" if found == "drops its tokens" else found


def _below_or_at(steps: Sequence[State], watermark: int) -> str:
    found = find_fault(steps, watermark + 1)
    return found if found == "ignores the watermark" else find_fault(steps, watermark)


def _same_step_only(steps: Sequence[State], watermark: int) -> str:
    """Looks for the same name in both lists."""
    found = find_fault(steps, watermark)
    return "none" if found == "admits while it preempts" else found


def _watermark_before(steps: Sequence[State], watermark: int) -> str:
    """Looks at the blocks that were free before the step."""
    for before, now in pairwise(steps):
        if now["admitted"] and before["free"] < watermark and len(now["running"]) > 1:
            return "ignores the watermark"
    found = find_fault(steps, watermark)
    return "none" if found == "ignores the watermark" else found


def _spelled_otherwise(steps: Sequence[State], watermark: int) -> str:
    return find_fault(steps, watermark).replace(" ", "_")


# ---- 14-3: a service to tune -----------------------------------------------------------------------------------------


class Service:
    """160 requests at 1.4 times what the machine serves with 8 places; each run is a simulation."""

    choices = {"max_num_seqs": [2, 4, 8, 16], "watermark": [0, 2, 8, 24], "max_waiting": [0, 2, 6, 1000]}

    def __init__(self, fixed_s: float, token_s: float, slo: tuple[float, float], rate: float, num_blocks: int):
        self._load = fixed_s, token_s, *slo, rate, num_blocks
        self.runs_left = 30

    def __repr__(self) -> str:
        fixed_s, token_s, ttft_s, tpot_s, rate, num_blocks = self._load
        return (f"a service: {num_blocks} blocks, {fixed_s * 1e3:g} ms a step and {token_s * 1e3:g} ms a token, {rate} "
                f"requests/s, TTFT up to {ttft_s} s, TPOT up to {tpot_s * 1e3:g} ms")

    def goodput(self, max_num_seqs: int, watermark: int, max_waiting: int) -> float:
        """The share in time; ``ValueError`` for another value than the choices, or one run too many."""
        for name, value in zip(self.choices, (max_num_seqs, watermark, max_waiting), strict=True):
            if value not in self.choices[name]:
                raise ValueError(f"{name} must be one of {self.choices[name]}, got {value!r}")
        if not self.runs_left:
            raise ValueError("30 runs are used up: go through one setting at a time, and remember what you have run")
        self.runs_left -= 1
        return _goodput(self._load, (max_num_seqs, watermark, max_waiting))


class _Door(Scheduler):
    max_waiting = 0

    def add(self, request: Request) -> None:
        if len(self.waiting) >= self.max_waiting + self.max_num_seqs - len(self.running):
            self.finish(request, "error")
        else:
            super().add(request)


@cache
def _goodput(load: tuple[float, ...], settings: Settings) -> float:
    fixed_s, token_s, ttft_s, tpot_s, rate, num_blocks = load
    door = _Door(BlockPool(int(num_blocks), 16, caching=False), max_num_seqs=settings[0], watermark=settings[1])
    door.max_waiting = settings[2]
    result = simulate(chats_and_jobs(rate, 160), door, lambda plan: fixed_s + token_s * plan.num_tokens)
    for own in result.requests:
        own.failure = None if own.token_times_s else "refused"
    return round(result.summary(Slo(ttft_s=ttft_s, tpot_s=tpot_s)).goodput, 4)


def tuned(service: Service) -> Settings:
    """One setting after the other, round and round, until nothing is better."""
    run = cache(service.goodput)
    best = tuple(values[1] for values in service.choices.values())
    while True:
        before = best
        for place, values in enumerate(service.choices.values()):
            best = max((best[:place] + (value,) + best[place + 1:] for value in values), key=lambda own: run(*own))
        if best == before:
            return best


def _first_of_each(service: Service) -> Settings:
    return tuple(values[0] for values in service.choices.values())


def _largest(service: Service) -> Settings:
    return tuple(values[-1] for values in service.choices.values())


def _alone(place: int) -> Callable[[Service], Settings]:
    """All but one setting at the best: what who never tried that one would get."""
    def solution(service: Service) -> Settings:
        best = tuned(service)
        return best[:place] + (service.choices[list(service.choices)[place]][-1],) + best[place + 1:]
    return solution


def _one_round(service: Service) -> Settings:
    best = _largest(service)
    for place, values in enumerate(service.choices.values()):
        best = max((best[:place] + (value,) + best[place + 1:] for value in values),
                   key=lambda own: service.goodput(*own))
    return best


def _each_by_itself(service: Service) -> Settings:
    """Each setting's best beside the others' first values."""
    first = _first_of_each(service)
    return tuple(max(values, key=lambda value, place=place: service.goodput(
        *first[:place], value, *first[place + 1:])) for place, values in enumerate(service.choices.values()))


def _all_of_them(service: Service) -> Settings:
    return max(((a, b, c) for a in service.choices["max_num_seqs"] for b in service.choices["watermark"]
                for c in service.choices["max_waiting"]), key=lambda own: service.goodput(*own))


def _the_goodput(service: Service) -> float:
    return service.goodput(*tuned(service))


def _another_order(service: Service) -> Settings:
    places, watermark, waiting = tuned(service)
    return waiting, watermark, places


def _by_name(service: Service) -> dict[str, int]:
    return dict(zip(service.choices, tuned(service)))


def _case(requests: Sequence[tuple[int, int]], num_blocks: int, watermark: int,
          fault: str = "none") -> tuple[list[State], int]:
    return states(requests, num_blocks, watermark, fault), watermark


EXERCISES = {task.id: task for task in (
    Exercise(
        "14-1", "how many get in", admitted,
        cases=((10, 4, 8, 8, 0, False), (10, 4, 8, 8, 0, True), (10, 4, 6, 7, 1, False), (10, 4, 6, 7, 1, True),
               (12, 4, 5, 8, 0, True), (9, 4, 5, 3, 2, True), (9, 4, 8, 3, 3, False), (20, 4, 4, 9, 1, False),
               (4, 4, 13, 9, 2, False), (3, 4, 13, 9, 1, False), (3, 4, 9, 9, 0, True), (4, 4, 13, 3, 9, False)),
        misconceptions=(
            Misconception(_last_token_too, "the last token of an answer is never read: it needs no room"),
            Misconception(_rounds_down, "a block that is begun is held whole: round up"),
            Misconception(_in_tokens, "requests share no block: count whole blocks for each"),
            Misconception(_watermark_always, "while nobody runs the watermark means nothing: the first gets in if it "
                                             "fits"),
            Misconception(_watermark_in_reserve, "who reserves the worst case needs no watermark"),
            Misconception(_no_watermark, "optimistic: the watermark's blocks must stay free"),
            Misconception(_one_at_least, "who doesn't fit the pool alone does not get in"),
            Misconception(_output_apart, "prompt and answer follow each other in the same blocks: add them up first"),
            Misconception(_room_for_the_next, "before anything is computed, the prompt is all that is known"),
            Misconception(_negative, "never fewer than none, and the first may use the watermark's blocks"),
        )),
    Exercise(
        "14-2", "the faulty scheduler", find_fault,
        cases=(_case([(4, 2), (2, 2)], 6, 1), _case([(5, 2), (3, 2)], 7, 3, FAULTS[3]),
               _case([(4, 2), (3, 2)], 4, 0, FAULTS[0]), _case([(5, 4), (3, 3)], 6, 0, FAULTS[2]),
               _case([(5, 3), (5, 3), (3, 2)], 7, 0, FAULTS[1]), _case([(2, 2), (4, 2), (1, 2)], 5, 1),
               _case([(5, 2), (2, 2)], 4, 3), _case([(1, 5), (2, 3), (1, 4), (1, 2)], 5, 0),
               _case([(3, 2), (3, 2)], 4, 0), _case([(5, 3), (2, 4), (1, 3), (2, 3)], 8, 2),
               _case([(1, 2), (3, 3), (5, 6), (3, 2)], 6, 0, FAULTS[0])),
        misconceptions=(
            Misconception(_any_dip, "the watermark binds admission only: decodes may take those blocks later"),
            Misconception(_alone_too, "who is admitted while nobody else runs may use the watermark's blocks"),
            Misconception(_only_the_last, "two victims in one step: the last, and then the last of those who are left"),
            Misconception(_literally_the_first, "a victim is wrong if anybody who came later stays, first or not"),
            Misconception(_against_running_now, "a newcomer of this step is no one who stayed: compare victims with "
                                                "those who ran before and still run"),
            Misconception(_first_two, "go through all steps: faults come late"),
            Misconception(_tokens_of_running, "a victim waits: its tokens stand in `known` all the same, now and in "
                                              "the step before"),
            Misconception(_below_or_at, "the watermark is what stays free at least: just as much is allowed"),
            Misconception(_same_step_only, "whoever is admitted in a step that preempts: it needn't be the victim"),
            Misconception(_watermark_before, "blocks count after planning: others may have ended meanwhile"),
            Misconception(_spelled_otherwise, "return one of the five names exactly as the text spells them"),
        )),
    Exercise(
        "14-3", "a service to tune", tuned,
        cases=((Service(0.02, 0.001, (1.0, 0.06), 4.2, 80),), (Service(0.02, 0.001, (3.0, 0.04), 3.5, 40),)),
        misconceptions=(
            Misconception(_first_of_each, "the smallest of each wastes the machine: run it and see"),
            Misconception(_largest, "the largest of each lets everybody wait: run it and see"),
            Misconception(_alone(0), "more places make each step longer: TPOT. Try fewer"),
            Misconception(_alone(1), "a large watermark reserves again. Try a smaller one"),
            Misconception(_alone(2), "a long queue accepts requests that will be late. Try a shorter one"),
            Misconception(_one_round, "one round is not enough: with another setting changed, the first may do better "
                                      "elsewhere"),
            Misconception(_each_by_itself, "the settings depend on each other: keep the best of one while you try the "
                                           "next"),
            Misconception(_all_of_them, "64 runs are too many: one setting at a time"),
            Misconception(_the_goodput, "return the settings, not what they reach"),
            Misconception(_another_order, "the order is max_num_seqs, watermark, max_waiting"),
            Misconception(_by_name, "return a tuple of three numbers"),
        )),
)}
