"""Exercises: ``f = check("00-1", f)`` judges the reader's function and always returns one that works.

An exercise is registered in one module a notebook, ``minillm/course/exercises/nbNN.py``, in its ``EXERCISES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from minillm.course.agreement import call, difference, show_value
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
    """Run the function on all cases; report the first that fails (they go from plain to odd), with a hint where the
    mistake is known."""
    results = [_result(function, case) for case in task.cases] if function else []
    if not function or any(isinstance(got, NotImplementedError) for got in results):
        return Verdict("not tried", "not tried yet (the reference stands in)")
    expected = [call(task.reference, case) for case in task.cases]
    wrong = [i for i in range(len(results)) if not _same(results[i], expected[i], task.dtype)]
    if not wrong:
        return Verdict("passed", f"passed ({len(task.cases)} cases)")
    first, got = wrong[0], results[wrong[0]]
    raised = f"it raised {type(got).__name__}: {got}"
    hint = _hint(task, results, first)
    return Verdict("wrong", "\n".join([
        "wrong (the reference stands in)", f"  input     {show_value(task.cases[first])}",
        f"  expected  {show_value(expected[first])}",
        f"  got       {raised if isinstance(got, Exception) else show_value(got)}",
        *([f"  hint      {hint}"] if hint else [])]))


def _result(function: Function, case: Any) -> Any:
    """What the function gives, or the exception that it raises."""
    try:
        return call(function, case)
    except Exception as error:  # whatever the reader's code does must become an explanation, not a dead notebook
        return error


def _same(got: Any, other: Any, dtype: str | None) -> bool:
    if isinstance(got, Exception) or isinstance(other, Exception):
        return type(got) is type(other)
    return not difference(got, other, dtype)


def _hint(task: Exercise, results: list[Any], first: int) -> str:
    """Of the known mistakes that explain the first failing case, the one that explains the most cases."""
    best, hint = 0, ""
    for known in task.misconceptions:
        theirs = [_result(known.function, case) for case in task.cases]
        same = [_same(got, other, task.dtype) for got, other in zip(results, theirs, strict=True)]
        if same[first] and sum(same) > best:
            best, hint = sum(same), known.hint
    return hint
