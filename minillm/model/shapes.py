"""The shapes of well-known models, so that their cost can be estimated without their files. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minillm.errors import ModelError
from minillm.measure.results import read_strict_json, shipped_file
from minillm.model.config import ModelConfig, config_from_hf, load_config


def _shapes() -> dict[str, dict[str, Any]]:
    return read_strict_json(shipped_file("model_shapes.json"))


def known_models() -> tuple[str, ...]:
    """Names of the models in ``data/model_shapes.json``, such as ``"llama-3-8b"``."""
    return tuple(_shapes())


def find_config(model: str | Path) -> ModelConfig:
    """The config of a known model, of a folder with a ``config.json``, or of a ``.gguf`` file. Fetches nothing.

    Raises:
        ModelError: none of the three (the message names the known models), or a config that is not supported.
    """
    shapes = _shapes()
    if str(model).lower() in shapes:
        return config_from_hf(shapes[str(model).lower()]["config"])
    try:
        if str(model) and (path := Path(model).expanduser()).exists():
            return load_config(path)
    except (OSError, RuntimeError, ValueError):  # no path at all: too long, a NUL in it, nobody's "~"
        pass
    raise ModelError(f"there is no model {str(model)[:200]!r} here: give a folder with a config.json, a .gguf file, or "
                     f"one of {', '.join(shapes)}")
