"""The anatomy of a notebook, as rules. Each rule takes a notebook and yields what is wrong with it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat

from minillm.course.address import badges
from minillm.course.files import CourseError, data_file
from minillm.course.lint_links import broken_links, missing_neighbours

# Sections in their order, by cell tag, and what each is.
SECTIONS = {
    "title": "title", "where": "where we are", "goals": "you will be able to", "setup": "setup",
    "estimate": "estimate and predict", "build": "build", "check": "check", "agree": "the same in minillm",
    "count": "count", "measure": "measure", "break": "where it loses", "exercise": "exercises",
    "quiz": "retrieval checks", "recap": "recap",
}
_SAME_SECTION = {"exercise-check": "exercise"}
FREE_TAGS = {"plot", "widget", "inspect", "nbval-ignore-output", "nbval-skip", "raises-exception"}
IGNORED_OUTPUT = "nbval-ignore-output"
MUST_IGNORE = {"measure", "plot", "setup", "widget"}
LIMITS = {"cells": 48, "code lines": 25, "median code lines": 8, "build lines": 20, "setup lines": 10,
          "code width": 100, "words a cell": 120, "words": 1800, "bytes": 300_000, "figures": 5}
SETUP = """\
try:
    from minillm.course import start
except ImportError:  # a fresh Colab: add the package, replace nothing that is there
    %pip install -q --no-deps git+https://github.com/{repository}
    %pip install -q gguf jinja2 regex
    from minillm.course import start
from minillm.course import agree, canvas, check, explore, figures, glossary, in_background, quiz, recorded, show

session = start()"""

Rule = Callable[[Any], Iterator[str]]


def setup_cell() -> str:
    """The text of the setup cell, the same in every notebook."""
    from minillm.course.address import repository

    return SETUP.format(repository=repository())


def lint_file(path: Path) -> list[str]:
    """Everything wrong with a notebook file; an empty list when it keeps the anatomy."""
    size = path.stat().st_size
    faults = [f"file has {size:,} bytes, at most {LIMITS['bytes']:,}"] if size > LIMITS["bytes"] else []
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    # nbformat walks through a notebook before it validates it, and trips over whatever is of another kind
    except (nbformat.ValidationError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return [*faults, f"not a valid notebook: {reason}"]
    title = "\n".join(cell.source for cell in notebook.cells if "title" in tags(cell))
    if badges(f"notebooks/{path.name}") not in title:
        faults.append(f"badges: the title needs exactly {badges(f'notebooks/{path.name}')}")
    return [*faults, *missing_neighbours(title, path), *broken_links(notebook, path.parent), *lint(notebook)]


def lint(notebook: Any) -> list[str]:
    """The faults that can be seen in the notebook itself."""
    return [f"{rule.__name__}: {fault}" for rule in RULES for fault in rule(notebook)]


def tags(cell: Any) -> list[str]:
    """A cell's tags."""
    return cell.metadata.get("tags", [])


def section(cell: Any) -> str | None:
    """The section a cell opens or belongs to by its own tags."""
    own = [_SAME_SECTION.get(tag, tag) for tag in tags(cell)]
    return next((tag for tag in own if tag in SECTIONS), None)


def sections(notebook: Any) -> Iterator[str]:
    """Every section once and in order; one may be absent where the metadata's ``minillm.absent`` says why."""
    seen = [name for cell in notebook.cells if (name := section(cell))]
    absent = _object(_object(notebook.metadata, "minillm"), "absent")
    for name, title in SECTIONS.items():
        if name not in seen and not str(absent.get(name, "")).strip():
            yield f"section {title!r} (tag {name!r}) is missing, and the metadata does not say why"
        if name in seen and name in absent:
            yield f"section {title!r} is there although the metadata calls it absent"
    order = list(SECTIONS)
    for before, after in pairwise(seen):
        if order.index(after) < order.index(before):
            yield f"a cell tagged {after!r} comes after one tagged {before!r}"


def known_tags(notebook: Any) -> Iterator[str]:
    """Tags are those of the anatomy: a misspelt one would hide a section."""
    allowed = set(SECTIONS) | set(_SAME_SECTION) | FREE_TAGS
    for cell in notebook.cells:
        for tag in tags(cell):
            if tag not in allowed:
                yield f"cell {cell.id!r} has the unknown tag {tag!r}"


