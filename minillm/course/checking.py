"""Exercises: ``f = check("00-1", f)`` judges the reader's function and always returns one that works.

An exercise is registered in one module a notebook, ``minillm/course/exercises/nbNN.py``, in its ``EXERCISES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from minillm.course.agreement import call, difference, show_value, size
from minillm.course.files import CourseError

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Misconception:
    """A wrong solution that people really write, and the hint that helps out of it."""

    function: Function
    hint: str


@dataclass(frozen=True, slots=True)
class Exercise:
    """What ``check`` needs: the reference, cases (tuples of arguments), and at least three known wrong solutions."""

    id: str
    title: str
    reference: Function
    cases: tuple[Any, ...]
    misconceptions: tuple[Misconception, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """``outcome`` is "passed", "wrong" or "not tried"; ``message`` is what the reader sees."""

    outcome: str
    message: str


def exercise(exercise_id: str) -> Exercise:
    """The registered exercise ``"NN-k"``.

    Raises:
        CourseError: naming those that exist, when there is none of that id.
    """
    number = exercise_id.partition("-")[0]
    try:
        known = import_module(f"minillm.course.exercises.nb{number}").EXERCISES
    except ModuleNotFoundError:
        raise CourseError(f"no exercises are registered for notebook {number!r}") from None
    if exercise_id not in known:
        raise CourseError(f"there is no exercise {exercise_id!r}; notebook {number} has {', '.join(sorted(known))}")
    return known[exercise_id]


def check(exercise_id: str, function: Function | None = None) -> Function:
    """Say whether the reader's function is right, and return it if it is, else the reference.

    So "Run all" works before anything is solved, and later cells use the reader's own work once it is right.
    """
    task = exercise(exercise_id)
    verdict = judge(task, function)
    print(f"{task.id} {task.title}: {verdict.message}")
    return function if verdict.outcome == "passed" and function is not None else task.reference


def judge(task: Exercise, function: Function | None) -> Verdict:
    """Run the function on all cases; report the smallest that fails, with a hint where the mistake is known."""
    if function is None:
        return Verdict("not tried", "not tried yet (the reference stands in)")
    failures = []
    for case in task.cases:
        try:
            got, why = call(function, case), None
        except NotImplementedError:
            return Verdict("not tried", "not tried yet (the reference stands in)")
        except Exception as error:  # whatever the reader's code does must become an explanation, not a dead notebook
            got, why = error, f"it raised {type(error).__name__}: {error}"
        expected = call(task.reference, case)
        why = why or difference(got, expected, task.dtype)
        if why:
            failures.append((size(case), case, got, expected, why))
    if not failures:
        return Verdict("passed", f"passed ({len(task.cases)} cases)")
    return Verdict("wrong", _explain(task, min(failures, key=lambda failure: failure[0])))


def _explain(task: Exercise, failure: tuple[int, Any, Any, Any, str]) -> str:
    _, case, got, expected, why = failure
    lines = ["wrong (the reference stands in)", f"  input     {show_value(case)}",
             f"  expected  {show_value(expected)}",
             f"  got       {why if isinstance(got, Exception) else show_value(got)}"]
    hint = "" if isinstance(got, Exception) else _hint(task, case, got)
    return "\n".join(lines + ([f"  hint      {hint}"] if hint else []))


def _hint(task: Exercise, case: Any, got: Any) -> str:
    for known in task.misconceptions:
        try:
            if not difference(got, call(known.function, case), task.dtype):
                return known.hint
        except Exception:  # a wrong solution may fail on this case in its own way: then it is not this one
            continue
    return ""
