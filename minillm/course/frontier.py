"""Quality against memory, of recorded runs: points with their intervals, the frontier drawn, and the noise floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import wrap
from typing import Any, NamedTuple

from minillm.course.display import MARKERS, PALETTE, Shown, canvas, show
from minillm.course.files import data_file
from minillm.measure.results import Recording
from minillm.measure.roofline import KV_SCALE_BYTES

_COLORS = [color for color in PALETTE if color != "#F0E442"]  # hollow markers in yellow are not seen on white


class Point(NamedTuple):
    """A way to run a model: what it takes, how far it is off, and the ends of that value's interval.

    Names are ``"weights"`` or ``"weights, what else"``: those of the same weights share a colour.
    """

    name: str
    x: float
    value: float
    low: float
    high: float


def on_frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in one of ``x`` and ``value`` without losing in the other, from the smallest x on."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.x, point.value)):
        if not kept or point.value < kept[-1].value:
            kept.append(point)
    return kept


def frontier(panels: Mapping[str, Sequence[Point]], floors: Mapping[str, float], *, x_label: str, y_label: str,
             finding: str, least: float) -> Shown:
    """A panel for each of ``panels``, hollow as recorded values are; the smaller on both axes, the better.

    Args:
        floors: by panel, the value below which a difference means nothing; drawn as a line, or named where it lies
            below the axis.
        least: where the y axis, which is logarithmic, begins.
        finding: the title and alternative text.
    """
    figure, axes = canvas(7.5, 4.2, ncols=len(panels), sharex=True, sharey=True, squeeze=False)
    names = list(dict.fromkeys(point.name for points in panels.values() for point in points))
    weights = list(dict.fromkeys(name.partition(",")[0] for name in names))
    for ax, (title, points) in zip(axes[0], panels.items(), strict=True):
        edge = on_frontier(points)
        ax.plot([point.x for point in edge], [max(least, point.value) for point in edge], "-", color="#bbbbbb",
                linewidth=4, zorder=1, label="frontier")
        for point in points:
            if point.value < least:
                ax.annotate("below", (point.x, least), (-8, 0), textcoords="offset points", ha="right", va="center",
                            fontsize=8)
            color = _COLORS[weights.index(point.name.partition(",")[0]) % len(_COLORS)]
            value, low, high = (max(least, part) for part in (point.value, point.low, point.high))
            ax.errorbar(point.x, value, [[value - low], [high - value]], fmt=MARKERS[names.index(point.name) % 8],
                        color=color, markerfacecolor="white", markersize=7, capsize=3, label=point.name, zorder=3)
        _floor(ax, floors[title], least)
        ax.set_title(title, fontsize=9.5)
        ax.set(xlabel=x_label, yscale="log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.grid(axis="y")
        ax.minorticks_off()
    axes[0, 0].set(ylabel=y_label, xlim=(0, None), ylim=(least / 2, None))
    figure.suptitle("\n".join(wrap(finding, 96)), x=0.01, ha="left", fontsize=9.5)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8.5,
                  frameon=False)
    return show(figure, alt=finding, table=_table(panels, x_label, y_label))


def _floor(ax: Any, floor: float, least: float) -> None:
    if floor >= least:
        ax.axhline(floor, color="#555555", linestyle=":", label="noise floor")
    else:
        ax.annotate(f"noise floor: {floor:.0e}" if floor else "noise floor: 0", (0.02, 0.015),
                    xycoords="axes fraction", fontsize=8.5)


def _table(panels: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> dict[str, list[Any]]:
    rows = [(title, point, point in on_frontier(points)) for title, points in panels.items() for point in points]
    return {"model": [title for title, _, _ in rows], "side": [point.name for _, point, _ in rows],
            x_label: [point.x for _, point, _ in rows], y_label: [point.value for _, point, _ in rows],
            "from": [point.low for _, point, _ in rows], "to": [point.high for _, point, _ in rows],
            "on the frontier": ["yes" if best else "no" for _, _, best in rows]}


# ---- of recorded runs of `minillm bench quality` ---------------------------------------------------------------------

Samples = list[dict[str, Any]]
Interval = Callable[[Sequence[float], Sequence[float]], tuple[float, float]]


def recorded_quality(model: str) -> tuple[dict[str, Samples], Recording]:
    """The recorded run of a model: its samples by side, a sample for each passage; and all of it."""
    run = Recording.load(data_file(f"measurements/quality-{model}.json"))
    return {side: [own for own in run.samples if own["side"] == side] for side in run.settings["sides"]}, run


def kl_of(samples: Samples) -> float:
    """Nats a token."""
    return sum(own["kl"] for own in samples) / sum(own["num_tokens"] for own in samples)


def kv_bytes(settings: Mapping[str, Any], head_dim: int) -> float:
    """Bytes that a side keeps of a number of K or V, on a CPU, scales included."""
    if settings["kv_cache_dtype"] == "int8":
        return 1 + KV_SCALE_BYTES / head_dim
    return 4 if settings["quantization"] is None and settings["dtype"] in ("auto", "float32") else 2


def quality_points(model: str, head_dim: int, shown: Mapping[str, str], interval: Interval) -> list[Point]:
    """The sides ``shown``, each under the name that it has there. x: bytes of the weights, and of as many requests' K
    and V as weigh the same in 16 bit, over both in 16 bit. value: KL; its ends are what ``interval`` gives from the
    passages' sums and tokens."""
    sides, run = recorded_quality(model)
    plain = sides["bfloat16"][0]["weight_bytes"]
    points = []
    for name, label in shown.items():
        own = sides[name]
        memory = (own[0]["weight_bytes"] / plain + kv_bytes(run.settings["sides"][name], head_dim) / 2) / 2
        ends = interval([sample["kl"] for sample in own], [sample["num_tokens"] for sample in own])
        points.append(Point(label, memory, kl_of(own), *map(float, ends)))
    return points


def kl_by_kind(samples: Samples) -> dict[str, float]:
    """KL by kind of text in English, and by language for the rest."""
    kinds: dict[str, Samples] = {}
    for own in samples:
        kinds.setdefault(own["kind"] if own["language"] == "en" else f"in {own['language']}", []).append(own)
    return {kind: kl_of(own) for kind, own in kinds.items()}
