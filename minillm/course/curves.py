"""Panels side by side over one x axis: what was measured, recorded and yours, beside what the cost model expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minillm.course.display import PALETTE, Shown, canvas, show

# By the value in the table's column "run": colour, line, face of the markers.
_STYLES = {"recorded": (PALETTE[0], "o--", "white"), "yours": (PALETTE[2], "s-", PALETTE[2])}


def curves(table: Mapping[str, Sequence[Any]], *, x: str, panels: Mapping[str, tuple[str, str | None]], y_label: str,
           finding: str, law: str = "cost model", recorded_label: str = "") -> Shown:
    """A panel for each of ``panels``: title to the columns of measured values and of the law (dotted; or ``None``).

    Args:
        table: the columns; ``"run"`` says ``"recorded"`` or ``"yours"`` in each row. It is shown below the figure.
        x: the column of all x axes, and their label.
        recorded_label: device, date and path of the recorded run.
    """
    figure, axes = canvas(7.5, 3.2, ncols=len(panels), squeeze=False)
    for who in dict.fromkeys(table["run"]):
        color, line, face = _STYLES[who]
        rows = [i for i, run in enumerate(table["run"]) if run == who]
        across = [table[x][i] for i in rows]
        label = f"{who}: {recorded_label}" if who == "recorded" and recorded_label else who
        for ax, (measured, expected) in zip(axes[0], panels.values(), strict=True):
            ax.plot(across, [table[measured][i] for i in rows], line, color=color, markerfacecolor=face, label=label)
            if expected:
                ax.plot(across, [table[expected][i] for i in rows], ":", color=color, label=f"{who}, {law}")
    for ax, title in zip(axes[0], panels, strict=True):
        ax.set_title(title, fontsize=9.5)
        ax.set(xlabel=x, ylabel=y_label, ylim=(0, None), xlim=(0, None))
    figure.suptitle(finding, x=0.01, ha="left", fontsize=9.5)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=2, fontsize=8.5,
                  frameon=False)
    return show(figure, alt=finding, table=table)
