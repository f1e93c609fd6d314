"""Tiny random models of every family, made by transformers; their tensors by canonical name, and as GGUF files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
FAMILIES = {
    "llama": {"head_dim": 8}, "llama-biases": {"attention_bias": True, "mlp_bias": True}, "mistral": {},
    "qwen2": {}, "qwen3": {"head_dim": 16}, "qwen3-biases": {"attention_bias": True, "head_dim": 4},
    "mixtral": {"num_local_experts": 3}, "qwen3_moe": {"num_experts": 3, "head_dim": 8, **SPARSE},
    "qwen3_moe-mixed": {"num_experts": 3, "head_dim": 8, "mlp_only_layers": [0], **SPARSE},
}


def make_model(name: str, **keys):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition("-")[0], **{**SIZES, **FAMILIES[name], **keys})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():  # norms and biases start as ones and zeros, which would hide a mix-up
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def canonical(model) -> dict[str, torch.Tensor]:
    """What :func:`load_weights` must give, from the tensors transformers computes with."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("model.").replace("mlp.gate.weight", "mlp.router.weight")
        if name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            tensors[stem + "gate_proj"], tensors[stem + "up_proj"] = tensor.chunk(2, dim=1)
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = tensor
    return tensors


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
                 "qwen3_moe": "qwen3moe"}


def interleave_rotary_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of q and k in llama GGUF files, written out: x0 y0 x1 y1 ... for each head."""
    rows, half = [], weight.shape[0] // num_heads // 2
    for head in range(num_heads):
        start = head * 2 * half
        for pair in range(half):
            rows += [start + pair, start + half + pair]
    return weight[rows]


def gguf_name(name: str, names: gguf.TensorNameMap) -> str:
    suffix = ".bias" if name.endswith(".bias") else ".weight"
    stem = name.removesuffix(suffix).replace("mlp.router", "mlp.gate")
    return names.get_name(stem if stem == "lm_head" else f"model.{stem}") + suffix


def write_gguf(path: Path, model, *, kind=None, metadata: dict | None = None, extra: dict | None = None) -> Path:
    """Write ``model`` as llama.cpp's converter would: matrices as type ``kind``, vectors as float32."""
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    if hasattr(config, "num_local_experts"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    for name, tensor in canonical(model).items():
        values = tensor.float().numpy()
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            values = interleave_rotary_pairs(values, heads[projection])
        if kind is None or values.ndim == 1:
            writer.add_tensor(gguf_name(name, names), values)
        else:
            writer.add_tensor(gguf_name(name, names), gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny() -> SimpleNamespace:
    """The helpers of this file, under one name."""
    helpers = (make_model, canonical, assert_equal, interleave_rotary_pairs, write_gguf)
    return SimpleNamespace(**{helper.__name__: helper for helper in helpers})
