"""Rotary position embedding (RoPE): a position becomes a rotation of each head's query and key.

A head of size D is D / 2 pairs (x[i], x[i + D / 2]). Pair i of the token at position p turns by the angle
``p * inverse_frequency[i]``, so the dot product of a query and a key depends on the distance of their positions
alone. Scaled types slow some pairs down, so that distances longer than those seen in training stay in range.

Sources: RoPE (Su et al. 2021, arXiv:2104.09864); position interpolation, "linear" (Chen et al. 2023,
arXiv:2306.15595); YaRN (Peng et al. 2023, arXiv:2309.00071), whose section 3 describes "dynamic" NTK too; Llama 3.1's
scheme (Meta's reference code). All values equal those of transformers' ``modeling_rope_utils``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from minillm.attention.base import StepTensors
from minillm.errors import ModelError
from minillm.model.config import ModelConfig, RopeConfig


class RotaryEmbedding:
    """Gives each step its rotation, computed once and used by every layer.

    ``"dynamic"`` depends on the length of the text: all rows that a step computes for a sequence turn with the
    frequencies of the length that the sequence has after this step, and keys cached earlier stay as they were. That
    is what transformers does for a single request that is prefilled at once; prefilling beyond
    ``max_position_embeddings`` in chunks gives slightly different keys, there and here.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu"):
        self.config = config
        self.scale = attention_factor(config.rope)
        self.frequencies = inverse_frequencies(config).to(device)

    def __call__(self, step: StepTensors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each ``[T, 1, head_dim]`` in ``dtype``, as :func:`rotate` wants them."""
        frequencies = self._frequencies_by_row(step) if self.config.rope.type == "dynamic" else self.frequencies
        angles = (step.positions.float().unsqueeze(-1) * frequencies).unsqueeze(1)
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def _frequencies_by_row(self, step: StepTensors) -> Tensor:
        last_rows = [end - 1 for end in step.query_starts[1:]]
        lengths = [position + 1 for position in step.positions[last_rows].tolist()]
        counts = [end - start for start, end in zip(step.query_starts, step.query_starts[1:])]
        rows = [inverse_frequencies(self.config, length).expand(count, -1) for length, count in zip(lengths, counts)]
        return torch.cat(rows).to(step.positions.device)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (a, b) of ``heads`` ``[T, any, head_dim]`` to (a cos - b sin, b cos + a sin); the same shape.

    ``sin`` holds ``-sin`` in its first half, so that swapping the halves with ``roll`` is all that is left to do.
    """
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def inverse_frequencies(config: ModelConfig, sequence_length: int | None = None) -> Tensor:
    """Radians per position of each pair, float32 ``[head_dim / 2]``.

    ``sequence_length`` (tokens) matters to ``"dynamic"`` alone; shorter texts than the trained length change nothing.

    Raises:
        ModelError: for an unknown RoPE type.
    """
    rope, theta, dim = config.rope, config.rope.theta, config.head_dim
    if rope.type == "dynamic":
        stretch = max(sequence_length or 0, config.max_position_embeddings) / config.max_position_embeddings
        theta *= (rope.factor * stretch - (rope.factor - 1)) ** (dim / (dim - 2))
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    trained_length = rope.original_max_position_embeddings or config.max_position_embeddings
    if rope.type in ("default", "dynamic"):
        return frequencies
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope, trained_length)
    if rope.type == "yarn":
        return _yarn(frequencies, rope, trained_length)
    raise ModelError(f"unknown RoPE type {rope.type!r}; known: default, linear, dynamic, llama3, yarn")


def attention_factor(rope: RopeConfig) -> float:
    """What YaRN multiplies cos and sin by (so attention scores by its square); 1.0 for every other type.

    An explicit ``attention_factor`` wins; else ``0.1 ln(factor) + 1`` (YaRN, equation 22), or the ratio of two such
    terms where the config holds both ``mscale`` and ``mscale_all_dim``.
    """
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequencies: Tensor, rope: RopeConfig, trained_length: int) -> Tensor:
    """Pairs that turn often within the trained length keep their speed, slow ones are slowed by ``factor``."""
    turns = trained_length * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope.factor)


def _yarn(frequencies: Tensor, rope: RopeConfig, trained_length: int) -> Tensor:
    """As llama3, but the ramp between kept and slowed pairs is linear in the pair's index."""
    dim = 2 * len(frequencies)

    def pair_with_turns(turns: float) -> float:
        """The (fractional) index of the pair that turns so often within the trained length."""
        return dim * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slow = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    return frequencies * (slow / rope.factor + (1 - slow))
