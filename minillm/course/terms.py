"""The course's words, each explained once, where it first appears (``data/glossary.json``)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from minillm.course import html
from minillm.course.files import CourseError, data_file


@dataclass(frozen=True, slots=True)
class Term:
    """A word, its meaning in a sentence or two, and the notebook that brings it."""

    term: str
    meaning: str
    notebook: str


@dataclass(frozen=True, slots=True)
class Glossary:
    """Some terms, shown as a table."""

    terms: tuple[Term, ...]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": "\n".join(f"{term.term}: {term.meaning}" for term in self.terms),
                "text/html": html.table(("term", "meaning"), [(term.term, term.meaning) for term in self.terms])}


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
