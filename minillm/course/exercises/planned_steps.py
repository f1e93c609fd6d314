"""Planned steps in which exercise 13-2 looks for a fault, and answers to what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.course.checking import Exercise, Misconception

Row = tuple[int, int, bool]
Steps = Sequence[Sequence[Row]]


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


_DECODES = [(1, 1, True)] * 3
EXERCISE = Exercise(
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
    ))
