"""Which device to compute on: one rule for the engine, the measurements and the commands."""

from __future__ import annotations

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
