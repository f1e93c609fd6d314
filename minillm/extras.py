"""Packages that only a part of minillm needs, and the extra that installs each: what to say when one is missing."""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "notebooks": ("the notebooks' packages", "or make lab", (
        "IPython", "PIL", "ipykernel", "ipywidgets", "jupyterlab", "matplotlib", "nbclient", "nbformat", "packaging")),
    "bench": ("the benchmark's packages", "or make bench", ("accelerate", "transformers")),
    "llamacpp": ("llama.cpp's bindings", "it compiles for some minutes", ("llama_cpp",)),
}


def require(*packages: str) -> None:
    """Look for packages without importing them, before work starts that would only fail in a process of its own.

    Raises:
        ModuleNotFoundError: for the first that is missing.
    """
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def advice(error: ModuleNotFoundError) -> str | None:
    """What to install, in one line; ``None`` when no extra holds what is missing."""
    missing = (error.name or "").partition(".")[0]
    for extra, (what, note, packages) in EXTRAS.items():
        if missing in packages:
            return (f"this needs {what} ({missing} is missing): python -m pip install -c constraints.txt -e "
                    f"'.[{extra}]' ({note})")
    return None
