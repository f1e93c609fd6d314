"""Where the course finds its files: shipped data, the notebooks, and the reader's cache folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minillm.measure.results import shipped_file
from minillm.measure.results import write_atomically as write_text

__all__ = ["CourseError", "Store", "cache_folder", "data_file", "data_folder", "notebooks_folder", "write_text"]

_PACKAGE = Path(__file__).resolve().parents[1]


class CourseError(ValueError):
    """Something the course needs is missing or does not fit; the message says what to do."""


def data_file(name: str) -> Path:
    """The path of a shipped data file, such as ``"quizzes/00.json"``.

    Raises:
        CourseError: when it is missing.
    """
    try:
        return shipped_file(name)
    except FileNotFoundError as error:
        raise CourseError(str(error)) from None


def data_folder() -> Path:
    """The folder of a checkout into which recorded runs are written.

    Raises:
        CourseError: when this is an installed package without its checkout.
    """
    return _checkout_folder("data")


def notebooks_folder() -> Path:
    """The folder of the numbered notebooks.

    Raises:
        CourseError: when this is an installed package without its checkout.
    """
    return _checkout_folder("notebooks")


def _checkout_folder(name: str) -> Path:
    folder = _PACKAGE.parent / name
    if not folder.is_dir() or not (_PACKAGE.parent / "pyproject.toml").is_file():
        raise CourseError(f"there is no {name} folder beside the package: run this in a checkout of the project "
                          "(git clone, then pip install -e .).")
    return folder


def cache_folder() -> Path:
    """The reader's own folder: machine card, ladder and guesses (``MINILLM_HOME``, else the user's cache folder)."""
    from minillm.model.hub import cache_dir

    return cache_dir()


class Store:
    """A small JSON object kept in a file, or in memory alone when ``path`` is ``None`` (a run that records nothing).

    A file that does not parse is moved aside as ``NAME.broken``, so that a notebook never dies of it.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self.values: dict[str, Any] = {}
        if path is not None and path.is_file():
            try:
                values = json.loads(path.read_text(encoding="utf-8"))
                if not isinstance(values, dict):
                    raise ValueError("not a JSON object")
                self.values = values
            except ValueError:
                path.replace(path.with_name(path.name + ".broken"))

    def put(self, key: str, value: Any) -> None:
        """Set one entry and save."""
        self.values[key] = value
        if self.path is not None:
            write_text(self.path, json.dumps(self.values, indent=1, ensure_ascii=False) + "\n")
