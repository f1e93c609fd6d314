"""How long this process waited for a processor that others held: the sign that its times are not its own. No torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

TASKS = Path("/proc/self/task")


def scheduler_seconds() -> tuple[float, float] | None:
    """Seconds that this process's threads ran, and waited ready to run, so far; ``None`` where the system (all but
    Linux) does not tell. Source: "Scheduler Statistics" of the Linux kernel's documentation, ``schedstat``."""
    ran = waited = 0
    for file in TASKS.glob("*/schedstat"):
        with suppress(OSError, ValueError):  # a thread that has just ended
            ran_ns, waited_ns, _ = map(int, file.read_text().split())
            ran, waited = ran + ran_ns, waited + waited_ns
    return (ran / 1e9, waited / 1e9) if ran else None


def waited_share(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """The share (0 to 1) of the time that its threads wanted to run between two readings, which they waited instead."""
    if before is None or after is None:
        return None
    ran, waited = (max(0.0, end - start) for start, end in zip(before, after, strict=True))
    return waited / (ran + waited) if ran + waited else None
