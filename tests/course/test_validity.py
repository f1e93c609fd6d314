"""A notebook that Jupyter could not open is refused, however readable its JSON is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm.course.lint import lint_file

CELL = {"cell_type": "code", "id": "a", "metadata": {}, "source": "1", "outputs": [], "execution_count": None}


@pytest.mark.parametrize("fault", [
    {"cell_type": "nonsense"}, {"outputs": [{"output_type": "nonsense"}]}, {"id": "not an id"}, {"source": 5},
    {"outputs": None}, {"metadata": None},
], ids=lambda fault: next(iter(fault)))
def test_a_notebook_that_breaks_nbformats_schema_is_refused(fault: dict, tmp_path: Path) -> None:
    path = tmp_path / "90_x.ipynb"
    for cell, refused in ((CELL, False), (CELL | fault, True)):
        path.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
        assert any("not a valid notebook" in found for found in lint_file(path)) == refused
