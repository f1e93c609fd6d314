"""Exercises of notebook 10: idle slot-steps, a scheduler with a fault, and who goes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapreplace

from minillm.course.checking import Exercise, Misconception

Steps = Sequence[Sequence[str]]


def idle(lengths: Sequence[int], slots: int) -> int:
    """Each static batch takes its longest request's steps in all slots; a token uses one slot-step."""
    return sum(slots * max(lengths[i:i + slots]) for i in range(0, len(lengths), slots)) - sum(lengths)


def _last_batch_as_it_is(lengths: Sequence[int], slots: int) -> int:
    batches = [lengths[i:i + slots] for i in range(0, len(lengths), slots)]
    return sum(len(batch) * max(batch) - sum(batch) for batch in batches)


def _sorted_first(lengths: Sequence[int], slots: int) -> int:
    return idle(sorted(lengths, reverse=True), slots)


def _shortest_first(lengths: Sequence[int], slots: int) -> int:
    return idle(sorted(lengths), slots)


def _longest_of_all(lengths: Sequence[int], slots: int) -> int:
    return -(-len(lengths) // slots) * slots * max(lengths, default=0) - sum(lengths)


def _one_batch(lengths: Sequence[int], slots: int) -> int:
    return slots * max(lengths, default=0) - sum(lengths)


def _used(lengths: Sequence[int], slots: int) -> int:
    return sum(lengths)


def _all_slot_steps(lengths: Sequence[int], slots: int) -> int:
    return idle(lengths, slots) + sum(lengths)


def _gaps(lengths: Sequence[int], slots: int) -> int:
    """The first token taken for free: each step count one less."""
    return idle([n - 1 for n in lengths], slots)


def _steps(lengths: Sequence[int], slots: int) -> int:
    return (idle(lengths, slots) + sum(lengths)) // slots


def _continuous(lengths: Sequence[int], slots: int) -> int:
    free = [0] * slots
    for length in lengths:
        heapreplace(free, free[0] + length)
    return slots * max(free) - sum(lengths)


def _no_request(lengths: Sequence[int], slots: int) -> int:
    return slots * max(lengths) + idle(lengths, slots) - slots * max(lengths)


FAULTS = "static", "leaks a slot", "last in, first out", "none"


def find_fault(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    """Who is new must have waited longest; a slot may be idle only while nobody waits."""
    begun: set[str] = set()
    idle_while_waiting = beside_others = half_filled = False
    for number, step in enumerate(steps):
        waiting = [name for name, first in arrives.items() if first <= number and name not in begun]
        new = [name for name in step if name not in begun]
        if set(new) != set(waiting[:len(new)]):
            return "last in, first out"
        idle_here = len(step) < slots and len(waiting) > len(new)
        idle_while_waiting |= idle_here
        beside_others |= bool(new) and len(new) < len(step)
        half_filled |= bool(new) and idle_here
        begun.update(step)
    if not idle_while_waiting:
        return "none"
    return "leaks a slot" if beside_others or half_filled else "static"


def _any_idle_slot(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    found = find_fault(arrives, steps, slots)
    return "static" if found == "none" and any(len(step) < slots for step in steps) else found


def _static_for_leak(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    found = find_fault(arrives, steps, slots)
    return "static" if found == "leaks a slot" else found


def _leak_for_static(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    found = find_fault(arrives, steps, slots)
    return "leaks a slot" if found == "static" else found


def _by_name(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    """First come is taken for first in the alphabet."""
    return find_fault(dict(sorted(arrives.items())), steps, slots)


def _all_wait_from_the_start(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    return find_fault(dict.fromkeys(arrives, 0), steps, slots)


def _joins_when_empty(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    """Static, because nobody ever joined beside others; who waited isn't asked."""
    begun: set[str] = set()
    beside = False
    for step in steps:
        new = [name for name in step if name not in begun]
        beside |= bool(new) and len(new) < len(step)
        begun.update(step)
    found = find_fault(arrives, steps, slots)
    return found if beside or found == "last in, first out" else "static"


def _order_not_asked(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    found = find_fault(arrives, steps, slots)
    return "none" if found == "last in, first out" else found


def _never_at_once(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    """Whoever is missing from the first step waited for nothing: order is asked only within one step's arrivals."""
    found = find_fault(arrives, steps, slots)
    together = len(set(arrives.values())) == 1
    return "none" if found == "last in, first out" and not together else found


def _fewer_at_the_end(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    """A leak, because the last steps are not full."""
    found = find_fault(arrives, steps, slots)
    return "leaks a slot" if found == "none" and len(steps[-1]) < slots else found


def _another_spelling(arrives: Mapping[str, int], steps: Steps, slots: int) -> str:
    return find_fault(arrives, steps, slots).replace(", ", "_").replace(" ", "_")


def _record(arrives: Mapping[str, int], lengths: Sequence[int], slots: int, fault: str) -> list[list[str]]:
    """Who is in each step of a scheduler with this fault."""
    left, running, steps, leaked = dict(zip(arrives, lengths, strict=True)), [], [], 0
    waited = list(arrives)
    while waited or running:
        waiting = [name for name in waited if arrives[name] <= len(steps)]
        room = 0 if fault == "static" and running else slots - leaked - len(running)
        for name in (waiting[::-1] if fault == "last in, first out" else waiting)[:room]:
            running.append(name)
            waited.remove(name)
        steps.append(list(running))
        for name in steps[-1]:
            left[name] -= 1
            if not left[name]:
                running.remove(name)
                leaked = int(fault == "leaks a slot")
    return steps


def _case(names: str, starts: Sequence[int], lengths: Sequence[int], slots: int, fault: str) -> tuple:
    arrives = dict(zip(names, starts, strict=True))
    return arrives, _record(arrives, lengths, slots, fault), slots


def mean_end(lengths: Sequence[int], slots: int) -> float:
    """Shortest first: each takes the slot that is free first."""
    return _mean_in_order(sorted(lengths), slots)


def _mean_in_order(lengths: Sequence[int], slots: int) -> float:
    return sum(_ends(lengths, slots)) / len(lengths)


def _ends(lengths: Sequence[int], slots: int) -> list[int]:
    free, ends = [0] * slots, []
    for length in lengths:
        ends.append(free[0] + length)
        heapreplace(free, ends[-1])
    return ends


def _longest_first(lengths: Sequence[int], slots: int) -> float:
    return _mean_in_order(sorted(lengths, reverse=True), slots)


def _as_they_come(lengths: Sequence[int], slots: int) -> float:
    return _mean_in_order(lengths, slots)


def _static_sorted(lengths: Sequence[int], slots: int) -> float:
    """Static batches of the shortest: whoever joins waits for the whole batch before."""
    ordered, total, start = sorted(lengths), 0, 0
    for i in range(0, len(ordered), slots):
        batch = ordered[i:i + slots]
        total += sum(start + length for length in batch)
        start += batch[-1]
    return total / len(ordered)


def _one_slot(lengths: Sequence[int], slots: int) -> float:
    return _mean_in_order(sorted(lengths), 1)


def _slots_divide(lengths: Sequence[int], slots: int) -> float:
    return _one_slot(lengths, slots) / slots


def _last_end(lengths: Sequence[int], slots: int) -> float:
    return float(max(_ends(sorted(lengths), slots)))


def _sum(lengths: Sequence[int], slots: int) -> float:
    return float(sum(_ends(sorted(lengths), slots)))


def _waits_only(lengths: Sequence[int], slots: int) -> float:
    return mean_end(lengths, slots) - sum(lengths) / len(lengths)


def _by_turns(lengths: Sequence[int], slots: int) -> float:
    """Slots dealt out like cards, in the order given."""
    free, ends = [0] * slots, []
    for i, length in enumerate(lengths):
        free[i % slots] += length
        ends.append(free[i % slots])
    return sum(ends) / len(lengths)


_EIGHT = [12, 3, 5, 2, 9, 4, 2, 3]
_SIXTEEN = [16, 2, 10, 10, 16, 2, 4, 10, 10, 6, 24, 4, 2, 16, 10, 6]

EXERCISES = {task.id: task for task in (
    Exercise(
        "10-1", "idle slot-steps", idle,
        cases=(([3, 1, 2], 2), ([5], 1), ([4, 4], 2), ([2, 9, 9, 2], 2), (_EIGHT, 4), ([7], 4), ([1, 1, 1], 2),
               (_SIXTEEN, 4), ([], 4)),
        misconceptions=(
            Misconception(_last_batch_as_it_is, "the last batch has empty slots too: they are idle for all its steps"),
            Misconception(_sorted_first, "the requests run in the order given: sorting them changes the batches"),
            Misconception(_shortest_first, "the requests run in the order given: sorting them changes the batches"),
            Misconception(_longest_of_all, "a batch runs until *its own* longest ends, not the longest of all"),
            Misconception(_one_batch, "more requests than slots make several batches, one after the other"),
            Misconception(_used, "these are the slot-steps that make a token: asked for are the others"),
            Misconception(_all_slot_steps, "these are all slot-steps: take off those that make a token"),
            Misconception(_gaps, "the first step, which reads the prompt, makes a token too"),
            Misconception(_steps, "these are steps: each has a slot-step for each slot"),
            Misconception(_continuous, "in a static batch nobody joins before the last of it has ended"),
            Misconception(_no_request, "no requests, no batch, nothing idle: max() of nothing fails"),
        )),
    Exercise(
        "10-2", "the faulty scheduler", find_fault,
        cases=(
            _case("abcd", (0, 0, 0, 0), (1, 3, 2, 2), 2, "none"),
            _case("abcd", (0, 0, 0, 0), (1, 3, 2, 2), 2, "static"),
            _case("abcdef", (0, 0, 0, 0, 0, 0), (1, 3, 2, 2, 2, 1), 3, "leaks a slot"),
            _case("abcd", (0, 0, 0, 0), (1, 3, 2, 2), 2, "last in, first out"),
            _case("abc", (0, 0, 2), (1, 4, 2), 2, "none"),
            _case("cab", (0, 0, 0), (2, 3, 1), 1, "none"),
            _case("abcd", (0, 0, 2, 2), (2, 2, 1, 2), 2, "none"),
            _case("zyx", (0, 0, 1), (1, 3, 2), 2, "none"),
            _case("abcde", (0, 0, 0, 0, 0), (2, 1, 2, 1, 2), 2, "leaks a slot"),
            _case("abcd", (0, 0, 1, 2), (3, 4, 2, 2), 2, "last in, first out"),
            _case("abcde", (0, 0, 0, 1, 1), (2, 4, 1, 3, 1), 3, "static"),
            _case("abcdefg", (0, 0, 0, 1, 1, 3, 4), (3, 1, 4, 2, 3, 1, 2), 3, "leaks a slot"),
            _case("abcd", (0, 0, 0, 1), (2, 2, 3, 1), 4, "none")),
        misconceptions=(
            Misconception(_any_idle_slot, "an idle slot is no fault while nobody waits: who had arrived by then?"),
            Misconception(_static_for_leak, "a static scheduler lets nobody join the others, and fills every batch"),
            Misconception(_leak_for_static, "every slot comes back into use, all at the same step? Then none is lost"),
            Misconception(_by_name, "names have no order: the order of arrival is that of `arrives`"),
            Misconception(_all_wait_from_the_start, "before it arrives a request does not wait: see `arrives`"),
            Misconception(_joins_when_empty, "joining an empty batch is no fault where nobody waited before"),
            Misconception(_order_not_asked, "who joined, and who had waited longer at that moment?"),
            Misconception(_never_at_once, "whoever has waited longest goes first, whenever the others came"),
            Misconception(_fewer_at_the_end, "at the end nobody is left to join: the last steps need not be full"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
        )),
    Exercise(
        "10-3", "who goes first?", mean_end,
        cases=(([3, 1], 1), ([2], 3), ([4, 4, 4], 1), ([5, 1, 1, 1], 2), (_EIGHT, 4), ([1, 9, 9, 1, 1], 2),
               (_SIXTEEN, 4), ([3, 3, 1], 8)),
        misconceptions=(
            Misconception(_longest_first, "longest first shortens the whole, perhaps; but then all short ones wait"),
            Misconception(_as_they_come, "this is first come, first served: you may choose the order"),
            Misconception(_by_turns, "you may choose the order; and a newcomer takes the slot that is free first"),
            Misconception(_static_sorted, "requests join as soon as a slot is free; nobody waits for a batch to end"),
            Misconception(_one_slot, "there are several slots: a newcomer takes the one that is free first"),
            Misconception(_slots_divide, "slots run side by side; a request still takes as many steps as tokens"),
            Misconception(_last_end, "asked for is the mean over requests, not when the last one ends"),
            Misconception(_sum, "divide by the number of requests"),
            Misconception(_waits_only, "a request ends after its wait *and* its own steps"),
        )),
)}
