"""How large the channels of a head's keys and values are, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from textwrap import wrap

from minillm.course.display import PALETTE, Shown, canvas, show


def channel_bars(panels: Mapping[str, Sequence[float]], loudest: Mapping[str, Sequence[float]]) -> Shown:
    """A bar for each channel, a panel for each of ``panels`` (title to values): sizes over the median channel's.

    Args:
        loudest: for keys and for values, the same of each head's loudest channel, which the finding is about.
    """
    figure, axes = canvas(7.5, 2.7, ncols=len(panels), sharey=True, squeeze=False)
    values = {title: [float(value) for value in own] for title, own in panels.items()}
    for ax, (title, own) in zip(axes[0], values.items(), strict=True):
        ax.bar(range(len(own)), own, width=0.8, color=PALETTE[0])
        ax.axhline(1, color="#555555", linewidth=1, linestyle=":")
        ax.set_title(title, fontsize=9.5)
        ax.set(xlabel="channel")
    axes[0, 0].set_ylabel("size / median (times)")
    heads = "; ".join(f"of {name} {statistics.median(own):.1f} times in the median head, at most {max(own):.1f}"
                      for name, own in loudest.items())
    finding = f"The loudest channel over its head's median channel: {heads}."
    figure.suptitle("\n".join(wrap(finding, 96)), x=0.01, ha="left", fontsize=9.5)
    return show(figure, alt=finding, table={"channel": list(range(len(next(iter(values.values())))))} | values)
