"""Run a notebook in a fresh kernel to commit it, or hand the reader a copy."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat

from minillm.course.files import CourseError, write_text
from minillm.course.live import VARIABLE

_TIMEOUT_S = 300
# A link of the course to another of its files: a relative target, whose folder changes in a copy.
_RELATIVE_LINK = re.compile(r"\]\((?![a-z]+:|#|/)([^)\s]+)\)")


def execute(path: Path) -> str:
    """Run a notebook and write it back as it is committed: outputs and execution counts, live panels empty, no widget
    state. Returns a line with its seconds and peak memory; nothing is written when a cell fails or writes to stderr.

    Raises:
        CourseError: naming the cell.
    """
    notebook = nbformat.read(path, as_version=4)
    start_s = time.perf_counter()
    peak_bytes = run(notebook, path.parent, {VARIABLE: "0"})
    seconds = time.perf_counter() - start_s
    clean(notebook)
    write_text(path, nbformat.writes(notebook) + "\n")
    return f"{path.name}: {seconds:.0f} s, peak memory {peak_bytes / 1e9:.2f} GB, {path.stat().st_size / 1e3:.0f} kB"


def run(notebook: Any, folder: Path, variables: dict[str, str], timeout_s: float = _TIMEOUT_S) -> int:
    """Execute every cell in a kernel of this Python, started in ``folder``, each within ``timeout_s`` seconds. Returns
    the kernel's peak memory in bytes.

    Raises:
        CourseError: on the first cell that fails, ends its kernel or writes to stderr.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    client = NotebookClient(notebook, timeout=math.ceil(min(timeout_s, _TIMEOUT_S)), kernel_name="python3",
                            record_timing=False,
                            extra_arguments=["--IPKernelApp.log_level=40"],  # errors of the kernel, not its advice
                            resources={"metadata": {"path": str(folder)}})
    try:
        client.execute(env=os.environ | variables)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise CourseError(f"a cell failed, nothing was written:\n{error}") from None
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                raise CourseError(f"cell {cell.id!r} writes to stderr, nothing was written:\n{output['text']}")
    return _peak_bytes_of_children()


def _peak_bytes_of_children() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def clean(notebook: Any) -> None:
    """Bring an executed notebook into the form in which it is kept: the same bytes wherever it ran."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _merged(cell.outputs)
            cell.metadata.pop("execution", None)


def _merged(outputs: list[Any]) -> list[Any]:
    """Pieces of one text stream put together: how they were cut depends on timing."""
    merged: list[Any] = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == "stream" and last.output_type == "stream" and last.name == output.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def work_copy(path: Path, *, fresh: bool = False) -> str:
    """The reader's own copy under ``notebooks/mine``, without outputs, so that predictions are not spoiled.

    An existing copy is kept; with ``fresh`` it is set aside under a new name first.
    """
    copy = path.parent / "mine" / path.name
    if copy.exists() and not fresh:
        return f"{copy} is there already and was not touched; --fresh starts over"
    if copy.exists():
        copy.rename(copy.with_name(f"{copy.stem}.{time.strftime('%Y%m%d-%H%M%S')}.ipynb"))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
        else:
            cell.source = _RELATIVE_LINK.sub(r"](../\1)", cell.source)
    write_text(copy, nbformat.writes(notebook) + "\n")
    return f"{copy}"
