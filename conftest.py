"""What every test may rely on: one thread a worker, fixed seeds, and visible skips of what this machine lacks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys

# Before torch is imported anywhere: test workers and notebook kernels share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

# A shell that starts a run in the background has it ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_browser() -> str | None:
    """The path of a Chromium that tests may drive, or ``None``."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, a test whose marker asks for what is not here."""
    if item.get_closest_marker("browser") and find_browser() is None:
        if os.environ.get("MINILLM_REQUIRE_BROWSER") == "1":
            pytest.fail("MINILLM_REQUIRE_BROWSER=1, and no Chromium was found", pytrace=False)
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    if item.get_closest_marker("colab") and os.environ.get("MINILLM_REQUIRE_COLAB") != "1":
        pytest.skip("installs Colab's versions into the cache folder, 0.3 GB (MINILLM_REQUIRE_COLAB=1 insists)")
    if item.get_closest_marker("network") and os.environ.get("MINILLM_OFFLINE") == "1":
        pytest.skip("MINILLM_OFFLINE=1")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Python's, numpy's and torch's global generators start each test alike (where they are loaded at all)."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def browser_path() -> str:
    """The Chromium of a test that is marked ``browser``."""
    path = find_browser()
    assert path is not None, "mark the test with @pytest.mark.browser"
    return path
