"""A measured run as a file: every raw sample, and all that is needed to judge or repeat it. No torch.

Kept under ``data/measurements/NAME.json`` (strict JSON: NaN and infinity are refused, a missing value is null).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "gguf", "llama-cpp-python")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One run. ``samples`` are flat or nested JSON objects, in the order they were taken.

    ``settings`` is what was asked, ``environment`` (see :func:`environment`) where it ran, ``recorded_at`` UTC.
    """

    name: str
    samples: list[dict[str, Any]]
    settings: dict[str, Any]
    environment: dict[str, Any]
    recorded_at: str = field(default_factory=lambda: now())

    def save(self, path: str | Path | None = None) -> Path:
        """Write to ``path``, or to ``NAME.json`` in :func:`measurements_dir`; returns where.

        Raises:
            ValueError: a NaN or an infinity anywhere, or a name that is no plain file name.
        """
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"a recording's name may hold letters, digits, '.', '_' and '-', got {self.name!r}")
        return write_strict_json(path or measurements_dir() / f"{self.name}.json", asdict(self))

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Read a file written by :meth:`save`; one that holds NaN or infinity raises ``ValueError``."""
        return cls(**read_strict_json(path))

    def values(self, key: str, **where: Any) -> list[float]:
        """``sample[key]`` of the samples whose fields equal ``where`` and that have it, in order.

        ``recording.values("ttft_s", engine="minillm-auto")``
        """
        chosen = [s for s in self.samples if all(s.get(name) == value for name, value in where.items())]
        return [sample[key] for sample in chosen if sample.get(key) is not None]


def now() -> str:
    """UTC date and time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(**extra: Any) -> dict[str, Any]:
    """Where a run takes place: operating system, CPU, cores, versions and commit; ``extra`` adds to it."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "versions": package_versions(),
        "commit": git_commit(),
        **extra,
    }


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    with suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match.group(1)
    return platform.processor() or platform.machine()


def package_versions() -> dict[str, str]:
    """Versions of Python and of those installed packages that make a difference to speed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def git_commit() -> str | None:
    """Commit of the checkout this package runs from, with ``-dirty`` where ``minillm/`` was changed since; ``None``
    outside a checkout of it, such as an installed package."""
    package = Path(__file__).resolve().parents[1]
    tracked = _git(package, "ls-files", "--", "__init__.py")
    commit = _git(package, "rev-parse", "HEAD")
    if not tracked or not commit:
        return None
    return commit + ("-dirty" if _git(package, "status", "--porcelain", "--", ".") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def measurements_dir() -> Path:
    """``data/measurements`` of the checkout, or of the current folder when the package is installed elsewhere."""
    of_checkout = Path(__file__).resolve().parents[2] / "data" / "measurements"
    return of_checkout if of_checkout.is_dir() else Path.cwd() / "data" / "measurements"


def shipped_file(name: str) -> Path:
    """The path of a data file that comes with the package, such as ``"hardware.json"``: beside the package in a
    checkout, inside it once installed.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    places = [package.parent / "data" / name, package / "data" / name]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"data file {name!r} is missing; looked in {places[0].parent} and {places[1].parent}. "
                                "Install the package again, or work in a complete checkout.")
    return found


def read_strict_json(path: str | Path) -> Any:
    """The JSON in ``path``; NaN and infinity, which are no JSON, raise ``ValueError``."""
    def refuse(constant: str) -> None:
        raise ValueError(f"{path} holds {constant}, which is not valid JSON")
    return json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=refuse)


def write_strict_json(path: str | Path, value: Any) -> Path:
    """Write ``value`` as JSON, whole or not at all; returns where. NaN and infinity raise ``ValueError``."""
    write_atomically(Path(path), json.dumps(value, indent=1, allow_nan=False) + "\n")
    return Path(path)


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees the old file or the whole new one; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def shown_path(path: Path) -> Path:
    """``path`` as it is shown to people: from the current folder where it lies below it, else in full."""
    path, here = path.resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
