"""``tests/contract.md`` has no gap: each promise and each field case names a test that exists, or what it waits for."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACT = Path(__file__).with_name("contract.md")

# Faults that people reported about other engines and courses; the number is the case's, a letter its room.
CASES = """
T01 T02 T03 T05 T06  D01 D02  C01 C03 C04  S01 S02 S04 S05 S06 S08 S10 S11  P01 P02 P03 P05 P06 P07
K01 K02 K03 K04 K05 K07 K09  Q01 Q03 Q04 Q05 Q07  X02 X04 X05  N01 N03 N04  M02 M03 M04 M06 M07
H01 H02 H04 H05 H06 H08 H09 H10  B01 B02 B03 B06 B07 B08 B09  J01 J02 J03 J04 J06 J08
""".split()

SECTIONS = ("Text in, text out", "Sampling", "Stopping", "Exactness", "Cache and scheduler", "Speculative decoding",
            "Weights", "HTTP", "Metrics", "Notebooks", "Cases")


def parse(text: str) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """The rows ``(promise or case, test)`` of each section, and what is malformed."""
    sections: dict[str, list[tuple[str, str]]] = {}
    faults, section = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:].strip()
            sections[section] = []
        elif line.startswith("|") and section:
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            if cells[0].startswith(("---", ":--", "promise or case")):
                continue
            if len(cells) != 2 or not all(cells):
                faults.append(f"a row needs a promise and a test: {line}")
            else:
                sections[section].append((cells[0], cells[1]))
    return sections, faults


@cache
def node_names(path: Path) -> frozenset[str]:
    """Names of the test functions of a file (``Class::name`` inside classes), found without running it."""
    if not path.is_file():
        return frozenset()
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        functions = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + f.name for f in functions if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))}
    return frozenset(name for name in names if name.split("::")[-1].startswith("test_"))


def column_faults(cell: str) -> list[str]:
    """What is wrong with the test column of a row: node ids in backticks, or ``planned: what it waits for``."""
    if cell.startswith("planned"):
        return [] if re.match(r"planned: \S", cell) else ["planned says what it waits for: `planned: ...`"]
    ids = re.findall(r"`([^`]+)`", cell)
    if not ids or re.sub(r"`[^`]+`|[\s,;]|<br>", "", cell):
        return [f"expected node ids in backticks, or planned: {cell}"]
    faults = []
    for node_id in ids:
        path, _, name = node_id.partition("::")
        if path.endswith(".ipynb"):
            if not (ROOT / path).is_file():
                faults.append(f"no such notebook: {node_id}")
        elif name not in node_names(ROOT / path):
            faults.append(f"no such test: {node_id}")
    return faults


def case_ids(promise: str) -> list[str]:
    """The case ids that a row stands for."""
    return re.findall(r"\b[A-Z]\d\d\b", promise)


def examine(text: str) -> list[str]:
    """Every fault of a contract file."""
    sections, faults = parse(text)
    faults += [f"section missing or empty: {name}" for name in SECTIONS if not sections.get(name)]
    rows = [row for section in sections.values() for row in section]
    promises = [promise for promise, _ in rows]
    faults += [f"stands twice: {promise}" for promise in sorted(set(promises)) if promises.count(promise) > 1]
    found = [case for promise, _ in sections.get("Cases", []) for case in case_ids(promise)[:1]]
    faults += [f"case missing: {case}" for case in CASES if case not in found]
    faults += [f"unknown case: {case}" for case in found if case not in CASES]
    faults += [f"case stands twice: {case}" for case in sorted(set(found)) if found.count(case) > 1]
    return faults + [f"{promise}: {fault}" for promise, cell in rows for fault in column_faults(cell)]


def test_the_contract_has_no_gap() -> None:
    assert examine(CONTRACT.read_text("utf-8")) == []


def whole() -> str:
    """A contract without a fault."""
    here = "`tests/test_contract.py::test_a_gap_is_found`"
    body = "\n".join(f"## {name}\n| promise or case | test |\n|---|---|\n| {name} promise | {here} |\n"
                     for name in SECTIONS if name != "Cases")
    return f"{body}\n## Cases\n| promise or case | test |\n|---|---|\n" + "\n".join(
        f"| {case} fault | planned: part {case} |" for case in CASES)


@pytest.mark.parametrize(("before", "after", "fault"), [
    ("| T01 fault | planned: part T01 |", "", "case missing: T01"),
    ("| T01 fault |", "| T02 other fault |", "case stands twice: T02"),
    ("| T01 fault |", "| Z99 fault |", "unknown case: Z99"),
    ("planned: part T01", "planned", "planned says what it waits for"),
    ("planned: part T01", "soon", "expected node ids"),
    ("planned: part T01", "", "a row needs a promise and a test"),
    ("planned: part T01", "`tests/test_contract.py::test_that_is_not_there`", "no such test"),
    ("planned: part T01", "`tests/nowhere.py::test_x`", "no such test"),
    ("## Metrics", "## Numbers", "section missing or empty: Metrics"),
    ("| HTTP promise |", "| Weights promise |", "stands twice: Weights promise"),
])
def test_a_gap_is_found(before: str, after: str, fault: str) -> None:
    assert examine(whole()) == []
    assert before in whole()
    assert any(fault in found for found in examine(whole().replace(before, after, 1)))
