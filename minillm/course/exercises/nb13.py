"""Exercises of notebook 13: when a prompt's first token comes, a planner with a fault, and a chunk within a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.course.checking import Exercise, Misconception

Row = tuple[int, int, bool]
Steps = Sequence[Sequence[Row]]


def first_step(prompt: int, streams: int, budget: int, chunk: int) -> int | None:
    """Whole steps, each of which reads a chunk or what the streams leave of the budget."""
    size = min(chunk, budget - streams)
    return -(-prompt // size) if size > 0 else None


def _streams_forgotten(prompt: int, streams: int, budget: int, chunk: int) -> int:
    return -(-prompt // min(chunk, budget))


def _chunk_alone(prompt: int, streams: int, budget: int, chunk: int) -> int:
    return -(-prompt // chunk)


def _budget_alone(prompt: int, streams: int, budget: int, chunk: int) -> int | None:
    return first_step(prompt, streams, budget, prompt)


def _streams_from_the_chunk(prompt: int, streams: int, budget: int, chunk: int) -> int | None:
    return first_step(prompt, 0, min(budget, chunk) - streams, prompt)


def _rounded_down(prompt: int, streams: int, budget: int, chunk: int) -> int | None:
    size = min(chunk, budget - streams)
    return prompt // size if size > 0 else None


def _always_one_more(prompt: int, streams: int, budget: int, chunk: int) -> int | None:
    size = min(chunk, budget - streams)
    return prompt // size + 1 if size > 0 else None


def _a_step_of_its_own(prompt: int, streams: int, budget: int, chunk: int) -> int | None:
    steps = first_step(prompt, streams, budget, chunk)
    return None if steps is None else steps + 1


def _from_zero(prompt: int, streams: int, budget: int, chunk: int) -> int | None:
    steps = first_step(prompt, streams, budget, chunk)
    return None if steps is None else steps - 1


def _a_float(prompt: int, streams: int, budget: int, chunk: int) -> float | None:
    size = min(chunk, budget - streams)
    return prompt / size if size > 0 else None


def _never_never(prompt: int, streams: int, budget: int, chunk: int) -> int:
    """Divides by nothing where the streams leave nothing."""
    return -(-prompt // min(chunk, budget - streams))


def _at_least_one_token(prompt: int, streams: int, budget: int, chunk: int) -> int:
    return -(-prompt // max(1, min(chunk, budget - streams)))


def _zero_for_never(prompt: int, streams: int, budget: int, chunk: int) -> int:
    return first_step(prompt, streams, budget, chunk) or 0


def _exhausted_only_below(prompt: int, streams: int, budget: int, chunk: int) -> int | None:
    """Asks whether the budget is below the streams, and not whether it is equal."""
    return None if budget < streams else _never_never(prompt, streams, budget, chunk)


def find_fault(steps: Steps, chunk: int) -> str:
    """One question a fault, for each step."""
    for rows in steps:
        if any(samples and planned < lacks for lacks, planned, samples in rows):
            return "samples too early"
        if any(planned > chunk for _, planned, _ in rows):
            return "no cap"
        if any(lacks == 1 and not planned for lacks, planned, _ in rows) and any(
                lacks > 1 and planned for lacks, planned, _ in rows):
            return "prompts first"
    return "none"


def _first_step_only(steps: Steps, chunk: int) -> str:
    return find_fault(steps[:1], chunk)


def _last_step_only(steps: Steps, chunk: int) -> str:
    return find_fault(steps[-1:], chunk)


def _order_of_rows(steps: Steps, chunk: int) -> str:
    """Takes a prompt that stands above a decode for one that was served first."""
    for rows in steps:
        lacks = [lacks for lacks, planned, _ in rows if planned]
        if lacks != sorted(lacks):
            return "prompts first"
    return find_fault(steps, chunk)


def _who_waits_is_wronged(steps: Steps, chunk: int) -> str:
    """Asks whether a decode waits, but not whether a prompt was read meanwhile."""
    if any(lacks == 1 and not planned for rows in steps for lacks, planned, _ in rows):
        return "prompts first"
    return find_fault(steps, chunk)


def _whose_turn_ignored(steps: Steps, chunk: int) -> str:
    """Never asks who waits."""
    found = find_fault(steps, chunk)
    return "none" if found == "prompts first" else found


def _over_all_steps(steps: Steps, chunk: int) -> str:
    """Looks for a decode that waits in any step, and a prompt that is read in any step."""
    return find_fault([[row for rows in steps for row in rows]], chunk)


def _sum_of_the_step(steps: Steps, chunk: int) -> str:
    if any(sum(planned for _, planned, _ in rows) > chunk for rows in steps):
        return "no cap"
    return find_fault(steps, chunk)


def _full_chunk_is_too_much(steps: Steps, chunk: int) -> str:
    return find_fault(steps, chunk - 1)


def _lacks_above_the_chunk(steps: Steps, chunk: int) -> str:
    """Compares what is lacking, not what was planned."""
    if any(lacks > chunk for rows in steps for lacks, _, _ in rows):
        return "no cap"
    return find_fault(steps, chunk)


def _no_prompt_may_sample(steps: Steps, chunk: int) -> str:
    if any(samples and lacks > 1 for rows in steps for lacks, _, samples in rows):
        return "samples too early"
    return find_fault(steps, chunk)


def _short_of_a_chunk(steps: Steps, chunk: int) -> str:
    if any(samples and 1 < planned < chunk for rows in steps for _, planned, samples in rows):
        return "samples too early"
    return find_fault(steps, chunk)


def _sampling_ignored(steps: Steps, chunk: int) -> str:
    found = find_fault(steps, chunk)
    return "none" if found == "samples too early" else found


def _another_spelling(steps: Steps, chunk: int) -> str:
    return find_fault(steps, chunk).replace(" ", "_")


def _none_for_no_fault(steps: Steps, chunk: int) -> str | None:
    found = find_fault(steps, chunk)
    return None if found == "none" else found


@dataclass
class Meter:
    """A step's seconds by chunk: flat while weights are read, then rising, in tiles. Counts its calls."""

    flat_s: float
    token_s: float
    tile: int
    most_calls: int
    calls: int = 0

    def __call__(self, chunk: int) -> float:
        if not isinstance(chunk, int) or chunk < 1:
            raise ValueError(f"a step reads at least one token, and whole ones; got {chunk!r}")
        self.calls += 1
        if self.calls > self.most_calls:
            raise RuntimeError(f"this would be call {self.calls}; {self.most_calls} are allowed")
        return max(self.flat_s, -(-chunk // self.tile) * self.tile * self.token_s)

    def __repr__(self) -> str:
        return f"<step_s: at least {self.flat_s} s, {self.token_s} s a token, tiles of {self.tile}>"


def largest_chunk(step_s: Meter, prompt: int, limit_s: float) -> int:
    """Bisection: ``low`` is surely within the limit, ``high`` surely beyond it."""
    low, high = 0, prompt + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_s(middle) <= limit_s else (low, middle)
    return low


def _one_by_one(step_s: Meter, prompt: int, limit_s: float) -> int:
    chunk = 0
    while chunk < prompt and step_s(chunk + 1) <= limit_s:
        chunk += 1
    return chunk


def _from_above(step_s: Meter, prompt: int, limit_s: float) -> int:
    return next((chunk for chunk in range(prompt, 0, -1) if step_s(chunk) <= limit_s), 0)


def _powers_of_two(step_s: Meter, prompt: int, limit_s: float) -> int:
    chunk = 0
    while (larger := 2 * chunk or 1) <= prompt and step_s(larger) <= limit_s:
        chunk = larger
    return chunk


def _a_straight_line(step_s: Meter, prompt: int, limit_s: float) -> int:
    """Time in proportion to the tokens, from one measurement."""
    return min(prompt, int(limit_s / (step_s(prompt) / prompt)))


def _one_token_times(step_s: Meter, prompt: int, limit_s: float) -> int:
    """Time in proportion to the tokens, from a step of one."""
    return min(prompt, int(limit_s / step_s(1)))


def _strictly_below(step_s: Meter, prompt: int, limit_s: float) -> int:
    return largest_chunk(step_s, prompt, math.nextafter(limit_s, 0))


def _at_least_one(step_s: Meter, prompt: int, limit_s: float) -> int:
    return max(1, largest_chunk(step_s, prompt, limit_s))


def _never_the_whole(step_s: Meter, prompt: int, limit_s: float) -> int:
    return largest_chunk(step_s, prompt - 1, limit_s)


def _first_that_is_too_long(step_s: Meter, prompt: int, limit_s: float) -> int:
    return min(prompt, largest_chunk(step_s, prompt, limit_s) + 1)


def _none_for_nothing(step_s: Meter, prompt: int, limit_s: float) -> int | None:
    return largest_chunk(step_s, prompt, limit_s) or None


def _asks_for_nothing(step_s: Meter, prompt: int, limit_s: float) -> int:
    return largest_chunk(step_s, prompt, limit_s) if step_s(0) <= limit_s else 0


def _beyond_the_prompt(step_s: Meter, prompt: int, limit_s: float) -> int:
    high = 1
    while high < 2 * prompt and step_s(high) <= limit_s:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if step_s(middle) <= limit_s else (low, middle)
    return low


_DECODES = [(1, 1, True)] * 3
EXERCISES = {task.id: task for task in (
    Exercise(
        "13-1", "the first token's step", first_step,
        cases=((20, 3, 12, 8), (2000, 8, 2048, 512), (2000, 8, 264, 256), (512, 8, 2048, 128), (100, 8, 24, 32),
               (64, 8, 24, 16), (5, 2, 100, 64), (10, 4, 4, 8), (10, 6, 4, 8), (1, 3, 3, 8)),
        misconceptions=(
            Misconception(_streams_forgotten, "the streams take their tokens from the budget first"),
            Misconception(_chunk_alone, "can the step afford a whole chunk beside the streams? The budget is for all"),
            Misconception(_budget_alone, "one prompt gets at most a chunk in a step, even if more of the budget is "
                                         "left"),
            Misconception(_streams_from_the_chunk, "the streams take from the budget; the chunk is the prompt's own"),
            Misconception(_rounded_down, "a last piece that is not a whole chunk takes a step too"),
            Misconception(_always_one_more, "when the chunks come out even there is no extra piece"),
            Misconception(_a_step_of_its_own, "the step that reads the last chunk samples the first token itself"),
            Misconception(_from_zero, "count from 1: a prompt that fits one step has its first token in step 1"),
            Misconception(_a_float, "steps are whole: round up"),
            Misconception(_never_never, "what if the streams leave nothing of the budget?"),
            Misconception(_at_least_one_token, "where the streams take all of the budget the prompt gets nothing, not "
                                               "one token"),
            Misconception(_zero_for_never, "never is None, not 0"),
            Misconception(_exhausted_only_below, "a budget equal to the streams leaves nothing either"),
        )),
    Exercise(
        "13-2", "the faulty planner", find_fault,
        cases=(([[(1, 1, True), (20, 8, True)]], 8),
               ([[(1, 1, True), (20, 8, False)], [(1, 1, True), (12, 8, False)], [(1, 1, True), (4, 4, True)]], 8),
               ([[*_DECODES, (20, 20, True)]], 8), ([[*_DECODES, (20, 16, False)]], 8),
               ([[(1, 1, True), (1, 0, False), (20, 8, False)]], 8),
               ([[(1, 1, True), (20, 8, False)], [(1, 0, False), (12, 8, False)]], 8),
               ([[(20, 8, False), (1, 1, True)], [(12, 8, False), (1, 1, True)]], 8),
               ([[(1, 1, True), (1, 1, True), (1, 0, False), (20, 0, False)]], 8),
               ([[(1, 1, True), (1, 0, False)], [(1, 1, True), (1, 1, True), (9, 4, False)]], 8),
               ([[(1, 1, True), (20, 8, False)], [(1, 1, True), (12, 8, True)], [(1, 1, True), (1, 1, True)]], 8),
               ([[*_DECODES, (8, 8, True), (30, 5, False)]], 8),
               ([[*_DECODES, (40, 16, False)], [*_DECODES, (24, 16, False)], [*_DECODES, (8, 8, True)]], 16),
               ([[*_DECODES, (40, 16, False)], [*_DECODES, (24, 17, False)], [*_DECODES, (7, 7, True)]], 16),
               ([[(1, 1, True), (12, 4, False), (9, 8, False)], [(1, 1, True), (8, 4, True), (1, 1, True)],
                 [(1, 1, True), (4, 4, True), (1, 1, True)]], 8)),
        misconceptions=(
            Misconception(_first_step_only, "the fault may show in a later step"),
            Misconception(_last_step_only, "the fault may show in an earlier step"),
            Misconception(_order_of_rows, "rows stand in order of arrival; who was served first shows only in who got "
                                          "nothing"),
            Misconception(_who_waits_is_wronged, "one that lacks one token got none: did a prompt get any in that "
                                                 "step? Else the budget was too small for all"),
            Misconception(_over_all_steps, "look at one step at a time: the prompt must have been read in the step in "
                                           "which the other waited"),
            Misconception(_whose_turn_ignored, "somebody lacked one token and got none, while a prompt was read"),
            Misconception(_sum_of_the_step, "the chunk caps one prompt; the step as a whole has a budget"),
            Misconception(_full_chunk_is_too_much, "a whole chunk is allowed: more than it is not"),
            Misconception(_lacks_above_the_chunk, "a prompt may lack more than a chunk; how much was planned?"),
            Misconception(_no_prompt_may_sample, "a prompt's last chunk samples: that is its first token"),
            Misconception(_short_of_a_chunk, "a short last chunk samples rightly; and a prompt may be read to its end "
                                             "in less than a chunk"),
            Misconception(_sampling_ignored, "a row samples although it still lacks more than was planned"),
            Misconception(_none_for_no_fault, "where no fault is found a word is asked for as well: read the list of "
                                              "names once more"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
        )),
    Exercise(
        "13-3", "the largest chunk within a limit", largest_chunk,
        cases=((Meter(0.0, 0.01, 1, 12), 2000, 0.5), (Meter(0.04, 0.0015, 1, 12), 2000, 0.25),
               (Meter(0.04, 0.0015, 16, 12), 2000, 0.25), (Meter(0.04, 0.001, 1, 12), 2000, 0.04),
               (Meter(0.005, 2.0 ** -14, 1, 12), 2000, 2.0 ** -5), (Meter(0.04, 0.0015, 1, 12), 2000, 0.03),
               (Meter(0.04, 0.0001, 1, 12), 2000, 0.5), (Meter(0.04, 0.0001, 1, 12), 2000, 0.1999),
               (Meter(0.04, 0.0015, 1, 2), 1, 0.05), (Meter(0.04, 0.0015, 1, 2), 1, 0.01)),
        misconceptions=(
            Misconception(_one_by_one, "one after the other needs up to 2,000 calls: each answer should halve what is "
                                       "left"),
            Misconception(_from_above, "one after the other from above needs as many calls: halve what is left"),
            Misconception(_powers_of_two, "the largest chunk need not be a power of two: search on between the last "
                                          "that held and the first that did not"),
            Misconception(_a_straight_line, "time is not in proportion to tokens: below the knee it is flat, and it "
                                            "may rise in steps. Measure, do not extrapolate"),
            Misconception(_one_token_times, "what does a step of 2 tokens take, beside a step of 1? Most of a short "
                                            "step is reading, which its tokens share"),
            Misconception(_strictly_below, "a step that takes exactly the limit keeps it"),
            Misconception(_at_least_one, "if even one token takes too long, say 0"),
            Misconception(_never_the_whole, "the whole prompt may be one chunk"),
            Misconception(_first_that_is_too_long, "return the last that holds, not the first that does not"),
            Misconception(_none_for_nothing, "return 0 where no chunk holds, not None"),
            Misconception(_asks_for_nothing, "do not ask for a step of 0 tokens: that nothing takes no time is known"),
            Misconception(_beyond_the_prompt, "a prompt has no chunk longer than itself; and searching for an upper "
                                              "end first costs calls: the prompt is one"),
        )),
)}
