"""Which device to compute on: one rule for the engine, the measurements and the commands."""

from __future__ import annotations

from pathlib import Path

import torch


def resolve_device(device: str = "auto") -> str:
    """``"auto"`` as ``"cuda"`` where there is one, else ``"cpu"``; any other device as it is, once it has been tried.

    Raises:
        ValueError: torch does not know the device, or cannot use it here.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {device!r} cannot be used here; try device='cpu' ({reason})") from error
    return device


def free_bytes(device: torch.device | str) -> int:
    """Memory of ``device`` that can still be taken, within a container's limit; 4 GiB where nothing tells."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([found for found in (_available_bytes(), _container_bytes()) if found is not None], default=4 * 2**30)


def _available_bytes() -> int | None:
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):  # macOS, Windows
        return None


def _container_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    try:
        return max(0, int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text()))
    except (OSError, ValueError):  # no container, or "max": no limit
        return None
