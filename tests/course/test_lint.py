"""The anatomy linter: the shipped notebooks keep it, and each rule catches its own fault."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minillm.course import lint as lint_module
from minillm.course.address import badges
from minillm.course.lint import LIMITS, RULES, SECTIONS, count_words, lint, lint_file, setup_cell
from minillm.course.lint_links import broken_links

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")), ids=lambda path: path.stem)
def test_shipped_notebooks_keep_the_anatomy(path):
    assert lint_file(path) == []


def code(name, source, *tags, text=None):
    outputs = [] if text is None else [new_output("stream", name="stdout", text=text)]
    return new_code_cell(source, id=name, metadata={"tags": list(tags)}, outputs=outputs)


def prose(name, source, *tags):
    return new_markdown_cell(source, id=name, metadata={"tags": list(tags)})


def good():
    """The smallest notebook that keeps the anatomy."""
    ignored = "nbval-ignore-output"
    notebook = new_notebook(cells=[
        prose("title", f"# Nothing\n{badges('notebooks/90_x.ipynb')}\nprevious: none · next: none", "title"),
        prose("where", "Here.", "where"),
        prose("goals", "Do it.", "goals"), code("start", setup_cell(), "setup", ignored, text="started"),
        code("guess", "1", "estimate", text="1"), code("piece", "2", "build", text="2"),
        code("proof", "3", "check", text="3"),
        code("same", "4", "agree", text="4"), code("counted", "5", "count", text="5"),
        code("timed", "6", "measure", ignored, text="6"), prose("loses", "Not here.", "break"),
        code("task-one", "def f():\n    raise NotImplementedError", "exercise"),
        code("judge-one", 'f = check("00-1", f)', "exercise-check", text="ok"),
        code("task-two", "def g():\n    raise NotImplementedError", "exercise"),
        code("judge-two", 'g = check("00-2", g)', "exercise-check", text="ok"),
        code("questions", "7", "quiz", text="7"), prose("recap", "Done.", "recap"),
    ])
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                         "minillm": {"number": "90", "minutes": 5, "memory_gb": 1.0}}
    return numbered(notebook)


def numbered(notebook):
    for count, cell in enumerate([cell for cell in notebook.cells if cell.cell_type == "code"], start=1):
        cell.execution_count = count
    return notebook


def cell(notebook, name):
    return next(cell for cell in notebook.cells if cell.id == name)


def test_the_smallest_good_notebook_has_no_fault(tmp_path):
    assert lint(good()) == []
    path = tmp_path / "90_x.ipynb"
    nbformat.write(good(), path)
    assert lint_file(path) == []


@pytest.mark.parametrize("own", [None, [], "x", {"absent": None}])
def test_metadata_of_another_kind_is_a_fault_and_no_crash(own):
    notebook = good()
    notebook.metadata["minillm"] = own
    assert any("minillm.number is missing" in fault for fault in lint(notebook))


def figure_output(alt="A figure with enough words in it."):
    return new_output("display_data", data={"text/html": f'<img alt="{alt}" src="data:,">'})


def move(notebook, name, index):
    chosen = cell(notebook, name)
    notebook.cells.remove(chosen)
    notebook.cells.insert(index, chosen)
    numbered(notebook)


def drop(notebook, name):
    notebook.cells.remove(cell(notebook, name))
    numbered(notebook)


def tag(notebook, name, *tags):
    cell(notebook, name).metadata["tags"] = list(tags)


FAULTS = {  # rule and words of the message: how to break a good notebook
    ("sections", "'count' (tag 'count') is missing"): lambda n: drop(n, "counted"),
    ("sections", "tagged 'estimate' comes after"): lambda n: move(n, "guess", 9),
    ("sections", "'measure' is there although"): lambda n: n.metadata["minillm"].update(absent={"measure": "no clock"}),
    ("known_tags", "unknown tag 'biuld'"): lambda n: tag(n, "loses", "break", "biuld"),
    ("metadata", "kernelspec must be python3"): lambda n: n.metadata["kernelspec"].update(name="my-env"),
    ("metadata", "widget state"): lambda n: n.metadata.update(widgets={}),
    ("metadata", "minutes is missing"): lambda n: n.metadata["minillm"].pop("minutes"),
    ("cell_ids", "'3f2a9c01' is not a meaningful"): lambda n: cell(n, "guess").update(id="3f2a9c01"),
    ("cell_ids", "'guess' stands twice"): lambda n: cell(n, "piece").update(id="guess"),
    ("sizes", "49 cells, at most 48"): lambda n: n.cells.extend(prose(f"p-{'x' * i}", "x") for i in range(1, 33)),
    ("sizes", "'proof' has 26 lines"): lambda n: cell(n, "proof").update(source="x = 1\n" * 26),
    ("sizes", "'piece' has 21 lines, at most 20"): lambda n: cell(n, "piece").update(source="x = 1\n" * 21),
    ("sizes", "a line of 101 characters"): lambda n: cell(n, "proof").update(source="#" * 101),
    ("sizes", "median code cell has 9"): lambda n: [c.update(source="x = 1\n" * 9) for c in n.cells if c.id in (
        "guess", "piece", "proof", "same", "counted", "timed", "questions")],
    ("sizes", "'loses' has 121 words"): lambda n: cell(n, "loses").update(source="word " * 121),
    ("sizes", "words, at most 1800"): lambda n: n.cells.extend(
        prose(f"w-{'x' * i}", "word " * 115) for i in range(1, 17)),
    ("figures", "6 figures, at most 5"): lambda n: cell(n, "proof").update(outputs=[figure_output()] * 6),
    ("figures", "without alternative text"): lambda n: cell(n, "proof").update(outputs=[figure_output("short")]),
    ("setup", "exactly one code cell"): lambda n: cell(n, "start").update(source="import minillm"),
    ("compared", "'timed' is tagged 'measure' and needs"): lambda n: tag(n, "timed", "measure"),
    ("compared", "at least 70 % must be"): lambda n: [
        tag(n, name, section, "nbval-ignore-output")
        for name, section in (("guess", "estimate"), ("piece", "build"), ("proof", "check"))],
    ("outputs", "execution counts"): lambda n: cell(n, "proof").update(execution_count=None),
    ("outputs", "stores an error"): lambda n: cell(n, "proof").update(
        outputs=[new_output("error", ename="E", evalue="")]),
    ("outputs", "stores stderr"): lambda n: cell(n, "proof").update(
        outputs=[new_output("stream", name="stderr", text="W")]),
    ("outputs", "stores a live widget"): lambda n: cell(n, "proof").update(outputs=[new_output(
        "display_data", data={"application/vnd.jupyter.widget-view+json": {}})]),
    ("exercises", "1 exercise, at least 2"): lambda n: (drop(n, "task-two"), drop(n, "judge-two")),
    ("exercises", "2 exercises and 1 checks"): lambda n: drop(n, "judge-two"),
    ("exercises", "must be a stub"): lambda n: cell(n, "task-one").update(source="def f():\n    return 1"),
    ("exercises", "must hold f = check"): lambda n: cell(n, "judge-one").update(source='check("00-1", f)'),
    ("records", "no record of 'nothing'"): lambda n: cell(n, "timed").update(source='session.measure("nothing", f)'),
    ("records", "no record of 'never'"): lambda n: cell(n, "timed").update(source='kept = recorded("never")'),
    ("guesses", "'91 x' must begin with"): lambda n: cell(n, "guess").update(
        source='session.ledger.predict("91 x", 1, "s")\nsession.ledger.measured("91 x", 1)'),
    ("guesses", "'90 x' is not followed"): lambda n: cell(n, "guess").update(
        source='session.ledger.measured("90 x", 1)\nsession.ledger.predict("90 x", 1, "s")'),
    ("guesses", "no ledger.predict before"): lambda n: cell(n, "timed").update(
        source='session.ledger.measured("90 x", 1)'),
}


@pytest.mark.parametrize(("rule", "words"), FAULTS, ids=lambda value: value.replace(" ", "_"))
def test_each_fault_is_caught_by_its_rule(rule, words):
    notebook = good()
    FAULTS[rule, words](notebook)
    assert [fault for fault in lint(notebook) if fault.startswith(f"{rule}: ") and words in fault], lint(notebook)


def test_every_rule_has_a_fault_that_it_catches():
    assert {rule for rule, _ in FAULTS} == {rule.__name__ for rule in RULES}


def test_a_section_may_be_absent_where_the_metadata_says_why():
    notebook = good()
    drop(notebook, "counted")
    notebook.metadata["minillm"]["absent"] = {"count": "nothing is computed here"}
    assert lint(notebook) == []
    notebook.metadata["minillm"]["absent"] = {"count": " "}
    assert lint(notebook)


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_is_missed(name):
    notebook = good()
    notebook.cells = [c for c in notebook.cells if lint_module.section(c) != name]
    assert any(f"(tag {name!r}) is missing" in fault for fault in lint(notebook))


@pytest.mark.parametrize(("change", "words"), [
    (lambda n: cell(n, "title").update(source="# Nothing"), "badges"),
    (lambda n: cell(n, "loses").update(source="[x](99_nowhere.ipynb)"), "links to 99_nowhere.ipynb"),
    (lambda n: cell(n, "loses").update(source="[x](00_nowhere.py) (planned)"), "links to 00_nowhere.py"),
    (lambda n: cell(n, "proof").update(outputs=[new_output("stream", name="stdout", text="x" * LIMITS["bytes"])]),
     "bytes"),
])
def test_faults_of_the_file(change, words, tmp_path):
    notebook = good()
    change(notebook)
    path = tmp_path / "90_x.ipynb"
    nbformat.write(notebook, path)
    assert [fault for fault in lint_file(path) if words in fault], lint_file(path)


def test_a_title_links_to_its_neighbours_and_nothing_that_is_written_is_called_planned(tmp_path):
    path = tmp_path / "90_x.ipynb"
    nbformat.write(good(), path)
    for name in ("89_before.ipynb", "91_after.ipynb", "92_later.ipynb"):
        nbformat.write(new_notebook(), tmp_path / name)
    assert [fault for fault in lint_file(path) if fault.startswith("neighbours")] == [
        "neighbours: the title does not link to 89_before.ipynb",
        "neighbours: the title does not link to 91_after.ipynb"]
    notebook = good()
    title = f"{badges('notebooks/90_x.ipynb')}\n[89 Before](89_before.ipynb) · next: [91](91_after.ipynb)"
    cell(notebook, "title").update(source=title)
    cell(notebook, "loses").update(source="See 92 Later on (planned) and 93 Never (planned).")
    nbformat.write(notebook, path)
    assert lint_file(path) == [
        "neighbours: the title has no 'previous: ...'",
        "links: cell 'loses' calls notebook 92 planned; it is there, so link to it"]


def test_each_measurement_has_one_notebook():
    """Two notebooks that measure under one name would overwrite each other's record."""
    measured = [name for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
                for name in set(lint_module.measure_names(nbformat.read(path, as_version=4)))]
    assert len(measured) == len(set(measured)), measured


