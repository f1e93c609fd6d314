"""Mixture of experts: many MLPs a layer, a few of which each token visits."""

from __future__ import annotations

import torch
from torch import Tensor

from minillm.model.config import ModelConfig
from minillm.model.layers import WeightReader, gated


class Experts:
    """A router picks ``num_experts_per_token`` MLPs for each token; their outputs are added up by its weights.

    Sources: Shazeer et al. 2017 (arXiv:1701.06538); Mixtral (Jiang et al. 2024, arXiv:2401.04088), which scales the
    picked weights to sum 1, as Qwen3-MoE does with ``norm_topk_prob``.
    """

    def __init__(self, layer: int, config: ModelConfig, reader: WeightReader):
        prefix, count = f"layers.{layer}.mlp", config.num_experts
        inner, size = config.moe_intermediate_size, config.hidden_size
        self.top_k, self.normalize = config.num_experts_per_token, config.norm_topk_prob
        self.router = reader.linear([f"{prefix}.router"], [count], size, role="router")
        gate = reader.take(f"{prefix}.experts.gate_proj", count, inner, size)
        up = reader.take(f"{prefix}.experts.up_proj", count, inner, size)
        down = reader.take(f"{prefix}.experts.down_proj", count, size, inner)
        self.experts = [(reader.make([gate[i], up[i]], is_read=i < self.top_k),
                         reader.make([down[i]], is_read=i < self.top_k)) for i in range(count)]

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[T, hidden]`` to ``[T, hidden]``. Each expert that any row picked runs once, for its rows."""
        weights, picked = self.route(hidden)
        output = torch.zeros_like(hidden)
        for expert in picked.unique().tolist():
            rows, slots = torch.where(picked == expert)
            result = gated(hidden[rows], *self.experts[expert])
            output.index_add_(0, rows, result * weights[rows, slots].unsqueeze(-1))
        return output

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The weight and the index of each expert a row visits: two ``[T, num_experts_per_token]``."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        probabilities = self.router(hidden).softmax(-1, dtype=wide)
        weights, picked = probabilities.topk(self.top_k, -1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(hidden.dtype), picked
