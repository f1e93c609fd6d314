"""The schedulers of exercise 14-2, which may break a rule, and answers to what is wrong with them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minillm.course.checking import Exercise, Misconception

State = dict[str, Any]


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


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


def find_fault(steps: Sequence[State], watermark: int, without: str = "") -> str:
    """Each rule, except one to leave out, on each step and the one before it."""
    for before, now in pairwise([{"running": [], "known": {}}, *steps]):
        stay = [name for name in before["running"] if name in now["running"]]
        broken = {
            "preempts the first": any(before["running"].index(victim) < before["running"].index(other)
                                      for victim in now["preempted"] for other in stay),
            "admits while it preempts": now["preempted"] and now["admitted"],
            "drops its tokens": any(now["known"][victim] < before["known"][victim] for victim in now["preempted"]),
            "ignores the watermark": now["admitted"] and len(now["running"]) > 1 and now["free"] < watermark}
        found = [fault for fault, is_broken in broken.items() if is_broken and fault != without]
        if found:
            return found[0]
    return "none"


class Steps(list):
    """Steps that are short to print: the one where the fault shows, or a rule is nearest to broken, comes last."""

    def __init__(self, steps: Sequence[State] = (), watermark: int = 0):
        super().__init__(steps)
        self.watermark = watermark

    def __repr__(self) -> str:
        ends = [end for end in range(1, len(self) + 1) if find_fault(self[:end], self.watermark) != "none"]
        nearest = max(range(len(self)), key=lambda i: (bool(self[i]["preempted"]), -self[i]["free"]), default=0)
        at = ends[0] - 1 if ends else nearest
        told = "; ".join(f"{i}: " + ", ".join(
            f"{what} {''.join(value)}" if isinstance(value, list) else f"{what} {value}" if what == "free" else
            "known " + " ".join(f"{name}{count}" for name, count in value.items())
            for what, value in self[i].items() if value != []) for i in range(max(0, at - 1), min(at + 1, len(self))))
        return f"{len(self)} steps, of them {told}; watermark"


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


def _no_order(steps: Sequence[State], watermark: int) -> str:
    """Never asks who of those who ran came first."""
    return find_fault(steps, watermark, without="preempts the first")


def _case(requests: Sequence[tuple[int, int]], num_blocks: int, watermark: int,
          fault: str = "none") -> tuple[list[State], int]:
    return Steps(states(requests, num_blocks, watermark, fault), watermark), watermark


EXERCISE = Exercise(
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
        Misconception(_no_order, "compare each victim's place in the last step's `running` with theirs who stay"),
        Misconception(_spelled_otherwise, "return one of the five names exactly as the text spells them"),
    ))
