"""Exercises of notebook 00: the four numbers, a stopwatch with a flaw, and the passes of a chat's second turn."""

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


def _divides_by_no_gap(arrival: float, token_times: list[float]) -> Numbers:
    return four_numbers(arrival, token_times) | {"tpot": (token_times[-1] - token_times[0]) / (len(token_times) - 1)}


def _without_names(arrival: float, token_times: list[float]) -> tuple[Any, ...]:
    return tuple(four_numbers(arrival, token_times).values())


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
    """The stage that a reported TTFT wrongly counts or leaves out; ``"none"`` where the report is right to 1 ms.

    ``stages_ms`` holds milliseconds of loading, tokenizing, queueing, prefill, and one decode step.
    """
    return _closest(abs(reported_ms - _ttft(stages_ms)), stages_ms)


def _ttft(stages_ms: dict[str, float]) -> float:
    return sum(stages_ms[stage] for stage in _UNTIL_FIRST_TOKEN)


def _closest(off_ms: float, stages_ms: dict[str, float]) -> str:
    return "none" if abs(off_ms) < 1 else min(stages_ms, key=lambda stage: abs(stages_ms[stage] - off_ms))


def _blame_the_longest(reported_ms: float, stages_ms: dict[str, float]) -> str:
    return max(stages_ms, key=lambda stage: stages_ms[stage])


def _only_what_is_too_much(reported_ms: float, stages_ms: dict[str, float]) -> str:
    return find_flaw(reported_ms, stages_ms) if reported_ms > _ttft(stages_ms) else "none"


def _with_its_sign(reported_ms: float, stages_ms: dict[str, float]) -> str:
    return _closest(reported_ms - _ttft(stages_ms), stages_ms)


def _only_load(reported_ms: float, stages_ms: dict[str, float]) -> str:
    return "load" if abs(reported_ms - _ttft(stages_ms) - stages_ms["load"]) < 1 else "none"


def _with_a_decode_step(reported_ms: float, stages_ms: dict[str, float]) -> str:
    return _closest(abs(reported_ms - _ttft(stages_ms) - stages_ms["decode"]), stages_ms)


def _without_tokenizing(reported_ms: float, stages_ms: dict[str, float]) -> str:
    return _closest(abs(reported_ms - stages_ms["queue"] - stages_ms["prefill"]), stages_ms)


def _prefill_alone(reported_ms: float, stages_ms: dict[str, float]) -> str:
    return _closest(abs(reported_ms - stages_ms["prefill"]), stages_ms)


def second_turn(num_prompt: int, num_answer: int, num_new: int, num_second_answer: int) -> tuple[int, int]:
    """Forward passes of a chat's second turn and tokens computed in all of them.

    The first turn read ``num_prompt`` tokens and wrote ``num_answer``; the cache still holds all that it computed. The
    second prompt is both of those and ``num_new`` tokens more. The first answer's last token was never read: it is
    computed now, with the new ones. The second answer's last token never is.
    """
    cached = num_prompt + num_answer - 1
    prefill = num_prompt + num_answer + num_new - cached
    return num_second_answer, prefill + num_second_answer - 1


def _whole_first_turn_cached(num_prompt: int, num_answer: int, num_new: int, num_second_answer: int) -> tuple[int, int]:
    return num_second_answer, num_new + num_second_answer - 1


def _nothing_cached(num_prompt: int, num_answer: int, num_new: int, num_second_answer: int) -> tuple[int, int]:
    return num_second_answer, num_prompt + num_answer + num_new + num_second_answer - 1


def _only_the_prompt_cached(num_prompt: int, num_answer: int, num_new: int, num_second_answer: int) -> tuple[int, int]:
    return num_second_answer, num_answer + num_new + num_second_answer - 1


def _a_pass_too_many(num_prompt: int, num_answer: int, num_new: int, num_second_answer: int) -> tuple[int, int]:
    return num_second_answer + 1, num_new + num_second_answer + 1


def _reads_the_last_token(num_prompt: int, num_answer: int, num_new: int, num_second_answer: int) -> tuple[int, int]:
    return num_second_answer, num_new + num_second_answer + 1


def _a_pass_a_token(num_prompt: int, num_answer: int, num_new: int, num_second_answer: int) -> tuple[int, int]:
    return num_new + num_second_answer, num_new + num_second_answer


_STAGES = {"load": 2100, "tokenize": 2, "queue": 300, "prefill": 60, "decode": 17}

EXERCISES = {task.id: task for task in (
    Exercise(
        "00-1", "four numbers", four_numbers,
        cases=((10.0, [12.0, 12.5, 14.0]), (0.0, [2.0, 3.0]), (1.0, [1.5, 1.5, 1.75]), (3.0, [5.0])),
        misconceptions=(
            Misconception(_divides_by_no_gap, "a single token has no gap, so no TPOT either: return None for it"),
            Misconception(_without_names, "the values are right; return them in a dict, as the stub says"),
            Misconception(_mean_over_n, "N tokens have N - 1 gaps between them; and one token has no TPOT at all"),
            Misconception(_whole_over_n, "TPOT starts at the first token: the wait before it is TTFT, counted already"),
            Misconception(_first_gap_from_arrival, "ITL has N - 1 entries: the wait for the first token is not a gap "
                                                   "between two tokens"),
            Misconception(_clock_from_zero, "clocks start anywhere: a duration is a difference of two readings"),
        )),
    Exercise(
        "00-2", "the flawed stopwatch", find_flaw,
        cases=((2462, _STAGES), (362, _STAGES), (361.6, _STAGES), (62, _STAGES), (379, _STAGES), (302, _STAGES),
               (360, _STAGES), (120, {"load": 900, "tokenize": 5, "queue": 0, "prefill": 75, "decode": 40})),
        misconceptions=(
            Misconception(_blame_the_longest, "the longest stage is not always the wrong one: first add up what TTFT "
                                              "should be, then look at the difference"),
            Misconception(_only_load, "loading is one possible flaw of six: compare the difference with every stage"),
            Misconception(_only_what_is_too_much, "a TTFT can also be too small: its clock may have started too late"),
            Misconception(_with_its_sign, "a stage left out makes the report too small: compare the size of the "
                                          "difference, abs(...), with each stage"),
            Misconception(_with_a_decode_step, "prefill yields the first token: a decode step comes after it, and "
                                               "belongs to no TTFT"),
            Misconception(_without_tokenizing, "tokenizing comes between arrival and first token too, however short"),
            Misconception(_prefill_alone, "TTFT starts when the caller asks: tokenizing and queueing belong to it"),
        )),
    Exercise(
        "00-3", "the second turn", second_turn,
        cases=((34, 15, 12, 20), (34, 15, 12, 1), (5, 1, 1, 1), (1000, 300, 8, 3)),
        misconceptions=(
            Misconception(_whole_first_turn_cached, "the first answer's last token was returned and never read, so "
                                                    "the cache lacks it: this turn computes it"),
            Misconception(_nothing_cached, "what the first turn computed is still in the KV cache: do not count it"),
            Misconception(_only_the_prompt_cached, "the first turn computed its answer too, but for its last token"),
            Misconception(_a_pass_too_many, "prefill already yields the first token, so N tokens take N - 1 decode "
                                            "steps"),
            Misconception(_reads_the_last_token, "nothing follows the last token, so the model never reads it"),
            Misconception(_a_pass_a_token, "the question's tokens are all known: one pass computes them together"),
        )),
)}
