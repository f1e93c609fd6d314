"""The repository's public address, in one place: ``address.txt`` beside this file holds ``owner/name``.

Everything that repeats it (badges, the Colab cell, the package's metadata) is written by :func:`move`, and a test
holds all of it together.
"""

from __future__ import annotations

import re
from pathlib import Path

from minillm.course.files import write_text

_FILE = Path(__file__).with_name("address.txt")
BRANCH = "main"
# The three ways in which links name a repository on GitHub: its page, Binder's and Colab's.
_PREFIXES = ("github.com/", "mybinder.org/v2/gh/", "colab.research.google.com/github/")


def repository() -> str:
    """The address as ``owner/name``."""
    return _FILE.read_text(encoding="utf-8").strip()


def clone_url() -> str:
    """What ``git clone`` and ``pip install git+...`` take."""
    return f"https://github.com/{repository()}"


def badges(path: str) -> str:
    """Markdown that opens ``path`` (relative to the repository's root) on Binder and on Colab."""
    return (f"[![Open on Binder](https://mybinder.org/badge_logo.svg)]({binder_url(path)}) "
            f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({colab_url(path)})")


def binder_url(path: str) -> str:
    """The address that starts ``path`` in JupyterLab on Binder."""
    return f"https://mybinder.org/v2/gh/{repository()}/{BRANCH}?urlpath=lab/tree/{path}"


def colab_url(path: str) -> str:
    """The address that opens ``path`` in Colab."""
    return f"https://colab.research.google.com/github/{repository()}/blob/{BRANCH}/{path}"


def carriers(root: Path) -> list[Path]:
    """The files under ``root`` (a checkout) that repeat the address."""
    return [root / "README.md", root / "CONTRIBUTING.md", root / "pyproject.toml",
            *sorted((root / "notebooks").glob("*.md")), *sorted((root / "notebooks").glob("*.ipynb"))]


def move(new: str, root: Path | None = None) -> list[Path]:
    """Write the address ``owner/name`` into ``address.txt`` and every file that repeats the old one.

    Returns the files that changed.

    Raises:
        ValueError: ``new`` is not of the form ``owner/name``.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+", new):
        raise ValueError(f"an address has the form owner/name, got {new!r}")
    old, root = repository(), root or _FILE.parents[2]
    changed = []
    for path in carriers(root):
        before = path.read_text(encoding="utf-8")
        after = before
        for prefix in _PREFIXES:
            after = re.sub(re.escape(prefix + old) + r"(?![\w-])", prefix + new, after)
        if after != before:
            write_text(path, after)
            changed.append(path)
    write_text(root / _FILE.relative_to(_FILE.parents[2]), new + "\n")
    return changed
