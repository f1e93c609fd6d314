"""``minillm bench record``: fresh kernels, one card, nothing kept of a busy machine, a budget that ends it."""

from __future__ import annotations

import argparse
import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from minillm.course import commands, execute, recording
from minillm.course.files import CourseError
from minillm.course.lint import measure_names
from minillm.course.recording import record, recorded_card, with_kernels_apart
from minillm.measure.bench import compare
from minillm.measure.card import MachineCard
from minillm.measure.results import Recording

CELL = """
import os
from minillm.course.recording import measured, recording_card
assert os.environ["MINILLM_LIVE"] == "1"
class Session:
    measure = staticmethod(measured)
session = Session()
session.measure("one", lambda: {"value": 1, "rate": recording_card().read_bytes_per_s})
session.measure("two", lambda: {"value": 2})
"""


def a_card(**changes):
    return MachineCard(**{
        "device": "cpu", "device_name": "test", "num_threads": 1, "read_bytes_per_s": 7e9, "noise": 0.1,
        "flops_per_s": {"float32": 1e9}, "operator_overhead_s": 1e-6, "buffer_bytes": 1} | changes)


@pytest.fixture
def place(monkeypatch, tmp_path):
    """A checkout with one measuring notebook, on an idle machine; ``waited`` and ``card`` play a busy one."""
    data = tmp_path / "data"
    monkeypatch.setattr(recording, "data_folder", lambda: data)
    monkeypatch.setattr(recording, "load_per_core", lambda: 0.1)
    cards = [a_card()]

    def measure(folder):
        measure.calls += 1
        cards[0].save(folder / recording.CARD)
        return cards[0]

    measure.calls, measure.cards = 0, cards
    monkeypatch.setattr(recording, "measure_card_once", measure)

    def notebook(name, *sources):
        path = tmp_path / f"{name}.ipynb"
        cells = [new_code_cell(source, id=f"c-{i}") for i, source in enumerate(sources)]
        nbformat.write(new_notebook(cells=cells), path)
        return path

    return argparse.Namespace(data=data / "measurements", notebook=notebook, measure=measure, monkeypatch=monkeypatch)


def names(place):
    return sorted(path.name for path in place.data.glob("*.json")) if place.data.exists() else []


def test_one_card_is_shared_by_all_and_what_follows_the_last_measurement_is_not_run(place):
    paths = [place.notebook("90_a", CELL, "1 / 0"), place.notebook("91_b", "raise SystemError('it measures nothing')"),
             place.notebook("92_c", CELL.replace('"one"', '"three"').replace('"two"', '"four"'))]
    before = [path.read_bytes() for path in paths]
    said = []
    assert record(paths, force=True, say=said.append)
    assert place.measure.calls == 1 and [path.read_bytes() for path in paths] == before
    assert names(place) == ["course_card.json", *(f"course_{name}.json" for name in ("four", "one", "three", "two"))]
    one = Recording.load(place.data / "course_one.json")
    assert one.samples == [{"value": 1, "rate": 7e9}] and one.settings["notebook"] == "90_a"
    assert MachineCard(**one.settings["card"]) == MachineCard.load(place.data / "course_card.json")
    assert any("90_a.ipynb: one, two kept" in line for line in said) and "machine card: test" in said[0]
    place.monkeypatch.setattr(recording, "data_file", lambda name: place.data / name.removeprefix("measurements/"))
    assert recorded_card("one") == recorded_card()


def test_a_busy_machine_is_refused_and_force_measures_all_the_same(place):
    path = place.notebook("90_a", CELL)
    place.monkeypatch.setattr(recording, "load_per_core", lambda: 2.0)
    with pytest.raises(CourseError, match=r"busy \(load average 2.0 per core\).*--force"):
        record([path])
    place.monkeypatch.setattr(recording, "load_per_core", lambda: 0.0)
    place.measure.cards[0] = a_card(cpu_share=0.4)
    with pytest.raises(CourseError, match="while the card was measured.*--force"):
        record([path])
    assert names(place) == []
    assert record([path], force=True, say=lambda line: None) and "course_one.json" in names(place)


def test_a_measurement_whose_threads_waited_is_not_kept(place):
    """Its times would show other work; the old record stays."""
    said = []
    source = CELL.replace("import os\n", "import os\nimport minillm.course.recording as r\n"
                                         "r.waited_share = lambda before, after: 0.3\n")
    path = place.notebook("90_a", source)
    assert not record([path], say=said.append)
    assert names(place) == [] and any("not kept, other work ran" in line for line in said)
    assert any("waited 30.0%" in line for line in said)
    assert record([path], force=True, say=said.append) and len(names(place)) == 3


