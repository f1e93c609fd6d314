"""The ladder: one prompt, one machine, a rung for each idea that makes the engine faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minillm.course.display import PALETTE, Shown, canvas, show
from minillm.course.files import CourseError, Store


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to run, its predicted and its measured speed in tokens per second."""

    name: str
    notebook: str
    predicted: float
    measured: float | None = None


class Ladder:
    """All rungs of one reader's machine, kept between notebooks."""

    def __init__(self, store: Store):
        self._store = store

    def add(self, name: str, *, notebook: str, predicted: float, measured: float | None = None) -> Rung:
        """Add or replace a rung (tokens/s). Predict first; call again with what was measured."""
        if not predicted > 0 or (measured is not None and not measured > 0):
            raise CourseError("tokens/s must be above 0")
        self._store.put(name, {"notebook": notebook, "predicted": float(predicted),
                               "measured": None if measured is None else float(measured)})
        return Rung(name, **self._store.values[name])

    def rungs(self) -> list[Rung]:
        """Every rung, by notebook and then in the order of adding."""
        return sorted((Rung(name, **values) for name, values in self._store.values.items()), key=lambda r: r.notebook)

    def figure(self) -> Shown:
        """A bar a rung from zero, with a line where the prediction was.

        Raises:
            CourseError: while the ladder has no rung.
        """
        rungs = self.rungs()
        if not rungs:
            raise CourseError("the ladder has no rung yet; notebook 00 adds the first")
        figure, axes = canvas(7.5, 1.2 + 0.45 * len(rungs))
        places = range(len(rungs))
        axes.barh(places, [r.measured or 0 for r in rungs], color=PALETTE[0], height=0.55, label="measured")
        axes.plot([r.predicted for r in rungs], places, "|", color=PALETTE[1], markersize=18, markeredgewidth=2.5,
                  label="predicted")
        axes.set_yticks(places, [f"{r.notebook}  {r.name}" for r in rungs])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens/s on this machine, one request unless a rung says more")
        figure.legend(loc="outside lower left", ncols=2, fontsize=8.5, frameon=False)
        best = max(rungs, key=lambda r: r.measured or 0)
        data: dict[str, list[Any]] = {
            "notebook": [r.notebook for r in rungs], "rung": [r.name for r in rungs],
            "predicted tokens/s": [r.predicted for r in rungs], "measured tokens/s": [r.measured for r in rungs]}
        found = f"{best.name} is the fastest measured, at {best.measured:.1f} tokens/s" if best.measured \
            else "none is measured yet"
        count = "1 rung" if len(rungs) == 1 else f"{len(rungs)} rungs"
        finding = f"The ladder has {count}; {found}."
        figure.suptitle(finding, x=0.01, ha="left", fontsize=9.5)
        return show(figure, alt=finding, table=data)
