"""What a decoder looks like, in numbers: :class:`ModelConfig`, whatever file it was read from. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from minillm.errors import ModelError
from minillm.model.gguf_config import hf_config
from minillm.model.gguf_file import read_gguf
from minillm.model.kinds import CONFIG_KINDS, ROPE_KINDS, check_kinds

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: base ``theta`` and how its frequencies are scaled for long contexts (transformers' names)."""

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder, any family: a family is a set of switches, not a file of copied layers.

    ``sliding_window`` holds one entry a layer: the window in tokens, or ``None`` for full attention.
    ``sparse_layers`` holds one entry a layer: True where the MLP is a mixture of experts.
    ``eos_token_ids``: every id that ends a text, from the model's and the generation config.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()
    sparse_layers: tuple[bool, ...] = ()
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in tokens, ``None`` for full attention."""
        return self.sliding_window or (None,) * self.num_layers


# What transformers assumes when config.json leaves a key out, by model type: the models' own files rely on it.
_QWEN = {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "bos_token_id": 1, "eos_token_id": 2}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {**_MISTRAL, "sliding_window": 4096},
    "mixtral": {**_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        **_QWEN, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "decoder_sparse_step": 1, "norm_topk_prob": False,
    },
}
# Keys that would change the arithmetic in ways this decoder does not have: anything but these values is refused.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "partial_rotary_factor": (None, 1), "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0), "quantization_config": (None,), "clip_qkv": (None,), "logit_scale": (None, 1),
    "logits_scaling": (None, 1), "embedding_multiplier": (None, 1), "residual_multiplier": (None, 1),
    "attention_multiplier": (None,), "query_pre_attn_scalar": (None,), "qk_layernorm": (None, False),
    "attention_chunk_size": (None,), "no_rope_layers": (None, []), "num_shared_experts": (None, 0),
}
ROPE_TYPES = get_args(RopeType)
ROPE_KEYS = {*ROPE_KINDS, "rope_type", "type", "partial_rotary_factor", "finetuned"}


def load_config(path: str | Path) -> ModelConfig:
    """The config of a model on disk: a Hugging Face folder or a GGUF file.

    Raises:
        ModelError: no config there, or one that this decoder cannot follow exactly, naming the key.
    """
    path = Path(path)
    if path.is_file():
        return config_from_hf(hf_config(read_gguf(path)))
    if (config := read_json(path / "config.json")) is None:
        raise ModelError(f"{path} holds no config.json; give a Hugging Face model folder or a .gguf file")
    return config_from_hf(config, read_json(path / "generation_config.json"))


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or ``None`` where there is no such file; ``ModelError`` where it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object; fetch the model again")
    return content


def config_from_hf(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """The config in a ``config.json``, with the ids that end a text from its ``generation_config.json`` too.

    Raises:
        ModelError: an unknown model type, activation or RoPE type, a missing key, a value of the wrong kind or out of
            range, heads that do not divide, or a switch that changes the arithmetic and is not built: never a silent
            default.
    """
    given, family = config, config.get("model_type")
    if family not in tuple(FAMILY_DEFAULTS):  # a tuple may be asked for anything, a dictionary not for a list
        raise ModelError(f"model_type {family!r} is not supported; known: {', '.join(FAMILY_DEFAULTS)}")
    defaults, generation = FAMILY_DEFAULTS[family], generation or {}
    config = defaults | given
    check_kinds(config, CONFIG_KINDS, "the model's config")
    check_kinds(generation, CONFIG_KINDS, "generation_config.json")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    _refuse_unknown_switches(config | scaling, family)
    config = _NotNull((key, value) for key, value in config.items() if value is not None)
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads", num_heads)
    head_dim = config.get("head_dim", config["hidden_size"] // num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}")
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"head_dim {head_dim} must be even for rotary embeddings, and at least 2")
    bias = config.get("attention_bias", False) and family in ("llama", "qwen3", "qwen3_moe")
    return ModelConfig(
        model_type=family, num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"], tie_word_embeddings=config.get("tie_word_embeddings", False),
        hidden_size=config["hidden_size"], intermediate_size=config["intermediate_size"],
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        max_position_embeddings=config["max_position_embeddings"], rope=_rope(config, scaling),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)), qk_norm=family in ("qwen3", "qwen3_moe"),
        qkv_bias=bias or family == "qwen2", o_bias=bias, mlp_bias=config.get("mlp_bias", False) and family == "llama",
        sliding_window=_sliding_window(config, family),
        **_experts(config, family), **_special_ids(given, generation, defaults))


class _NotNull(dict[str, Any]):
    """What a config gives; asking for a key that it lacks, or gives as null, is an error that names it."""

    def __missing__(self, key: str) -> Any:
        raise ModelError(f"the model's config lacks {key!r}")


def _refuse_unknown_switches(config: dict[str, Any], family: str) -> None:
    for key, neutral in NEUTRAL_VALUES.items():
        if key in config and config[key] not in neutral:
            raise ModelError(f"{family} with {key} = {config[key]!r} is not supported (only {neutral[-1]!r} is)")
    if family == "llama" and config.get("sliding_window") is not None:
        raise ModelError("llama with a sliding_window is not supported; such models have model_type 'mistral'")


def _rope(config: dict[str, Any], scaling: dict[str, Any]) -> RopeConfig:
    """RoPE parameters, wherever the config holds them: in ``scaling`` or at the top level."""
    if unknown := sorted(set(scaling) - ROPE_KEYS):
        raise ModelError(f"RoPE parameter {unknown[0]!r} is not supported; known: {', '.join(sorted(ROPE_KEYS))}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"RoPE type {kind!r} is not supported; known: {', '.join(ROPE_TYPES)}")
    check_kinds(scaling, ROPE_KINDS, "the model's RoPE scaling")
    options = {key: scaling[key] for key in ROPE_KINDS if scaling.get(key) is not None}
    theta = float(options.pop("rope_theta", config.get("rope_theta", 10_000.0)))
    if kind == "default":
        return RopeConfig(theta=theta)
    original, limit = "original_max_position_embeddings", config["max_position_embeddings"]
    if kind in ("llama3", "yarn"):
        options[original] = config.get(original) or options.get(original) or limit
    if kind == "yarn":
        options.setdefault("factor", limit / options[original])
    for name in ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",):
        if name not in options:
            raise ModelError(f"RoPE type {kind!r} needs {name!r} in rope_scaling or rope_parameters")
    if kind == "llama3" and options["high_freq_factor"] <= options["low_freq_factor"]:
        raise ModelError("RoPE type 'llama3' needs a high_freq_factor above its low_freq_factor")
    return RopeConfig(theta=theta, type=kind, **options)


def _sliding_window(config: dict[str, Any], family: str) -> tuple[int | None, ...]:
    """One window (in tokens) or ``None`` a layer."""
    num_layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if window is None or family.startswith("qwen") and not config.get("use_sliding_window"):
        return (None,) * num_layers
    may_mix = family in ("qwen2", "qwen3")
    full = config["max_window_layers"] if may_mix else 0
    by_position = ["full_attention" if layer < full else "sliding_attention" for layer in range(num_layers)]
    kinds = config.get("layer_types") or by_position
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelError(f"layer_types must name full_attention or sliding_attention for each of {num_layers} layers")
    if not may_mix and "full_attention" in kinds:
        raise ModelError(f"{family} with layer_types that mix full and sliding attention is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _experts(config: dict[str, Any], family: str) -> dict[str, Any]:
    """The fields of :class:`ModelConfig` that describe a mixture of experts; nothing for a dense model."""
    num_layers = config["num_hidden_layers"]
    if family not in ("mixtral", "qwen3_moe"):
        return {"sparse_layers": (False,) * num_layers}
    mixtral = family == "mixtral"
    num_experts = config.get("num_local_experts") or config["num_experts"]
    per_token = config["num_experts_per_tok"]
    if per_token > num_experts:
        raise ModelError(f"num_experts_per_tok {per_token} must be at most the number of experts, {num_experts}")
    dense = () if mixtral else config.get("mlp_only_layers") or ()
    step = 1 if mixtral else config["decoder_sparse_step"]
    return {
        "sparse_layers": tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        "num_experts": num_experts,
        "num_experts_per_token": per_token,
        "moe_intermediate_size": config["intermediate_size" if mixtral else "moe_intermediate_size"],
        "norm_topk_prob": mixtral or config["norm_topk_prob"],
    }


def _special_ids(config: dict[str, Any], generation: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """BOS, and every EOS id of both files; the family's default where neither file names one."""
    bos = (defaults | generation | config).get("bos_token_id")
    sources = [source["eos_token_id"] for source in (config, generation) if "eos_token_id" in source]
    sources = sources or [defaults.get("eos_token_id")]
    ids = dict.fromkeys(token_id for ids in sources for token_id in (ids if isinstance(ids, list) else [ids]))
    # An id outside the vocabulary can never be sampled; some configs write -1 for "none".
    tokens = range(config["vocab_size"])
    return {"bos_token_id": bos if bos in tokens else None, "eos_token_ids": tuple(i for i in ids if i in tokens)}
