"""Small pieces of HTML: escaped, without scripts; what a viewer strips of the styles takes no meaning away."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

__all__ = ["escape", "details", "table", "rich_text", "format_cell"]


def details(summary: str, body: str) -> str:
    """A fold that opens on click, in every viewer and without a kernel. ``body`` is HTML, ``summary`` plain text."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with a header row; numbers are shown to four significant digits, columns with text stand left."""
    left = [' style="text-align: left"' if any(isinstance(row[i], str) for row in rows) else ""
            for i in range(len(header))]
    head = "".join(f"<th{style}>{escape(str(cell))}</th>" for style, cell in zip(left, header, strict=True))
    body = "".join("<tr>" + "".join(f"<td{style}>{escape(format_cell(cell))}</td>"
                                    for style, cell in zip(left, row, strict=True)) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def format_cell(value: Any) -> str:
    """A table cell: ``None`` as a dash, floats to four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def rich_text(text: str) -> str:
    """Escaped text in which `backquotes` mark code."""
    parts = escape(text, quote=False).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
