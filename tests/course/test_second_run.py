"""Every notebook a second time, in its own place: the same outputs, no file, thread, process or server left behind,
less memory than it states.

Where Colab's versions are asked for, as CI does, that run has them, with the package installed as the setup cell
installs it there. The interpreter and torch are those of the tests. Beside them lie Colab's older versions of what a
notebook loads, in a folder of their own that comes first; all that Colab has not preloaded and the setup cell does not
add is hidden.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from minillm.course import execute
from minillm.course.lint import IGNORED_OUTPUT, tags
from minillm.model.hub import cache_dir

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).with_name("colab")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
VIEW = "application/vnd.jupyter.widget-view+json"
BINDER_GB = 2.0

# Before the first cell and after the last.
PROBE = """
def probe_leftovers():
    import psutil, threading
    me = psutil.Process()
    connections = getattr(me, "net_connections", None) or me.connections  # its name before psutil 6
    return {"threads": {thread.name for thread in threading.enumerate()},
            "processes": {c.pid for c in me.children(True)},
            "servers": {c.laddr.port for c in connections() if c.status == psutil.CONN_LISTEN}}
leftovers_before = probe_leftovers()"""
REPORT = """
import json, sys
from minillm.course.session import where
from minillm.measure.bench.peers import peak_rss_bytes
used = peak_rss_bytes()
left = {kind: sorted(map(str, now - leftovers_before[kind])) for kind, now in probe_leftovers().items()}
loaded = {"ipykernel", "IPython", "ipywidgets", "matplotlib", "numpy", "tokenizers", "transformers"} & {*sys.modules}
print(json.dumps({"left": left, "memory_gb": used / 1e9, "where": where(), "package": sys.modules["minillm"].__file__,
                  "versions": {name: sys.modules[name].__version__ for name in loaded},
                  "modules": sorted({name.partition(".")[0] for name in sys.modules})}))"""
# After a live run: moves every slider and presses every button.
MOVE = """
import json, ipywidgets
moved, html = [], ipywidgets.HTML
texts = lambda: [w.value for w in ipywidgets.Widget.widgets.values() if isinstance(w, html)]
for widget in list(ipywidgets.Widget.widgets.values()):
    before = texts()
    if isinstance(widget, ipywidgets.SelectionSlider):
        widget.index = widget.index - 1 if widget.index else len(widget.options) - 1
    elif isinstance(widget, ipywidgets.Button) and widget.description != "Stop":
        widget.click()
    else:
        continue
    moved.append([type(widget).__name__, sum(a != b for a, b in zip(before, texts()))])
print(json.dumps({"moved": moved, "broken": [text for text in texts() if "Traceback" in text]}))"""


# ---- where it runs -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """Where a second run takes place: what is in its environment, and the package's folder, for Colab's."""

    variables: dict[str, str]
    package: Path | None = None


@dataclass(frozen=True)
class Package:
    """One line of packages.txt."""

    name: str
    version: str
    emulated: bool


def preloaded() -> dict[str, Package]:
    """packages.txt by canonical name."""
    lines = re.findall(r"^(= )?([\w-]+)==(\S+) +\S", (SITE / "packages.txt").read_text("utf-8"), re.M)
    return {canonicalize_name(name): Package(name, version, bool(emulated)) for emulated, name, version in lines}


def added() -> set[str]:
    """The distributions that notebook 00's setup cell installs beside the package, with all they need."""
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    source = next(cell.source for cell in notebook.cells if "setup" in tags(cell))
    (names,) = re.findall(r"%pip install -q ((?:[\w-]+ ?)+)$", source, re.M)
    return closure(names.split())


def closure(names: list[str]) -> set[str]:
    """Distributions and, all the way down, those they require here."""
    found, todo = set(), [canonicalize_name(name) for name in names]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            for requirement in map(Requirement, metadata.requires(name) or []):
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    todo.append(canonicalize_name(requirement.name))
    return found


def modules_here() -> dict[str, set[str]]:
    """Top-level module to the canonical names of the distributions that bring it, in the tests' environment."""
    return {module: {canonicalize_name(name) for name in names}
            for module, names in metadata.packages_distributions().items()}


def pip_install(folder: Path, *arguments: str) -> None:
    """``pip install --no-deps`` into a folder, with the user's own configuration of pip."""
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target",
                           str(folder), *arguments], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def versions():
    """The folder of Colab's versions; kept in the user's cache for the next run."""
    wanted = sorted(f"{p.name}=={p.version}" for p in preloaded().values() if p.emulated)
    key = hashlib.sha256(" ".join([sys.version, *wanted]).encode()).hexdigest()[:12]
    folder = cache_dir() / "tests" / f"colab-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as making:
            pip_install(Path(making) / "all", *wanted)
            if not folder.exists():
                (Path(making) / "all").rename(folder)
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package as a service installs it: without its checkout and without dependencies."""
    source = tmp_path_factory.mktemp("source")
    for name in ("minillm", "data"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    folder = tmp_path_factory.mktemp("package")
    pip_install(folder, "--no-build-isolation", str(source))
    return folder


@pytest.fixture(scope="module")
def colab(versions, package, reader_home):
    """A kernel of the emulation."""
    allowed = set(preloaded()) | added() | {"minillm-course"}
    missing = [module for module, owners in modules_here().items() if not owners & allowed]
    return Kernel({"PYTHONPATH": os.pathsep.join(map(str, (SITE, versions, package))),
                   "MINILLM_COLAB_MISSING": " ".join(missing), "MINILLM_HOME": str(reader_home),
                   "PYTHONDONTWRITEBYTECODE": ""}, package)  # compiled once, beside the versions that are kept


@pytest.fixture(scope="module")
def kernel(request):
    """Colab's where its versions are asked for, else the tests' own."""
    asked_for = os.environ.get("MINILLM_REQUIRE_COLAB") == "1"
    return request.getfixturevalue("colab") if asked_for else Kernel({})


@pytest.mark.colab
def test_what_the_package_requires_is_preloaded_or_added():
    """``--no-deps`` leaves nothing out: each requirement is there, at a version within its bound."""
    there, own = preloaded(), added()
    for requirement in map(Requirement, metadata.requires("minillm-course") or []):
        if requirement.marker is None:  # the extras' own
            name = canonicalize_name(requirement.name)
            assert name in there or name in own, f"the setup cell must install {name}"
            assert name not in there or requirement.specifier.contains(there[name].version), name


@pytest.mark.colab
def test_what_colab_lacks_is_hidden(colab):
    """The emulation can fail: without the setup cell's packages, the package does not load a GGUF file."""
    code = "import minillm, importlib.util as u; print([bool(u.find_spec(n)) for n in ('pytest', 'gguf')])"
    for more, seen in (("", "[False, True]"), (" gguf", "[False, False]")):
        hidden = colab.variables["MINILLM_COLAB_MISSING"] + more
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env=os.environ | colab.variables | {"MINILLM_COLAB_MISSING": hidden})
        assert (done.stdout.strip(), done.stderr) == (seen, "")


