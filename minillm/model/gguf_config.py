"""A GGUF file's metadata in the keys of a Hugging Face ``config.json``, so that one mapper checks both. No torch.

Key names: the GGUF specification (ggml, docs/gguf.md) and the ``gguf`` package's ``constants.Keys``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minillm.errors import ModelError
from minillm.model.gguf_file import GGUFFile
from minillm.model.kinds import ABOVE_ONE, COUNT, INDEX, LAYERS, NOT_NEGATIVE, POSITIVE, TEXT, Kind, check_kinds

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
# Every id that ends a text: end of sequence, of turn, of message.
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Keys that would change the arithmetic in ways this decoder does not have: anything but these values is refused.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "expert_shared_count": (0,), "leading_dense_block_count": (0,), "expert_gating_func": (1,),
    "expert_weights_scale": (0, 1), "attn_logit_softcapping": (0,), "final_logit_softcapping": (0,),
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1), "attention.clamp_kqv": (0,),
    "attention.scale": (0,), "attention.causal": (True,), "use_parallel_residual": (False,),
    "rope.scaling.yarn_log_multiplier": (0,), "rope.scaling.alpha": (0,),
}
# The one published "llama3" scaling; a GGUF keeps only the divisors that it gives.
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """What ``config.json`` would say of the model in ``file``.

    Raises:
        ModelError: an architecture, RoPE scaling or switch that is not supported, a missing key, or a value of the
            wrong kind or out of range, by name.
    """
    metadata, architecture = file.metadata, file.metadata.get("general.architecture")
    if architecture not in tuple(FAMILIES):  # a tuple may be asked for anything, a dictionary not for a list
        raise ModelError(f"{file.path}: architecture {architecture!r} is not supported; known: {', '.join(FAMILIES)}")
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise ModelError(f"{file.path}: split.count = {parts!r}: join the parts first (llama-gguf-split --merge)")
    keys = _Keys(file, architecture)
    for key, neutral in NEUTRAL_VALUES.items():
        if (value := metadata.get(f"{architecture}.{key}", neutral[0])) not in neutral:
            raise ModelError(f"{file.path}: {architecture}.{key} = {value!r} is not supported")
    family = FAMILIES[architecture]
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else None,
        "hidden_size": keys.need("embedding_length", COUNT),
        "intermediate_size": keys.need("feed_forward_length", COUNT),
        "num_hidden_layers": keys.need("block_count", LAYERS),
        "num_attention_heads": keys.need("attention.head_count", COUNT),
        "num_key_value_heads": keys.get("attention.head_count_kv", COUNT),
        "max_position_embeddings": keys.need("context_length", COUNT),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon", POSITIVE),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [metadata[f"tokenizer.ggml.{k}"] for k in END_KEYS if f"tokenizer.ggml.{k}" in metadata],
    }
    config["head_dim"] = _head_dim(keys, config)
    config["rope_parameters"] = _rope(keys, config)
    return config | _switches(keys, family)


class _Keys:
    """Metadata below ``<architecture>.``; an array counts only where all its entries are equal."""

    def __init__(self, file: GGUFFile, architecture: str):
        self.file, self.architecture = file, architecture

    def need(self, key: str, kind: Kind) -> Any:
        name = f"{self.architecture}.{key}"
        if name not in self.file.metadata:
            raise ModelError(f"{self.file.path} lacks the key {name}")
        value = self.file.metadata[name]
        if isinstance(value, list):
            if not value or value != value[:1] * len(value):
                raise ModelError(f"{self.file.path}: {name} differs between layers: not supported")
            value = value[0]
        check_kinds({name: value}, {name: kind}, str(self.file.path))
        return value

    def get(self, key: str, kind: Kind, default: Any = None) -> Any:
        return self.need(key, kind) if f"{self.architecture}.{key}" in self.file.metadata else default


def _head_dim(keys: _Keys, config: dict[str, Any]) -> int:
    default = config["hidden_size"] // config["num_attention_heads"]
    head_dim = keys.get("attention.key_length", COUNT, keys.get("rope.dimension_count", COUNT, default))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := keys.get(key, COUNT, head_dim)) != head_dim:
            raise ModelError(f"{keys.file.path}: {keys.architecture}.{key} = {other} beside {head_dim}: not supported")
    return head_dim


def _switches(keys: _Keys, family: str) -> dict[str, Any]:
    """Biases, sliding window and experts."""
    tensors = keys.file.tensors
    config: dict[str, Any] = {"attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in tensors,
                              "mlp_bias": "blk.0.ffn_gate.bias" in tensors}
    if num_experts := keys.get("expert_count", INDEX):
        config |= {"num_local_experts": num_experts, "num_experts_per_tok": keys.need("expert_used_count", COUNT)}
        config["norm_topk_prob"] = True  # as llama.cpp computes both sparse families
        if family == "llama":
            config["model_type"] = "mixtral"
        else:
            config["moe_intermediate_size"] = keys.need("expert_feed_forward_length", COUNT)
    if window := keys.get("attention.sliding_window", INDEX):
        if family != "llama":
            raise ModelError(f"{keys.file.path}: {keys.architecture}.attention.sliding_window is not supported")
        config |= {"model_type": config.get("model_type", "mistral"), "sliding_window": window}
    return config


def _rope(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": keys.get("rope.freq_base", ABOVE_ONE, 10_000.0), "rope_type": "default"}
    factor = keys.get("rope.scaling.factor", NOT_NEGATIVE, keys.get("rope.scale_linear", NOT_NEGATIVE, 0))
    kind = keys.get("rope.scaling.type", TEXT, "linear" if factor else "none")
    if "rope_freqs.weight" in keys.file.tensors:
        if kind != "none":
            raise ModelError(f"{keys.file.path}: rope_freqs.weight together with {kind} RoPE scaling is not supported")
        return rope | _llama3_scaling(keys.file, rope["rope_theta"], config["head_dim"])
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return rope
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope["factor"] = factor = keys.need("rope.scaling.factor", POSITIVE)
        rope["original_max_position_embeddings"] = keys.get("rope.scaling.original_context_length", COUNT)
        rope["beta_fast"] = keys.get("rope.scaling.yarn_beta_fast", POSITIVE)
        rope["beta_slow"] = keys.get("rope.scaling.yarn_beta_slow", POSITIVE)
        scale = keys.get("rope.scaling.attn_factor", POSITIVE, keys.get("rope.scaling.yarn_attn_factor", POSITIVE, 1.0))
        # llama.cpp multiplies YaRN's own factor (Peng et al. 2023, section 3.4) by this one.
        rope["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0) if scale != 1 else None
    return rope


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The "llama3" parameters whose frequency divisors are those in ``rope_freqs.weight`` [head_dim / 2].

    A file keeps only the divisors, so the published parameters are tried and must give them back.
    """
    divisors = file.dequantize("rope_freqs.weight").astype(np.float64)
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    smooth = (LLAMA3["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    expected = 1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-5, atol=0):
        raise ModelError(f"{file.path}: rope_freqs.weight does not hold Llama 3.1's RoPE scaling: not supported")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
