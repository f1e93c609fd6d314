"""Several lines in one panel or more, told apart by colour, marker and dash: policies over a load, for example."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from minillm.course.display import DASHES, MARKERS, PALETTE, Shown, canvas, show

Values = Sequence[float]


def lines(x: Values, panels: Mapping[str, Mapping[str, Values]], *, x_label: str, finding: str,
          yours: Mapping[str, Mapping[str, Values]] | None = None, level: float | None = None,
          level_label: str = "", logarithmic: Sequence[str] = (), dashed: bool = False) -> Shown:
    """A panel for each of ``panels``: the label of its y axis to its lines, name to values over ``x``.

    Args:
        finding: the title and alternative text.
        yours: the reader's own lines by the same names, filled and solid; ``panels`` are then hollow and dashed.
        level: where a dotted line is drawn across every panel.
        level_label: what the dotted line is, for the legend.
        logarithmic: the panels with a logarithmic y axis; the others begin at 0.
        dashed: hollow and dashed, as recorded runs are, also without ``yours``.
    """
    figure, axes = canvas(7.5, 3.3 if len(panels) > 1 or yours else 2.9, ncols=len(panels), squeeze=False)
    hollow, table = dashed or bool(yours), {x_label: list(x)}
    for ax, (label, rows) in zip(axes[0], panels.items(), strict=True):
        for i, (name, values) in enumerate(rows.items()):
            ax.plot(x, values, MARKERS[i], linestyle="--" if hollow else DASHES[i], color=PALETTE[i],
                    markerfacecolor="white" if hollow else PALETTE[i], label=f"recorded: {name}" if hollow else name)
            table[f"{name}, {label}"] = list(values)
            if yours:
                ax.plot(x, yours[label][name], MARKERS[i] + "-", color=PALETTE[i], label=f"yours: {name}")
                table[f"yours: {name}, {label}"] = list(yours[label][name])
        if level is not None:
            ax.axhline(level, color="#555555", linestyle=":", label=level_label or None)
        ax.set(xlabel=x_label, ylabel=label, xlim=(0, None))
        if label in logarithmic:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
        else:
            ax.set_ylim(bottom=0)
    figure.suptitle("\n".join(wrap(finding, 96)), x=0.01, ha="left", fontsize=9.5)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8.5,
                  frameon=False)
    return show(figure, alt=finding, table=table)
