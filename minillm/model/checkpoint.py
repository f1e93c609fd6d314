"""Files that hold a model's tensors, behind one small interface: a Hugging Face folder, or a GGUF file.

Each knows its tensors' names and shapes without reading them, and where a canonical tensor (see
:mod:`minillm.model.weights`) may lie in it: under one of several names, in one piece, in one piece per expert, or as
one half of a fused tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from minillm.errors import ModelError
from minillm.model.config import ModelConfig, read_json
from minillm.model.gguf_file import read_gguf
from minillm.model.hub import no_safetensors
from minillm.model.quantize import QuantizedTensor, pack

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
# Ends of the names of tensors that follow from the config, and are no weights: old checkpoints carry the rotary
# frequencies, GGUF files the divisors of RoPE.
IGNORABLE = (".rotary_emb.inv_freq", "rope_freqs.weight")
# An expert's matrix in Mixtral's files, and where all experts lie together: the name, and the half of it.
EXPERT_NAMES = {"gate_proj": ("w1", "gate_up_proj", 0), "up_proj": ("w3", "gate_up_proj", 1),
                "down_proj": ("w2", "down_proj", None)}


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
    """Tensors by the names they have in the file, ``shapes`` by those names."""

    shapes: dict[str, tuple[int, ...]]

    def locations(self, name: str) -> list[Location]:
        """Where canonical tensor ``name`` may lie, the usual place first."""

    def read(self, name: str) -> torch.Tensor:
        """The tensor ``name`` of the file, in its layout in Hugging Face checkpoints, on the CPU."""

    def read_blocks(self, name: str) -> QuantizedTensor | None:
        """The same as the file holds it, if that is 4 bit in groups and a router's choice does not hang on it."""


def open_checkpoint(path: Path, config: ModelConfig) -> Checkpoint:
    """The checkpoint at ``path``: a folder, or a GGUF file. ``ModelError`` where a file is missing or damaged."""
    return (HFCheckpoint if path.is_dir() else GGUFCheckpoint)(path, config)


class HFCheckpoint(Checkpoint):
    """A folder with ``model.safetensors``, or with shards and ``model.safetensors.index.json``."""

    def __init__(self, folder: Path, config: ModelConfig):
        self.num_experts = config.num_experts
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.files: dict[str, safe_open] = {}
        for path in _find_files(folder):
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is not a whole safetensors file ({error}); fetch it again") from error
            for name in file.keys():
                view = file.get_slice(name)
                if view.get_dtype() not in FLOAT_DTYPES and not name.endswith(IGNORABLE):
                    raise ModelError(f"{path}: tensor {name!r} is stored as {view.get_dtype()}: quantized checkpoints "
                                     "are not supported; use the model's unquantized version, or a GGUF file")
                self.shapes[name], self.files[name] = tuple(view.get_shape()), file
        # A folder saved from the bare decoder leaves the prefix out.
        self.prefix = "model." if any(name.startswith("model.") for name in self.shapes) else ""

    def locations(self, name: str) -> list[Location]:
        """See :class:`Checkpoint`."""
        name = name if name == "lm_head.weight" else self.prefix + name
        layer, _, part = name.partition(".mlp.")
        if part == "router.weight":
            return [Location((f"{layer}.{block}.gate.weight",)) for block in ("mlp", "block_sparse_moe")]
        if not part.startswith("experts."):
            return [Location((name,))]
        matrix = part.removeprefix("experts.")
        in_mixtral, fused, half = EXPERT_NAMES[matrix]
        per_expert = [
            Location(tuple(f"{layer}.{block}.experts.{i}.{stored}.weight" for i in range(self.num_experts)), stack=True)
            for block, stored in (("mlp", matrix), ("block_sparse_moe", in_mixtral), ("mlp", in_mixtral))
        ]
        return [*per_expert, Location((f"{layer}.mlp.experts.{fused}",), half=half)]

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Checkpoint`; mapped from disk, not copied."""
        return self.files[name].get_tensor(name)

    def read_blocks(self, name: str) -> QuantizedTensor | None:
        """See :class:`Checkpoint`."""
        return None


def _find_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if (content := read_json(index)) is None:
        raise no_safetensors(folder)
    if not isinstance(content.get("weight_map"), dict):
        raise ModelError(f"{index} has no weight_map; fetch the model again")
    return [folder / name for name in sorted(set(map(str, content["weight_map"].values())))]


class GGUFCheckpoint(Checkpoint):
    """A GGUF file; every tensor is dequantized to float32."""

    def __init__(self, path: Path, config: ModelConfig):
        import gguf

        self.file = read_gguf(path)
        self.shapes = {name: tensor.shape for name, tensor in self.file.tensors.items()}
        architecture = self.file.metadata["general.architecture"]
        self.names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_layers)
        # Only the "llama" architecture is stored with rotary pairs interleaved.
        self.heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if architecture == "llama" else {}

    def locations(self, name: str) -> list[Location]:
        """See :class:`Checkpoint`. The ``gguf`` package knows the name of each tensor of a Hugging Face folder."""
        suffix = ".bias" if name.endswith(".bias") else ".weight"
        stem = name.removesuffix(suffix).replace("mlp.router", "mlp.gate")
        stored = self.names.get_name(f"model.{stem}") or self.names.get_name(stem) or stem
        return [Location((f"{stored}{suffix}",))]

    def read(self, name: str) -> torch.Tensor:
        """See :class:`Checkpoint`."""
        return self._in_order(name, torch.from_numpy(self.file.dequantize(name)))

    def read_blocks(self, name: str) -> QuantizedTensor | None:
        """See :class:`Checkpoint`; blocks of 32, with scales and middles rounded to bfloat16."""
        if len(self.shapes[name]) != 2 or ".ffn_gate_inp." in name or (blocks := self.file.q4_blocks(name)) is None:
            return None
        codes, scales, middles = (self._in_order(name, torch.from_numpy(part)) for part in blocks)
        if not (scales.isfinite().all() and middles.isfinite().all()):
            raise ModelError(f"{self.file.path}: tensor {name!r} holds inf or nan; fetch the model again")
        return QuantizedTensor(pack(codes), scales.bfloat16(), middles.bfloat16(), 32, codes.shape[1])

    def _in_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
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
