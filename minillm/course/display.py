"""Figures that everyone can read: a sentence that states the finding, the data as a table, one palette."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from minillm.course import html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by readers with any colour vision (https://jfly.uni-koeln.de/color/).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
STYLE: dict[str, Any] = {
    "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white", "font.size": 10,
    "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "grid.color": "#dddddd", "legend.frameon": False, "axes.titlesize": 11, "axes.titlelocation": "left",
}
_DPI = 144


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure ready for any page: PNG bytes, the finding in words, the data as rows."""

    png: bytes
    alt: str
    header: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    width: int

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.alt}

    def html(self) -> str:
        """The picture with its alternative text, and the numbers in a fold below."""
        picture = base64.b64encode(self.png).decode("ascii")
        image = (f'<img alt="{escape(self.alt)}" width="{self.width}" style="max-width: 100%; height: auto" '
                 f'src="data:image/png;base64,{picture}">')  # a widget has no style of the page's to keep it inside
        return f"<div>{image}</div>" + html.details("The numbers behind the figure", html.table(self.header, self.rows))


def show(figure: Figure, *, alt: str, table: Mapping[str, Sequence[Any]]) -> Shown:
    """Close a matplotlib figure and return it as something a notebook displays.

    Args:
        alt: what the figure shows, as a sentence with its finding; read aloud instead of the picture.
        table: the plotted data, a column a key; columns of equal length.
    Raises:
        ValueError: when the finding or the data is missing, or columns differ in length.
    """
    if len(alt.split()) < 5:
        raise ValueError("alt must be a sentence that states the finding, not a label")
    columns = {name: list(values) for name, values in table.items()}
    if not columns or len({len(values) for values in columns.values()}) != 1 or not next(iter(columns.values())):
        raise ValueError("table must hold the plotted data: named columns of equal length, at least one row")
    rows = tuple(zip(*columns.values(), strict=True))
    return Shown(_png(figure), alt, tuple(columns), rows, round(figure.get_figwidth() * 96))


def canvas(width: float = 7.5, height: float = 3.0, **options: Any) -> tuple[Figure, Any]:
    """A new figure and its axes in the course's style; ``options`` go to ``Figure.subplots``. Nothing else changes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(**options)


def _png(figure: Figure) -> bytes:
    import matplotlib
    from PIL import Image

    raw = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(raw, format="png", dpi=_DPI, facecolor="white", transparent=False)
    small = io.BytesIO()  # 256 colours are plenty for lines and letters, at a third of the size
    Image.open(raw).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()