def metadata(notebook: Any) -> Iterator[str]:
    """Kernelspec, number, minutes and memory stand; there is no widget state."""
    if _object(notebook.metadata, "kernelspec").get("name") != "python3":
        yield "the kernelspec must be python3"
    if "widgets" in notebook.metadata:
        yield "widget state is stored; run `minillm course execute`"
    own = _object(notebook.metadata, "minillm")
    for key in ("number", "minutes", "memory_gb"):
        if key not in own:
            yield f"metadata.minillm.{key} is missing"


def cell_ids(notebook: Any) -> Iterator[str]:
    """Ids are stable words, not random digits, and unique."""
    seen: set[str] = set()
    for cell in notebook.cells:
        name = cell.get("id", "")
        words = re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name)
        if not words or re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f-]+)?", name):
            yield f"cell id {name!r} is not a meaningful name of lower-case words"
        if name in seen:
            yield f"cell id {name!r} stands twice"
        seen.add(name)


def sizes(notebook: Any) -> Iterator[str]:
    """Few cells, short cells, few words; no line that a notebook would cut."""
    if len(notebook.cells) > LIMITS["cells"]:
        yield f"{len(notebook.cells)} cells, at most {LIMITS['cells']}"
    lines = {cell.id: _code_lines(cell) for cell in _code(notebook)}
    for cell in _code(notebook):
        limit = LIMITS["setup lines"] if "setup" in tags(cell) else LIMITS["build lines"] if "build" in tags(cell) \
            else LIMITS["code lines"]
        if lines[cell.id] > limit:
            yield f"cell {cell.id!r} has {lines[cell.id]} lines, at most {limit}"
        width = max(map(len, cell.source.splitlines()), default=0)
        if width > LIMITS["code width"] and "setup" not in tags(cell):
            yield f"cell {cell.id!r} has a line of {width} characters, at most {LIMITS['code width']}"
    median = statistics.median(lines.values()) if lines else 0
    if median > LIMITS["median code lines"]:
        yield f"the median code cell has {median} lines, at most {LIMITS['median code lines']}"
    words = {cell.id: count_words(cell.source) for cell in notebook.cells if cell.cell_type == "markdown"}
    for name, count in words.items():
        if count > LIMITS["words a cell"]:
            yield f"cell {name!r} has {count} words, at most {LIMITS['words a cell']}"
    if sum(words.values()) > LIMITS["words"]:
        yield f"{sum(words.values())} words, at most {LIMITS['words']}"


def figures(notebook: Any) -> Iterator[str]:
    """At most five figures, each with its alternative text."""
    pictures = [(cell.id, html) for cell in _code(notebook) for html in _pictures(cell)]
    if len(pictures) > LIMITS["figures"]:
        yield f"{len(pictures)} figures, at most {LIMITS['figures']}"
    for name, html in pictures:
        if not re.search(r'<img alt="[^"]{20,}"', html):
            yield f"cell {name!r} has a figure without alternative text; use show(figure, alt=..., table=...)"


def setup(notebook: Any) -> Iterator[str]:
    """The setup cell is the same everywhere."""
    cells = [cell for cell in _code(notebook) if "setup" in tags(cell)]
    if [cell.source.strip() for cell in cells] != [setup_cell()]:
        yield "there must be exactly one code cell tagged 'setup', with the text of minillm.course.lint.setup_cell()"


def compared(notebook: Any) -> Iterator[str]:
    """What a clock or a plot shows is not compared; most of the rest is."""
    with_output = [cell for cell in _code(notebook) if cell.outputs]
    for cell in _code(notebook):
        must = MUST_IGNORE & set(tags(cell))
        if must and IGNORED_OUTPUT not in tags(cell):
            yield f"cell {cell.id!r} is tagged {min(must)!r} and needs the tag {IGNORED_OUTPUT!r}"
    free = [cell for cell in with_output if IGNORED_OUTPUT in tags(cell)]
    if with_output and 1 - len(free) / len(with_output) < 0.7:
        kept = len(with_output) - len(free)
        yield f"{kept} of {len(with_output)} cells with output are compared, at least 70 % must be"


