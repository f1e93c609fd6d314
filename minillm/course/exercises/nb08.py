"""Exercises of notebook 08: intensity, what limits a step, and the crossover batch."""

from __future__ import annotations

import math

from minillm.course.checking import Exercise, Misconception

Numbers = dict[str, float]


def intensity(batch: int, weights: int, bytes_per_weight: int, token_bytes: int, context: int) -> float:
    """FLOPs of the matrices over the bytes of weights and caches, of one decode step."""
    return 2 * weights * batch / (weights * bytes_per_weight + batch * context * token_bytes)


def _weights_per_request(batch: int, weights: int, bytes_per_weight: int, token_bytes: int, context: int) -> float:
    return 2 * weights * batch / (batch * (weights * bytes_per_weight + context * token_bytes))


def _no_cache(batch: int, weights: int, bytes_per_weight: int, token_bytes: int, context: int) -> float:
    return intensity(batch, weights, bytes_per_weight, token_bytes, 0)


def _one_cache(batch: int, weights: int, bytes_per_weight: int, token_bytes: int, context: int) -> float:
    return 2 * weights * batch / (weights * bytes_per_weight + context * token_bytes)


def _one_operation(batch: int, weights: int, bytes_per_weight: int, token_bytes: int, context: int) -> float:
    return intensity(batch, weights, bytes_per_weight, token_bytes, context) / 2


def _flops_of_one(batch: int, weights: int, bytes_per_weight: int, token_bytes: int, context: int) -> float:
    return intensity(batch, weights, bytes_per_weight, token_bytes, context) / batch


def _upside_down(batch: int, weights: int, bytes_per_weight: int, token_bytes: int, context: int) -> float:
    return 1 / intensity(batch, weights, bytes_per_weight, token_bytes, context)


_MACHINE = {"read": 20e9, "flops": 300e9, "call": 1e-6}


def limit(step: Numbers, machine: Numbers) -> str:
    """The ceiling that explains a step's seconds, if one is within a factor of two."""
    floors = {"bytes": step["bytes"] / machine["read"], "flops": step["flops"] / machine["flops"],
              "calls": step["calls"] * machine["call"]}
    name = max(floors, key=lambda key: floors[key])
    return name if step["seconds"] <= 2 * floors[name] else "none"


def _always_bytes(step: Numbers, machine: Numbers) -> str:
    return "bytes"


def _sum_of_floors(step: Numbers, machine: Numbers) -> str:
    total = step["bytes"] / machine["read"] + step["flops"] / machine["flops"] + step["calls"] * machine["call"]
    return limit(step | {"seconds": 0.0}, machine) if step["seconds"] <= 2 * total else "none"


def _calls_divided(step: Numbers, machine: Numbers) -> str:
    return limit(step, machine | {"call": 1 / machine["call"]})


def _never_none(step: Numbers, machine: Numbers) -> str:
    return limit(step | {"seconds": 0.0}, machine)


def _twice_is_too_much(step: Numbers, machine: Numbers) -> str:
    return limit(step | {"seconds": 1.0001 * step["seconds"]}, machine)


def _the_smallest(step: Numbers, machine: Numbers) -> str:
    floors = {"bytes": step["bytes"] / machine["read"], "flops": step["flops"] / machine["flops"],
              "calls": step["calls"] * machine["call"]}
    return min(floors, key=lambda key: floors[key])


def _raw_numbers(step: Numbers, machine: Numbers) -> str:
    return max(("bytes", "flops", "calls"), key=lambda key: step[key])


def _calls_forgotten(step: Numbers, machine: Numbers) -> str:
    return limit(step | {"calls": 0}, machine)


def crossover(weights: int, bytes_per_weight: int, token_bytes: int, context: int, read: float,
              flops: float) -> int | None:
    """Smallest batch whose multiplications take at least as long as its reading; None where none does."""
    gain = 2 * weights / flops - context * token_bytes / read
    return math.ceil(weights * bytes_per_weight / read / gain) if gain > 0 else None


def _without_caches(weights: int, bytes_per_weight: int, token_bytes: int, context: int, read: float,
                    flops: float) -> int | None:
    return crossover(weights, bytes_per_weight, token_bytes, 0, read, flops)


def _rounded_down(weights: int, bytes_per_weight: int, token_bytes: int, context: int, read: float,
                  flops: float) -> int | None:
    gain = 2 * weights / flops - context * token_bytes / read
    return math.floor(weights * bytes_per_weight / read / gain) if gain > 0 else None


def _one_more(weights: int, bytes_per_weight: int, token_bytes: int, context: int, read: float,
              flops: float) -> int | None:
    found = _rounded_down(weights, bytes_per_weight, token_bytes, context, read, flops)
    return None if found is None else found + 1


