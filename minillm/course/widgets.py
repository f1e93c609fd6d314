"""Controls that explore a cost model or recorded data, and long work with a Stop button.

Both are plain objects with a picture or text for pages without a kernel. Only core ipywidgets, 7.7 or 8.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from minillm.course import live
from minillm.course.display import Shown

Choices = Sequence[Any]


@dataclass
class Explorer:
    """A figure that depends on a few choices. ``controls``: name to the values to choose from, in order."""

    draw: Callable[..., Shown]
    controls: dict[str, Choices]
    default: dict[str, Any]
    _form: Any = field(default=None, repr=False)

    def figure(self, **values: Any) -> Shown:
        """The figure for these values; the rest at their defaults."""
        return self.draw(**(self.default | values))

    def form(self) -> Any:
        """Sliders over a figure, made once. An exception while drawing is shown in the figure's place."""
        if self._form is None:
            from ipywidgets import HTML, Layout, SelectionSlider, VBox

            picture = HTML()
            sliders = [SelectionSlider(options=list(values), value=self.default[name],
                                       description=name.replace("_", " "), continuous_update=False,
                                       style={"description_width": "initial"},
                                       layout=Layout(width="90%", max_width="720px"))
                       for name, values in self.controls.items()]

            def redraw(_change: Any = None) -> None:
                try:
                    chosen = {name: s.value for name, s in zip(self.controls, sliders, strict=True)}
                    picture.value = self.draw(**chosen).html()
                except Exception:
                    picture.value = _error_html()

            for slider in sliders:
                slider.observe(redraw, names="value")
            redraw()
            self._form = VBox([*sliders, picture])
        return self._form

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return self.figure()._repr_mimebundle_() | live.widget_bundle(self.form)


def explore(draw: Callable[..., Shown], *, default: dict[str, Any] | None = None, **controls: Choices) -> Explorer:
    """Make an :class:`Explorer`: ``explore(draw, batch=[1, 2, 4], context=[512, 1024])``.

    Args:
        draw: from one keyword argument a control to what :func:`~minillm.course.display.show` returns; quick, because a
            slider waits for it.
        default: the values shown first, and on a page without a kernel; the first of each control where not given.
        controls: the values to choose from.
    Raises:
        ValueError: for no control, an empty one, or a default that is not among the values.
    """
    if not controls or not all(len(values) for values in controls.values()):
        raise ValueError("explore() needs at least one control with at least one value")
    chosen = {name: values[0] for name, values in controls.items()} | (default or {})
    for name, value in chosen.items():
        if name not in controls or value not in controls[name]:
            raise ValueError(f"default {name}={value!r} is not among the values of a control")
    return Explorer(draw, dict(controls), chosen)


class Background:
    """Work in a thread of its own, its text arriving in its own panel, with a Stop button that really stops.

    A kernel runs no callback while a cell blocks, so a Stop button needs this. Text goes through the panel's value,
    never through captured output, which would land in whichever cell happens to run.
    """

    def __init__(self, work: Callable[[], Iterator[str]]):
        self._work, self._stop = work, threading.Event()
        self._parts: list[str] = []
        self._form: Any = None
        self._panel: Any = None
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="minillm-course", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """What has arrived so far."""
        return "".join(self._parts)

    @property
    def running(self) -> bool:
        """True until the work has ended, failed or been stopped."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Ask the work to end; its generator is closed at the next piece."""
        self._stop.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False when it has not come within ``timeout_s`` seconds."""
        self._thread.join(timeout_s)
        return not self.running

    def _run(self) -> None:
        pieces = None
        try:
            pieces = self._work()
            for piece in pieces:
                self._parts.append(piece)
                self._show()
                if self._stop.is_set():
                    break
        except Exception:
            self.error = traceback.format_exc(limit=-1)
        finally:
            if hasattr(pieces, "close"):
                pieces.close()
            self._show(ended=True)

    def _show(self, ended: bool = False) -> None:
        if self._panel is not None:
            note = " (stopped)" if ended and self._stop.is_set() else " (done)" if ended else " …"
            failure = f"<pre>{escape(self.error)}</pre>" if self.error else ""
            self._panel.value = f"<p style='white-space: pre-wrap'>{escape(self.text)}<i>{note}</i></p>{failure}"

    def form(self) -> Any:
        """The panel and its button, made once."""
        if self._form is None:
            from ipywidgets import HTML, Button, VBox

            self._panel, button = HTML(), Button(description="Stop", button_style="warning")
            button.on_click(lambda _: self.stop())
            self._form = VBox([button, self._panel])
            self._show(ended=not self.running)
        return self._form

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        if not live.is_live():
            self.wait()
        return {"text/plain": self.text + (f"\n{self.error}" if self.error else "")} | live.widget_bundle(self.form)


def in_background(work: Callable[[], Iterator[str]]) -> Background:
    """Start a generator of text in a thread and return its panel; show it as a cell's last value."""
    return Background(work)


def _error_html() -> str:
    return f"<pre>{escape(traceback.format_exc(limit=-1))}</pre>"
