"""Exercises of notebook 04: top-p, a penalty with a fault, and what the slow loop computes again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.course.checking import Exercise, Misconception

Numbers = Sequence[float]


def _ordered(probabilities: Numbers) -> list[int]:
    return sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))


def top_p(probabilities: Numbers, p: float) -> list[int]:
    """Ids that stay: those with less than ``p`` before them."""
    kept, before = [], 0.0
    for token in _ordered(probabilities):
        if before >= p:
            break
        kept.append(token)
        before += probabilities[token]
    return sorted(kept)


def _stops_before(probabilities: Numbers, p: float) -> list[int]:
    kept, mass = [], 0.0
    for token in _ordered(probabilities):
        mass += probabilities[token]
        if mass > p:
            break
        kept.append(token)
    return sorted(kept)


def _unsorted(probabilities: Numbers, p: float) -> list[int]:
    kept, before = [], 0.0
    for token, probability in enumerate(probabilities):
        if before >= p:
            break
        kept.append(token)
        before += probability
    return kept


def _above_p(probabilities: Numbers, p: float) -> list[int]:
    return [token for token, probability in enumerate(probabilities) if probability >= p]


def _one_too_many(probabilities: Numbers, p: float) -> list[int]:
    kept, before = [], 0.0
    for token in _ordered(probabilities):
        if before > p:
            break
        kept.append(token)
        before += probabilities[token]
    return sorted(kept)


def _ties_reversed(probabilities: Numbers, p: float) -> list[int]:
    kept, before = [], 0.0
    for probability, token in sorted(((value, i) for i, value in enumerate(probabilities)), reverse=True):
        if before >= p:
            break
        kept.append(token)
        before += probability
    return sorted(kept)


def _by_probability(probabilities: Numbers, p: float) -> list[int]:
    kept = top_p(probabilities, p)
    return [token for token in _ordered(probabilities) if token in kept]


# A call that one kind of fault answers wrongly: logits, prompt, output, penalty.
_WITNESSES = {"none": ([1.0, -1.0], [0], [1], 4.0), "wrong sign": ([-1.0], [], [0], 4.0),
              "counted": ([1.0], [], [0, 0], 4.0), "prompt forgotten": ([1.0], [0], [], 4.0)}


@dataclass(frozen=True)
class ToyPenalty:
    """A repetition penalty on a list of logits, perhaps with one fault; shown as a call and what it gives."""

    name: str
    fault: str = "none"

    def __repr__(self) -> str:
        witness = _WITNESSES[self.fault]
        return f"adjust {self.name}, where adjust{witness} gives {self(*witness)}"

    def __call__(self, logits: Numbers, prompt_ids: Sequence[int], output_ids: Sequence[int],
                 penalty: float) -> list[float]:
        """Every token seen in prompt or output gets less likely, once."""
        seen = list(output_ids) if self.fault == "prompt forgotten" else [*prompt_ids, *output_ids]
        adjusted = list(logits)
        for token in seen if self.fault == "counted" else dict.fromkeys(seen):
            value = adjusted[token]
            adjusted[token] = value / penalty if value > 0 or self.fault == "wrong sign" else value * penalty
        return adjusted


def find_fault(adjust: ToyPenalty) -> str:
    """One probe with a positive, a negative and a repeated token, one of them in the prompt alone."""
    positive, negative, twice = adjust([4.0, -4.0, 4.0], [0], [1, 2, 2], 2.0)
    if positive != 2.0:
        return "prompt forgotten"
    if negative != -8.0:
        return "wrong sign"
    return "none" if twice == 2.0 else "counted"


def _positive_only(adjust: ToyPenalty) -> str:
    found = find_fault(adjust)
    return "none" if found == "wrong sign" else found


def _each_token_once(adjust: ToyPenalty) -> str:
    found = find_fault(adjust)
    return "none" if found == "counted" else found


def _no_prompt(adjust: ToyPenalty) -> str:
    found = find_fault(adjust)
    return "none" if found == "prompt forgotten" else found


def _negative_in_the_prompt(adjust: ToyPenalty) -> str:
    if adjust([-4.0], [0], [], 2.0) != [-8.0]:
        return "wrong sign"
    return find_fault(adjust)


def _signs_confused(adjust: ToyPenalty) -> str:
    found = find_fault(adjust)
    return {"none": "wrong sign", "wrong sign": "none"}.get(found, found)


def recomputed(prompt: int, answer: int) -> int:
    """Positions the loop without a cache computes beyond the first time."""
    return sum(prompt + done for done in range(answer)) - (prompt + answer - 1)


def _all_positions(prompt: int, answer: int) -> int:
    return recomputed(prompt, answer) + prompt + answer - 1


def _prompt_alone(prompt: int, answer: int) -> int:
    return prompt * (answer - 1)


def _last_token_counted(prompt: int, answer: int) -> int:
    return recomputed(prompt, answer) - 1


def _answer_grows_from_one(prompt: int, answer: int) -> int:
    return sum(prompt + done for done in range(1, answer + 1)) - (prompt + answer - 1)


EXERCISES = {task.id: task for task in (
    Exercise(
        "04-1", "top-p", top_p,
        cases=(([0.5, 0.3, 0.2], 0.7), ([0.3, 0.2, 0.5], 0.7), ([0.2, 0.5, 0.3], 0.7), ([0.5, 0.25, 0.25], 0.5),
               ([0.9, 0.1], 0.3), ([0.25, 0.25, 0.25, 0.25], 0.5), ([0.125, 0.625, 0.25], 0.875), ([0.5, 0.5], 1.0)),
        misconceptions=(
            Misconception(_stops_before, "the token that crosses p stays: it is kept while the mass *before* it is "
                                         "below p, so at least one always is"),
            Misconception(_unsorted, "walk from the most likely token down, not in the order of ids"),
            Misconception(_above_p, "p is a share of the whole, not a bound for one token"),
            Misconception(_one_too_many, "once exactly p has passed the rest is out: keep while before < p"),
            Misconception(_ties_reversed, "of two tokens of one probability, which does your order put first?"),
            Misconception(_by_probability, "return the ids in rising order"),
        )),
    Exercise(
        "04-2", "the faulty penalty", find_fault,
        cases=((ToyPenalty("A"),), (ToyPenalty("B", "wrong sign"),), (ToyPenalty("C", "counted"),),
               (ToyPenalty("D", "prompt forgotten"),), (ToyPenalty("E", "counted"),), (ToyPenalty("F"),),
               (ToyPenalty("G", "prompt forgotten"),), (ToyPenalty("H", "wrong sign"),)),
        misconceptions=(
            Misconception(_positive_only, "dividing a negative logit makes it larger: probe one"),
            Misconception(_each_token_once, "give it a token that came twice: the penalty applies once a token"),
            Misconception(_negative_in_the_prompt, "a logit that stays and one that moves the wrong way show two "
                                                   "faults: does your test tell them apart?"),
            Misconception(_no_prompt, "give it a token that stands in the prompt and not in the output"),
            Misconception(_signs_confused, "-4 with a penalty of 2 must become less likely: -8"),
        )),
    Exercise(
        "04-3", "what is computed again", recomputed,
        cases=((34, 1), (34, 2), (34, 15), (1, 1), (1, 100), (4000, 200)),
        misconceptions=(
            Misconception(_all_positions, "what must be computed once does not count: which positions are those?"),
            Misconception(_prompt_alone, "earlier answer tokens are computed again too"),
            Misconception(_last_token_counted, "which token of the answer is chosen but never run through the model?"),
            Misconception(_answer_grows_from_one, "the first pass reads the prompt alone"),
        )),
)}
