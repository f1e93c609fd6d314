"""Read GGUF files: metadata as plain Python values, tensors as float32 arrays. No torch.

The layout is that of the GGUF specification (ggml, docs/gguf.md): magic, version, counts, key-value pairs, tensor
infos, padding, tensor data. The header is parsed here, because the ``gguf`` package's reader keeps a NumPy view of
every string and takes seconds for a vocabulary; the many quantized block formats are left to that package.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minillm.errors import ModelError

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GGUFTensor:
    """Where one tensor lies: ``shape`` slowest dimension first (as in torch), ``offset`` in bytes from the data."""

    shape: tuple[int, ...]
    type: int
    offset: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header. ``metadata`` holds every key with a plain Python value, arrays as lists; ``tensors`` every
    tensor's place, by its name in the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data_start: int

    def dequantize(self, name: str) -> np.ndarray:
        """The values of tensor ``name``: a writable float32 array of its shape.

        Raises:
            ModelError: the tensor's type is not one the ``gguf`` package can dequantize, or the file ends too early.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.type)
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
            num_bytes = int(np.prod(tensor.shape, dtype=np.int64)) // block_elements * block_bytes
            start = self.data_start + tensor.offset
            if start + num_bytes > self.path.stat().st_size:
                raise ModelError(f"{self.path} ends within tensor {name!r}: the file is cut short; fetch it again")
            raw = np.memmap(self.path, np.uint8, "r", offset=start, shape=(num_bytes,))
            rows = raw.reshape(*tensor.shape[:-1], tensor.shape[-1] // block_elements * block_bytes)
            return np.require(quants.dequantize(rows, kind), np.float32, ["C", "W"]).reshape(tensor.shape)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ModelError(
                f"{self.path}: tensor {name!r} has type {tensor.type}, which the gguf package cannot dequantize "
                f"({error}); use a file of another quantization, or a newer gguf package"
            ) from error


def read_gguf(path: str | Path) -> GGUFFile:
    """Parse the header of ``path``; the tensors' data stays on disk.

    Raises:
        ModelError: not a GGUF file, a version this reader does not know, or a file cut short.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            metadata, tensors, end = _parse(data, path)
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment must be a positive number, got {alignment!r}")
    return GGUFFile(path, metadata, tensors, -(-end // alignment) * alignment)


def _parse(data: mmap.mmap, path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor], int]:
    if data[:4] != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
    version, num_tensors, num_pairs = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported; known: 2 and 3, little-endian")
    reader = _Reader(data, 24)
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = reader.string()
        metadata[key] = reader.value()
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(num_tensors):
        name = reader.string()
        # GGUF lists the fastest dimension first, torch the slowest.
        shape = tuple(reversed(reader.scalars("Q", reader.scalar("I"))))
        if name in tensors:
            raise ModelError(f"{path} holds tensor {name!r} twice")
        tensors[name] = GGUFTensor(shape, reader.scalar("I"), reader.scalar("Q"))
    return metadata, tensors, reader.position


class _Reader:
    """A cursor over the header's bytes."""

    def __init__(self, data: mmap.mmap, position: int):
        self.data, self.position = data, position

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        if count * struct.calcsize(code) > len(self.data) - self.position:  # before a list of that length is made
            raise ValueError("it ends within its header")
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data, position, length_of = self.data, self.position, struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = position + 8
            position = start + length_of(data, position)[0]
            if position > len(data):
                raise ValueError("it ends within its header")
            texts.append(data[start:position].decode("utf-8", "replace"))
        self.position = position
        return texts

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind != ARRAY:
            return self.values(kind, 1)[0]
        return self.values(self.scalar("I"), self.scalar("Q"))

    def values(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            return self.strings(count)
        if kind not in SCALARS:  # arrays of arrays among them: no model has any
            raise ValueError(f"it holds a value of unknown type {kind}")
        return list(self.scalars(SCALARS[kind], count))
