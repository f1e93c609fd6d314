"""The parts a decoder layer is made of: reading weights, RMS norm, attention and the MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import silu

from minillm.attention.base import AttentionBackend, StepTensors
from minillm.errors import ModelError
from minillm.model.config import ModelConfig
from minillm.model.linear import Linear, activation_dtype, make_linear
from minillm.model.quantize import SCHEMES, QuantizedTensor, Scheme, quantize
from minillm.model.quantized import make_quantized_linear
from minillm.model.rope import rotate

Role = Literal["layer", "head", "router"]


class WeightReader:
    """Hands out weights by name, once each, with their shapes checked; linear layers in the kernel of the device.

    Weights leave the mapping when they are taken (if it is a ``dict``), so that a model is never held twice. Those of
    linear layers are quantized by ``quantization``, but for routers, whose choice is not to change; some may come
    quantized.
    ``num_bytes`` and ``bytes_read`` add up what norms and linear layers hold, and what a step of one token reads of it.
    """

    def __init__(self, weights: Mapping[str, Tensor | QuantizedTensor], *, dtype: str, device: torch.device,
                 quantization: Scheme | None = None):
        self.weights = weights if isinstance(weights, dict) else dict(weights)
        self.dtype, self.device, self.quantization = dtype, device, quantization
        self.activations = activation_dtype(dtype, device, quantized=quantization is not None)
        self.num_bytes = self.bytes_read = 0

    def take(self, name: str, *shape: int) -> Tensor | QuantizedTensor:
        """The weight ``name``, as it was stored.

        Raises:
            ModelError: when it is missing, or its shape is not ``shape``.
        """
        if name not in self.weights:
            raise ModelError(f"the model's files hold no tensor {name!r}, which its config asks for")
        weight = self.weights.pop(name)
        if tuple(weight.shape) != shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(weight.shape)}, but the config asks for {shape}")
        return weight

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight ``[size]``, in float32 or wider."""
        vector = self.take(name, size).to(self.device, torch.promote_types(self.activations, torch.float32))
        self.num_bytes, self.bytes_read = self.num_bytes + vector.nbytes, self.bytes_read + vector.nbytes
        return vector

    def linear(self, names: list[str], sizes: list[int], num_inputs: int, *, bias: bool = False,
               role: Role = "layer") -> Linear:
        """One linear layer that computes those of ``names`` (with ``sizes`` outputs each) behind one another."""
        named = list(zip(names, sizes, strict=True))
        weights = [self.take(f"{name}.weight", size, num_inputs) for name, size in named]
        biases = [self.take(f"{name}.bias", size) for name, size in named] if bias else []
        return self.make(weights, biases, role=role, name=", ".join(names))

    def make(self, weights: Sequence[Tensor | QuantizedTensor], biases: Sequence[Tensor] = (), *, is_read: bool = True,
             role: Role = "layer", name: str = "an expert") -> Linear:
        """One linear layer that computes those of ``weights``, each ``[out, in]``, behind one another.

        ``is_read``: whether a step of one token reads it, as it does all layers but most experts.
        """
        terms, scheme = _join(biases) if biases else None, self.quantization
        if scheme is None or role == "router":
            dtype = self.dtype if scheme is None else str(self.activations).removeprefix("torch.")
            layer = make_linear(_join(weights), terms, dtype=dtype, device=self.device)
        else:
            scheme = SCHEMES["int8"] if role == "head" else scheme
            if scheme.name != "int4" and any(isinstance(part, QuantizedTensor) for part in weights):
                raise ModelError(f"{name}: weights that come in 4 bit need quantization='int4'")
            try:
                parts = [part if isinstance(part, QuantizedTensor) else quantize(part, scheme) for part in weights]
            except ValueError as error:
                raise ModelError(f"{name}: {error}") from None
            layer = make_quantized_linear(QuantizedTensor.join(parts), terms, dtype=self.activations,
                                          device=self.device)
        self.num_bytes += layer.num_bytes
        self.bytes_read += layer.bytes_read if is_read else 0
        return layer

    def finish(self) -> None:
        """Raise :class:`ModelError` if a weight was never asked for."""
        if self.weights:
            extra = ", ".join(sorted(self.weights)[:5])
            raise ModelError(f"{len(self.weights)} tensors in the model's files have no use in its config: {extra}")


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class RMSNorm:
    """Scale rows to root mean square 1, then by a learned weight (Zhang and Sennrich 2019, arXiv:1910.07467).

    ``x / sqrt(mean(x^2) + epsilon) * weight``. With n numbers a row the root is ``hypot(|x|, sqrt(n epsilon)) /
    sqrt(n)``: two operators instead of five, and a decode step runs 61 norms of one short row each. Computed in
    float32 where activations have 16 bits (in float64 for float64).
    """

    def __init__(self, weight: Tensor, epsilon: float):
        size = weight.shape[-1]
        self.weight = weight * size**0.5
        self.floor = weight.new_full((), (size * epsilon) ** 0.5)

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., size]`` to the same shape and dtype."""
        length = vector_norm(hidden, dim=-1, keepdim=True, dtype=self.weight.dtype).hypot_(self.floor)
        return (hidden / length).mul_(self.weight).to(hidden.dtype)


class Attention:
    """Queries, keys and values from one linear layer; rotate; attend; project back.

        hidden [T, hidden] -> qkv [T, heads + 2 * kv_heads, head_dim] = | query heads | key heads | value heads |
    """

    def __init__(self, layer: int, config: ModelConfig, reader: WeightReader):
        self.layer, self.config = layer, config
        prefix = f"layers.{layer}.self_attn"
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = reader.linear([f"{prefix}.{name}_proj" for name in "qkv"], [query_size, kv_size, kv_size],
                                 config.hidden_size, bias=config.qkv_bias)
        self.output = reader.linear([f"{prefix}.o_proj"], [config.hidden_size], query_size, bias=config.o_bias)
        self.qk_norm = None
        if config.qk_norm:
            query, key = (reader.vector(f"{prefix}.{name}_norm.weight", config.head_dim) for name in "qk")
            weight = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))
            self.qk_norm = RMSNorm(weight, config.rms_norm_eps)

    def __call__(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], step: StepTensors,
                 attention: AttentionBackend) -> Tensor:
        """``[T, hidden]`` to ``[T, hidden]``."""
        config = self.config
        qkv = self.qkv(hidden).view(len(hidden), -1, config.head_dim)
        query_key, value = qkv.tensor_split((config.num_heads + config.num_kv_heads,), 1)
        if self.qk_norm is not None:
            query_key = self.qk_norm(query_key)
        query, key = rotate(query_key, *rotation).tensor_split((config.num_heads,), 1)
        attention.write(self.layer, key, value, step)
        return self.output(attention.attend(self.layer, query, step).reshape(len(hidden), -1))


class MLP:
    """``down(silu(gate(x)) * up(x))`` (SwiGLU, Shazeer 2020, arXiv:2002.05202), gate and up in one linear layer."""

    def __init__(self, layer: int, config: ModelConfig, reader: WeightReader):
        prefix, inner = f"layers.{layer}.mlp", config.intermediate_size
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.gate_up = reader.linear(names, [inner, inner], config.hidden_size, bias=config.mlp_bias)
        self.down = reader.linear([f"{prefix}.down_proj"], [config.hidden_size], inner, bias=config.mlp_bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[T, hidden]`` to ``[T, hidden]``."""
        return gated(hidden, self.gate_up, self.down)


def gated(hidden: Tensor, gate_up: Linear, down: Linear) -> Tensor:
    """The gated MLP of ``gate_up`` and ``down``, ``[T, hidden]`` to ``[T, hidden]``."""
    gate, up = gate_up(hidden).chunk(2, -1)
    return down(silu(gate).mul_(up))
