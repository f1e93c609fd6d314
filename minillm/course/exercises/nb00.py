"""Exercises of notebook 00: the four numbers, a stopwatch with a flaw, and counting forward passes."""

from __future__ import annotations

from typing import Any

from minillm.course.checking import Exercise, Misconception

Numbers = dict[str, Any]


def four_numbers(arrival: float, token_times: list[float]) -> Numbers:
    """TTFT, TPOT, ITL and end-to-end time of a request that arrived at ``arrival`` and got token i at
    ``token_times[i]``, all in one unit of one clock. TPOT is ``None`` for a single token."""
    first, last, n = token_times[0], token_times[-1], len(token_times)
    return {
        "ttft": first - arrival,
        "tpot": (last - first) / (n - 1) if n > 1 else None,
        "itl": [after - before for before, after in zip(token_times, token_times[1:], strict=False)],
        "e2e": last - arrival,
    }


def _mean_over_n(arrival: float, token_times: list[float]) -> Numbers:
    return four_numbers(arrival, token_times) | {"tpot": (token_times[-1] - token_times[0]) / len(token_times)}


def _whole_over_n(arrival: float, token_times: list[float]) -> Numbers:
    return four_numbers(arrival, token_times) | {"tpot": (token_times[-1] - arrival) / len(token_times)}


def _first_gap_from_arrival(arrival: float, token_times: list[float]) -> Numbers:
    times = [arrival, *token_times]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    return four_numbers(arrival, token_times) | {"itl": gaps}


def _clock_from_zero(arrival: float, token_times: list[float]) -> Numbers:
    return four_numbers(arrival, token_times) | {"ttft": token_times[0], "e2e": token_times[-1]}


# What a stopwatch around a request should count as TTFT: everything from arrival to the first token.
_UNTIL_FIRST_TOKEN = ("tokenize", "queue", "prefill")


def find_flaw(reported_ms: float, stages_ms: dict[str, float]) -> str:
    """The stage that a reported TTFT wrongly counts, or leaves out; ``"none"`` where the report is right.

    ``stages_ms`` holds milliseconds of loading, tokenizing, queueing, prefill, and one decode step.
    """
    honest = sum(stages_ms[stage] for stage in _UNTIL_FIRST_TOKEN)
    off = abs(reported_ms - honest)
    return "none" if off < 1 else min(stages_ms, key=lambda stage: abs(stages_ms[stage] - off))


def _blame_the_longest(reported_ms: float, stages_ms: dict[str, float]) -> str:
    return max(stages_ms, key=lambda stage: stages_ms[stage])


def _only_what_is_too_much(reported_ms: float, stages_ms: dict[str, float]) -> str:
    honest = sum(stages_ms[stage] for stage in _UNTIL_FIRST_TOKEN)
    return find_flaw(reported_ms, stages_ms) if reported_ms > honest else "none"


def _prefill_alone(reported_ms: float, stages_ms: dict[str, float]) -> str:
    off = abs(reported_ms - stages_ms["prefill"])
    return "none" if off < 1 else min(stages_ms, key=lambda stage: abs(stages_ms[stage] - off))


def count_forwards(num_prompt_tokens: int, num_output_tokens: int) -> tuple[int, int]:
    """Forward passes of one request, and tokens computed in all of them, when every pass reuses what earlier ones
    computed: one prefill and N - 1 decode steps of one token; the last token is never read."""
    return num_output_tokens, num_prompt_tokens + num_output_tokens - 1


def _a_pass_a_token_and_one(num_prompt_tokens: int, num_output_tokens: int) -> tuple[int, int]:
    return num_output_tokens + 1, num_prompt_tokens + num_output_tokens


def _reads_the_last_token(num_prompt_tokens: int, num_output_tokens: int) -> tuple[int, int]:
    return num_output_tokens, num_prompt_tokens + num_output_tokens


def _prompt_token_by_token(num_prompt_tokens: int, num_output_tokens: int) -> tuple[int, int]:
    return num_prompt_tokens + num_output_tokens - 1, num_prompt_tokens + num_output_tokens - 1


def _no_reuse(num_prompt_tokens: int, num_output_tokens: int) -> tuple[int, int]:
    return num_output_tokens, sum(num_prompt_tokens + step for step in range(num_output_tokens))


_STAGES = {"load": 2100, "tokenize": 2, "queue": 300, "prefill": 60, "decode": 17}

EXERCISES = {task.id: task for task in (
    Exercise(
        "00-1", "four numbers", four_numbers,
        cases=((0.0, [2.0]), (0.0, [2.0, 3.0]), (10.0, [12.0, 12.5, 14.0, 14.25]), (1.0, [1.5, 1.5, 1.75])),
        misconceptions=(
            Misconception(_mean_over_n, "N tokens have N - 1 gaps between them; and one token has no TPOT at all"),
            Misconception(_whole_over_n, "TPOT starts at the first token: the wait before it is TTFT, counted already"),
            Misconception(_first_gap_from_arrival, "ITL has N - 1 entries: the wait for the first token is not a gap "
                                                   "between two tokens"),
            Misconception(_clock_from_zero, "clocks start anywhere: a duration is a difference of two readings"),
        )),
    Exercise(
        "00-2", "the flawed stopwatch", find_flaw,
        cases=((362, _STAGES), (2462, _STAGES), (62, _STAGES), (379, _STAGES), (302, _STAGES),
               (120, {"load": 900, "tokenize": 5, "queue": 0, "prefill": 75, "decode": 40})),
        misconceptions=(
            Misconception(_blame_the_longest, "the longest stage is not always the wrong one: first add up what TTFT "
                                              "should be, then look at the difference"),
            Misconception(_only_what_is_too_much, "a TTFT can also be too small: its clock may have started too late"),
            Misconception(_prefill_alone, "TTFT starts when the caller asks: tokenizing and queueing belong to it"),
        )),
    Exercise(
        "00-3", "count the forward passes", count_forwards,
        cases=((1, 1), (5, 1), (5, 2), (37, 24), (1000, 3)),
        misconceptions=(
            Misconception(_a_pass_a_token_and_one, "prefill already yields the first token, so N tokens take N - 1 "
                                                   "decode steps"),
            Misconception(_reads_the_last_token, "nothing follows the last token, so the model never reads it"),
            Misconception(_prompt_token_by_token, "the prompt's tokens are all known: one pass computes them together"),
            Misconception(_no_reuse, "a decode step computes one token; what came before is kept in the KV cache"),
        )),
)}
