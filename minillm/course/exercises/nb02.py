"""Exercises of notebook 02: the mask, attention with a fault, and counting pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minillm.course.checking import Exercise, Misconception

Mask = list[list[bool]]
Heads = Sequence[Sequence[Sequence[float]]]


def mask(num_queries: int, num_keys: int, window: int | None) -> Mask:
    """Queries are the last tokens; each sees itself and what came before, at most ``window`` keys."""
    first = num_keys - num_queries
    return [[key <= first + row and (window is None or key > first + row - window) for key in range(num_keys)]
            for row in range(num_queries)]


def _queries_come_first(num_queries: int, num_keys: int, window: int | None) -> Mask:
    return [[key <= row and (window is None or key > row - window) for key in range(num_keys)]
            for row in range(num_queries)]


def _not_itself(num_queries: int, num_keys: int, window: int | None) -> Mask:
    first = num_keys - num_queries
    return [[key < first + row and (window is None or key > first + row - window) for key in range(num_keys)]
            for row in range(num_queries)]


def _window_too_wide(num_queries: int, num_keys: int, window: int | None) -> Mask:
    return mask(num_queries, num_keys, None if window is None else window + 1)


def _window_from_the_end(num_queries: int, num_keys: int, window: int | None) -> Mask:
    first, oldest = num_keys - num_queries, 0 if window is None else num_keys - window
    return [[oldest <= key <= first + row for key in range(num_keys)] for row in range(num_queries)]


def _no_window(num_queries: int, num_keys: int, window: int | None) -> Mask:
    return mask(num_queries, num_keys, None)


def _hidden_is_true(num_queries: int, num_keys: int, window: int | None) -> Mask:
    return [[not seen for seen in row] for row in mask(num_queries, num_keys, window)]


@dataclass(frozen=True)
class ToyAttention:
    """Attention in plain Python, perhaps with one fault. Lists ``[token][head][number]`` in and out."""

    name: str
    fault: str = "none"

    def __repr__(self) -> str:
        return f"attention {self.name}"

    def __call__(self, query: Heads, key: Heads, value: Heads) -> list[list[list[float]]]:
        """As many queries as keys; query head h reads KV head ``h // (heads // kv_heads)``."""
        heads, kv_heads = len(query[0]), len(key[0])
        kv_head = [h % kv_heads if self.fault == "wrong head" else h * kv_heads // heads for h in range(heads)]
        return [[self._one(row[h], key, value, kv_head[h], t) for h in range(heads)] for t, row in enumerate(query)]

    def _one(self, query: Sequence[float], key: Heads, value: Heads, head: int, position: int) -> list[float]:
        seen = len(key) if self.fault == "no mask" else position + 1
        scale = 1.0 if self.fault == "no scale" else len(query) ** -0.5
        scores = [scale * sum(a * b for a, b in zip(query, key[t][head])) for t in range(seen)]
        weights = [math.exp(score - max(scores)) for score in scores]
        total = sum(weights)
        return [sum(w * value[t][head][i] for t, w in enumerate(weights)) / total for i in range(len(query))]


def find_fault(attend: ToyAttention) -> str:
    """One probe a fault; in each, the other faults would show nothing."""
    zeros, one = [0.0] * 4, [1.0] * 4
    # One token: only the choice of the head can be wrong. Two KV heads of different values, four query heads.
    out = attend([[zeros] * 4], [[zeros, zeros]], [[zeros, one]])
    if [head[0] for head in out[0]] != [0.0, 0.0, 1.0, 1.0]:
        return "wrong head"
    # The first token must not notice the second.
    out = attend([[zeros]] * 2, [[zeros]] * 2, [[zeros], [one]])
    if out[0][0][0] != 0.0:
        return "no mask"
    # Scores 0 and q.k / sqrt(4) = 2, so the second token's weight is e^2 / (1 + e^2).
    out = attend([[one], [one]], [[zeros], [one]], [[zeros], [one]])
    return "none" if abs(out[1][0][0] - math.exp(2) / (1 + math.exp(2))) < 1e-6 else "no scale"


def _one_head_only(attend: ToyAttention) -> str:
    found = find_fault(attend)
    return "none" if found == "wrong head" else found


def _looks_at_the_last_token(attend: ToyAttention) -> str:
    found = find_fault(attend)
    return "none" if found == "no mask" else found


def _zero_queries_only(attend: ToyAttention) -> str:
    found = find_fault(attend)
    return "none" if found == "no scale" else found


def _scale_forgotten(attend: ToyAttention) -> str:
    found = find_fault(attend)
    return {"none": "no scale", "no scale": "none"}.get(found, found)


def _another_word(attend: ToyAttention) -> str:
    return find_fault(attend).replace("none", "no fault")


def _always_the_mask(attend: ToyAttention) -> str:
    return "no mask"


def pairs(prompt: int, answer: int, window: int | None) -> int:
    """(query, key) pairs: the token at position p sees p + 1 keys, or the window; the last token is never read."""
    return sum(min(position + 1, window or position + 1) for position in range(prompt + answer - 1))


def _full_square(prompt: int, answer: int, window: int | None) -> int:
    return (prompt + answer - 1) * min(prompt + answer - 1, window or prompt + answer - 1)


def _prefill_alone(prompt: int, answer: int, window: int | None) -> int:
    return pairs(prompt, 1, window)


def _reads_the_last_token(prompt: int, answer: int, window: int | None) -> int:
    return pairs(prompt, answer + 1, window)


def _without_itself(prompt: int, answer: int, window: int | None) -> int:
    return sum(min(position, window or position) for position in range(prompt + answer - 1))


def _without_window(prompt: int, answer: int, window: int | None) -> int:
    return pairs(prompt, answer, None)


EXERCISES = {task.id: task for task in (
    Exercise(
        "02-1", "who sees whom", mask,
        cases=((3, 3, None), (1, 4, None), (2, 5, None), (5, 5, 2), (2, 6, 3), (1, 1, 1), (1, 3, 9)),
        misconceptions=(
            Misconception(_queries_come_first, "the queries are the last tokens of the text: with 5 keys and 2 queries "
                                               "row 0 stands at position 3"),
            Misconception(_not_itself, "a token sees itself too: key <= query"),
            Misconception(_window_too_wide, "a window of w holds w keys, the query's own among them"),
            Misconception(_window_from_the_end, "each token has a window of its own, which ends at that token"),
            Misconception(_no_window, "with a window of w, keys that lie w or more behind are hidden"),
            Misconception(_hidden_is_true, "True means seen here, as in torch's attn_mask"),
        )),
    Exercise(
        "02-2", "the faulty attention", find_fault,
        cases=((ToyAttention("A"),), (ToyAttention("B", "no mask"),), (ToyAttention("C", "wrong head"),),
               (ToyAttention("D", "no scale"),)),
        misconceptions=(
            Misconception(_one_head_only, "a wrong choice of head shows only with several KV heads of different "
                                          "values and more query heads than that"),
            Misconception(_scale_forgotten, "query and key of four ones have the score 4 / sqrt(4) = 2, so the weights "
                                            "are 1 and e^2 over their sum"),
            Misconception(_another_word, "return one of the four names exactly as the text spells them"),
            Misconception(_looks_at_the_last_token, "the last token sees everything in any case: look at the first"),
            Misconception(_zero_queries_only, "where all scores are 0 the scale does not show: give it a score whose "
                                              "weights you can work out"),
            Misconception(_always_the_mask, "one of them has another fault, and one has none: probe before you blame"),
        )),
    Exercise(
        "02-3", "pairs of a request", pairs,
        cases=((3, 1, None), (34, 15, None), (1, 1, None), (10, 5, 4), (100, 1, 8), (2, 8, 16), (4000, 200, None)),
        misconceptions=(
            Misconception(_full_square, "half of the square is masked: position p sees p + 1 keys"),
            Misconception(_prefill_alone, "each decode step attends too: one query over all keys so far"),
            Misconception(_reads_the_last_token, "nothing follows the last token, so it never becomes a query"),
            Misconception(_without_itself, "a token attends to itself as well"),
            Misconception(_without_window, "a window caps the keys that a token sees"),
        )),
)}
