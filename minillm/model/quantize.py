"""Weights in 8 and 4 bit: which whole numbers stand for a matrix, and what they are multiplied by.

A row of a matrix is cut into groups of inputs that share a scale, and in 4 bit what the middle code stands for:

    int8    weight ~ code * scale                   codes -127..127, one group a row
    int4    weight ~ (code - 8) * scale + middle    codes 0..15, two in a byte, 32 inputs a group

A weight is wrong by half a scale at most, so all depends on how the scale is chosen. None of the rules here looks at
data: ``"absmax"`` puts the middle at 0, ``"minmax"`` spreads the codes from the smallest weight of a group to the
largest, ``"least-squares"`` moves both ends where that lowers the squared error. Scales and middles are bfloat16, as
kernels want them, and are rounded *before* the codes are chosen, which then make up for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from minillm.config import QUANTIZATIONS

Fit = Literal["absmax", "minmax", "least-squares"]
FITS: tuple[Fit, ...] = get_args(Fit)
LARGEST = 1e15  # whose squares can still be added up in float32
# Rows are quantized so many weights at a time: what a fit makes on the way stays in the cache.
_CHUNK = 2**18


@dataclass(frozen=True)
class Scheme:
    """How a model's matrices are quantized.

    Args:
        name: ``"int8"`` or ``"int4"``. A head keeps 8 bits under both: nothing rounds its errors off.
        group_size: inputs that share a scale; None: all of a row. The last group of a row may be shorter.
        fit: how scales are chosen, one of :data:`FITS`. In 8 bit only ``"absmax"``.
    Raises:
        ValueError: a name, a size or a fit that there is not.
    """

    name: str
    group_size: int | None = None
    fit: Fit = "absmax"

    def __post_init__(self) -> None:
        if str(self.name) not in QUANTIZATIONS:
            raise ValueError(f"quantization must be one of {', '.join(map(repr, QUANTIZATIONS))}, got {self.name!r}")
        if str(self.fit) not in FITS or self.name == "int8" and self.fit != "absmax":
            raise ValueError(f"fit must be one of {', '.join(map(repr, FITS))}, for int8 'absmax', got {self.fit!r}")
        size = self.group_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"group_size must be a whole number of at least 1 or None, got {size!r}")


# What ``quantization="int8"`` and ``"int4"`` mean.
SCHEMES = {"int8": Scheme("int8"), "int4": Scheme("int4", group_size=32, fit="least-squares")}


def scheme_of(quantization: str | Scheme | None) -> Scheme | None:
    """A scheme itself, or by the name that the engine's option has.

    Raises:
        ValueError: an unknown name.
    """
    if quantization is None or isinstance(quantization, Scheme):
        return quantization
    return SCHEMES[Scheme(quantization).name]  # which refuses other names


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix ``[out, in]`` in few bits.

    ``stored``: int8 ``[out, in]``; or uint8 ``[out, ceil(in / 2)]``, two codes in each, that of the even input in the
    lower half. ``scales`` and, in 4 bit, ``middles``: bfloat16 ``[out, groups]``.
    """

    stored: Tensor
    scales: Tensor
    middles: Tensor | None
    group_size: int
    num_inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return len(self.stored), self.num_inputs

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(part.nbytes for part in (self.stored, self.scales, self.middles) if part is not None)

    @property
    def codes(self) -> Tensor:
        """``[out, in]``: int8, or uint8 of 0..15."""
        if self.middles is None:
            return self.stored
        return torch.stack((self.stored & 15, self.stored >> 4), -1).flatten(1)[:, :self.num_inputs]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix that the codes stand for, ``[out, in]``."""
        wide = torch.float32 if dtype == torch.float16 else dtype  # which has no room for small scales
        scales = self._spread(self.scales.to(wide))
        values = self.codes * scales if self.middles is None else \
            (self.codes.to(wide) - 8) * scales + self._spread(self.middles.to(wide))
        return values.to(dtype)

    def _spread(self, by_group: Tensor) -> Tensor:
        if by_group.shape[1] == 1:
            return by_group
        return by_group.repeat_interleave(self.group_size, 1)[:, :self.num_inputs]

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """With ``change`` of each part: rows picked, or another device."""
        return replace(self, stored=change(self.stored), scales=change(self.scales),
                       middles=None if self.middles is None else change(self.middles))

    @staticmethod
    def join(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """Matrices of one scheme and as many inputs, below one another."""
        stored, scales, middles = zip(*((part.stored, part.scales, part.middles) for part in parts))
        return replace(parts[0], stored=torch.cat(stored), scales=torch.cat(scales),
                       middles=None if middles[0] is None else torch.cat(middles))


def quantize(weight: Tensor, scheme: Scheme) -> QuantizedTensor:
    """``weight`` ``[out, in]``, any float dtype, in ``scheme``.

    Raises:
        ValueError: it is no matrix, or holds a number that is not finite or beyond :data:`LARGEST`.
    """
    if weight.dim() != 2:
        raise ValueError(f"only a matrix can be quantized, got shape {tuple(weight.shape)}")
    if not all(-LARGEST <= end <= LARGEST for end in map(Tensor.item, weight.aminmax())):
        raise ValueError(f"only weights up to {LARGEST:g} can be quantized, this has larger ones, inf or nan; use the "
                         "model without quantization, or fetch it again")
    size = min(scheme.group_size or weight.shape[1], weight.shape[1])
    whole = weight.shape[1] - weight.shape[1] % size
    parts = [_quantized(columns, min(size, columns.shape[1]), scheme)
             for columns in (weight[:, :whole], weight[:, whole:]) if columns.shape[1]]  # the rest is a group by itself
    codes, scales, middles = (None if column[0] is None else torch.cat(column, 1) for column in zip(*parts))
    return QuantizedTensor(codes if middles is None else pack(codes), scales, middles, size, weight.shape[1])


def pack(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 ``[out, in]`` to ``[out, ceil(in / 2)]``, two in a byte."""
    even, odd = codes[:, ::2], pad(codes[:, 1::2], (0, codes.shape[1] % 2))
    return even | odd << 4