def test_planned_notebooks_may_be_linked_as_planned(tmp_path):
    notebook = good()
    cell(notebook, "loses").update(source="[06](06_kv_cache.ipynb) (planned), [anchor](#title), [web](https://example.org)")
    path = tmp_path / "90_x.ipynb"
    nbformat.write(notebook, path)
    assert lint_file(path) == []


def test_what_is_no_notebook_is_said_plainly(tmp_path):
    path = tmp_path / "90_x.ipynb"
    path.write_text("{")
    assert any("not a valid notebook" in fault for fault in lint_file(path))


def test_words_are_what_a_reader_reads():
    assert count_words("## Two words\n[a link](https://example.org/x/y) <b>bold</b> | --- |") == 5


@pytest.mark.parametrize("target", ["x" * 5000, "\0x", "%00", "\udcff", "~nobody/x"], ids=ascii)
def test_a_link_that_is_no_path_at_all_is_a_broken_link(tmp_path, target):
    notebook = new_notebook(cells=[prose("a", f"[x]({target})")])
    assert len(list(broken_links(notebook, tmp_path))) == 1


def test_a_file_of_brackets_is_no_notebook(tmp_path):
    path = tmp_path / "00_deep.ipynb"
    path.write_text("[" * 100_000)
    assert "not a valid notebook" in lint_file(path)[0]


def test_the_map_gives_each_notebooks_minutes():
    """The map of the course and a notebook's title and metadata say the same."""
    table = (NOTEBOOKS / "README.md").read_text(encoding="utf-8")
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        minutes = notebook.metadata["minillm"]["minutes"]
        row = next(line for line in table.splitlines() if line.startswith(f"| {path.name[:2]} |"))
        assert row.split("|")[4].strip() == str(minutes), path.name
        assert f"{minutes} minutes · " in notebook.cells[0].source, path.name
