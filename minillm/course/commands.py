"""``minillm course``: execute, record, lint and copy notebooks; write the glossary."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from minillm.course.files import CourseError, notebooks_folder
from minillm.extras import require
from minillm.measure.results import shown_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands of ``minillm course``."""
    actions = parser.add_subparsers(dest="action", required=True)
    execute = actions.add_parser("execute", help="run a notebook and keep its outputs, as it is committed")
    record = actions.add_parser("record", help="run a notebook live and keep its measurements under data/measurements")
    work = actions.add_parser("work", help="make your own copy of a notebook, outputs cleared, under notebooks/mine")
    work.add_argument("--fresh", action="store_true", help="start over; the old copy is kept beside it")
    record.add_argument("--force", action="store_true", help="on a busy machine too")
    for action in (execute, record, work):
        action.add_argument("number", help="of the notebook, such as 00")
    lint = actions.add_parser("lint", help="hold notebooks against the anatomy of the course")
    lint.add_argument("number", nargs="?", help="of one notebook; all without it")
    actions.add_parser("glossary", help="write notebooks/glossary.md from data/glossary.json")
    address = actions.add_parser("address", help="print the repository's address, or write a new one everywhere")
    address.add_argument("new", nargs="?", metavar="OWNER/NAME", help="into badges, notebooks and metadata")


def main(args: argparse.Namespace) -> int:
    """Run one sub-command; returns the exit code."""
    if args.action == "lint":
        return _lint(args.number)
    if args.action == "address":
        return _address(args.new)
    if args.action == "glossary":
        from minillm.course.terms import write_glossary

        print(f"written: {shown_path(write_glossary())}")
        return 0
    path = find_notebook(args.number)
    if args.action != "work":  # the kernel is a process of its own: what it lacks is better known before
        require("nbformat", "nbclient", "ipykernel", "ipywidgets", "matplotlib", "packaging", "PIL")
    from minillm.course import execute
    from minillm.course.recording import record

    if args.action == "execute":
        print(execute.execute(path))
    elif args.action == "record":
        return 0 if record([path], force=args.force) else 1
    else:
        print(execute.work_copy(path, fresh=args.fresh))
        print(f"open it: python -m jupyter lab {shown_path(path.parent / 'mine' / path.name)}")
    return 0


def record_all(args: argparse.Namespace) -> int:
    """``minillm bench record``: every notebook that measures something, or those named; 1 when one was not kept."""
    require("nbformat", "nbclient", "ipykernel", "ipywidgets", "matplotlib", "packaging", "PIL")
    from minillm.course.recording import record

    paths = [find_notebook(number) for number in args.notebooks.split(",") if number.strip()] or all_notebooks()
    return 0 if record(paths, force=args.force, budget_s=args.budget_s) else 1


def all_notebooks() -> list[Path]:
    """The numbered notebooks that are there, in order."""
    return sorted(notebooks_folder().glob("[0-9][0-9]_*.ipynb"))


def find_notebook(number: str) -> Path:
    """The path of notebook ``"NN"``; its leading zero may be left out.

    Raises:
        CourseError: when there is none of that number, or it is only planned.
    """
    ready = {path.name[:2]: path for path in all_notebooks()}
    digits = number.zfill(2)
    if digits not in ready:
        planned = re.findall(r"^\| (\d\d) \|", (notebooks_folder() / "README.md").read_text("utf-8"), re.MULTILINE)
        state = f"{digits} is planned" if digits in planned else f"there is no notebook {number!r}"
        raise CourseError(f"{state}; ready: {', '.join(ready) or 'none'}")
    return ready[digits]


def _lint(number: str | None) -> int:
    from minillm.course.lint import lint_file

    paths = [find_notebook(number)] if number else all_notebooks()
    faults = [f"{path.name}: {fault}" for path in paths for fault in lint_file(path)]
    print("\n".join(faults) or f"{len(paths)} {'notebook' if len(paths) == 1 else 'notebooks'}, no fault")
    return 1 if faults else 0


def _address(new: str | None) -> int:
    from minillm.course import address

    changed = address.move(new) if new else []
    print("\n".join([address.repository(), *(f"written: {path.name}" for path in changed)]))
    return 0
