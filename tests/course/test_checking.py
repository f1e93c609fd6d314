"""Exercises: solutions pass, every registered wrong solution is caught with its hint, and "Run all" always works."""

from pathlib import Path

import nbformat
import pytest

from minillm.course import check
from minillm.course.checking import exercise, judge
from minillm.course.files import CourseError
from minillm.course.lint import tags

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NUMBERS = sorted(path.name[:2] for path in NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def exercises_of(number):
    from importlib import import_module
    return import_module(f"minillm.course.exercises.nb{number}").EXERCISES


ALL = [task for number in NUMBERS for task in exercises_of(number).values()]


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.id)
def test_reference_passes(task):
    assert judge(task, task.reference).outcome == "passed"


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.id)
def test_at_least_three_wrong_solutions_all_caught_with_their_hint(task, capsys):
    assert len(task.misconceptions) >= 3
    for known in task.misconceptions:
        assert check(task.id, known.function) is task.reference
        out = capsys.readouterr().out
        assert "wrong" in out and "expected" in out and "got" in out
        assert known.hint in out


def stub():
    raise NotImplementedError


@pytest.mark.parametrize("function", [None, lambda *arguments: stub()])
def test_an_untouched_stub_is_not_tried_and_the_reference_stands_in(function, capsys):
    assert check("00-1", function) is exercise("00-1").reference
    assert "not tried yet" in capsys.readouterr().out


def test_a_right_solution_is_returned_itself(capsys):
    def mine(prompt, answer, new, second_answer):
        return second_answer, new + second_answer
    assert check("00-3", mine) is mine
    assert "passed" in capsys.readouterr().out


def test_a_crash_is_explained(capsys):
    check("00-3", lambda *lengths: 1 / 0)
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_a_known_crash_has_its_hint_and_the_plain_case_comes_first(capsys):
    def mine(arrival, times):
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        return {"ttft": times[0] - arrival, "tpot": sum(gaps) / len(gaps), "itl": gaps, "e2e": times[-1] - arrival}
    check("00-1", mine)
    out = capsys.readouterr().out
    assert "(3.0, [5.0])" in out and "ZeroDivisionError" in out and "no TPOT" in out
    check("00-1", lambda arrival, times: {})
    assert "(10.0, [12.0, 12.5, 14.0])" in capsys.readouterr().out


def test_an_unknown_mistake_has_no_hint(capsys):
    check("00-3", lambda *lengths: (-1, -1))
    out = capsys.readouterr().out
    assert "got       (-1, -1)" in out and "hint" not in out


def test_unknown_exercises_are_named():
    with pytest.raises(CourseError, match="00-1, 00-2"):
        check("00-9", None)
    with pytest.raises(CourseError, match="no exercises are registered"):
        check("99-1", None)


def solutions_of(path):
    """The solution file's parts by exercise id: ``# %% 00-1`` begins each."""
    parts = (NOTEBOOKS / "solutions" / f"{path.stem}.py").read_text(encoding="utf-8").split("# %% ")[1:]
    return {part.split(maxsplit=1)[0]: part.split("\n", 1)[1] for part in parts}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")), ids=lambda path: path.stem)
def test_exercise_cells_pass_with_the_solutions_injected(path, capsys, monkeypatch):
    monkeypatch.setenv("MINILLM_LIVE", "0")
    solutions = iter(solutions_of(path).items())
    cells = [cell for cell in nbformat.read(path, as_version=4).cells
             if {"exercise", "exercise-check"} & set(tags(cell)) and cell.cell_type == "code"]
    namespace = {"check": check}
    for stub_cell, check_cell in zip(cells[::2], cells[1::2], strict=True):
        exercise_id, solution = next(solutions)
        assert "exercise" in tags(stub_cell) and f'check("{exercise_id}"' in check_cell.source
        exec(solution, namespace)
        exec(check_cell.source, namespace)
        assert f"{exercise_id} {exercise(exercise_id).title}: passed" in capsys.readouterr().out
    assert next(solutions, None) is None