def outputs(notebook: Any) -> Iterator[str]:
    """Committed as executed: every cell run in order, no error, no stderr, no widget."""
    counts = [cell.execution_count for cell in _code(notebook)]
    if counts != list(range(1, len(counts) + 1)):
        yield "execution counts are not 1, 2, 3, ...; run `minillm course execute`"
    for cell in _code(notebook):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"cell {cell.id!r} stores an error"
            if output.get("name") == "stderr":
                yield f"cell {cell.id!r} stores stderr"
            if any("widget" in kind for kind in output.get("data", ())):
                yield f"cell {cell.id!r} stores a live widget"


def exercises(notebook: Any) -> Iterator[str]:
    """At least two exercises, each a stub that raises, each followed by its check."""
    stubs = [cell for cell in _code(notebook) if "exercise" in tags(cell)]
    checks = [cell for cell in _code(notebook) if "exercise-check" in tags(cell)]
    if (stubs or checks) and len(stubs) < 2:
        yield f"{len(stubs)} exercise, at least 2"
    if len(stubs) != len(checks):
        yield f"{len(stubs)} exercises and {len(checks)} checks: each exercise has one check after it"
    for cell in stubs:
        if "raise NotImplementedError" not in cell.source:
            yield f"exercise {cell.id!r} must be a stub that raises NotImplementedError"
    for cell in checks:
        if not re.search(r"= check\(\"\d\d-\d+\", ", cell.source):
            yield f"cell {cell.id!r} must hold f = check(\"NN-k\", f)"


def measure_names(notebook: Any) -> list[str]:
    """The names that a notebook's cells give to ``session.measure``, in order."""
    return [name for cell in _code(notebook) for name in re.findall(r"""session\.measure\(\s*["']([\w.-]+)["']""",
                                                                     cell.source)]


def records(notebook: Any) -> Iterator[str]:
    """What a notebook measures or shows as recorded lies under ``data/measurements``."""
    shown = [name for cell in _code(notebook) for name in re.findall(
        r"""\brecorded(?:_card)?\(\s*["']([\w.-]+)["']""", cell.source)]
    for name in dict.fromkeys(measure_names(notebook) + shown):
        try:
            data_file(f"measurements/course_{name}.json")
        except CourseError:
            yield f"there is no record of {name!r} (data/measurements/course_{name}.json): `minillm course record NN`"


def guesses(notebook: Any) -> Iterator[str]:
    """Every prediction is of this notebook, and what came out is entered after it."""
    number = str(_object(notebook.metadata, "minillm").get("number"))
    code = "\n".join(cell.source for cell in _code(notebook))
    made = {verb: {match[1]: match.start() for match in re.finditer(
        rf"""ledger\.{verb}\(\s*["']([^"']+)["']""", code)} for verb in ("predict", "measured")}
    for key, place in made["predict"].items():
        if not key.startswith(f"{number} "):
            yield f"the guess {key!r} must begin with the notebook's number: {number + ' ...'!r}"
        if made["measured"].get(key, -1) < place:
            yield f"the guess {key!r} is not followed by ledger.measured({key!r}, ...)"
    for key in made["measured"].keys() - made["predict"].keys():
        yield f"ledger.measured({key!r}, ...) has no ledger.predict before it"


RULES: tuple[Rule, ...] = (
    sections, known_tags, metadata, cell_ids, sizes, figures, setup, compared, outputs, exercises, records, guesses)


def count_words(markdown: str) -> int:
    """Words a reader reads: link targets, HTML tags and table rules do not count."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    text = re.sub(r"<[^>]+>", " ", text)
    return len(re.findall(r"[^\W_][\w'’.,/-]*", text))


def _object(values: Any, key: str) -> dict[str, Any]:
    """The object under ``key``, empty where there is none: nbformat's schema leaves metadata free."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _code_lines(cell: Any) -> int:
    return len([line for line in cell.source.splitlines() if line.strip()])


def _pictures(cell: Any) -> list[str]:
    data = [output.get("data", {}) for output in cell.outputs]
    html = [str(item.get("text/html", "")) for item in data]
    return [text for text in html if "<img" in text] + ["" for item in data if "image/png" in item]
