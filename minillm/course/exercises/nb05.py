"""Exercises of notebook 05: the floor of a prefill, a report with a fault, and where attention passes the matrices."""

from __future__ import annotations

import math
from typing import Any

from minillm.course.checking import Exercise, Misconception

Report = dict[str, Any]


def floor_s(tokens: int, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
            flops: float) -> float:
    """The longer of reading every weight once and of all multiplications; the head for one row."""
    pairs = tokens * (tokens + 1) // 2
    reading = (body + head) * bytes_per_weight / read
    multiplying = (2 * body * tokens + 2 * head + pair_flops * pairs) / flops
    return max(reading, multiplying)


def _sum(tokens: int, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float, flops: float) -> float:
    reading = (body + head) * bytes_per_weight / read
    return reading + floor_s(tokens, body, head, pair_flops, 0, read, flops)


def _reads_per_token(tokens: int, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                     flops: float) -> float:
    return floor_s(tokens, body, head, pair_flops, bytes_per_weight * tokens, read, flops)


def _head_for_all(tokens: int, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                  flops: float) -> float:
    return max((body + head) * bytes_per_weight / read,
               (2 * (body + head) * tokens + pair_flops * tokens * (tokens + 1) // 2) / flops)


def _no_pairs(tokens: int, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
              flops: float) -> float:
    return floor_s(tokens, body, head, 0, bytes_per_weight, read, flops)


def _whole_square(tokens: int, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                  flops: float) -> float:
    return max((body + head) * bytes_per_weight / read,
               (2 * body * tokens + 2 * head + pair_flops * tokens**2) / flops)


_MODEL = {"layers": 2, "heads": 4, "kv_heads": 2, "dim": 8, "body": 10_000, "head": 3_000, "vocab": 100}


def make_report(tokens: int, fault: str = "none") -> Report:
    """What a prefill of ``tokens`` tokens in float32 says it did."""
    m = _MODEL
    rows = tokens if fault == "logits for every row" else 1
    heads = m["heads"] if fault == "keys of every query head" else m["kv_heads"]
    return {"tokens": tokens, "weight_bytes": 4 * (m["body"] + m["head"]) * (
        tokens if fault == "weights read per token" else 1),
        "logit_bytes": rows * m["vocab"] * 4, "kv_bytes": 2 * m["layers"] * heads * m["dim"] * 4 * tokens}


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


def _head_never_read(tokens: int, body: int, head: int, pair_flops: int, bytes_per_weight: int, read: float,
                     flops: float) -> float:
    pairs = tokens * (tokens + 1) // 2
    return max(body * bytes_per_weight / read, (2 * body * tokens + 2 * head + pair_flops * pairs) / flops)


def _crossing_rounded_down(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    layer = hidden * dim * (heads + 2 * kv_heads) + heads * dim * hidden + 3 * hidden * inner
    return max(1, layer // (heads * dim) - 1)


def _crossing_full_keys(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> int:
    return crossing(hidden, inner, heads, heads, dim)


EXERCISES = {task.id: task for task in (
    Exercise(
        "05-1", "the floor of a prefill", floor_s,
        cases=((1, 100, 20, 0, 4, 10.0, 1000.0), (1000, 100, 20, 0, 4, 100.0, 10.0), (10, 100, 20, 8, 2, 1e9, 10.0),
               (7, 50, 500, 4, 2, 1e9, 1.0), (4000, 7_504_924_672, 525_336_576, 524_288, 2, 3.35e12, 3.46e14)),
        misconceptions=(
            Misconception(_sum, "reading and multiplying go on at the same time: the longer counts, not the sum"),
            Misconception(_reads_per_token, "one pass reads each weight once, however many tokens go through"),
            Misconception(_head_never_read, "the head is read too, once"),
            Misconception(_head_for_all, "the head runs for the last row alone"),
            Misconception(_no_pairs, "attention adds pair_flops for each of T (T + 1) / 2 pairs"),
            Misconception(_whole_square, "the mask hides half: T (T + 1) / 2 pairs, not T * T"),
        )),
    Exercise(
        "05-2", "the report that does not add up", find_fault,
        cases=tuple((_MODEL, make_report(tokens, fault)) for tokens, fault in (
            (16, "none"), (16, "weights read per token"), (16, "logits for every row"),
            (16, "keys of every query head"), (1, "none"), (5, "logits for every row"))),
        misconceptions=(
            Misconception(_keys_alone, "keys *and* values are kept: two of each"),
            Misconception(_logits_are_fine, "how many rows of logits does a prefill need?"),
            Misconception(_weights_are_fine, "how often does one pass read a weight?"),
            Misconception(_all_heads, "keys and values belong to KV heads, not to query heads"),
        )),
    Exercise(
        "05-3", "where attention passes the matrices", crossing,
        cases=((8, 16, 2, 1, 4), (576, 1536, 9, 3, 64), (4096, 14_336, 32, 8, 128), (8192, 28_672, 64, 8, 128),
               (64, 0, 8, 1, 64), (10, 7, 3, 1, 4)),
        misconceptions=(
            Misconception(_crossing_square, "half of the square is masked: pairs are T (T + 1) / 2"),
            Misconception(_crossing_rounded_down, "the smallest prompt at which attention takes *at least* as much: "
                                                  "round up to a whole token"),
            Misconception(_crossing_full_keys, "keys and values have kv_heads heads, so their matrices are narrower"),
            Misconception(_crossing_kv_heads, "every query head computes its own scores: heads, not kv_heads"),
            Misconception(_crossing_scores_alone, "a pair costs its score and its value: 4 FLOPs a number"),
            Misconception(_crossing_mlp_alone, "attention's own four matrices are matrices too"),
        )),
)}
