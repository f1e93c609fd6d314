"""A row of weights, the values that its codes stand for, and what is lost: the picture that notebook 15 explores."""

from __future__ import annotations

import math
import random

from minillm.course.display import PALETTE, Shown, canvas, show

FITS = ("absmax", "minmax", "least-squares")


def grid_of(group: list[float], bits: int, fit: str) -> list[float]:
    """The evenly spaced values that ``bits`` bits can stand for in a group: 2^bits, or one fewer for absmax."""
    low, high, top = min(group), max(group), 2**bits - 1
    if fit == "absmax":
        step = max(map(abs, group)) / (top // 2)
        return [step * code for code in range(-(top // 2), top // 2 + 1)]
    step = (high - low) / top
    for _ in range(6 * (fit == "least-squares")):
        codes = [min(top, max(0, round((weight - low) / (step or 1)))) for weight in group]
        mean, centre = sum(group) / len(group), sum(codes) / len(codes)
        spread = sum((code - centre) ** 2 for code in codes)
        if spread:
            step = sum((code - centre) * weight for code, weight in zip(codes, group)) / spread
        low = mean - step * centre
    return [low + step * code for code in range(top + 1)]


def weight_line(outlier: float, bits: int, size: int, fit: str, *, length: int = 64) -> Shown:
    """A row of ``length`` normal weights whose third is ``outlier`` times as large as its largest, in groups of
    ``size``: weights and the values of their group's codes on a number line, the outlier's group and the last.
    """
    rng = random.Random(3)
    row = [rng.gauss(0, 1) for _ in range(length)]
    row[2] = outlier * max(map(abs, row))
    groups = [row[i:i + size] for i in range(0, length, size)]
    grids = [grid_of(group, bits, fit) for group in groups]
    back = [min(grid, key=lambda value: abs(value - weight)) for group, grid in zip(groups, grids) for weight in group]
    others = [i for i in range(length) if i != 2]
    rms = math.sqrt(sum((row[i] - back[i]) ** 2 for i in others) / len(others))
    stored = bits + 16 * len(groups) * (1 + (fit != "absmax")) / length
    used = len({round(back[i], 9) for i in others})
    finding = (f"{bits} bit, groups of {size}, {fit}: {stored:.2f} bits a weight; the other {len(others)} weights "
               f"come back\nas {used} values, wrong by {rms:.2f} (root mean square; a normal weight is 1)")
    shown = {"the outlier's group": 0} | ({"the last group": len(groups) - 1} if len(groups) > 1 else {})
    figure, panels = canvas(7.5, 1.5 + 0.95 * len(shown), nrows=len(shown), squeeze=False, sharex=True)
    for ax, (title, place) in zip(panels[:, 0], shown.items()):
        near = back[place * size:(place + 1) * size]
        ax.vlines(grids[place], -0.4, 0.4, color="#999999", linewidth=0.9, label="what a code stands for")
        ax.plot(groups[place], [0.15] * len(near), "o", color=PALETTE[0], markersize=5, alpha=0.7, label="weight")
        ax.plot(near, [-0.15] * len(near), "x", color=PALETTE[1], markersize=5, label="comes back as")
        ax.set_title(title, fontsize=9)
        ax.set(yticks=[], ylim=(-0.5, 0.5))
        ax.spines["left"].set_visible(False)
    panels[-1, 0].set_xlabel("weight (normal: a standard deviation is 1)")
    figure.suptitle(finding, x=0.01, ha="left", fontsize=9.5)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8.5,
                  frameon=False)
    return show(figure, alt=finding, table={"weight": [round(w, 3) for w in row], "comes back as":
                                            [round(value, 3) for value in back]})