def _by_trying(weights: int, bytes_per_weight: int, token_bytes: int, context: int, read: float,
               flops: float) -> int | None:
    found = crossover(weights, bytes_per_weight, token_bytes, context, read, flops)
    return found if found is not None and found < 4096 else None


def _half_the_work(weights: int, bytes_per_weight: int, token_bytes: int, context: int, read: float,
                   flops: float) -> int | None:
    return crossover(weights, bytes_per_weight, token_bytes, context, read, 2 * flops)


def _negative(weights: int, bytes_per_weight: int, token_bytes: int, context: int, read: float,
              flops: float) -> int | None:
    gain = 2 * weights / flops - context * token_bytes / read
    return math.ceil(weights * bytes_per_weight / read / gain)


EXERCISES = {task.id: task for task in (
    Exercise(
        "08-1", "intensity", intensity,
        cases=((1, 100, 2, 4, 0), (8, 100, 2, 4, 10), (8, 100, 2, 4, 0), (3, 70, 4, 5, 6),
               (1, 134_515_008, 4, 46_080, 512), (16, 7_504_924_672, 2, 131_072, 32_768)),
        misconceptions=(
            Misconception(_weights_per_request, "a step reads the weights once for all requests; only caches are read "
                                                "per request"),
            Misconception(_flops_of_one, "every request multiplies by all of the weights"),
            Misconception(_no_cache, "each request's keys and values are read too"),
            Misconception(_one_cache, "every request has a cache of its own"),
            Misconception(_one_operation, "a weight takes a multiplication and an addition for each request"),
            Misconception(_upside_down, "intensity is FLOPs per byte, not bytes per FLOP"),
        )),
    Exercise(
        "08-2", "what limits a step", limit,
        cases=(({"bytes": 538e6, "flops": 2.7e8, "calls": 1300, "seconds": 0.030}, _MACHINE),
               ({"bytes": 538e6, "flops": 2.2e11, "calls": 1300, "seconds": 0.9}, _MACHINE),
               ({"bytes": 10e6, "flops": 1e7, "calls": 1300, "seconds": 0.002}, _MACHINE),
               ({"bytes": 538e6, "flops": 2.7e8, "calls": 1300, "seconds": 0.2}, _MACHINE),
               ({"bytes": 538e6, "flops": 1.2e10, "calls": 1300, "seconds": 0.05}, _MACHINE),
               ({"bytes": 400e6, "flops": 3e9, "calls": 10_000, "seconds": 0.04}, _MACHINE),
               ({"bytes": 400e6, "flops": 3e9, "calls": 10_000, "seconds": 0.045}, _MACHINE),
               ({"bytes": 10e6, "flops": 1e7, "calls": 1300, "seconds": 0.0026}, _MACHINE)),
        misconceptions=(
            Misconception(_always_bytes, "turn each number into seconds by its own rate, and compare"),
            Misconception(_never_none, "over twice its largest floor, a step is explained by none of the three"),
            Misconception(_sum_of_floors, "compare with twice the highest floor, not with twice their sum"),
            Misconception(_calls_divided, "`call` is seconds a call, not calls a second: multiply"),
            Misconception(_the_smallest, "the longest of the three holds a step up"),
            Misconception(_twice_is_too_much, "exactly twice is not more than twice"),
            Misconception(_raw_numbers, "bytes, FLOPs and calls have different rates: compare seconds"),
            Misconception(_calls_forgotten, "a small model's step may be nothing but calls"),
        )),
    Exercise(
        "08-3", "the crossover batch", crossover,
        cases=((1000, 2, 10, 0, 100.0, 1000.0), (1000, 2, 1, 10, 100.0, 1000.0), (1000, 2, 10, 100, 100.0, 1000.0),
               (134_515_008, 4, 46_080, 0, 21e9, 300e9), (7_504_924_672, 2, 131_072, 0, 3.35e12, 9.89e14),
               (7_504_924_672, 2, 131_072, 512, 3.35e12, 9.89e14), (7_504_924_672, 2, 131_072, 8192, 3.35e12, 9.89e14),
               (1000, 2, 1, 19_999, 1e6, 1e8), (2**30, 2, 1, 2**31 - 3, 2.0**20, 2.0**20)),
        misconceptions=(
            Misconception(_without_caches, "each further request also brings a cache to read: context * token_bytes"),
            Misconception(_one_more, "where both take equally long the batch is reached: round up, but not past it"),
            Misconception(_by_trying, "the batch may be beyond any that you try: solve for it"),
            Misconception(_rounded_down, "the smallest batch that reaches it: round up"),
            Misconception(_half_the_work, "2 FLOPs a weight and request"),
            Misconception(_negative, "where a request brings more to read than to multiply, no batch gets there"),
        )),
)}
