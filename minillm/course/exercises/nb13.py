"""Exercises of notebook 13: when a prompt's first token comes, a planner with a fault, and a chunk within a limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises import planned_steps


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
    planned_steps.EXERCISE,
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
