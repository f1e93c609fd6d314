"""Files that hold a model's tensors, behind one small interface: a Hugging Face folder, or a GGUF file.

Each knows its tensors' names and shapes without reading them, and where a canonical tensor (see
:mod:`minillm.model.weights`) may lie in it: under one of several names, in one piece, in one piece per expert, or as
one half of a fused tensor.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from minillm.errors import ModelError
from minillm.model.config import ModelConfig
from minillm.model.gguf_file import read_gguf

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Location:
    """Where a canonical tensor lies: tensor ``names`` in the file, stacked if ``stack``; of which half ``half``."""

    names: tuple[str, ...]
    stack: bool = False
    half: int | None = None

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the file of each of ``names``, for a canonical tensor of ``shape``."""
        if self.stack:
            return shape[1:]
        return shape if self.half is None else (shape[0], 2 * shape[1], *shape[2:])


class Checkpoint(Protocol):
    """Tensors by the names they have in the file."""

    shapes: dict[str, tuple[int, ...]]

    def locations(self, name: str, config: ModelConfig) -> list[Location]:
        """Where canonical tensor ``name`` may lie, the usual place first."""

    def is_ignorable(self, name: str) -> bool:
        """Whether the tensor ``name`` of the file holds no weights of its own."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name`` of the file, in its layout in Hugging Face checkpoints, on the CPU."""


def open_checkpoint(path: str | Path, config: ModelConfig) -> Checkpoint:
    """The checkpoint at ``path``: a folder, or a GGUF file. ``ModelError`` where a file is missing or damaged."""
    return HFCheckpoint(Path(path)) if Path(path).is_dir() else GGUFCheckpoint(Path(path), config)


class HFCheckpoint:
    """A folder with ``model.safetensors``, or with shards and ``model.safetensors.index.json``."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.files: dict[str, safe_open] = {}
        for file in self._find_files():
            self._open(file)

    def _find_files(self) -> list[Path]:
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                shards = [self.folder / name for name in sorted(set(weight_map.values()))]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise ModelError(f"cannot read {index}: {error!r}; fetch the model again") from error
            for shard in shards:
                if not shard.is_file():
                    raise ModelError(f"shard {shard.name} is missing from {self.folder}; fetch the model again")
            return shards
        if any(self.folder.glob("*.bin")):
            raise ModelError(
                f"{self.folder} holds only pickled weights (.bin), which may run code when read; use a revision with "
                "safetensors, or convert it: load it with transformers where you trust it and save_pretrained() it"
            )
        raise ModelError(f"{self.folder} holds no model.safetensors; give a folder with the model's weights")

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error
        for name in file.keys():
            view = file.get_slice(name)
            if view.get_dtype() not in FLOAT_DTYPES and not self.is_ignorable(name):
                raise ModelError(
                    f"{path}: tensor {name!r} is stored as {view.get_dtype()}: quantized checkpoints are not "
                    "supported; use the model's unquantized version, or a GGUF file"
                )
            self.shapes[name] = tuple(view.get_shape())
            self.files[name] = file

    def locations(self, name: str, config: ModelConfig) -> list[Location]:
        """See :class:`Checkpoint`. A folder saved from the bare decoder leaves out the prefix ``model.``."""
        if name == "lm_head.weight":
            return [Location((name,))]
        return [
            Location(tuple(prefix + stored for stored in place.names), place.stack, place.half)
            for prefix in ("model.", "")
            for place in _hf_places(name, config.num_experts)
        ]

    def is_ignorable(self, name: str) -> bool:
        """See :class:`Checkpoint`: old checkpoints carry the rotary frequencies, which follow from the config."""
        return name.endswith("rotary_emb.inv_freq")

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Checkpoint`; mapped from disk, not copied."""
        return self.files[name].get_tensor(name)


def _hf_places(name: str, num_experts: int) -> list[Location]:
    layer, _, part = name.partition(".mlp.")
    if part == "router.weight":
        return [Location((f"{layer}.{block}.gate.weight",)) for block in ("mlp", "block_sparse_moe")]
    if not part.startswith("experts."):
        return [Location((name,))]
    matrix = part.removeprefix("experts.")
    mixtral = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[matrix]
    fused = f"{layer}.mlp.experts." + ("down_proj" if matrix == "down_proj" else "gate_up_proj")
    half = {"gate_proj": 0, "up_proj": 1}.get(matrix)
    per_expert = [
        Location(tuple(pattern.format(expert) for expert in range(num_experts)), stack=True)
        for pattern in (
            f"{layer}.mlp.experts.{{}}.{matrix}.weight",
            f"{layer}.block_sparse_moe.experts.{{}}.{mixtral}.weight",
            f"{layer}.mlp.experts.{{}}.{mixtral}.weight",
        )
    ]
    return [*per_expert, Location((fused,), half=half)]


GGUF_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.router": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps", "mlp.experts.down_proj": "ffn_down_exps",
}


class GGUFCheckpoint:
    """A GGUF file; every tensor is dequantized to float32."""

    def __init__(self, path: Path, config: ModelConfig):
        self.file = read_gguf(path)
        self.shapes = {name: tensor.shape for name, tensor in self.file.tensors.items()}
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        # Only the "llama" architecture is stored with rotary pairs interleaved.
        self.heads = heads if self.file.metadata.get("general.architecture") == "llama" else {}

    def locations(self, name: str, config: ModelConfig) -> list[Location]:
        """See :class:`Checkpoint`."""
        layer, stem = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", name).groups()
        stem, dot, suffix = stem.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = f"{stem}{dot}{suffix}", "weight"
        prefix = "" if layer is None else f"blk.{layer}."
        return [Location((f"{prefix}{GGUF_NAMES[stem]}.{suffix}",))]

    def is_ignorable(self, name: str) -> bool:
        """See :class:`Checkpoint`: RoPE divisors are part of the config."""
        return name == "rope_freqs.weight"

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Checkpoint`."""
        tensor = torch.from_numpy(self.file.dequantize(name))
        heads = self.heads.get(name.split(".")[-2])
        return tensor if heads is None else split_rotary_pairs(tensor, heads)


def split_rotary_pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the row order of q and k in llama GGUF files, head by head.

    ``tensor`` is [num_heads * head_dim, ...]. Such files put the two halves of each rotary pair side by side
    (x0 y0 x1 y1 ..., llama.cpp's ``permute``); Hugging Face keeps them a half head apart (x0 x1 ... y0 y1 ...). The
    head count is that of the tensor itself: fewer for k than for q where heads share keys.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
