"""Every notebook under Colab's versions, with the package installed as its setup cell installs it there.

The interpreter and torch are those of the tests. Beside them lie Colab's older versions of what a notebook loads, in a
folder of their own that comes first; everything that Colab has not preloaded and the setup cell does not add is hidden.
"""

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
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from minillm.course.lint import tags
from minillm.model.hub import cache_dir

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).with_name("colab")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
RUN = [*NOTEBOOKS[:-1:3], NOTEBOOKS[-1]]  # a third, as each runs in three other tests under the versions pinned here
LIVE = {NOTEBOOKS[0], NOTEBOOKS[-1]}  # the others run as their outputs are kept: quicker, and without forms
VIEW = "application/vnd.jupyter.widget-view+json"

# Appended to each notebook. Under ipywidgets 7.7 it also moves every slider and presses every button.
LAST_CELL = """
import json, sys
from importlib import metadata
import ipykernel, IPython, ipywidgets, matplotlib, numpy, torch, transformers, minillm
from minillm.course.session import where
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
loaded = (ipykernel, IPython, ipywidgets, matplotlib, numpy, torch, transformers)
json.dumps({"versions": {m.__name__: m.__version__ for m in loaded}, "where": where(), "package": minillm.__file__,
            "moved": moved, "broken": [text for text in texts() if "Traceback" in text],
            "modules": sorted({name.partition(".")[0] for name in sys.modules})})
"""

pytestmark = pytest.mark.colab


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
def variables(versions, package, reader_home):
    """What a kernel of the emulation has in its environment."""
    allowed = set(preloaded()) | added() | {"minillm-course"}
    missing = [module for module, owners in modules_here().items() if not owners & allowed]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (SITE, versions, package))),
                         "MINILLM_COLAB_MISSING": " ".join(missing), "MINILLM_HOME": str(reader_home),
                         "PYTHONDONTWRITEBYTECODE": ""}  # compiled once, beside the versions that are kept


def test_what_the_package_requires_is_preloaded_or_added():
    """``--no-deps`` leaves nothing out: each requirement is there, at a version within its bound."""
    there, own = preloaded(), added()
    for requirement in map(Requirement, metadata.requires("minillm-course") or []):
        if requirement.marker is None:  # the extras' own
            name = canonicalize_name(requirement.name)
            assert name in there or name in own, f"the setup cell must install {name}"
            assert name not in there or requirement.specifier.contains(there[name].version), name


def test_what_colab_lacks_is_hidden(variables):
    """The emulation can fail: without the setup cell's packages, the package does not load a GGUF file."""
    code = "import minillm, importlib.util as u; print([bool(u.find_spec(n)) for n in ('pytest', 'gguf')])"
    for more, seen in (("", "[False, True]"), (" gguf", "[False, False]")):
        hidden = variables["MINILLM_COLAB_MISSING"] + more
        done = subprocess.run([sys.executable, "-c", code], env=variables | {"MINILLM_COLAB_MISSING": hidden},
                              capture_output=True, text=True)
        assert (done.stdout.strip(), done.stderr) == (seen, "")


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.stem)
def test_runs_under_colabs_versions(path, variables, package, tmp_path):
    """No error and no stderr; it knows where it is; live, its forms are ipywidgets 7.7's and work."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(new_code_cell(LAST_CELL, id="last-cell"))
    live = path in LIVE
    client = NotebookClient(notebook, timeout=300, kernel_name="python3",
                            resources={"metadata": {"path": str(tmp_path)}},
                            extra_arguments=["--IPKernelApp.log_level=40"])
    client.execute(env=variables | {"MINILLM_LIVE": str(int(live))})
    for cell in notebook.cells:
        assert not [output.text for output in cell.get("outputs", ()) if output.get("name") == "stderr"], cell.id
    (setup,) = (cell for cell in notebook.cells if "setup" in tags(cell))
    assert " · colab · " in setup.outputs[0].text
    report = json.loads(notebook.cells[-1].outputs[-1].data["text/plain"].strip("'"))
    there = preloaded()
    for name, version in report["versions"].items():
        known = there[canonicalize_name(name)]
        assert version == known.version or not known.emulated, name
    assert report["where"] == "colab" and Path(report["package"]).is_relative_to(package)
    assert not set(report["modules"]) & set(variables["MINILLM_COLAB_MISSING"].split())
    see_the_forms(notebook, report, live)


def see_the_forms(notebook, report, live):
    """Live, each quiz and explorer shows a form; each slider and button of one changes what stands below it."""
    for cell in notebook.cells:
        if {"quiz", "widget"} & set(tags(cell)):
            assert live == any(VIEW in output.get("data", {}) for output in cell.outputs), cell.id
    states = notebook.metadata.get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    assert bool(states) == live
    assert {state["model_module_version"] for state in states.values()} <= {"1.5.0", "1.2.0"}
    assert bool(report["moved"]) == live and not report["broken"]
    assert all(changed for _, changed in report["moved"]), report["moved"]
