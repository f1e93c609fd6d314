"""Exercises of notebook 02: the mask, one query's attention, attention with a fault, and counting pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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


def _window_or_zero(num_queries: int, num_keys: int, window: int | None) -> Mask:
    return mask(num_queries, num_keys, window or 0)


def one_query(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one new token: query [heads, d], key and value [T, KV heads, d] -> [heads, d]."""
    return _one_query(query, key, value)


def _one_query(query: Tensor, key: Tensor, value: Tensor, *, kv_head: list[int] | None = None,
               scale: float | None = None, axis: int = 0) -> Tensor:
    heads, numbers = query.shape
    group = heads // key.shape[1]
    kv_head = kv_head or [head // group for head in range(heads)]
    scores = (query * key[:, kv_head]).sum(-1) * (numbers ** -0.5 if scale is None else scale)  # [T, heads]
    return (scores.softmax(axis).unsqueeze(-1) * value[:, kv_head]).sum(0)


def _tiled_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _one_query(query, key, value, kv_head=[head % key.shape[1] for head in range(len(query))])


def _number_of_kv_heads_for_group(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _one_query(query, key, value, kv_head=[head // key.shape[1] for head in range(len(query))])


def _groups_of_three(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _one_query(query, key, value, kv_head=[head // 3 for head in range(len(query))])


def _unscaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _one_query(query, key, value, scale=1.0)


def _scaled_for_64(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _one_query(query, key, value, scale=1 / 8)


def _scaled_without_root(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _one_query(query, key, value, scale=1 / query.shape[-1])


def _softmax_over_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _one_query(query, key, value, axis=1)


def _no_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    kv_head = [head * key.shape[1] // len(query) for head in range(len(query))]
    scores = (query * key[:, kv_head]).sum(-1) * query.shape[-1] ** -0.5
    return (scores.unsqueeze(-1) * value[:, kv_head]).sum(0)


def _returns_nothing(*_arguments: object) -> None:
    return None


def _tensors(heads: int, kv_heads: int, tokens: int, numbers: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same random query, keys and values at every call."""
    generator = torch.Generator().manual_seed(heads)
    shapes = (heads, numbers), (tokens, kv_heads, numbers), (tokens, kv_heads, numbers)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


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


def _window_in_decode_only(prompt: int, answer: int, window: int | None) -> int:
    return pairs(prompt, 1, None) + pairs(prompt, answer, window) - pairs(prompt, 1, window)


def _window_always_full(prompt: int, answer: int, window: int | None) -> int:
    return pairs(prompt, answer, None) if window is None else window * (prompt + answer - 1)


def _window_formula_unguarded(prompt: int, answer: int, window: int | None) -> int:
    if window is None:
        return pairs(prompt, answer, None)
    return window * (window + 1) // 2 + (prompt + answer - 1 - window) * window


def _one_pair_a_token(prompt: int, answer: int, window: int | None) -> int:
    return pairs(prompt, 1, window) + answer


_NOTHING = Misconception(_returns_nothing, "the function ran to its end without `return`")
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
            Misconception(_window_or_zero, "`window or 0` makes a window of no keys out of no window"),
            _NOTHING,
        )),
    Exercise(
        "02-2", "one query", one_query,
        cases=tuple(_tensors(*sizes) for sizes in ((8, 4, 3, 4), (9, 3, 5, 64), (6, 2, 2, 16), (4, 4, 3, 8),
                                                   (2, 1, 1, 4))),
        misconceptions=(
            Misconception(_tiled_heads, "neighbours share: with 8 query heads and 4 KV heads, query heads 0 and 1 both "
                                        "read KV head 0"),
            Misconception(_number_of_kv_heads_for_group, "a group is the number of query heads for each KV head; here "
                                                         "h was divided by the number of KV heads"),
            Misconception(_groups_of_three, "h // 3 fits nine query heads over three KV heads: how many share one "
                                            "here?"),
            Misconception(_unscaled, "the scores are too large: dot products grow with the numbers that a head has"),
            Misconception(_scaled_for_64, "8 is the square root of 64: look at how many numbers a head has here"),
            Misconception(_scaled_without_root, "d random products add up to a sum about as large as the root of d, "
                                                "not d"),
            Misconception(_softmax_over_heads, "the weights of one head over all tokens must add up to 1; here those "
                                               "of one token over all heads do"),
            Misconception(_no_softmax, "scores may be negative and add up to anything: they are no weights yet"),
            _NOTHING,
        ), dtype="float32"),
    Exercise(
        "02-3", "find the flaw", find_fault,
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
            _NOTHING,
        )),
    Exercise(
        "02-4", "pairs of a request", pairs,
        cases=((3, 1, None), (34, 15, None), (1, 1, None), (10, 5, 4), (100, 1, 8), (2, 8, 16), (4000, 200, None)),
        misconceptions=(
            Misconception(_full_square, "half of the square is masked: position p sees p + 1 keys"),
            Misconception(_prefill_alone, "each decode step attends too: one query over all keys so far"),
            Misconception(_reads_the_last_token, "nothing follows the last token, so it never becomes a query"),
            Misconception(_without_itself, "a token attends to itself as well"),
            Misconception(_without_window, "a window caps the keys that a token sees"),
            Misconception(_window_in_decode_only, "the window holds in prefill too: a late prompt token sees no more "
                                                  "keys than it allows"),
            Misconception(_window_always_full, "a window is a limit: early tokens have fewer keys behind them than it "
                                               "allows"),
            Misconception(_window_formula_unguarded, "what if the window is longer than the whole text?"),
            Misconception(_one_pair_a_token, "a decode step is one query, but how many keys does it meet?"),
            _NOTHING,
        )),
)}