def _quantized(columns: Tensor, size: int, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes ``[out, in]``, scales and middles ``[out, in / size]`` of columns that ``size`` divides."""
    of_groups = _int8 if scheme.name == "int8" else _int4
    pieces = [of_groups(rows.float().unflatten(1, (-1, size)), scheme.fit)
              for rows in columns.split(max(1, _CHUNK // columns.shape[1]))]
    codes, scales, middles = (None if column[0] is None else torch.cat(column) for column in zip(*pieces))
    return codes.flatten(1), scales, middles


def _int8(groups: Tensor, fit: Fit) -> tuple[Tensor, Tensor, None]:
    scale = (groups.abs().amax(-1) / 127).bfloat16()
    return (groups / _divisor(scale)).round_().clamp_(-127, 127).to(torch.int8), scale, None


def _int4(groups: Tensor, fit: Fit) -> tuple[Tensor, Tensor, Tensor]:
    low, high = groups.amin(-1), groups.amax(-1)
    if fit == "absmax":
        scale, middle = groups.abs().amax(-1) / 7, torch.zeros_like(low)
    elif fit == "minmax":
        scale, middle = (high - low) / 15, low + (high - low) * (8 / 15)
    else:
        scale, middle = _least_squares(groups, low, high)
    scale, middle = scale.bfloat16(), middle.bfloat16()
    return _nearest(groups, scale, middle).to(torch.uint8), scale, middle


def _least_squares(groups: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and middle of least squared error among those found from several starts.

    Each start spreads the codes over a part of the range, rounds, and solves twice for the line through the points
    (code, weight) that fits best: k-means, with centres that must lie evenly.
    """
    mean, best = groups.mean(-1), torch.full_like(low, torch.inf)
    best_scale, best_middle = torch.zeros_like(low), low
    for share in (1.0, 0.9, 0.8):
        scale, middle = (high - low) * (share / 15), (low + high) / 2 + (high - low) * (share / 30)
        for _ in range(2):
            codes = _nearest(groups, scale, middle) - 8
            centred = codes - codes.mean(-1, keepdim=True)
            spread = centred.square().sum(-1)
            scale = torch.where(spread > 0, (centred * groups).sum(-1) / spread, scale)
            middle = mean - scale * codes.mean(-1)
        wrong = (_nearest(groups, scale, middle) - 8) * scale.unsqueeze(-1) + middle.unsqueeze(-1) - groups
        error = wrong.square().sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        best_scale, best_middle = torch.where(better, scale, best_scale), torch.where(better, middle, best_middle)
    return best_scale, best_middle


def _nearest(groups: Tensor, scale: Tensor, middle: Tensor) -> Tensor:
    """The code of each weight, 0 to 15, as a float."""
    return ((groups - middle.float().unsqueeze(-1)) / _divisor(scale)).round_().add_(8).clamp_(0, 15)


def _divisor(scale: Tensor) -> Tensor:
    """Scales to divide by: 1 in place of 0, where all of a group is one number."""
    return torch.where(scale == 0, 1.0, scale.float()).unsqueeze(-1)
