"""``y = x @ weight.T + bias`` by the fastest kernel this device really has.

In decode a linear layer is a read of its weight: speed is bytes read over memory bandwidth, so halving the bytes
nearly halves the time. Three kernels, each probed once per process on a tiny problem (:func:`has_kernel`):

    kernel        weights           activations      bytes   why
    fbgemm-fp16   float16, packed   float32          half    halves the bytes, keeps float32 arithmetic (x86)
    onednn        packed            as the weights   as is   the order in which the kernel reads, laid out once
    dense         plain             as the weights   as is   ``torch.nn.functional.linear``: any device, any dtype

onednn and dense read the same bytes, so the quicker of the two for one row on this device is taken. Measured on all
linear layers of a 135M model with two threads on x86 (time relative to dense in the same dtype):

    rows                                     1     2     8     32    128   1024
    onednn float32, MKL on its home CPU     1.14  1.14  0.7   0.9   0.9   1.0      dense is taken
    onednn float32, another CPU             0.6         0.5   0.6   0.8            onednn is taken
    onednn bfloat16                         0.74  0.76  0.8   0.9   1.0   1.0
    fbgemm-fp16, to the better float32      0.64  0.77  0.7   0.95  1.0   1.15     taken for "auto"

So each choice is made for a single request's decode; where it loses at other row counts, that isn't worth a second
copy of the weights. A packed kernel also gives a row the same bits in nearly every batch size; dense may not.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Linear(ABC):
    """One linear layer without gradients. Call it with ``[T, in]`` in the activation dtype; it returns ``[T, out]``.

    ``kernel`` names how it is computed; ``num_bytes`` is the memory it holds, ``bytes_read`` what one call reads of it.
    """

    kernel: str
    num_bytes: int
    bytes_read: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """``x`` ``[T, in]`` to ``[T, out]``, same dtype."""

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The weight ``[out, in]`` as a plain tensor; a copy where the kernel keeps it packed."""


class DenseLinear(Linear):
    """The weight as it is, through ``torch.nn.functional.linear``."""

    kernel = "dense"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self._weight, self._bias = weight, bias
        self.num_bytes = self.bytes_read = num_bytes_of(weight) + num_bytes_of(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias)

    @property
    def weight(self) -> Tensor:
        return self._weight


