"""Read GGUF files: metadata as plain Python values, tensors as float32 arrays. No torch.

The layout is that of the GGUF specification (ggml, docs/gguf.md): magic, version, counts, key-value pairs, tensor
infos, padding, tensor data. The header is parsed here, because the ``gguf`` package's reader keeps a NumPy view of
every string and takes seconds for a vocabulary; the many quantized block formats are left to that package.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minillm.errors import ModelError

STRING, ARRAY = 8, 9
Q4_0, Q4_1 = 2, 3  # types of tensors (ggml.h) that are read without the gguf package
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
        from gguf import GGMLQuantizationType, quants

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.type)
            rows = self._rows(name, quants.quant_shape_to_byte_shape(tensor.shape, kind))
            return np.require(quants.dequantize(rows, kind), np.float32, ["C", "W"]).reshape(tensor.shape)
        except (ValueError, KeyError, IndexError, NotImplementedError) as error:
            raise ModelError(f"{self.path}: tensor {name!r} has type {tensor.type}, which the gguf package cannot "
                             f"dequantize ({error}); use a file of another quantization, or a newer gguf package"
                             ) from error

    def q4_blocks(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Tensor ``name``, ``[out, in]``, as it is stored in blocks of 32: codes uint8 ``[out, in]``, scales and
        middles float32 ``[out, in / 32]``, where weight = (code - 8) * scale + middle. None for other types than Q4_0
        and Q4_1.

        Raises:
            ModelError: the file ends too early.
        """
        tensor = self.tensors[name]
        if tensor.type not in (Q4_0, Q4_1) or tensor.shape[-1] % 32:
            return None
        num_halves = 1 if tensor.type == Q4_0 else 2  # float16 in front of a block's codes: scale; scale and smallest
        rows = self._rows(name, (tensor.shape[0], tensor.shape[1] // 32 * (2 * num_halves + 16)))
        blocks = rows.reshape(tensor.shape[0], -1, 2 * num_halves + 16)
        numbers = np.ascontiguousarray(blocks[..., :2 * num_halves]).view(np.float16).astype(np.float32)
        pairs = blocks[..., 2 * num_halves:]  # the low halves are a block's first 16 codes
        codes = np.concatenate((pairs & 15, pairs >> 4), -1).reshape(tensor.shape)
        scales = numbers[..., 0]
        return codes, scales, 8 * scales + numbers[..., 1] if num_halves == 2 else np.zeros_like(scales)

    def _rows(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The bytes of a tensor, mapped from the file."""
        start = self.data_start + self.tensors[name].offset
        if start + math.prod(shape) > self.path.stat().st_size:
            raise ModelError(f"{self.path} ends within tensor {name!r}: the file is cut short; fetch it again")
        return np.memmap(self.path, np.uint8, "r", start, shape)


def read_gguf(path: str | Path) -> GGUFFile:
    """Parse the header of ``path``; the tensors' data stays on disk.

    Raises:
        ModelError: not a GGUF file, a version this reader does not know, or a file cut short.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(data, path)
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path} is not a whole GGUF file ({error}); fetch it again") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _parse(data: mmap.mmap, path: Path) -> GGUFFile:
    if data.read(4) != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
    version, num_tensors, num_pairs = _numbers(data, "IQQ")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported; known: 2 and 3, little-endian")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        (key,), (kind,) = _strings(data, 1), _numbers(data, "I")
        metadata[key] = _values(data, *_numbers(data, "IQ")) if kind == ARRAY else _values(data, kind, 1)[0]
    tensors: dict[str, GGUFTensor] = {}
    for _ in range(num_tensors):
        (name,), (num_dims,) = _strings(data, 1), _numbers(data, "I")
        shape = _numbers(data, f"{num_dims}Q")[::-1]  # GGUF lists the fastest dimension first, torch the slowest
        if name in tensors:
            raise ModelError(f"{path} holds tensor {name!r} twice")
        tensors[name] = GGUFTensor(shape, *_numbers(data, "IQ"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"{path}: general.alignment must be a positive number, got {alignment!r}")
    return GGUFFile(path, metadata, tensors, -(-data.tell() // alignment) * alignment)


# These read on from where ``data`` stands. A length is checked before anything of that length is made.


def _numbers(data: mmap.mmap, layout: str) -> tuple[Any, ...]:
    """The numbers of :mod:`struct`'s ``layout``, little-endian and without padding."""
    num_bytes = struct.calcsize(f"<{layout}")
    if num_bytes > len(data) - data.tell():
        raise ValueError("it ends within its header")
    return struct.unpack(f"<{layout}", data.read(num_bytes))


def _strings(data: mmap.mmap, count: int) -> list[str]:
    texts, end, length_at = [], data.tell(), struct.Struct("<Q").unpack_from
    for _ in range(count):
        start = end + 8
        end = start + length_at(data, end)[0]
        if end > len(data):
            raise ValueError("it ends within its header")
        texts.append(data[start:end].decode("utf-8", "replace"))
    data.seek(end)
    return texts


def _values(data: mmap.mmap, kind: int, count: int) -> list[Any]:
    if kind == STRING:
        return _strings(data, count)
    if kind not in SCALARS:  # arrays of arrays among them: no model has any
        raise ValueError(f"it holds a value of unknown type {kind}")
    return list(_numbers(data, f"{count}{SCALARS[kind]}"))
