"""Exercises of notebook 05: the longest prompt in time, a report with a fault, where attention passes matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from minillm.course.checking import Exercise, Misconception

Report = dict[str, Any]


def _most(fits: Callable[[int], bool]) -> int:
    """The largest whole number that fits; 0 if 1 does not."""
    low, high = 0, 1
    while high < 2**40 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _multiplying(tokens: int, body: int, head: int, pair_flops: int, flops: float) -> float:
    return (2 * body * tokens + 2 * head + pair_flops * (tokens * (tokens + 1) // 2)) / flops


def longest(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
            flops: float) -> int:
    """The most tokens whose floor, the longer of reading and multiplying, is at most ``target``."""
    reading = (body + head) * bytes_per_weight / read
    return _most(lambda tokens: max(reading, _multiplying(tokens, body, head, pair_flops, flops)) <= target)


def _longest_of_sum(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                    flops: float) -> int:
    reading = (body + head) * bytes_per_weight / read
    return _most(lambda tokens: reading + _multiplying(tokens, body, head, pair_flops, flops) <= target)


def _longest_read_per_token(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                            flops: float) -> int:
    reading = (body + head) * bytes_per_weight / read
    return _most(lambda tokens: max(reading * tokens, _multiplying(tokens, body, head, pair_flops, flops)) <= target)


def _longest_head_never_read(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                             flops: float) -> int:
    reading = body * bytes_per_weight / read
    return _most(lambda tokens: max(reading, _multiplying(tokens, body, head, pair_flops, flops)) <= target)


def _longest_head_for_all(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                          flops: float) -> int:
    reading = (body + head) * bytes_per_weight / read
    return _most(lambda tokens: max(reading, _multiplying(tokens, body + head, 0, pair_flops, flops)) <= target)


def _longest_no_pairs(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                      flops: float) -> int:
    return longest(target, body, head, 0, bytes_per_weight, read, flops)


def _longest_whole_square(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                          flops: float) -> int:
    reading = (body + head) * bytes_per_weight / read
    return _most(lambda tokens: max(reading, (2 * body * tokens + 2 * head + pair_flops * tokens**2) / flops) <= target)


def _longest_float32(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                     flops: float) -> int:
    return longest(target, body, head, pair_flops, 4, read, flops)


def _longest_never_reads(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                         flops: float) -> int:
    return _most(lambda tokens: _multiplying(tokens, body, head, pair_flops, flops) <= target)


def _longest_one_too_many(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                          flops: float) -> int:
    return longest(target, body, head, pair_flops, bytes_per_weight, read, flops) + 1


def _longest_shorter(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                     flops: float) -> int:
    reading = (body + head) * bytes_per_weight / read
    return _most(lambda tokens: min(reading, _multiplying(tokens, body, head, pair_flops, flops)) <= target)


def _longest_one_flop(target: float, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                      flops: float) -> int:
    reading = (body + head) * bytes_per_weight / read
    return _most(lambda tokens: max(reading, _multiplying(tokens, body, head, 2 * pair_flops, 2 * flops)) <= target)


_MODEL = {"layers": 2, "heads": 4, "kv_heads": 2, "dim": 8, "body": 10_000, "head": 3_000, "vocab": 100}
_ONE_KV_HEAD = {"layers": 3, "heads": 8, "kv_heads": 1, "dim": 16, "body": 50_000, "head": 2_000, "vocab": 70}
_ALL_KV_HEADS = {"layers": 2, "heads": 6, "kv_heads": 6, "dim": 4, "body": 7_000, "head": 900, "vocab": 50}


def make_report(model: dict[str, int], tokens: int, fault: str = "none") -> Report:
    """What a prefill of ``tokens`` tokens in float32 says it did."""
    rows = tokens if fault == "logits for every row" else 1
    heads = model["heads"] if fault == "keys of every query head" else model["kv_heads"]
    return {"tokens": tokens, "weight_bytes": 4 * (model["body"] + model["head"]) * (
        tokens if fault == "weights read per token" else 1),
        "logit_bytes": rows * model["vocab"] * 4,
        "kv_bytes": 2 * model["layers"] * heads * model["dim"] * 4 * tokens}


def find_fault(model: dict[str, int], report: Report) -> str:
    """Compare each counter with what it must be."""
    if report["weight_bytes"] != 4 * (model["body"] + model["head"]):
        return "weights read per token"
    if report["logit_bytes"] != 4 * model["vocab"]:
        return "logits for every row"
    kv = 2 * model["layers"] * model["kv_heads"] * model["dim"] * 4 * report["tokens"]
    return "none" if report["kv_bytes"] == kv else "keys of every query head"


def _keys_alone(model: dict[str, int], report: Report) -> str:
    kv = model["layers"] * model["kv_heads"] * model["dim"] * 4 * report["tokens"]
    found = find_fault(model, report)
    return found if found not in ("none", "keys of every query head") else \
        "none" if report["kv_bytes"] == kv else "keys of every query head"


def _logits_are_fine(model: dict[str, int], report: Report) -> str:
    found = find_fault(model, report)
    return "none" if found == "logits for every row" else found


def _weights_are_fine(model: dict[str, int], report: Report) -> str:
    found = find_fault(model, report)
    return "none" if found == "weights read per token" else found


def _all_heads(model: dict[str, int], report: Report) -> str:
    found = find_fault(model, report)
    return {"none": "keys of every query head", "keys of every query head": "none"}.get(found, found)


def _without_head(model: dict[str, int], report: Report) -> str:
    return "weights read per token" if report["weight_bytes"] != 4 * model["body"] else find_fault(model, report)


def _one_of_query_heads(model: dict[str, int], report: Report) -> str:
    found = find_fault(model, report)
    kv = model["layers"] * model["heads"] * model["dim"] * 4 * report["tokens"]
    return found if found not in ("none", "keys of every query head") else \
        "none" if report["kv_bytes"] == kv else "keys of every query head"


def _looks_for_the_fault(model: dict[str, int], report: Report) -> str:
    for fault in ("weights read per token", "logits for every row", "keys of every query head"):
        if report == make_report(model, report["tokens"], fault):
            return fault
    return "none"


def _heads_faulty_where_all_differ(model: dict[str, int], report: Report) -> str:
    found = find_fault(model, report)
    kv = 2 * model["layers"] * model["heads"] * model["dim"] * 4 * report["tokens"]
    return "keys of every query head" if found == "none" and report["kv_bytes"] == kv else found


def crossing(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    """Smallest prompt whose attention takes at least the FLOPs of the matrices."""
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    # 2 * layer * T <= 4 * heads * dim * T (T + 1) / 2
    return max(1, math.ceil(layer / (heads * dim)) - 1)


def _crossing_square(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    return math.ceil(layer / (2 * heads * dim))


def _crossing_kv_heads(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    return max(1, math.ceil(layer / (kv_heads * dim)) - 1)


def _crossing_scores_alone(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    return max(1, math.ceil(2 * layer / (heads * dim)) - 1)


def _crossing_mlp_alone(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    return max(1, math.ceil(3 * hidden * inner / (heads * dim)) - 1)


def _crossing_rounded_down(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    return max(1, layer // (heads * dim) - 1)


def _crossing_full_keys(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    return crossing(hidden, inner, heads, heads, dim)


def _crossing_half_square(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    return crossing(hidden, inner, heads, kv_heads, dim) + 1


def _crossing_hidden_for_heads(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    layer = 2 * hidden * hidden + 2 * hidden * kv_heads * dim + 3 * hidden * inner
    return max(1, math.ceil(layer / (heads * dim)) - 1)


def _crossing_hidden_pairs(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    return max(1, math.ceil(layer / hidden) - 1)


def _crossing_two_in_mlp(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 2 * hidden * inner
    return max(1, math.ceil(layer / (heads * dim)) - 1)


def _crossing_one_flop(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    return max(1, math.ceil(layer / (2 * heads * dim)) - 1)


def _crossing_not_rounded(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> float:
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    return layer / (heads * dim) - 1


EXERCISES = {task.id: task for task in (
    Exercise(
        "05-1", "the longest prompt in time", longest,
        cases=((2.0, 100, 20, 8, 4, 1000.0, 1000.0), (1.0, 400, 100, 0, 2, 1100.0, 10_300.0),
               (1.0, 400, 100, 12, 2, 900.0, 10_300.0), (1.0, 400, 400, 12, 2, 1100.0, 10_300.0),
               (0.5, 400, 100, 4, 2, 1e6, 1500.0),
               (10.0, 106_203_456, 28_311_552, 69_120, 4, 24e9, 377e9),
               (0.185, 7_504_924_672, 525_336_576, 524_288, 2, 3.35e12, 3.46e14),
               (0.004, 7_504_924_672, 525_336_576, 524_288, 2, 3.35e12, 3.46e14)),
        misconceptions=(
            Misconception(_longest_of_sum, "which of two things that go on at the same time ends the wait?"),
            Misconception(_longest_shorter, "of reading and multiplying, the one that ends last ends the wait"),
            Misconception(_longest_read_per_token, "how often does one pass read a weight?"),
            Misconception(_longest_head_never_read, "is there a matrix beside the layers' that a pass reads?"),
            Misconception(_longest_never_reads, "a pass cannot end before every weight has come from memory"),
            Misconception(_longest_float32, "look at bytes_per_weight: not every model is kept in float32"),
            Misconception(_longest_head_for_all, "for how many rows of the prompt does the head run?"),
            Misconception(_longest_no_pairs, "the matrices are not all that is multiplied: what does attention add?"),
            Misconception(_longest_whole_square, "how many of the T * T pairs does the mask leave?"),
            Misconception(_longest_one_flop, "a weight is multiplied and added: how many FLOPs are that?"),
            Misconception(_longest_one_too_many, "is that the last prompt in time, or the first that is late?"),
        )),
    Exercise(
        "05-2", "the report that does not add up", find_fault,
        cases=tuple((model, make_report(model, tokens, fault)) for model, tokens, fault in (
            (_MODEL, 16, "none"), (_MODEL, 16, "weights read per token"), (_MODEL, 16, "logits for every row"),
            (_MODEL, 16, "keys of every query head"), (_MODEL, 1, "none"), (_MODEL, 5, "logits for every row"),
            (_ONE_KV_HEAD, 9, "none"), (_ONE_KV_HEAD, 9, "keys of every query head"),
            (_ONE_KV_HEAD, 1, "keys of every query head"), (_ONE_KV_HEAD, 3, "weights read per token"),
            (_ALL_KV_HEADS, 12, "none"), (_ALL_KV_HEADS, 12, "logits for every row"))),
        misconceptions=(
            Misconception(_keys_alone, "what is kept of a position besides its key?"),
            Misconception(_logits_are_fine, "how many rows of logits does a prefill need?"),
            Misconception(_weights_are_fine, "how often does one pass read a weight?"),
            Misconception(_all_heads, "which heads do keys and values belong to?"),
            Misconception(_without_head, "which weights does a pass read besides those of the layers?"),
            Misconception(_one_of_query_heads, "two mistakes cancel where heads = 2 x kv_heads: how many tensors are "
                                               "kept, and of which heads?"),
            Misconception(_looks_for_the_fault, "a faulty counter can equal a right one (a prompt of one token, as "
                                                "many KV heads as heads): work out the right value and compare with "
                                                "that"),
            Misconception(_heads_faulty_where_all_differ, "in this model every query head has a KV head of its own: "
                                                          "what is the right number of bytes then?"),
        )),
    Exercise(
        "05-3", "where attention passes the matrices", crossing,
        cases=((8, 16, 2, 1, 4), (576, 1536, 9, 3, 64), (4096, 14_336, 32, 8, 128), (8192, 28_672, 64, 8, 128),
               (64, 0, 8, 1, 64), (10, 7, 3, 1, 4)),
        misconceptions=(
            Misconception(_crossing_square, "does every token meet every other? Count the pairs that the mask leaves"),
            Misconception(_crossing_half_square, "a token meets itself too: count the pairs of a prompt of one token"),
            Misconception(_crossing_rounded_down, "is the attention of that many whole tokens *at least* as much?"),
            Misconception(_crossing_not_rounded, "a prompt has a whole number of tokens"),
            Misconception(_crossing_full_keys, "how many heads do keys and values have?"),
            Misconception(_crossing_kv_heads, "which heads compute scores: those of queries or those of keys?"),
            Misconception(_crossing_scores_alone, "what does a pair cost besides its score?"),
            Misconception(_crossing_mlp_alone, "attention has matrices of its own: four"),
            Misconception(_crossing_two_in_mlp, "count the MLP's matrices: this one is gated"),
            Misconception(_crossing_hidden_for_heads, "queries have heads * dim numbers: is that hidden here?"),
            Misconception(_crossing_hidden_pairs, "how many numbers do all query heads of a pair hold together?"),
            Misconception(_crossing_one_flop, "a weight is multiplied and added: how many FLOPs are that a token?"),
        )),
)}
