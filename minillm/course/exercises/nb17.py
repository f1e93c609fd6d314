"""Exercises of notebook 17: what speculation gains, a faulty one, and the best number of drafts in hindsight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises import faulty_speculation

Seconds = Mapping[int, float]


# ---- 17-1: what speculation gains ------------------------------------------------------------------------------------


def tokens_per_call(acceptance: float, num_drafts: int) -> float:
    """1 + a + ... + a^k."""
    return sum(acceptance**i for i in range(num_drafts + 1))


def speed_up(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    """Tokens over seconds, against a plain step of the same batch."""
    tokens, seconds = tokens_per_call(acceptance, num_drafts), num_drafts * draft_s + step_s[batch * (1 + num_drafts)]
    return tokens * step_s[batch] / seconds


def _no_bonus(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    tokens = sum(acceptance**i for i in range(1, num_drafts + 1))
    return tokens * step_s[batch] / (num_drafts * draft_s + step_s[batch * (1 + num_drafts)])


def _one_short(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    tokens = sum(acceptance**i for i in range(num_drafts))
    return tokens * step_s[batch] / (num_drafts * draft_s + step_s[batch * (1 + num_drafts)])


def _each_by_itself(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    """Every right draft counts, also behind a wrong one."""
    tokens = 1 + num_drafts * acceptance
    return tokens * step_s[batch] / (num_drafts * draft_s + step_s[batch * (1 + num_drafts)])


def _closed_form(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    tokens = (1 - acceptance**(num_drafts + 1)) / (1 - acceptance)
    return tokens * step_s[batch] / (num_drafts * draft_s + step_s[batch * (1 + num_drafts)])


def _free_drafts(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    return speed_up(acceptance, num_drafts, batch, 0.0, step_s)


def _one_draft_step(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    return speed_up(acceptance, num_drafts, batch, draft_s / max(1, num_drafts), step_s)


def _draft_for_each(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    return speed_up(acceptance, num_drafts, batch, draft_s * batch, step_s)


def _rows_free(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    return tokens_per_call(acceptance, num_drafts) * step_s[batch] / (num_drafts * draft_s + step_s[batch])


def _against_one(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    """Compares with a plain step of one request."""
    return speed_up(acceptance, num_drafts, batch, draft_s, step_s) * step_s[1] / step_s[batch]


def _batch_forgotten(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    return speed_up(acceptance, num_drafts, 1, draft_s, step_s)


def _batch_counts_twice(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    return batch * speed_up(acceptance, num_drafts, batch, draft_s, step_s)


def _upside_down(acceptance: float, num_drafts: int, batch: int, draft_s: float, step_s: Seconds) -> float:
    return 1 / speed_up(acceptance, num_drafts, batch, draft_s, step_s)


# ---- 17-3: the best number of drafts in hindsight --------------------------------------------------------------------


def least_seconds(right: Sequence[int], seconds: Sequence[float]) -> float:
    """From the end: the least time to finish from each place, over all numbers of drafts."""
    best = [0.0] * (len(right) + 1)
    for i in reversed(range(len(right))):
        best[i] = min(own + best[min(len(right), i + 1 + min(k, right[i]))] for k, own in enumerate(seconds))
    return best[0]


def _walk(right: Sequence[int], seconds: Sequence[float], choose: Sequence[int]) -> float:
    """Seconds of the calls that ask for ``choose[i]`` drafts when i tokens are there."""
    i, total = 0, 0.0
    while i < len(right):
        total += seconds[choose[i]]
        i += 1 + min(choose[i], right[i])
    return total


def best_fixed(right: Sequence[int], seconds: Sequence[float]) -> float:
    """The same number of drafts in every call."""
    return min(_walk(right, seconds, [k] * len(right)) for k in range(len(seconds)))


def _all_that_are_right(right: Sequence[int], seconds: Sequence[float]) -> float:
    return _walk(right, seconds, [min(most, len(seconds) - 1) for most in right])


def _best_rate(right: Sequence[int], seconds: Sequence[float]) -> float:
    """Each call by itself: most tokens a second."""
    return _walk(right, seconds, [max(range(min(most, len(seconds) - 1) + 1), key=lambda k: (1 + k) / seconds[k])
                                  for most in right])


def _most_always(right: Sequence[int], seconds: Sequence[float]) -> float:
    return _walk(right, seconds, [len(seconds) - 1] * len(right))


def _plain(right: Sequence[int], seconds: Sequence[float]) -> float:
    return len(right) * seconds[0]


def _no_own_token(right: Sequence[int], seconds: Sequence[float]) -> float:
    """A call with k right drafts moves on by k, and by one only where there is none."""
    best = [0.0] * (len(right) + 1)
    for i in reversed(range(len(right))):
        best[i] = min(own + best[min(len(right), i + max(1, min(k, right[i])))] for k, own in enumerate(seconds))
    return best[0]


def _wrong_ones_count(right: Sequence[int], seconds: Sequence[float]) -> float:
    """Moves on by k + 1 whatever was right."""
    best = [0.0] * (len(right) + 1)
    for i in reversed(range(len(right))):
        best[i] = min(own + best[min(len(right), i + 1 + k)] for k, own in enumerate(seconds))
    return best[0]


def _ends_exactly(right: Sequence[int], seconds: Sequence[float]) -> float:
    """Forbids a call that would go beyond the end."""
    best = [0.0] * (len(right) + 1)
    for i in reversed(range(len(right))):
        best[i] = min(own + best[i + 1 + min(k, right[i])] for k, own in enumerate(seconds)
                      if i + 1 + min(k, right[i]) <= len(right))
    return best[0]


def _beyond_the_list(right: Sequence[int], seconds: Sequence[float]) -> float:
    best = [0.0] * (len(right) + 1)
    for i in reversed(range(len(right))):
        best[i] = min(seconds[k] + best[min(len(right), i + 1 + k)] for k in range(right[i] + 1))
    return best[0]


# Right drafts after each token of an answer that copies, then thinks, then copies.
TRACE = [0, 0, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 1, 0, 0, 2, 1, 0, 0, 0, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0,
         0, 0, 1, 0]
FLAT = [20.0, 20.5, 21.0, 21.5, 22.0, 24.0, 26.0, 28.0, 30.0]
STEEP = [11.0, 12.5, 14.0, 15.5, 27.0, 28.5, 30.0, 31.5, 33.0]  # a kernel that slows down past four rows

EXERCISES = {task.id: task for task in (
    Exercise(
        "17-1", "what speculation gains", speed_up,
        cases=((0.5, 1, 1, 0.0, {1: 10.0, 2: 10.0}), (0.7, 2, 1, 2.0, {1: 10.0, 2: 10.5, 3: 11.0}),
               (0.8, 4, 1, 0.0, {1: 20.0, 5: 21.0}), (0.0, 3, 1, 0.0, {1: 20.0, 4: 20.0}),
               (1.0, 3, 1, 1.0, {1: 20.0, 4: 21.0}), (0.9, 0, 4, 5.0, {1: 10.0, 4: 12.0}),
               (0.8, 4, 8, 1.0, {1: 10.0, 5: 10.5, 8: 12.0, 40: 40.0}),
               (0.6, 2, 32, 3.0, {1: 10.0, 3: 10.0, 32: 30.0, 96: 80.0})),
        misconceptions=(
            Misconception(_no_bonus, "a call gives one token more than there are right drafts: the target's own"),
            Misconception(_one_short, "with k drafts the sum goes up to a^k: k + 1 terms"),
            Misconception(_each_by_itself, "a right draft behind a wrong one is thrown away: the i-th counts with a^i"),
            Misconception(_closed_form, "an acceptance of 1 is possible: add the powers up"),
            Misconception(_free_drafts, "the drafts take time too: draft_s for each"),
            Misconception(_one_draft_step, "drafts are made one after another: draft_s counts num_drafts times"),
            Misconception(_draft_for_each, "draft_s is for one draft of the whole batch: it does not grow with it"),
            Misconception(_rows_free, "a call with drafts has more rows: look its seconds up by rows"),
            Misconception(_against_one, "compare with a plain step of the same batch: step_s[batch]"),
            Misconception(_batch_forgotten, "every request of the batch brings 1 + num_drafts rows"),
            Misconception(_batch_counts_twice, "both ways make tokens for the whole batch: it cancels"),
            Misconception(_upside_down, "above 1 means faster: tokens over seconds, against plain"),
        )),
    faulty_speculation.EXERCISE,
    Exercise(
        "17-3", "the best in hindsight", least_seconds,
        cases=(([0, 0, 0], [10.0, 11.0]), ([1, 0], [10.0, 11.0]), ([2, 1, 0, 0], [10.0, 11.0, 12.0]),
               ([1, 0, 2, 1, 0], [10.0, 13.0, 13.5]), ([3, 2, 1, 0], [10.0, 16.0, 17.0]),
               ([5, 4, 3], [10.0, 12.0, 30.0]), ([5, 4], [10.0, 30.0, 12.0]),
               ([1, 3, 2, 1, 0], [10.0, 11.0, 12.0, 13.0]), (TRACE, FLAT), (TRACE, STEEP)),
        misconceptions=(
            Misconception(_all_that_are_right, "a right draft may cost more than it saves: seconds may jump"),
            Misconception(_best_rate, "the best call by itself may end where the next ones are worse: compare what is "
                                      "left to do as well"),
            Misconception(best_fixed, "the number may be another in each call"),
            Misconception(_most_always, "rows for wrong drafts take time too"),
            Misconception(_plain, "with no drafts at all it takes len(right) calls; drafts that are right save some"),
            Misconception(_no_own_token, "a call moves on by its right drafts and one more: the target's own token"),
            Misconception(_wrong_ones_count, "drafts beyond right[i] are wrong: a call keeps min(k, right[i]) of them"),
            Misconception(_ends_exactly, "a call may go beyond the end: what is too much is thrown away"),
            Misconception(_beyond_the_list, "at most len(seconds) - 1 drafts fit into a call"),
        )),
)}
