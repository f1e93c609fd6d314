"""Exercises of notebook 16: how many requests fit, and keys in 4 bit; the faulty store has a module of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises import faulty_store

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


# ---- 16-1: how many fit ----------------------------------------------------------------------------------------------


def fit(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int, kv: str) -> int:
    """Whole blocks of the memory over whole blocks of a request."""
    return _requests(memory, _token_bytes(layers, kv_heads, head_dim, kv), block_size, tokens)


def _token_bytes(layers: int, kv_heads: int, head_dim: int, kv: str, scale_bytes: int = 2) -> int:
    return 2 * layers * kv_heads * (head_dim * _BYTES[kv] + scale_bytes * (kv == "int8"))


def _requests(memory: int, token_bytes: int, block_size: int, tokens: int) -> int:
    return memory // (block_size * token_bytes) // -(-tokens // block_size)


def _keys_alone(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int, kv: str) -> int:
    return _requests(memory, _token_bytes(layers, kv_heads, head_dim, kv) // 2, block_size, tokens)


def _no_scales(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int, kv: str) -> int:
    return _requests(memory, _token_bytes(layers, kv_heads, head_dim, kv, 0), block_size, tokens)


def _wide_scales(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int, kv: str) -> int:
    return _requests(memory, _token_bytes(layers, kv_heads, head_dim, kv, 4), block_size, tokens)


def _shared_scale(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int, kv: str) -> int:
    """One scale for the keys and the values of a head."""
    return _requests(memory, _token_bytes(layers, kv_heads, head_dim, kv, 1), block_size, tokens)


def _scale_a_token(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int,
                   kv: str) -> int:
    """One scale for all heads of a layer."""
    each = _token_bytes(layers, kv_heads, head_dim, kv, 0) + 2 * 2 * layers * (kv == "int8")
    return _requests(memory, each, block_size, tokens)


def _scales_always(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int,
                   kv: str) -> int:
    return _requests(memory, 2 * layers * kv_heads * (head_dim * _BYTES[kv] + 2), block_size, tokens)


def _no_blocks(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int, kv: str) -> int:
    return memory // (_token_bytes(layers, kv_heads, head_dim, kv) * tokens)


def _part_blocks(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int, kv: str) -> int:
    """Rounds a request's tokens down to whole blocks."""
    blocks = memory // (block_size * _token_bytes(layers, kv_heads, head_dim, kv))
    return blocks // max(1, tokens // block_size)


def _blocks_alone(memory: int, layers: int, kv_heads: int, head_dim: int, block_size: int, tokens: int, kv: str) -> int:
    return memory // (block_size * _token_bytes(layers, kv_heads, head_dim, kv))


# ---- 16-3: keys in 4 bit ---------------------------------------------------------------------------------------------


def four_bits(rows: Tensor, group: int) -> Tensor:
    """By token, or by channel in groups of tokens: whichever has the smaller squared error."""
    return _better(rows, _by_token(rows), _by_channel(rows, group))


def _better(rows: Tensor, by_token: Tensor, by_channel: Tensor) -> Tensor:
    wrong = [(near - rows).square().sum() for near in (by_token, by_channel)]
    return by_channel if wrong[1] < wrong[0] else by_token


def _rounded(rows: Tensor, dim: int, most: int = 7, least: int | None = None) -> Tensor:
    scale = rows.abs().amax(dim, keepdim=True) / most
    scale = scale.where(scale > 0, 1.0)
    return (rows / scale).round().clamp(-most if least is None else least, most) * scale


def _by_token(rows: Tensor) -> Tensor:
    return _rounded(rows, 1)


def _by_channel(rows: Tensor, group: int) -> Tensor:
    return torch.cat([_rounded(part, 0) for part in rows.split(group)])


def _tokens_always(rows: Tensor, group: int) -> Tensor:
    return _by_token(rows)


def _channels_always(rows: Tensor, group: int) -> Tensor:
    return _by_channel(rows, group)


def _all_tokens(rows: Tensor, group: int) -> Tensor:
    """One scale a channel for all tokens."""
    return _better(rows, _by_token(rows), _rounded(rows, 0))


def _drops_the_rest(rows: Tensor, group: int) -> Tensor:
    whole = len(rows) - len(rows) % group
    return four_bits(rows[:whole], group)


def _largest_error(rows: Tensor, group: int) -> Tensor:
    by_token, by_channel = _by_token(rows), _by_channel(rows, group)
    wrong = [(near - rows).abs().max() for near in (by_token, by_channel)]
    return by_channel if wrong[1] < wrong[0] else by_token


def _worse(rows: Tensor, group: int) -> Tensor:
    by_token, by_channel = _by_token(rows), _by_channel(rows, group)
    return by_token if four_bits(rows, group) is not by_token and (four_bits(rows, group) == by_channel).all() \
        else by_channel


