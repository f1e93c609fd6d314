"""Exercises of notebook 15: bits a weight, a faulty quantizer, and factors against an outlier column."""

from __future__ import annotations

import math

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises import faulty_quantizer, outlier

# ---- 15-1: bits a weight ---------------------------------------------------------------------------------------------


def bits_a_weight(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    """Bits a weight of a row: codes in whole bytes; for each group a scale and ``num_middles`` of 16 bit."""
    groups = math.ceil(inputs / (size or inputs))
    return 8 * (math.ceil(inputs * bits / 8) + groups * 2 * (1 + num_middles)) / inputs


def _codes_alone(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    return 8 * math.ceil(inputs * bits / 8) / inputs


def _rest_has_no_scale(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    groups = max(1, inputs // (size or inputs))
    return 8 * (math.ceil(inputs * bits / 8) + groups * 2 * (1 + num_middles)) / inputs


def _half_bytes(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    return bits + 16 * math.ceil(inputs / (size or inputs)) * (1 + num_middles) / inputs


def _float32_scales(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    return bits_a_weight(inputs, bits, size, 2 * num_middles + 1)


def _no_middles(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    return bits_a_weight(inputs, bits, size, 0)


def _always_middles(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    return bits_a_weight(inputs, bits, size, 1)


def _bytes(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    return bits_a_weight(inputs, bits, size, num_middles) / 8


def _bytes_of_the_row(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    return bits_a_weight(inputs, bits, size, num_middles) / 8 * inputs


def _size_is_never_none(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    return bits_a_weight(inputs, bits, math.ceil(inputs / math.ceil(inputs / size)), num_middles)  # type: ignore


def _shared_by_size(inputs: int, bits: int, size: int | None, num_middles: int) -> float:
    """Sixteen bits over the group size, also where a row ends earlier."""
    return 8 * math.ceil(inputs * bits / 8) / inputs + 16 * (1 + num_middles) / (size or inputs)


EXERCISES = {task.id: task for task in (
    Exercise(
        "15-1", "bits a weight", bits_a_weight,
        cases=((576, 4, 32, 1), (576, 4, 32, 0), (576, 8, None, 0), (576, 4, 128, 1), (576, 4, None, 0), (33, 4, 32, 1),
               (7, 4, 3, 1), (16, 4, 64, 1), (1536, 4, 48, 1), (1, 4, 32, 1), (9, 2, 4, 0)),
        misconceptions=(
            Misconception(_codes_alone, "each group's scale takes 16 bits, and its middle as many"),
            Misconception(_no_middles, "a middle takes as much as a scale, where there is one"),
            Misconception(_always_middles, "absmax needs no middle: num_middles may be 0"),
            Misconception(_float32_scales, "scales and middles have 16 bits"),
            Misconception(_size_is_never_none, "size None: all of a row is one group"),
            Misconception(_rest_has_no_scale, "the rest of a row is a group of its own, with a scale"),
            Misconception(_shared_by_size, "a group that is not full has a whole scale too: count groups, rounded up"),
            Misconception(_half_bytes, "a row's codes fill whole bytes: round up"),
            Misconception(_bytes, "bits, not bytes: eight times as many"),
            Misconception(_bytes_of_the_row, "divide by the weights of the row, and give bits"),
        )),
    faulty_quantizer.EXERCISE,
    outlier.EXERCISE,
)}