class OneDnnLinear(Linear):
    """The weight in the blocked order that oneDNN's kernels read."""

    kernel = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        # .default picks the overload now: a tenth of a microsecond less Python in each of 100 calls a token
        self._apply = torch.ops.mkldnn._linear_pointwise.default
        self._packed, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias
        self.num_bytes = self.bytes_read = num_bytes_of(weight) + num_bytes_of(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._apply(x, self._packed, self._bias, "none", [], "")

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense()


class Fp16WeightLinear(Linear):
    """float16 weights times float32 activations, accumulated in float32: fbgemm widens each weight as it is read.

    fbgemm packs blocks of 512 inputs by 16 outputs and holds whole blocks (576 inputs occupy 1,024), but reads only
    what is filled; ``num_bytes`` counts the blocks.
    """

    kernel = "fbgemm-fp16"

    def __init__(self, weight: Tensor, bias: Tensor | None):
        # ._op is the operator without the checks in Python that only tracing needs: 1.5 us of each call
        self._apply = torch.ops.quantized.linear_dynamic_fp16.default._op
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        outputs, inputs = weight.shape
        self.bytes_read = 2 * outputs * inputs + num_bytes_of(bias)
        self.num_bytes = 2 * math.ceil(outputs / 16) * 16 * math.ceil(inputs / 512) * 512 + num_bytes_of(bias)

    def __call__(self, x: Tensor) -> Tensor:
        # Without this, torch asks the packed weight for a __torch_function__ that it hasn't: 10 of a call's 14 us.
        with torch._C.DisableTorchFunctionSubclass():
            return self._apply(x, self._packed)

    @property
    def weight(self) -> Tensor:
        return torch.ops.quantized.linear_unpack_fp16(self._packed)[0]


_KERNELS: dict[str, type[Linear]] = {kind.kernel: kind for kind in (DenseLinear, OneDnnLinear, Fp16WeightLinear)}


def make_linear(weight: Tensor, bias: Tensor | None = None, *, dtype: str, device: torch.device) -> Linear:
    """The linear layer of ``weight`` ``[out, in]`` and ``bias`` ``[out]`` (any float dtype) on ``device``.

    ``dtype`` is :class:`~minillm.config.EngineConfig`'s. With ``"auto"`` a weight that float16 cannot hold (beyond
    65,504, or so small that it would lose its digits) stays float32. A packed layer keeps no plain copy of its weight.
    """
    kernel = choose_kernel(dtype, device)
    if kernel == "fbgemm-fp16" and not fits_float16(weight):
        kernel = choose_kernel("float32", device)
    target = activation_dtype(dtype, device)
    moved = weight.to(device=device, dtype=target).contiguous()
    return _KERNELS[kernel](moved, None if bias is None else bias.to(device=device, dtype=target))


def activation_dtype(dtype: str, device: torch.device, *, quantized: bool = False) -> torch.dtype:
    """The dtype of activations, and of weights unless the kernel narrows them, under the option ``dtype``.

    ``"auto"`` is bfloat16 on CUDA where the hardware (not an emulation) has it, float16 on older CUDA devices, and
    float32 elsewhere; on a CPU bfloat16 beside ``quantized`` weights, whose kernels are quick with nothing else.
    """
    if dtype != "auto":
        return _DTYPES[dtype]
    if device.type != "cuda":
        return torch.bfloat16 if quantized and device.type == "cpu" else torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def choose_kernel(dtype: str, device: torch.device) -> str:
    """The kernel's name for the option ``dtype`` on ``device``: fewest bytes first, then the quickest for one row."""
    if device.type != "cpu":
        return "dense"
    target = activation_dtype(dtype, device)
    if dtype == "auto" and has_kernel("fbgemm-fp16", target):
        return "fbgemm-fp16"
    return min((kernel for kernel in ("onednn", "dense") if has_kernel(kernel, target)),
               key=lambda kernel: seconds_per_row(kernel, target))


@cache
def has_kernel(kernel: str, dtype: torch.dtype) -> bool:
    """Whether this CPU and torch build compute a tiny problem right with ``kernel`` and ``dtype`` activations.

    Asking the device beats asking for its name: private torch operators may move, and instruction sets differ.
    """
    if kernel == "dense":
        return True
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 24), (40, 24), (40,)))
    expected = linear(x.double(), weight.double(), bias.double())
    tolerance = 1e-4 if dtype == torch.float32 and kernel == "onednn" else 2e-2
    return computes_right(lambda: _KERNELS[kernel](weight, bias), x, expected, rtol=tolerance, atol=tolerance)


def computes_right(make: Callable[[], Linear], x: Tensor, expected: Tensor, **tolerances: float) -> bool:
    """Whether the layer can be made here and gives ``expected`` (float64) for ``x``, in the dtype of ``x``."""
    try:
        result = make()(x)
    except (RuntimeError, AttributeError, TypeError):  # the operator is missing, or refuses this CPU or dtype
        return False
    return result.dtype == x.dtype and torch.allclose(result.double(), expected, **tolerances)


@cache
def seconds_per_row(kernel: str, dtype: torch.dtype) -> float:
    """The best of 100 calls on one thread with one row and a 576 x 576 weight, which fits the cache.

    One thread, because a busy machine would otherwise time the wait of two threads for each other.
    """
    layer, x = _KERNELS[kernel](torch.ones(576, 576, dtype=dtype), None), torch.ones(1, 576, dtype=dtype)
    num_threads, best = torch.get_num_threads(), math.inf
    torch.set_num_threads(1)
    try:
        for _ in range(100):
            start = time.perf_counter()
            layer(x)
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(num_threads)
    return best


def fits_float16(weight: Tensor) -> bool:
    """Whether rounding to float16 keeps every digit it can: no overflow, and no error from numbers near zero."""
    norms = [((rows.half().float() - rows).norm(), rows.norm()) for rows in map(Tensor.float, weight.split(4096))]
    error, size = (torch.stack(column).norm() for column in zip(*norms))  # by blocks: no second copy of a large head
    return bool(error.isfinite() and error <= 2.0**-11 * size)


def num_bytes_of(tensor: Tensor | None) -> int:
    """Bytes of a weight or of a bias, if there is one."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
