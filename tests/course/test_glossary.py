"""The glossary: every term explained once, told apart from its neighbours, listed and used by its notebook."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from minillm.course import glossary, terms
from minillm.course.terms import PAGE, Glossary, Term, glossary_page

ROOT = Path(__file__).parents[2]
NOTEBOOKS = {path.name[:2]: path for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
TERMS = glossary().terms
LINE = re.compile(r"[.!?](?=\s|$)")


def cells(number: str) -> list[dict]:
    return json.loads(NOTEBOOKS[number].read_text(encoding="utf-8"))["cells"]


def plain(text: str) -> str:
    """Words alone: no emphasis, no line breaks, hyphens as spaces, lower case."""
    return re.sub(r"\s+", " ", re.sub(r"[-*`\[\]]", " ", text)).lower()


def spellings(term: str) -> list[str]:
    """What must be found in the text: "a, b" are two; what stands in parentheses only tells which "a" is meant."""
    return [plain(part).strip() for part in re.sub(r"\s*\(.*?\)", "", term).split(", ")]


def test_each_term_stands_once():
    assert [term for term, count in Counter(term.term.lower() for term in TERMS).items() if count > 1] == []


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.term)
def test_a_term_has_one_or_two_sentences_a_planned_notebook_and_told_confusions(term):
    assert term.meaning.endswith(".") and 1 <= len(LINE.findall(term.meaning)) <= 2, term.meaning
    planned = re.findall(r"^\| (\d\d) \|", (ROOT / "notebooks" / "README.md").read_text("utf-8"), re.MULTILINE)
    assert term.notebook in planned
    known = {other.term for other in TERMS}
    for other, why in term.confused_with.items():
        assert other != term.term and why.endswith(".") and len(why.split()) >= 5
        assert other in known or other.lower() in why.lower(), f"{other} is no term, and the sentence does not say it"


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_a_notebook_lists_its_terms_and_uses_each(number):
    recap = [cell for cell in cells(number) if "recap" in cell["metadata"].get("tags", [])]
    assert any(f'glossary("{number}")' in "".join(cell["source"]) for cell in recap)
    text = plain(" ".join("".join(cell["source"]) for cell in cells(number)))
    missing = [word for term in TERMS if term.notebook == number for word in spellings(term.term)
               if not re.search(rf"(?<!\w){re.escape(word)}", text)]
    assert missing == []


def test_the_page_is_made_from_the_terms():
    assert (ROOT / "notebooks" / PAGE).read_text("utf-8") == glossary_page(), "run: minillm course glossary"
    assert glossary_page().count("\n| ") == len(TERMS) + 1


def test_columns_are_shown_where_a_row_has_them():
    bare = Glossary((Term("a", "A.", "00"),))
    assert bare.table() == (["term", "meaning"], [["a", "A."]])
    both = Glossary((Term("a", "A.", "00", unit="s"), Term("b", "B.", "00", confused_with={"a": "An a is no b."})))
    assert both.table() == (["term", "meaning", "unit", "not to be confused with"],
                            [["a", "A.", "s", ""], ["b", "B.", "", "a: An a is no b."]])
    assert "not to be confused with" in both._repr_mimebundle_()["text/html"]
    assert Term("a", "A.", "00", confused_with="") == Term("a", "A.", "00")


def test_a_line_break_or_a_bar_in_a_term_does_not_break_the_table(monkeypatch):
    odd = Glossary((Term("a|b", "First line\nsecond | line.", "00"),))
    monkeypatch.setattr(terms, "glossary", lambda: odd)
    assert glossary_page().splitlines()[-1].startswith("| a\\|b | First line second \\| line. |")
