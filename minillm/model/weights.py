"""A model's weights under canonical names, from whatever file: checked in full before anything is read.

Canonical names are those of a Hugging Face Llama without the prefix ``model.``, each matrix [out, in], the rotary
halves of q and k a half head apart; experts are stacked, [num_experts, out, in].
"""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from minillm.errors import ModelError
from minillm.model.checkpoint import Checkpoint, Location, open_checkpoint
from minillm.model.config import ModelConfig
from minillm.model.converted import keep_converted, load_converted


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a model of ``config`` has; ``lm_head.weight`` only where it is untied."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_layers):
        sparse = bool(config.sparse_layers) and config.sparse_layers[layer]
        block = _attention(config) | (_experts(config) if sparse else _mlp(config))
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    shapes["norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _attention(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, out_features in (("q", query), ("k", key), ("v", key)):
        shapes[f"self_attn.{name}_proj.weight"] = (out_features, hidden)
        if config.qkv_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (out_features,)
    shapes["self_attn.o_proj.weight"] = (hidden, query)
    if config.o_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return shapes | {"post_attention_layernorm.weight": (hidden,)}


def _mlp(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    wide, hidden = config.intermediate_size, config.hidden_size
    matrices = {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide)}
    shapes: dict[str, tuple[int, ...]] = {f"mlp.{name}.weight": shape for name, shape in matrices.items()}
    if config.mlp_bias:
        shapes |= {f"mlp.{name}.bias": shape[:1] for name, shape in matrices.items()}
    return shapes


def _experts(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    count, wide, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    return {
        "mlp.router.weight": (count, hidden),
        "mlp.experts.gate_proj": (count, wide, hidden),
        "mlp.experts.up_proj": (count, wide, hidden),
        "mlp.experts.down_proj": (count, hidden, wide),
    }


def load_weights(path: str | Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The tensors of :func:`expected_tensors`, on the CPU, in the file's precision (GGUF: dequantized to float32).

    A tied head is not in the result, even where the file holds one: the decoder uses ``embed_tokens.weight``. A
    progress bar appears on a terminal when it takes over a second. Dequantized weights are kept for the next load
    (see :mod:`minillm.model.converted`).

    Raises:
        ModelError: a missing or extra tensor, a missing shard, a wrong shape or a damaged file, by name, before any
            tensor is read.
    """
    path, expected = Path(path), expected_tensors(config)
    is_gguf = not path.is_dir()
    if is_gguf and (kept := load_converted(path, expected)) is not None:
        return kept
    checkpoint = open_checkpoint(path, config)
    places = _locate_all(checkpoint, config, str(path))
    title = "Converting weights, once" if is_gguf else "Loading weights"
    with tqdm(total=len(places), desc=title, unit="tensor", delay=1.0, leave=False, disable=None) as bar:
        def read(name: str) -> torch.Tensor:
            bar.update()
            return _read(checkpoint, places[name])

        if is_gguf:
            keep_converted(path, expected, read)
            if (kept := load_converted(path, expected)) is not None:
                return kept
        return {name: read(name) for name in places}


def _locate_all(checkpoint: Checkpoint, config: ModelConfig, path: str) -> dict[str, Location]:
    stored, places, used = checkpoint.shapes, {}, set()
    for name, shape in expected_tensors(config).items():
        alternatives = checkpoint.locations(name, config)
        place = next((a for a in alternatives if any(part in stored for part in a.names)), alternatives[0])
        for part in place.names:
            if part not in stored:
                raise ModelError(f"tensor {part!r} ({name}) is missing from {path}; {_hint(name)}")
            if stored[part] != place.stored_shape(shape):
                raise ModelError(
                    f"tensor {part!r} in {path} has shape {list(stored[part])}, but the config asks for "
                    f"{list(place.stored_shape(shape))}; the config and the weights are not of one model"
                )
        places[name] = place
        used.update(place.names)
    if config.tie_word_embeddings:
        used.update(part for place in checkpoint.locations("lm_head.weight", config) for part in place.names)
    extra = sorted(name for name in stored if name not in used and not checkpoint.is_ignorable(name))
    if extra:
        raise ModelError(
            f"{path} holds {len(extra)} tensor(s) that its config has no place for, the first {extra[0]!r}; "
            "the config and the weights are not of one model"
        )
    return places


def _hint(name: str) -> str:
    if name == "lm_head.weight":
        return "its config says tie_word_embeddings = false; if the head is tied to the embedding, set it to true"
    return "fetch the model again"


def _read(checkpoint: Checkpoint, place: Location) -> torch.Tensor:
    tensors = [checkpoint.read(name) for name in place.names]
    if place.stack:
        return torch.stack(tensors)
    return tensors[0] if place.half is None else tensors[0].chunk(2, dim=1)[place.half].contiguous()
