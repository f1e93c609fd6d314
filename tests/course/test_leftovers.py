"""A notebook run again in its own place gives the same outputs, leaves no file, thread, process or server behind, and
stays below the memory that it states."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from minillm.course import execute
from minillm.course.lint import IGNORED_OUTPUT, tags

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHIPPED = pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")), ids=lambda path: path.stem)
BINDER_GB = 2.0
PROBE = """
def probe_leftovers():
    import psutil, threading
    me = psutil.Process()
    return {"threads": {thread.name for thread in threading.enumerate()},
            "processes": {c.pid for c in me.children(True)},
            "servers": {c.laddr.port for c in me.net_connections() if c.status == psutil.CONN_LISTEN}}
leftovers_before = probe_leftovers()"""
REPORT = """
import json
from minillm.measure.bench.peers import peak_rss_bytes
used = peak_rss_bytes()
left = {kind: sorted(map(str, now - leftovers_before[kind])) for kind, now in probe_leftovers().items()}
print(json.dumps({"left": left, "memory_gb": used / 1e9}))"""


def probed(notebook, folder: Path) -> dict:
    """What is left when the last cell has run, and the kernel's peak memory in GB."""
    pytest.importorskip("resource")
    notebook.cells = [new_code_cell(PROBE), *notebook.cells, new_code_cell(REPORT)]
    execute.run(notebook, folder, {"MINILLM_LIVE": "0"})
    return json.loads(notebook.cells[-1].outputs[-1].text)


def uncounted(outputs: list[dict]) -> list[dict]:
    """Outputs without the number of their cell, which the probe before the first has moved on."""
    return [{key: value for key, value in output.items() if key != "execution_count"} for output in outputs]


@lru_cache
def shipped(path: Path) -> dict:
    """What is left after one run, for all tests below, and the ids of cells whose outputs are not those kept."""
    before = sorted(path.parent.iterdir())
    notebook, again = (nbformat.read(path, as_version=4) for _ in range(2))
    report = probed(again, path.parent)
    again.cells = again.cells[1:-1]
    execute.clean(again)
    report["changed"] = [kept.id for kept, made in zip(notebook.cells, again.cells, strict=True)
                         if kept.cell_type == "code" and IGNORED_OUTPUT not in tags(kept)
                         and uncounted(made.outputs) != uncounted(kept.outputs)]
    return report | {"files": sorted(set(path.parent.iterdir()) ^ set(before))}


@SHIPPED
def test_runs_again_in_its_own_place_with_the_same_outputs_and_leaves_no_file(path: Path) -> None:
    """Beside CI's own nbval run this is the second in the same place; what is compared there must be equal here too."""
    assert (shipped(path)["changed"], shipped(path)["files"]) == ([], [])


@SHIPPED
def test_a_shipped_notebook_leaves_no_thread_process_or_server(path: Path) -> None:
    assert shipped(path)["left"] == {"threads": [], "processes": [], "servers": []}


@SHIPPED
def test_a_shipped_notebook_stays_below_the_memory_that_it_states(path: Path) -> None:
    """J08: and below the 2 GB of a Binder session."""
    stated = nbformat.read(path, as_version=4).metadata["minillm"]["memory_gb"]
    assert shipped(path)["memory_gb"] < stated < BINDER_GB


def test_what_is_left_behind_is_found(tmp_path: Path) -> None:
    """A thread that waits, a process that sleeps, a socket that listens: each is seen; one that has ended is not."""
    cells = ["import threading; threading.Thread(target=threading.Event().wait, name='waits', daemon=True).start()",
             "import subprocess; subprocess.Popen(['sleep', '60'])",
             "import socket; server = socket.create_server(('127.0.0.1', 0))",
             "done = threading.Thread(target=int); done.start(); done.join()"]
    found = probed(new_notebook(cells=[new_code_cell(cell) for cell in cells]), tmp_path)["left"]
    assert found["threads"] == ["waits"] and len(found["processes"]) == len(found["servers"]) == 1
