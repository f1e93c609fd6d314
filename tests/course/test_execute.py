"""``minillm course``: notebooks are executed, copied and recorded in a form that can be kept."""

import argparse
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from minillm.course import commands, execute
from minillm.course.files import CourseError


def notebook_file(folder: Path, *sources: str) -> Path:
    path = folder / "90_try.ipynb"
    notebook = new_notebook(cells=[new_markdown_cell("See [the next](06_kv_cache.ipynb) and [a page](https://example.org)",
                                                     id="title"),
                                   *(new_code_cell(source, id=f"cell-{i}") for i, source in enumerate(sources))])
    notebook.metadata = {"widgets": {"state": {}}, "kernelspec": {"name": "python3", "display_name": "my env"}}
    nbformat.write(notebook, path)
    return path


def test_executed_as_committed_and_the_same_twice(tmp_path):
    """J01: pieces of a stream are merged, so that a second run gives the same bytes."""
    path = notebook_file(tmp_path, "import sys\nfor i in range(3):\n    print(i); sys.stdout.flush()",
                         "import os\nos.environ['MINILLM_LIVE']")
    message = execute.execute(path)
    first = path.read_bytes()
    notebook = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2]
    assert [output.text for output in notebook.cells[1].outputs] == ["0\n1\n2\n"]
    assert notebook.cells[2].outputs[0].data["text/plain"] == "'0'"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert "peak memory" in message
    execute.execute(path)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("source", "words"), [
    ("1 / 0", "ZeroDivisionError"), ("import warnings\nwarnings.warn('old')", "'cell-0' writes to stderr"),
])
def test_nothing_is_written_when_a_cell_fails_or_warns(source, words, tmp_path):
    """J02: a warning is never committed as part of a lesson."""
    path = notebook_file(tmp_path, source)
    before = path.read_bytes()
    with pytest.raises(CourseError, match=words):
        execute.execute(path)
    assert path.read_bytes() == before


def test_work_copy_has_no_outputs_and_working_links_and_is_never_overwritten(tmp_path):
    path = notebook_file(tmp_path, "print(1)")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[1].execution_count = 1
    notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="1")]
    nbformat.write(notebook, path)
    copy = Path(execute.work_copy(path))
    assert copy == tmp_path / "mine" / path.name
    mine = nbformat.read(copy, as_version=4)
    assert mine.cells[1].outputs == [] and mine.cells[1].execution_count is None
    assert mine.cells[0].source == "See [the next](../06_kv_cache.ipynb) and [a page](https://example.org)"
    copy.write_text("my work")
    assert "was not touched" in execute.work_copy(path)
    assert copy.read_text() == "my work"
    execute.work_copy(path, fresh=True)
    assert sorted(p.read_text() == "my work" for p in copy.parent.iterdir()) == [False, True]


def command(*argv):
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    return commands.main(parser.parse_args(argv))


def test_lint_command_reports_and_fails(tmp_path, monkeypatch, capsys):
    notebook_file(tmp_path, "1")
    monkeypatch.setattr(commands, "notebooks_folder", lambda: tmp_path)
    assert command("lint") == 1
    assert "90_try.ipynb: sections: section 'title'" in capsys.readouterr().out


def test_work_command_and_unknown_numbers(tmp_path, monkeypatch, capsys):
    notebook_file(tmp_path, "1")
    monkeypatch.setattr(commands, "notebooks_folder", lambda: tmp_path)
    assert command("work", "90") == 0
    out = capsys.readouterr().out
    assert str(Path("mine") / "90_try.ipynb") in out and "open it: python -m jupyter lab" in out
    (tmp_path / "README.md").write_text("| 91 | Later | not yet |\n")
    with pytest.raises(CourseError, match="91 is planned; ready: 90"):
        command("work", "91")
    with pytest.raises(CourseError, match="no notebook '92'; ready: 90"):
        command("work", "92")
