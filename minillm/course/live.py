"""Is this the reader's own run, or one whose outputs will be kept for everybody?

``minillm course execute`` and the tests set ``MINILLM_LIVE=0``: nothing is timed, no form or slider is made, nothing
is written to the reader's cache folder, and every live panel says how to fill it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "MINILLM_LIVE"
EMPTY_PANEL = "run this cell to add your machine"


def is_live() -> bool:
    """True in the reader's own run."""
    return os.environ.get(VARIABLE, "1") != "0"


def widget_bundle(make: Callable[[], Any]) -> dict[str, Any]:
    """The widget part of a mimebundle, from ipywidgets 7.7 or 8; empty in a kept run, or without ipywidgets."""
    if not is_live():
        return {}
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        return {}
    widget = make()
    if hasattr(widget, "_repr_mimebundle_"):  # ipywidgets 8
        data = widget._repr_mimebundle_()
        data = data[0] if isinstance(data, tuple) else data
        return {key: value for key, value in (data or {}).items() if "widget" in key}
    return {"application/vnd.jupyter.widget-view+json":  # ipywidgets 7.7
            {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}
