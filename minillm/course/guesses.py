"""The ledger of guesses: what the reader predicted, and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minillm.course import html
from minillm.course.display import MARKERS, PALETTE, Shown, canvas, show
from minillm.course.files import CourseError, Store


@dataclass(frozen=True, slots=True)
class Guess:
    """One prediction; ``measured`` is ``None`` until the measuring cell has run."""

    key: str
    predicted: float
    unit: str
    measured: float | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured; 1 is a perfect estimate."""
        return self.predicted / self.measured if self.measured else None


class Ledger:
    """All guesses of one reader, in order, kept between notebooks."""

    def __init__(self, store: Store):
        self._store = store
        self._measured: set[str] = set()

    def predict(self, key: str, value: float, unit: str) -> Guess:
        """Write a guess down, before measuring; returns the guess that counts.

        A new guess under the same key replaces the old one, until it is measured: then the guess stands for the rest of
        this session, so that running its cell again cannot improve it.
        """
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise CourseError(f"a guess must be a number above 0, in {unit}; got {value!r}")
        if key in self._measured:
            return self[key]
        self._store.put(key, {"predicted": float(value), "unit": unit})
        return self[key]

    def measured(self, key: str, value: float) -> Guess:
        """Add what was measured, in the unit of the guess."""
        guess = self[key]
        self._store.put(key, {"predicted": guess.predicted, "unit": guess.unit, "measured": float(value)})
        self._measured.add(key)
        return self[key]

    def __getitem__(self, key: str) -> Guess:
        if key not in self._store.values:
            raise CourseError(f"no guess {key!r} in the ledger; make it first: ledger.predict({key!r}, value, unit)")
        return Guess(key, **self._store.values[key])

    def guesses(self) -> list[Guess]:
        """Every guess, oldest first."""
        return [self[key] for key in self._store.values]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": "\n".join(f"{guess.key}: {guess.predicted:.4g} {guess.unit}" for guess in self.guesses()),
                "text/html": self.html()}

    def html(self) -> str:
        """The ledger as a table."""
        rows = [(g.key, f"{g.predicted:.4g} {g.unit}", None if g.measured is None else f"{g.measured:.4g} {g.unit}",
                 g.ratio) for g in self.guesses()]
        return html.table(("guess", "predicted", "measured", "predicted / measured"), rows)

    def figure(self) -> Shown:
        """Predicted over measured, in the order of the guesses, on a logarithmic axis.

        Raises:
            CourseError: while nothing has been measured.
        """
        done = [guess for guess in self.guesses() if guess.ratio]
        if not done:
            raise CourseError("no guess has been measured yet; run a measuring cell first")
        ratios = [guess.ratio for guess in done]
        figure, axes = canvas(7.5, 2.8)
        axes.axhline(1, color="#555555", linewidth=1)
        axes.plot(range(len(done)), ratios, MARKERS[0] + ":", color=PALETTE[0])
        axes.set_yscale("log")
        axes.set_xticks(range(len(done)), [guess.key for guess in done], rotation=30, ha="right")
        axes.set_ylabel("predicted / measured (times)")
        closest = min(done, key=lambda guess: max(guess.ratio, 1 / guess.ratio))
        data: dict[str, list[Any]] = {
            "guess": [g.key for g in done], "predicted": [g.predicted for g in done],
            "measured": [g.measured for g in done], "unit": [g.unit for g in done], "predicted / measured": ratios}
        return show(figure, alt=f"{len(done)} guesses measured; the closest, {closest.key}, was {closest.ratio:.2f} "
                                "times the measured value.", table=data)
