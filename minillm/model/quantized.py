"""Linear layers over quantized weights, by the kernel that this device really has.

    kernel      weights                  activations
    int8pack    int8, one scale a row    bfloat16      torch's own: widens the weights as it reads them
    int4pack    4 bit, groups of 32-256  bfloat16      the same, with the weights in an order of its own
    unpacked    as they are stored       any           widened at each call, in plain torch: right everywhere, the
                                                       oracle of the others, and slow for few rows

A kernel is taken only where it computes a small problem right (:func:`has_packed_kernel`). Measured on all linear
layers of a 135M model but the head, milliseconds with two threads on x86 with AVX-512:

    rows                     1      2      8     32     64    128    512
    fbgemm-fp16           17.6   16.6   22.5   51.6   80.6    150    499     for comparison: "auto"
    int8pack              14.4   13.1   30.7   77.9    153    297   1082     up to 127 rows
    int8, widened         49.7   49.1   62.0   96.9    154    254    838     from 128 rows on
    int4pack               5.5    6.4   16.3   58.9    120    232   1045     always
    int4, widened          240    147    189    206    275    373   1173

So few bits are quick for few rows, where reading weights is the work, and lose where multiplying is.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from minillm.model.linear import Linear, activation_dtype, choose_kernel, computes_right, num_bytes_of
from minillm.model.quantize import SCHEMES, QuantizedTensor, quantize

WIDENED_FROM = 128  # rows


class UnpackedLinear(Linear):
    """The weight as it is stored; each call widens all of it."""

    kernel = "unpacked"

    def __init__(self, quantized: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype):
        self.quantized, self._bias, self._dtype = quantized, bias, dtype
        self.num_bytes = self.bytes_read = quantized.nbytes + num_bytes_of(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self._bias)

    @property
    def weight(self) -> Tensor:
        return self.quantized.dequantize(self._dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` ``[T]`` of the weight: ``[T, in]``, in the activations' dtype."""
        return self.quantized.map(lambda part: part[ids]).dequantize(self._dtype)


class Int8PackLinear(UnpackedLinear):
    """int8 weights, widened in registers.

    The kernel reads 16 inputs at a time and doesn't look where a row ends: with another number of inputs it answers
    with what lies behind the weight, or crashes (torch 2.13). So it is taken for multiples of 16 alone. Many rows are
    multiplied with the weight widened once.
    """

    kernel = "int8pack"

    def __init__(self, quantized: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype):
        super().__init__(quantized, bias, dtype)
        self._apply, self._stored = torch._weight_int8pack_mm, quantized.stored
        self._scales = quantized.scales[:, 0].contiguous()

    @classmethod
    def takes(cls, quantized: QuantizedTensor, dtype: torch.dtype) -> bool:
        """Whether the kernel is made for such a weight and activations of ``dtype``."""
        return quantized.middles is None and quantized.scales.shape[1] == 1 and quantized.num_inputs % 16 == 0 and \
            dtype == torch.bfloat16

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] >= WIDENED_FROM:
            return super().__call__(x)
        result = self._apply(x, self._stored, self._scales)
        return result if self._bias is None else result.add_(self._bias)


class Int4PackLinear(Linear):
    """4-bit weights in the order in which the kernel reads them; nothing else is kept."""

    kernel = "int4pack"

    def __init__(self, quantized: QuantizedTensor, bias: Tensor | None, dtype: torch.dtype):
        self._apply = torch._weight_int4pack_mm_for_cpu
        self._packed = torch._convert_weight_to_int4pack_for_cpu(quantized.codes.int(), 1)
        self._scales = torch.stack((quantized.scales.T, quantized.middles.T), -1).contiguous()  # [groups, out, 2]
        self._group_size, self._bias, self._num_inputs = quantized.group_size, bias, quantized.num_inputs
        self.num_bytes = self.bytes_read = quantized.nbytes + num_bytes_of(bias)

    @classmethod
    def takes(cls, quantized: QuantizedTensor, dtype: torch.dtype) -> bool:
        """See :class:`Int8PackLinear`."""
        outputs, inputs = quantized.shape
        return quantized.middles is not None and quantized.group_size in (32, 64, 128, 256) and outputs % 16 == 0 \
            and inputs % quantized.group_size == 0 and dtype == torch.bfloat16

    def __call__(self, x: Tensor) -> Tensor:
        result = self._apply(x.contiguous(), self._packed, self._group_size, self._scales)
        return result if self._bias is None else result.add_(self._bias)

    @property
    def weight(self) -> Tensor:
        """By asking for each input alone: the order of the packed weights is the kernel's own."""
        one_each = torch.eye(self._num_inputs, dtype=torch.bfloat16)
        return self._apply(one_each, self._packed, self._group_size, self._scales).T


def make_quantized_linear(quantized: QuantizedTensor, bias: Tensor | None, *, dtype: torch.dtype,
                          device: torch.device) -> Linear:
    """The linear layer of a quantized weight on ``device``, with activations of ``dtype``."""
    quantized, bias = quantized.map(lambda part: part.to(device)), None if bias is None else bias.to(device, dtype)
    kinds = (kind for kind in (Int8PackLinear, Int4PackLinear)
             if kind.takes(quantized, dtype) and has_packed_kernel(kind, device))
    return next(kinds, UnpackedLinear)(quantized, bias, dtype)


@cache
def has_packed_kernel(kind: type[Linear], device: torch.device) -> bool:
    """Whether this device and torch build compute a small problem right with ``kind``. Only a CPU is asked: CUDA's
    int8 kernel has a thread for each output, and nothing says that it is quick."""
    if device.type != "cpu":
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((3, 64), (48, 64), (48,)))
    quantized = quantize(weight, SCHEMES["int8" if kind is Int8PackLinear else "int4"])
    x, bias = x.bfloat16(), bias.bfloat16()
    expected = linear(x.double(), quantized.dequantize(torch.float64), bias.double())
    return computes_right(lambda: kind(quantized, bias, torch.bfloat16), x, expected, rtol=2e-2, atol=0.1)


def describe_kernels(dtype: str, device: torch.device, quantization: str | None = None) -> str:
    """One line for people, for example ``"fbgemm-fp16 kernel, float32 activations"``."""
    activations = activation_dtype(dtype, device, quantized=quantization is not None)
    kernels = [choose_kernel(dtype, device)]
    if quantization is not None:
        kinds = {"int8": (Int8PackLinear,), "int4": (Int4PackLinear, Int8PackLinear)}[quantization]
        packed = activations == torch.bfloat16
        kernels = [kind.kernel if packed and has_packed_kernel(kind, device) else "unpacked" for kind in kinds]
    return f"{' and '.join(dict.fromkeys(kernels))} kernel, {str(activations).removeprefix('torch.')} activations"
