"""Where a notebook's links lead: to files that are there, and from each title to its neighbours."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)[^)]*\)( \(planned\))?")
_PLANNED = re.compile(r"(\d\d) [A-Z][^()·\n]*\(planned\)")


def broken_links(notebook: Any, folder: Path) -> Iterator[str]:
    """Relative links lead to files; a notebook that is not written yet may be linked or named as "(planned)"."""
    written = {path.name[:2] for path in folder.glob("[0-9][0-9]_*.ipynb")}
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for target, planned in _LINK.findall(cell.source):
            allowed = planned and re.fullmatch(r"\d\d_[a-z0-9_]+\.ipynb", target)
            if not allowed and not os.path.exists(folder / target):  # which also answers for no path at all
                yield f"links: cell {cell.id!r} links to {target}, which is not there (nor is it marked '(planned)')"
        for number in _PLANNED.findall(cell.source):
            if number in written:
                yield f"links: cell {cell.id!r} calls notebook {number} planned; it is there, so link to it"


def missing_neighbours(title: str, path: Path) -> Iterator[str]:
    """The title says what comes before and after, and links to it where it is written."""
    number = int(path.name[:2])
    for word, neighbour in (("previous", number - 1), ("next", number + 1)):
        if not re.search(rf"{word}:\s", title):
            yield f"neighbours: the title has no '{word}: ...'"
        for other in sorted(path.parent.glob(f"{neighbour:02}_*.ipynb")):
            if f"]({other.name})" not in title:
                yield f"neighbours: the title does not link to {other.name}"
