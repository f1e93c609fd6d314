"""Keep what was dequantized: a GGUF file's weights as float32 safetensors, which the next load reads from disk.

Dequantizing the default model takes 1.5 s, reading it a quarter of that. The price is disk: 4 bytes a weight. Tensors
are read into memory of their own, not mapped: each is free again once the decoder has repacked it, where a mapping
would stay whole beside the copies. It is a cache and no more: whatever goes wrong, the weights are dequantized again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from minillm.model.hub import cache_dir

FORMAT_VERSION = 1  # to be raised with every change of names, layout or values
MAX_SHARE_OF_FREE_DISK = 0.2


def load_converted(path: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor] | None:
    """The kept float32 weights of the GGUF file ``path``, or ``None`` where there are none fit to use.

    ``expected`` holds the name and shape of each tensor.
    """
    head, tensors = _header(expected), {}
    try:
        with _place(path).open("rb") as file:
            if file.read(len(head)) != head:
                return None
            for name, shape in expected.items():
                tensors[name] = torch.empty(shape)
                if file.readinto(tensors[name].numpy()) != tensors[name].nbytes:
                    return None
            return None if file.read(1) else tensors
    except OSError:
        return None


def keep_converted(path: Path, expected: Mapping[str, tuple[int, ...]], read: Callable[[str], torch.Tensor]) -> None:
    """Keep the weights of the GGUF file ``path``, ``read(name)`` in float32, in place of those of older versions of it.

    They are read and written one after another, so that memory holds one at a time; the file appears in one step.
    Nothing is kept where the folder cannot be written or they would take over a fifth of the free disk.
    """
    with suppress(OSError):
        place = _place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = sum(4 * math.prod(shape) for shape in expected.values())
        if num_bytes > MAX_SHARE_OF_FREE_DISK * shutil.disk_usage(place.parent).free:
            return
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=place.parent) as folder:
            unfinished = Path(folder) / place.name
            with unfinished.open("wb") as file:
                file.write(_header(expected))
                for name in expected:
                    file.write(read(name).contiguous().numpy().data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, place)
        for other in place.parent.glob("*.safetensors"):
            if other != place:
                other.unlink()


def _header(expected: Mapping[str, tuple[int, ...]]) -> bytes:
    """The head of a safetensors file of float32 tensors that lie behind one another: its length, then JSON.

    The library writes only what is all in memory at once, which here is the price that streaming saves.
    """
    entries, start = {}, 0
    for name, shape in expected.items():
        end = start + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    return len(text).to_bytes(8, "little") + text


def _place(path: Path) -> Path:
    """One folder a path; in it a file named for that file's size, time of change and our format."""
    path = path.resolve()
    status = path.stat()
    identity = f"{status.st_size}-{status.st_mtime_ns}-{FORMAT_VERSION}"
    folder = f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    return cache_dir() / "converted" / folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:12]}.safetensors"
