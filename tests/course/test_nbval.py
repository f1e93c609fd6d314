"""What is known to break notebooks under nbval does not break these (J01, J02, J03); a second run equals the first."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from minillm.course import execute
from minillm.course.lint import IGNORED_OUTPUT

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "notebooks"
pytest.importorskip("nbval")


def folder_with(tmp_path, *cells):
    """A folder with the project's nbval settings and one notebook, executed as it would be committed."""
    for name in ("conftest.py", "sanitize.cfg"):
        shutil.copy(NOTEBOOKS / name, tmp_path)
    notebook = new_notebook(cells=[new_code_cell(source, id=f"cell-{i}", metadata={"tags": list(own)})
                                   for i, (source, *own) in enumerate(cells)])
    nbformat.write(notebook, tmp_path / "90_try.ipynb")
    execute.execute(tmp_path / "90_try.ipynb")
    return tmp_path


def nbval(folder, *more, **variables):
    """``pytest --nbval`` over a folder, strict, as the project runs it."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=120",
         f"--nbval-sanitize-with={folder / 'sanitize.cfg'}", "-p", "no:cacheprovider", "--rootdir", str(folder), *more,
         str(folder)],
        cwd=folder, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | variables)
    return done.returncode, done.stdout


def test_j01_j02_j03_noise_does_not_fail_strict_nbval(tmp_path):
    """J01 streams and bars, J02 a warning, J03 addresses, figures, clocks and a silent cell: passes twice in a row."""
    folder = folder_with(
        tmp_path,
        ("import sys\nfor i in range(20):\n    print(i); sys.stdout.flush()",),
        ("import os, warnings\nif os.environ.get('NEW_VERSION'):\n    warnings.warn('this is old', FutureWarning)\n"
         "    import tqdm; list(tqdm.tqdm(range(3)))\nprint('a')",),
        ("print('<object at 0x7f00aabb12>' if os.environ.get('NEW_VERSION') else '<object at 0x55ff00ee99>')",),
        ("import time; print(time.time())", "measure", IGNORED_OUTPUT),
        ("from minillm.course import canvas, show\nfigure, axes = canvas(3, 2)\n"
         "axes.bar([0, 1], [1, 2 + time.time() % 1]); "
         "show(figure, alt='Two bars, one of them always higher.', table={'x': [1]})",
         "plot", IGNORED_OUTPUT),
        ("time.sleep(6); 'long, and silent until now'",))
    for variables in ({}, {"NEW_VERSION": "1"}):
        code, out = nbval(folder, **variables)
        assert code == 0, out
    assert sorted(path.name for path in folder.iterdir()) == ["90_try.ipynb", "conftest.py", "sanitize.cfg"]


def test_the_readers_own_copies_are_left_alone(tmp_path):
    """``make test`` passes however far the exercises in notebooks/mine are done."""
    folder = folder_with(tmp_path, ("print(1)",))
    broken = new_notebook(cells=[new_code_cell("1 / 0")])
    (folder / "mine").mkdir()
    nbformat.write(broken, folder / "mine" / "90_try.ipynb")
    assert nbval(folder)[0] == 0


def test_a_wrong_number_fails_strict_nbval(tmp_path):
    """The comparison compares: what is counted may not change unseen, and a size is no address."""
    folder = folder_with(tmp_path, ("import os\nprint(os.environ.get('COUNT', '300x200'))",))
    assert nbval(folder)[0] == 0
    assert nbval(folder, COUNT="300x201")[0] == 1
