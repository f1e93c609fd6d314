"""The course's words, each explained once, where it first appears (``data/glossary.json``)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from minillm.course import html
from minillm.course.files import CourseError, data_file, notebooks_folder, write_text

PAGE = "glossary.md"


@dataclass(frozen=True, slots=True)
class Term:
    """A word, its meaning in a sentence or two, and the notebook that brings it.

    ``unit`` is what it is counted in, where it is a quantity. ``confused_with`` holds words that are taken for it, and
    for each the sentence that tells them apart.
    """

    term: str
    meaning: str
    notebook: str
    unit: str = ""
    confused_with: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "confused_with", self.confused_with or {})  # "" in the file stands for none

    def apart(self) -> str:
        """The words it is confused with and why they differ, in one line."""
        return " ".join(f"{other}: {why}" for other, why in self.confused_with.items())


@dataclass(frozen=True, slots=True)
class Glossary:
    """Some terms, shown as a table; unit and confusions have a column where any of them has one."""

    terms: tuple[Term, ...]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": "\n".join(f"{term.term}: {term.meaning}" for term in self.terms),
                "text/html": html.table(*self.table())}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and rows."""
        columns = {"term": [term.term for term in self.terms], "meaning": [term.meaning for term in self.terms],
                   "unit": [term.unit for term in self.terms],
                   "not to be confused with": [term.apart() for term in self.terms]}
        shown = [name for name, cells in columns.items() if any(cells)]
        return shown, [list(row) for row in zip(*(columns[name] for name in shown))]


def glossary(notebook: str | None = None) -> Glossary:
    """The terms that a notebook (``"00"``) brings, or all of them, alphabetically.

    Raises:
        CourseError: when a notebook brings none.
    """
    entries = [Term(**entry) for entry in json.loads(data_file("glossary.json").read_text(encoding="utf-8"))]
    chosen = [term for term in entries if notebook in (None, term.notebook)]
    if not chosen:
        raise CourseError(f"the glossary has no term of notebook {notebook!r}")
    return Glossary(tuple(sorted(chosen, key=lambda term: term.term.lower())))


def glossary_page() -> str:
    """The whole glossary as Markdown, with a link to the notebook that brings each term."""
    files = {path.name[:2]: path.name for path in sorted(notebooks_folder().glob("[0-9][0-9]_*.ipynb"))}
    lines = ["# Glossary", "", "Every word of the course, and the notebook that brings it. Made from "
             "`data/glossary.json` by `minillm course glossary`.", "",
             "| term | meaning | unit | not to be confused with | notebook |", "|---|---|---|---|---|"]
    for term in glossary().terms:
        place = f"[{term.notebook}]({files[term.notebook]})" if term.notebook in files else term.notebook
        cells = (term.term, term.meaning, term.unit, term.apart(), place)
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def write_glossary() -> Path:
    """Write :func:`glossary_page` to ``notebooks/glossary.md``; returns where."""
    path = notebooks_folder() / PAGE
    write_text(path, glossary_page())
    return path