# ---- the second run ------------------------------------------------------------------------------------------------


def reported(notebook, folder: Path, kernel: Kernel) -> dict:
    """What :data:`REPORT` says after a run. A cell that fails or writes to stderr fails it."""
    notebook.cells = [new_code_cell(PROBE), *notebook.cells, new_code_cell(REPORT)]
    execute.run(notebook, folder, kernel.variables | {"MINILLM_LIVE": "0"})
    return json.loads(notebook.cells.pop().outputs[-1].text)


def uncounted(outputs: list[dict]) -> list[dict]:
    """Outputs without the number of their cell, which the probe before the first has moved on."""
    return [{key: value for key, value in output.items() if key != "execution_count"} for output in outputs]


def files_in(folder: Path) -> set[Path]:
    """All of them, but for what Python compiles for whoever runs beside."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def second(request, kernel):
    """One second run, for all tests below: its report, the ids of cells whose outputs are not those kept, new files."""
    pytest.importorskip("resource")
    path = request.param
    before = files_in(path.parent)
    notebook, again = (nbformat.read(path, as_version=4) for _ in range(2))
    report = reported(again, path.parent, kernel)
    again.cells = again.cells[1:]
    execute.clean(again)
    changed = [kept.id for kept, made in zip(notebook.cells, again.cells, strict=True)
               if kept.cell_type == "code" and IGNORED_OUTPUT not in tags(kept)
               and uncounted(made.outputs) != uncounted(kept.outputs)]
    (setup,) = (cell.outputs[0].text for cell in again.cells if "setup" in tags(cell))
    return report | {"changed": changed, "files": sorted(files_in(path.parent) ^ before), "setup": setup,
                     "stated_gb": notebook.metadata["minillm"]["memory_gb"]}


def test_makes_the_same_outputs_in_its_own_place_and_leaves_no_file(second):
    """Beside CI's own nbval run this is the second in the same place; what is compared there must be equal here too."""
    assert (second["changed"], second["files"]) == ([], [])


def test_leaves_no_thread_process_or_server(second):
    assert second["left"] == {"threads": [], "processes": [], "servers": []}


def test_stays_below_the_memory_that_it_states(second):
    """J08: and below the 2 GB of a Binder session."""
    assert second["memory_gb"] < second["stated_gb"] < BINDER_GB


@pytest.mark.colab
def test_had_colabs_versions_and_knew_where_it_was(second, colab):
    there = preloaded()
    for name, version in second["versions"].items():
        known = there[canonicalize_name(name)]
        assert version == known.version or not known.emulated, name
    assert second["where"] == "colab" and " · colab · " in second["setup"]
    assert Path(second["package"]).is_relative_to(colab.package)
    assert not set(second["modules"]) & set(colab.variables["MINILLM_COLAB_MISSING"].split())


def test_what_is_left_behind_is_found(tmp_path):
    """A thread that waits, a process that sleeps, a socket that listens: each is seen; one that has ended is not."""
    cells = ["import threading; threading.Thread(target=threading.Event().wait, name='waits', daemon=True).start()",
             "import subprocess; subprocess.Popen(['sleep', '60'])",
             "import socket; server = socket.create_server(('127.0.0.1', 0))",
             "done = threading.Thread(target=int); done.start(); done.join()"]
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in cells])
    found = reported(notebook, tmp_path, Kernel({}))["left"]
    assert found["threads"] == ["waits"] and len(found["processes"]) == len(found["servers"]) == 1


@pytest.mark.colab
@pytest.mark.parametrize("path", [NOTEBOOKS[0], NOTEBOOKS[-1]], ids=lambda path: path.stem)
def test_forms_work_live_under_colabs_ipywidgets(path, colab, tmp_path):
    """Each quiz and explorer shows a form of ipywidgets 7.7; each slider and button changes what stands below it."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(new_code_cell(MOVE))
    execute.run(notebook, tmp_path, colab.variables | {"MINILLM_LIVE": "1", "MINILLM_BRIEF": "1"})
    report = json.loads(notebook.cells[-1].outputs[-1].text)
    for cell in notebook.cells:
        if {"quiz", "widget"} & set(tags(cell)):
            assert any(VIEW in output.get("data", {}) for output in cell.outputs), cell.id
    states = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert {state["model_module_version"] for state in states.values()} == {"1.5.0", "1.2.0"}
    assert report["moved"] and not report["broken"]
    assert all(changed for _, changed in report["moved"]), report["moved"]