def test_what_fails_or_comes_too_late_is_named_and_the_rest_goes_on(place):
    paths = [place.notebook("90_a", "1 / 0", CELL), place.notebook("91_b", CELL)]
    said = []
    assert not record(paths, force=True, budget_s=99.5, say=said.append)
    assert any("90_a.ipynb: not recorded" in line and "ZeroDivisionError" in line for line in said)
    assert "course_one.json" in names(place)
    assert not record(paths, force=True, budget_s=0, say=said.append)
    assert said[-1] == "91_b.ipynb: not recorded, the time is used up"


def test_the_names_that_a_notebook_measures():
    notebook = nbformat.from_dict({"cells": [
        {"cell_type": "code", "source": 'session.measure("a-b", f)\nx = session.measure(\n    "c", f)'},
        {"cell_type": "markdown", "source": 'session.measure("no", f)'}]})
    assert measure_names(notebook) == ["a-b", "c"]


def test_both_commands_record(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(recording, "record", lambda paths, **options: calls.append((
        [path.name[:2] for path in paths], options)) or True)
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    assert compare.main(parser.parse_args(["record", "--notebooks", "00", "--budget-s", "60", "--force"])) == 0
    assert compare.main(parser.parse_args(["record"])) == 0
    course = argparse.ArgumentParser()
    commands.add_arguments(course)
    assert commands.main(course.parse_args(["record", "0"])) == 0
    assert calls[0] == (["00"], {"force": True, "budget_s": 60})
    assert calls[1] == ([path.name[:2] for path in commands.all_notebooks()], {"force": False, "budget_s": 480})
    assert calls[2] == (["00"], {"force": False})


def test_a_record_is_strict_json(place):
    path = place.notebook("90_a", CELL.replace('"value": 1', '"value": float("nan")'))
    said = []
    assert not record([path], force=True, say=said.append)
    assert "not recorded" in said[-1] and json.dumps(names(place)) == "[]"


def test_ctrl_c_half_way_leaves_whole_records_with_their_card_and_nothing_else(place):
    paths = [place.notebook("90_a", CELL), place.notebook("91_b", CELL.replace('"one"', '"three"'))]
    real = execute.run

    def run(notebook, *args, **options):
        if "three" in notebook.cells[0].source:
            raise KeyboardInterrupt
        return real(notebook, *args, **options)

    place.monkeypatch.setattr(execute, "run", run)
    with pytest.raises(KeyboardInterrupt):
        record(paths, force=True, say=lambda line: None)
    assert names(place) == ["course_card.json", "course_one.json", "course_two.json"]
    assert sorted(path.name for path in place.data.iterdir()) == names(place)
    card = MachineCard.load(place.data / "course_card.json")
    assert MachineCard(**Recording.load(place.data / "course_one.json").settings["card"]) == card


def test_where_nothing_can_be_written_nothing_is_measured(place):
    place.data.parent.mkdir()
    place.data.write_text("a file, where the folder should be")
    with pytest.raises(OSError, match="measurements"):
        record([place.notebook("90_a", CELL)], force=True, say=lambda line: None)
    assert place.measure.calls == 0


def test_a_damaged_notebook_or_one_that_ends_its_kernel_is_named_and_the_rest_goes_on(place):
    damaged = place.notebook("89_a", CELL)
    damaged.write_text("{")
    paths = [damaged, place.notebook("90_b", "import os\nos._exit(3)", CELL), place.notebook("91_c", CELL)]
    said = []
    assert not record(paths, force=True, say=said.append)
    assert any("89_a.ipynb: not recorded, it is no valid notebook" in line for line in said)
    assert any("90_b.ipynb: not recorded" in line and "ernel died" in line for line in said)
    assert "course_one.json" in names(place)


def test_the_command_that_opens_a_work_copy_names_the_copy(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(commands, "find_notebook", lambda number: notebook)
    notebook = tmp_path / "90_a.ipynb"
    nbformat.write(new_notebook(), notebook)
    parser = argparse.ArgumentParser()
    commands.add_arguments(parser)
    assert commands.main(parser.parse_args(["work", "90"])) == 0
    copy, line = capsys.readouterr().out.splitlines()
    assert line.endswith(copy) and (tmp_path / "mine" / "90_a.ipynb").is_file()


def test_kernels_are_measured_in_another_process_and_come_back_on_the_card():
    """Those that the card has are not measured again, so this is quick; what goes wrong there is told here."""
    rates = {"linear": [[1, 1e-10], [8, 2e-10]], "kv_bytes_per_s": 1e9, "attention_flops_per_s": 1e9, "call_s": 1e-6}
    card = a_card(kernels={"auto": rates})
    assert with_kernels_apart(card, ["auto"], threads=1) == card
    with pytest.raises(CourseError, match="(?s)the card could not be measured.*float7"):
        with_kernels_apart(card, ["float7"], threads=1)
