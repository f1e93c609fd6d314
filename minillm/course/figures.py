"""The course's recurring pictures: the path of a token, where a request's time went, recorded and yours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from minillm.course.display import PALETTE, Shown, canvas, show
from minillm.course.live import EMPTY_PANEL
from minillm.measure.trace import STAGES

Spans = Sequence[tuple[str, float, float]]
_STATIONS = {  # name: (column, row, what happens there)
    "tokenize": (0, 1, "text to ids"), "queue": (1, 1, "wait for a step"), "prefill": (2, 1, "read the prompt"),
    "sample": (3, 1, "choose an id"), "detokenize": (4, 1, "ids to text"), "deliver": (5, 1, "to the reader"),
    "decode": (3, 0, "read one token"),
}
_COLORS = {"load": "#8c8c8c"} | {stage: PALETTE[i] for stage, i in (
    ("tokenize", 2), ("queue", 5), ("prefill", 0), ("decode", 1), ("sample", 6), ("detokenize", 3), ("deliver", 4))}
_PIXEL = 1 / 700  # of a panel's width
_YOURS = PALETTE[2]  # of the reader's own values: no colour that a stage with a bar of its own has
# Shades under black letters, told apart from their neighbours by lightness too.
_TOKEN_SHADES = ("#cfe5f5", "#ffe0b8", "#d5efe4", "#f3dbe9")
_HATCHES = {"load": "", "prefill": "//", "decode": "", "tokenize": "..", "detokenize": "xx", "deliver": "--"}


def token_path(lit: str | Sequence[str] = "all") -> Shown:
    """The path of a token with the stage of this notebook lit (``"all"`` for the whole of it).

    Raises:
        ValueError: naming the stages there are.
    """
    chosen = list(_STATIONS) if lit == "all" else [lit] if isinstance(lit, str) else list(lit)
    unknown = [name for name in chosen if name not in _STATIONS]
    if unknown:
        raise ValueError(f"no stage {unknown[0]!r} on the path; there are {', '.join(_STATIONS)}")
    figure, axes = canvas(7.5, 1.9)
    axes.set_axis_off()
    axes.set(xlim=(-0.75, 5.5), ylim=(-0.42, 1.45))
    for name, (x, y, what) in _STATIONS.items():
        bright = name in chosen
        axes.text(x, y, f"{name}\n", ha="center", va="center", fontsize=9.5, fontweight="bold", linespacing=1.1,
                  color="white" if bright else "#555555", zorder=3)
        axes.text(x, y - 0.13, what, ha="center", va="center", fontsize=7.5, color="white" if bright else "#555555",
                  zorder=3)
        axes.add_patch(_box(x, y, PALETTE[0] if bright else "#eeeeee"))
    for start, end in (((-0.75, 1), (-0.44, 1)), *[((x + 0.43, 1), (x + 0.56, 1)) for x in range(5)],
                       ((2.88, 0.7), (2.88, 0.29)), ((3.12, 0.29), (3.12, 0.7))):
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#333333", "lw": 1.4})
    axes.text(2.8, 0.5, "new id", ha="right", va="center", fontsize=8)
    axes.text(3.2, 0.5, "logits: once a token, N - 1 times", ha="left", va="center", fontsize=8)
    places = "the whole path" if lit == "all" else ", ".join(chosen)
    return show(figure, alt="The path of a token: text is tokenized, queued, prefilled; then sample and decode take "
                            f"turns, once a token, while ids become text and are delivered. Lit: {places}.",
                table={"stage": list(_STATIONS), "what happens": [what for _, _, what in _STATIONS.values()],
                       "this notebook": ["yes" if name in chosen else "no" for name in _STATIONS]})


def _box(x: float, y: float, color: str) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch((x - 0.41, y - 0.25), 0.82, 0.5, boxstyle="round,pad=0,rounding_size=0.06", facecolor=color,
                          edgecolor="#333333", linewidth=0.8)


def stage_timeline(runs: Mapping[str, Spans], *, first_token_s: Mapping[str, float], empty: str = "") -> Shown:
    """Where time went in one or more runs, a panel each with its own axis, from the moment the caller asked.

    Args:
        runs: name to spans ``(stage, start_s, end_s)``; seconds from the request's start, ``"load"`` allowed.
        first_token_s: name to when the first token came, marked by a line: the TTFT as that run would report it.
        empty: name of a panel that is to say how to fill it.
    """
    figure, axes = canvas(7.5, 0.7 + 1.05 * (len(runs) + bool(empty)), nrows=len(runs) + bool(empty), squeeze=False)
    used: dict[str, Any] = {}
    seen = _seen(runs)
    for ax, (name, spans) in zip(axes[:, 0], runs.items(), strict=False):
        last_s = max(end for _, _, end in spans)
        for stage, start, end in spans:
            wide = end - start > 4 * _PIXEL * last_s  # a white edge would hide a span that is hardly wider than itself
            used[stage] = ax.barh(0, (end - start) * 1e3, left=start * 1e3, height=0.62,
                                  color=_COLORS.get(stage, "#777777"), edgecolor="white", linewidth=0.4 * wide,
                                  hatch=_HATCHES.get(stage, "") if wide else "")
        mark, end = first_token_s[name] * 1e3, last_s * 1e3
        ax.plot([mark, mark], [-0.45, 0.45], color="black", linewidth=1.6)
        ax.annotate(f"first token, {mark:,.0f} ms", (mark, 0.42), (4 if mark < end / 2 else -4, 1), fontsize=8.5,
                    textcoords="offset points", ha="left" if mark < end / 2 else "right", va="bottom")
        ax.set_title(name, loc="left")
        ax.set(ylim=(-0.45, 0.85), xlim=(0, end * 1.01), yticks=[])
        ax.spines["left"].set_visible(False)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    if empty:
        _empty_panel(axes[-1, 0], empty)
    axes[-1, 0].set_xlabel("milliseconds since the caller asked (each panel has its own scale)")
    used = {stage: used[stage] for stage in ("load", *STAGES) if stage in seen}
    figure.legend(used.values(), used.keys(), loc="outside lower center", ncols=len(used), fontsize=8.5, frameon=False)
    rows = [(name, stage, *_total(spans, stage)) for name, spans in runs.items() for stage in _ordered(spans)]
    totals = {name: _total(spans, "load")[1] for name, spans in runs.items()}
    found = "; ".join(f"{name}: first token after {first_token_s[name] * 1e3:,.0f} ms"
                      + (f", {totals[name]:,.0f} ms of it loading" if totals[name] else "") for name in runs)
    columns = map(list, zip(*rows, strict=True))
    return show(figure, alt=f"Where the time of a request went. {found}.",
                table=dict(zip(("run", "stage", "spans", "milliseconds"), columns, strict=True)))


def _seen(runs: Mapping[str, Spans]) -> set[str]:
    """Stages with a span that is at least a pixel wide in its panel: only those belong in a legend."""
    ends = {name: max(end for _, _, end in spans) for name, spans in runs.items()}
    return {stage for name, spans in runs.items() for stage, start, end in spans if end - start > _PIXEL * ends[name]}


def _ordered(spans: Spans) -> list[str]:
    there = {stage for stage, _, _ in spans}
    return [stage for stage in ("load", *STAGES) if stage in there]


def _total(spans: Spans, stage: str) -> tuple[int, float]:
    lengths = [end - start for name, start, end in spans if name == stage]
    return len(lengths), sum(lengths) * 1e3


def _empty_panel(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left")
    axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(0, 1))
    for spine in axes.spines.values():
        spine.set(visible=True, linestyle=(0, (4, 4)), color="#999999")
    axes.text(0.5, 0.5, EMPTY_PANEL, ha="center", va="center", color="#666666", style="italic")


def recorded_and_yours(names: Sequence[Any], recorded: Sequence[float], yours: Sequence[float] | None, *, x_label: str,
                       y_label: str, recorded_label: str, finding: str,
                       absolute: Mapping[str, Sequence[Any]] | None = None, logarithmic: bool = False,
                       level: float = 1, is_floor: bool = True,
                       law: tuple[str, Sequence[float]] | None = None) -> Shown:
    """A recorded run (hollow, dashed) and the reader's (filled) on axes where the law shows and not the hardware.

    Args:
        names: x values without a unit, such as rows over the crossover batch: numbers give lines, words give bars.
        recorded, yours: measured over ideal by each machine's own card; ``yours`` is ``None`` in a recorded run.
        recorded_label: device, date and path of the recorded run.
        finding: the title and alternative text. A value well below 1 is added to it: faster than a card allows.
        absolute: columns of absolute values for the table below.
        logarithmic: both axes, for numbers over several decades.
        level: where a line is drawn across.
        is_floor: that line is the floor (at 1), so that values below it are called impossible.
        law: a name and the values that the cost model expects, drawn as a thin line (numbers as ``names`` only).
    """
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    if is_floor and level == 1:
        finding = _with_impossible(finding, recorded, yours)
    figure, axes = canvas(7.5, 3.2)
    empty = f"yours: {EMPTY_PANEL}"
    if all(isinstance(name, (int, float)) for name in names):
        axes.plot(names, recorded, "o--", markerfacecolor="white", color=PALETTE[0],
                  label=f"recorded: {recorded_label}")
        axes.plot(*((names, yours) if yours else ([], [])), "s-", color=_YOURS, label="yours" if yours else empty)
        if law:
            axes.plot(names, law[1], ":", color="#555555", label=law[0])
        axes.axhline(level, color="#555555", linewidth=1, linestyle="-" if is_floor and level == 1 else ":")
    else:
        _paired_bars(axes, names, recorded, yours, (f"recorded: {recorded_label}", "yours" if yours else empty))
    axes.annotate("floor = 1" if is_floor and level == 1 else f"{level:,g}", (1, level), (4, 0),
                  xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8.5, va="center")
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.margins(y=0.15)
    if logarithmic:
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_locator(FixedLocator(_apart(names)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:,g}")
            axis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=0)
    axes.set_title("\n".join(wrap(finding, 96)), loc="left", fontsize=9.5)
    figure.legend(loc="outside lower left", fontsize=8.5, frameon=False)
    columns = {x_label or "what": list(names), f"recorded, {y_label}": list(recorded)}
    columns |= {f"yours, {y_label}": list(yours)} if yours else {}
    columns |= {law[0]: list(law[1])} if law else {}
    return show(figure, alt=finding, table=columns | {key: list(values) for key, values in (absolute or {}).items()})


def _apart(values: Sequence[float]) -> list[float]:
    """Those of the growing ``values`` whose labels do not touch on a logarithmic axis: the first, and on from there."""
    kept = list(values[:1])
    for value in values[1:]:
        if math.log(value / kept[-1]) > 0.09 * math.log(values[-1] / values[0]):
            kept.append(value)
    return kept


def _with_impossible(finding: str, recorded: Sequence[float], yours: Sequence[float] | None) -> str:
    # A card is a measurement too: a few per cent below 1 are its noise.
    if any(ratio < 0.95 for ratio in recorded):
        finding += " The recorded run is faster than its card says is possible."
    if any(ratio < 0.95 for ratio in yours or ()):
        finding += " Yours is faster than your card says is possible: measure the card again, session.card(again=True)."
    return finding


def _paired_bars(axes: Any, names: Sequence[Any], recorded: Sequence[float], yours: Sequence[float] | None,
                 labels: tuple[str, str]) -> None:
    left, right = [i - 0.2 for i in range(len(names))], [i + 0.2 for i in range(len(names))]
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a line must not cross a number
    bars = axes.bar(left, recorded, 0.36, facecolor="white", edgecolor=PALETTE[0], linewidth=1.6, linestyle="--",
                    label=labels[0])
    digits = "%.2f" if max(*recorded, *(yours or ())) < 2 else "%.1f"
    axes.bar_label(bars, fmt=digits, fontsize=8 if len(names) > 6 else 9, padding=3, bbox=plate)
    live = axes.bar(right, yours or [0] * len(names), 0.36, color=_YOURS, label=labels[1])
    if yours:
        axes.bar_label(live, fmt=digits, fontsize=8 if len(names) > 6 else 9, padding=3, bbox=plate)
    axes.axhline(1, color="#555555", linewidth=1)
    axes.set_xticks(range(len(names)), names)


def token_boxes(tokens: Sequence[bytes], *, finding: str, columns: int = 88) -> Shown:
    """A text cut into its tokens, a box each, wrapped at ``columns`` characters; bytes that are no text as hex."""
    labels = [_token_label(token) for token in tokens]
    places, row, column = [], 0, 0
    for label in labels:
        if column and column + len(label) > columns:
            row, column = row + 1, 0
        places.append((row, column))
        column += len(label)
    figure, axes = canvas(7.5, 0.55 + 0.21 * (row + 1))
    axes.set_axis_off()
    axes.set(xlim=(0, columns), ylim=(row + 0.6, -0.6))
    for index, (label, (y, x)) in enumerate(zip(labels, places, strict=True)):
        axes.barh(y, len(label), left=x, height=0.86, color=_TOKEN_SHADES[index % len(_TOKEN_SHADES)], linewidth=0)
        axes.text(x + len(label) / 2, y, label, ha="center", va="center", family="DejaVu Sans Mono", fontsize=7.6)
    axes.set_title(finding, loc="left", fontsize=9.5)
    shown = tokens[:200]
    return show(figure, alt=finding, table={"token": [_token_label(token) for token in shown],
                                            "bytes": [len(token) for token in shown]})


def _token_label(token: bytes) -> str:
    try:
        return token.decode().replace(" ", "·").replace("\n", "↵").replace("\t", "→")
    except UnicodeDecodeError:
        return "".join(f"{byte:02x}" for byte in token)
