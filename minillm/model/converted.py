"""Keep what was dequantized: a GGUF file's weights as float32, one behind another, which the next load reads.

Dequantizing the default model takes 1.5 s, reading it a quarter of that. The price is disk: 4 bytes a weight. Each
tensor is mapped by itself: read when the decoder repacks it and free again after that, where one mapping of the file
would stay whole beside the copies. It is a cache and no more: whatever goes wrong, the weights are dequantized again.
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from minillm.model.hub import cache_dir

FORMAT_VERSION = 2  # to be raised with every change of names, layout or values
MAX_SHARE_OF_FREE_DISK = 0.2


def load_converted(path: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor] | None:
    """The kept float32 weights of the GGUF file ``path``, or ``None`` where there are none fit to use.

    ``expected`` holds the name and shape of each tensor.
    """
    tensors, offset = {}, 0
    with suppress(OSError, ValueError):  # gone, or cut short, in the middle
        place = _place(path, expected)
        if place.stat().st_size == 4 * sum(map(math.prod, expected.values())):
            for name, shape in expected.items():
                tensors[name] = torch.from_numpy(np.memmap(place, np.float32, "c", offset, shape))
                offset += tensors[name].nbytes
            return tensors
    return None


def keep_converted(path: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Keep the float32 ``weights`` of the GGUF file ``path``, in place of those of older versions of it.

    The file appears in one step. Nothing is kept where the folder cannot be written or they would take over a fifth of
    the free disk.
    """
    with suppress(OSError):
        place = _place(path, {name: tuple(tensor.shape) for name, tensor in weights.items()})
        place.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = sum(tensor.nbytes for tensor in weights.values())
        if num_bytes > MAX_SHARE_OF_FREE_DISK * shutil.disk_usage(place.parent).free:
            return
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=place.parent) as folder:
            unfinished = Path(folder) / place.name
            with unfinished.open("wb") as file:
                for tensor in weights.values():
                    file.write(tensor.contiguous().numpy().data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, place)
        for other in place.parent.iterdir():
            if other.is_file() and other != place:
                other.unlink()


def _place(path: Path, expected: Mapping[str, tuple[int, ...]]) -> Path:
    """One folder a path; in it a file named for that file's size and time of change, our format and the tensors."""
    path = path.resolve()
    status = path.stat()
    identity = f"{status.st_size}-{status.st_mtime_ns}-{FORMAT_VERSION}-{list(expected.items())}"
    folder = f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    return cache_dir() / "converted" / folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:12]}.f32"