def _eight_bits(rows: Tensor, group: int) -> Tensor:
    return _better(rows, _rounded(rows, 1, 127), torch.cat([_rounded(part, 0, 127) for part in rows.split(group)]))


def _fifteen(rows: Tensor, group: int) -> Tensor:
    """Divides by 15: more codes than 4 bits have."""
    return _better(rows, _rounded(rows, 1, 15), torch.cat([_rounded(part, 0, 15) for part in rows.split(group)]))


def _divides_by_zero(rows: Tensor, group: int) -> Tensor:
    def rounded(part: Tensor, dim: int) -> Tensor:
        scale = part.abs().amax(dim, keepdim=True) / 7
        return (part / scale).round() * scale

    return _better(rows, rounded(rows, 1), torch.cat([rounded(part, 0) for part in rows.split(group)]))


def _codes(rows: Tensor, group: int) -> Tensor:
    """The whole numbers themselves."""
    scale = rows.abs().amax(1, keepdim=True) / 7
    return (rows / scale.where(scale > 0, 1.0)).round()


def _drawn(tokens: int, channels: int, loud: dict[int, float], seed: int) -> Tensor:
    """Normal numbers; the channels in ``loud`` are so many times as large."""
    rows = torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))
    for channel, times in loud.items():
        rows[:, channel] *= times
    return rows


def _cases() -> tuple[tuple[Tensor, int], ...]:
    quiet, silent = _drawn(7, 6, {}, 5), _drawn(8, 4, {0: 0.0}, 6)
    quiet[2] = 0.0
    loud_token = _drawn(9, 6, {}, 7)
    loud_token[4] *= 40
    return ((_drawn(4, 4, {1: 20.0}, 0), 4), (_drawn(6, 8, {2: 30.0, 5: 12.0}, 1), 3), (loud_token, 9),
            (_drawn(10, 8, {3: 25.0}, 2), 4), (_drawn(32, 16, {}, 3), 32), (_drawn(64, 16, {1: 8.0}, 4), 16),
            (quiet, 4), (silent, 8), (_drawn(16, 8, {0: 2.5}, 8), 16))


EXERCISES = {task.id: task for task in (
    Exercise(
        "16-1", "how many fit", fit,
        cases=((2**20, 2, 2, 8, 4, 10, "int8"), (2**20, 2, 2, 8, 4, 10, "bfloat16"),
               (2**28, 30, 3, 64, 16, 1000, "float32"), (2**28, 30, 3, 64, 16, 1000, "int8"),
               (10**10, 32, 8, 128, 16, 8000, "bfloat16"), (10**10, 32, 8, 128, 16, 8000, "int8"),
               (10**7, 4, 1, 32, 16, 17, "int8"), (10**5, 4, 4, 32, 16, 16, "float32"), (5000, 2, 2, 8, 4, 3, "int8"),
               (300, 2, 2, 8, 4, 3, "int8"), (10**6, 1, 3, 10, 7, 50, "int8")),
        misconceptions=(
            Misconception(_keys_alone, "keys and values: twice the numbers"),
            Misconception(_no_scales, "int8: each row of codes has a scale of two bytes"),
            Misconception(_wide_scales, "a scale is a bfloat16: two bytes, not four"),
            Misconception(_shared_scale, "the keys of a head and its values are two rows: a scale each"),
            Misconception(_scale_a_token, "each KV head of each layer has scales of its own"),
            Misconception(_scales_always, "float32 and bfloat16 need no scales"),
            Misconception(_no_blocks, "memory is handed out in whole blocks, to each request by itself"),
            Misconception(_part_blocks, "a block that is begun is held whole: round up"),
            Misconception(_blocks_alone, "these are the blocks; how many does a request hold?"),
        )),
    faulty_store.EXERCISE,
    Exercise(
        "16-3", "keys in 4 bit", four_bits, cases=_cases(), dtype="float32",
        misconceptions=(
            Misconception(_tokens_always, "one loud channel makes every token's scale large: try a scale a channel"),
            Misconception(_channels_always, "one loud token, or a channel without outliers: compare both errors"),
            Misconception(_all_tokens, "a channel has a new scale every `group` tokens"),
            Misconception(_drops_the_rest, "the last group may be shorter: its tokens count too"),
            Misconception(_largest_error, "compare the squared errors, added up, and not the largest error"),
            Misconception(_worse, "of the two, take the one with the smaller error"),
            Misconception(_eight_bits, "4 bit: codes -7 to 7, so a scale is the largest / 7"),
            Misconception(_fifteen, "codes -15 to 15 are 31: too many for 4 bit. Use -7 to 7"),
            Misconception(_divides_by_zero, "a row or channel of zeros has scale 0: divide by 1 there"),
            Misconception(_codes, "return the numbers as they are read back: codes x scales"),
        )),
)}
