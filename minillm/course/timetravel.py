"""Time travel: a recorded run of the scheduler at any step, beside what it would have become under other settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minillm.course.display import PALETTE, Shown, canvas, show
from minillm.course.widgets import Explorer, explore
from minillm.schedule.fork import fork
from minillm.schedule.history import Added, History
from minillm.schedule.replay import RequestState, Snapshot, replay

# Light enough for black letters; neighbours in the order of arrival differ.
_SHADES = ("#9ecae9", "#ffd08a", "#a6ddc9", "#eab8d5", "#d9d9d9", "#f5e79e")


@dataclass(frozen=True, slots=True)
class Moment:
    """A step of a run, and what was counted up to its end: ``num_again`` tokens had been computed before."""

    snapshot: Snapshot
    finished: tuple[str, ...]
    num_again: int

    def state(self, request: str) -> tuple[str, RequestState | None]:
        """``"runs"``, ``"waits"``, ``"done"`` or ``"not here yet"``, and its tokens while it is here."""
        for verb, states in (("runs", self.snapshot.running), ("waits", self.snapshot.waiting)):
            for state in states:
                if state.request == request:
                    return verb, state
        return ("done" if request in self.finished else "not here yet"), None

    def __str__(self) -> str:
        return (f"{len(self.finished)} finished, {self.snapshot.num_preempted} preemptions, {self.num_again} tokens "
                "computed again")


def moments(history: History) -> list[Moment]:
    """Every step of a run; tokens found in the prefix cache are not computed, so not again either."""
    found, finished, reached, again = [], (), dict[str, int](), 0
    for snapshot in replay(history, blocks=True):
        for item in snapshot.items:
            end, before = item.start + item.num_tokens, reached.get(item.request, 0)
            again += max(0, min(end, before) - item.start)
            reached[item.request] = max(end, before)
        finished += tuple(request for request, _ in snapshot.finished)
        found.append(Moment(snapshot, finished, again))
    return found


def time_travel(history: History, settings: Mapping[str, Mapping[str, Any]], *,
                default: Mapping[str, Any] | None = None) -> Explorer:
    """A slider for the step, one for the step at which the run is forked, one for the settings it goes on with.

    Args:
        settings: by the name that the slider shows, what :func:`~minillm.schedule.fork.fork` changes.
        default: of the controls ``step``, ``fork_at`` and ``then``.
    """
    recorded, forks = moments(history), dict[tuple[int, str], list[Moment]]()
    names = [event.request for event in history.events if isinstance(event, Added)]
    most = max(len(event.prompt_token_ids) for event in history.events if isinstance(event, Added))
    most = max([most, *(state.num_known for moment in recorded for state in moment.snapshot.running)])
    counts = "finished", "preemptions", "computed again"

    def draw(step: int, fork_at: int, then: str) -> Shown:
        if (fork_at, then) not in forks:
            forks[fork_at, then] = moments(fork(history, fork_at, **settings[then]))
        other = forks[fork_at, then]
        worlds = {"as it was": recorded[min(step, len(recorded) - 1)],
                  f"{then}, from step {fork_at} on": other[min(step, len(other) - 1)]}
        figure, axes = canvas(7.5, 1.7 + 0.21 * len(names), nrows=2, ncols=2, sharex="row",
                              height_ratios=(len(names), 2.2))
        for column, (world, moment) in enumerate(worlds.items()):
            ended = " (over)" if step >= len((recorded, other)[column]) else ""
            axes[0, column].set_title(f"{world}{ended}:\n{moment}", fontsize=8.5, loc="left")
            _draw_requests(axes[0, column], names, moment, most)
            _draw_blocks(axes[1, column], names, moment.snapshot)
        figure.suptitle(f"Step {step}. In the end: {len(recorded)} steps, {recorded[-1].num_again} tokens computed "
                        f"again as it was; {len(other)} and {other[-1].num_again} in the fork.", x=0.01, ha="left",
                        fontsize=9.5)
        words = "; ".join(f"{world}: {moment}" for world, moment in worlds.items())
        table: dict[str, list[Any]] = {"request": [*names, *counts]}
        for world, moment in worlds.items():
            table[world] = [*(_words(moment, name) for name in names), len(moment.finished),
                            moment.snapshot.num_preempted, moment.num_again]
        return show(figure, alt=f"The scheduler after step {step}. {words}.", table=table)

    longest = max(len(recorded), *(len(moments(fork(history, 0, **own))) for own in settings.values()))
    return explore(draw, step=list(range(longest)), fork_at=list(range(len(recorded))), then=list(settings),
                   default=dict(default or {}))


def _words(moment: Moment, request: str) -> str:
    verb, state = moment.state(request)
    return verb if state is None else f"{verb}, {state.num_computed} of {state.num_known} computed"


def _draw_requests(axes: Any, names: Sequence[str], moment: Moment, most: int) -> None:
    for row, name in enumerate(names):
        verb, state = moment.state(name)
        if state is not None:
            axes.barh(row, state.num_known, height=0.76, facecolor="white", edgecolor="#777777", linewidth=0.8)
            axes.barh(row, state.num_computed, height=0.76, color=_shade(names, name), edgecolor="#333333",
                      linewidth=0.8)
        again = " again" if state and verb == "waits" and state.num_preemptions else ""
        axes.text(0.4 if state is None else state.num_known + 0.4, row, verb + again, va="center", fontsize=7.5,
                  color=PALETTE[1] if again else "#444444")
    axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, most * 1.25), xlabel="tokens: known (frame), computed (filled)")
    axes.set_yticks(range(len(names)), [_letter(names, name) for name in names], fontsize=8)
    axes.xaxis.label.set_size(8)
    axes.tick_params(axis="x", labelsize=8)


def _draw_blocks(axes: Any, names: Sequence[str], snapshot: Snapshot) -> None:
    columns = -(-len(snapshot.blocks) // 2)
    for number, block in enumerate(snapshot.blocks):
        x, y, holders = number % columns, number // columns, block.holders
        color = _shade(names, holders[0]) if holders else "white"
        axes.bar(x, 0.9, 0.9, bottom=y - 0.45, facecolor=color, edgecolor="#777777", linewidth=0.8,
                 hatch="////" if block.state == "cached" else "")
        if holders:
            axes.text(x, y, "".join(_letter(names, name) for name in holders), ha="center", va="center", fontsize=8)
    axes.set(ylim=(-(-len(snapshot.blocks) // columns) - 0.5, -0.5), xlim=(-0.5, columns - 0.5), xticks=[], yticks=[])
    axes.set_xlabel(f"blocks: {snapshot.num_held} held, {snapshot.num_cached} cached (hatched), "
                    f"{snapshot.num_free} free", fontsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _letter(names: Sequence[str], name: str) -> str:
    """Its own name where all are short, as in the table; else a letter or its place."""
    place = names.index(name)
    if all(len(own) == 1 for own in names):
        return name
    return chr(ord("A") + place) if len(names) <= 26 else str(place)


def _shade(names: Sequence[str], name: str) -> str:
    return _SHADES[names.index(name) % len(_SHADES)]
