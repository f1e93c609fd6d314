"""docs/images/render_demo.py draws no picture of a run that other work slowed down."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("printed", "reason"), [
    ("17.0 GB/s (70% of the 24 GB/s)\n other work ran on this machine meanwhile", "other work ran"),
    ("5.0 GB/s (29% of the 24 GB/s this machine reads at best)", "29 % of the card's bandwidth"),
    ("memory read  n/a", "no share"),
])
def test_a_picture_of_a_busy_machine_is_refused(printed: str, reason: str) -> None:
    check = runpy.run_path(str(ROOT / "docs" / "images" / "render_demo.py"))["check"]
    with pytest.raises(SystemExit, match=f"no picture of this run: .*{reason}"):
        check(printed)
    check("17.0 GB/s (70% of the 24 GB/s this machine reads at best)")
