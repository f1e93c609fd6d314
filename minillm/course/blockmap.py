"""A pool of blocks as a picture: a square a block, a colour a request, and how much of each last block is filled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from minillm.course.display import Shown, canvas, show

# Light enough for black letters; neighbours in time differ in lightness too.
_SHADES = ("#9ecae9", "#ffd08a", "#a6ddc9", "#eab8d5", "#d8d2f0", "#e8e29a", "#f3b8a6", "#c9d8b6")
_CACHED, _FREE = "#bdbdbd", "#ffffff"


def block_map(num_blocks: int, tables: Mapping[str, Sequence[int]], *, finding: str,
              filled: Mapping[str, float] | None = None, cached: Collection[int] = (),
              order: Sequence[str] = (), columns: int = 16) -> Shown:
    """The pool's blocks row by row, each with its number and the request that holds it.

    Args:
        tables: by request, its blocks in the order of its tokens. A block of several is split among them.
        finding: the title and alternative text.
        filled: by request, the share of its last block that is written; the rest of it is hatched. Default: all.
        cached: blocks that nobody holds and a prompt may still match, in grey.
        order: all requests there ever are, so that each keeps its colour from step to step.
        columns: squares a row.
    Raises:
        ValueError: a block is both held and cached, or is not in the pool.
    """
    holders: dict[int, list[str]] = {}
    for name, blocks in tables.items():
        for block in blocks:
            holders.setdefault(block, []).append(name)
    if strange := sorted({*holders, *cached} - {*range(num_blocks)}):
        raise ValueError(f"block {strange[0]} is not in a pool of {num_blocks}")
    if both := sorted({*holders} & {*cached}):
        raise ValueError(f"block {both[0]} is held and cached")
    names = list(dict.fromkeys((*order, *tables)))
    shade = {name: _SHADES[place % len(_SHADES)] for place, name in enumerate(names)}
    rows = -(-num_blocks // columns)
    figure, axes = canvas(7.5, 0.75 + 6.9 / columns * rows)
    axes.set_axis_off()
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.45, -0.55), aspect="equal")
    last = {blocks[-1]: (filled or {}).get(name, 1.0) for name, blocks in tables.items() if blocks}
    drawn = set()
    for block in range(num_blocks):
        y, x = divmod(block, columns)
        kind = "held" if block in holders else "cached" if block in cached else "free"
        drawn.add(kind)
        for part, name in enumerate(own := holders.get(block, [""])):
            left, width = x - 0.45 + 0.9 * part / len(own), 0.9 / len(own)
            axes.barh(y, width, 0.9, left=left, color=shade.get(name, _CACHED if kind == "cached" else _FREE),
                      edgecolor="none")
        spare = 1 - last[block] if block in last else 0
        if spare > 0:
            drawn.add("spare")
            axes.barh(y, 0.9 * spare, 0.9, left=x + 0.45 - 0.9 * spare, facecolor="white", edgecolor="#999999",
                      hatch="/////", linewidth=0)
        axes.barh(y, 0.9, 0.9, left=x - 0.45, facecolor="none", edgecolor="#333333" if kind != "free" else "#aaaaaa",
                  linewidth=0.8)
        plate = {"facecolor": shade.get(own[0], "white"), "edgecolor": "none", "pad": 0.3} if spare else None
        axes.text(x, y + 0.06, " ".join(own), ha="center", va="center", bbox=plate,
                  fontsize=9 if len(own) == 1 else 6.5)
        axes.text(x - 0.41, y - 0.4, block, ha="left", va="top", fontsize=4.8, color="#555555")
    axes.set_title(finding, loc="left", fontsize=9.5)
    _legend(figure, drawn)
    rows_of = sorted(holders) + sorted(cached)
    return show(figure, alt=finding, table={
        "block": rows_of or ["none is held"],
        "held by": [", ".join(holders.get(block, ["nobody: cached"])) for block in rows_of] or ["nobody"]})


def _legend(figure: Any, drawn: Collection[str]) -> None:
    from matplotlib.patches import Patch

    patches = {
        "held": Patch(facecolor=_SHADES[0], edgecolor="#333333", label="held by this letter (colours repeat)"),
        "spare": Patch(facecolor="white", edgecolor="#999999", hatch="/////", label="held, not yet written"),
        "cached": Patch(facecolor=_CACHED, edgecolor="#333333", label="cached"),
        "free": Patch(facecolor=_FREE, edgecolor="#aaaaaa", label="free"),
    }
    figure.legend(handles=[patch for kind, patch in patches.items() if kind in drawn], loc="outside lower left",
                  ncols=4, fontsize=8.5, frameon=False)
