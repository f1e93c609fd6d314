"""Who held which slot of a batch, step by step: a bar a request, and the slot-steps that nobody used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from minillm.course.display import Shown, canvas, show

Steps = Sequence[Mapping[str, int]]
"""Of each step: the requests in it, and how many tokens each computes (0: it holds its slot and computes nothing)."""

# Light enough for black letters. Requests with a slot one after the other get one after the other of them.
_SHADES = ("#9ecae9", "#ffd08a", "#a6ddc9", "#eab8d5")
_PROMPT = "#0072B2"


class Hold(NamedTuple):
    """``request`` is in ``slot`` from step ``first`` to before step ``end``."""

    slot: int
    request: str
    first: int
    end: int


def holds(steps: Steps, slots: int) -> list[Hold]:
    """The slots' holders in the order in which they came. A newcomer takes the lowest free slot and keeps it for as
    long as it is in every step; who was out of one comes anew.

    Raises:
        ValueError: a step has more requests than there are slots.
    """
    held: list[Hold | None] = [None] * slots
    done: list[Hold] = []
    for number, step in enumerate(steps):
        if len(step) > slots:
            raise ValueError(f"step {number} has {len(step)} requests, and there are {slots} slots")
        held = [hold if hold and hold.request in step else None for hold in held]
        there = {hold.request for hold in held if hold}
        for request in step:
            if request not in there:
                slot = held.index(None)
                held[slot] = Hold(slot, request, number, number + 1)
        for slot, hold in enumerate(held):
            if hold:
                if hold in done:
                    done.remove(hold)
                held[slot] = hold._replace(end=number + 1)
                done.append(held[slot])
    return sorted(done, key=lambda hold: (hold.first, hold.slot))


def gantt(runs: Mapping[str, Steps], *, slots: int, finding: str, edges: Mapping[str, Sequence[float]] | None = None,
          x_label: str = "step", height: float = 0.0, idle: str = "idle") -> Shown:
    """A panel a run over one axis: slots down, steps across. Dark: a prompt is read; hatched: nobody uses the slot.

    Args:
        runs: name to its steps.
        finding: the title and alternative text.
        edges: by run, where each step begins and where the last ends (``len(steps) + 1`` values), in seconds for
            example; by default step s goes from s to s + 1.
        height: inches, in place of what the number of slots asks for.
        idle: what the legend calls the hatching.
    """
    figure, axes = canvas(7.5, height or 1.0 + len(runs) * (0.35 + 0.24 * slots), nrows=len(runs), squeeze=False,
                          sharex=True)
    rows, labels = [], {}
    for ax, (name, steps) in zip(axes[:, 0], runs.items(), strict=True):
        at = list(edges[name]) if edges else list(range(len(steps) + 1))
        labels[idle] = ax.barh(range(slots), at[-1] - at[0], left=at[0], height=0.8, facecolor="white",
                               edgecolor="#999999", hatch="////", linewidth=0.6)
        for number, hold in enumerate(found := holds(steps, slots)):
            start, end = at[hold.first], at[hold.end]
            ax.barh(hold.slot, end - start, left=start, height=0.8, edgecolor="#333333", linewidth=0.6,
                    color=_SHADES[sum(other.slot == hold.slot for other in found[:number]) % len(_SHADES)])
            for step in range(hold.first, hold.end):
                tokens = steps[step][hold.request]
                if tokens != 1:
                    kind, color = ("reads its prompt", _PROMPT) if tokens else ("holds and waits", "white")
                    labels[kind] = ax.barh(hold.slot, at[step + 1] - at[step], left=at[step], height=0.8, color=color,
                                           edgecolor="#333333", linewidth=0.6)
            if hold.end - hold.first > 2:
                ax.text((at[hold.first + 1] + end) / 2, hold.slot, hold.request, ha="center", va="center", fontsize=8)
            rows.append((name, *hold))
        ax.set_title(name, loc="left", fontsize=9)
        ax.set_yticks(range(slots), [str(slot) for slot in range(slots)])
        ax.set(ylabel="slot", ylim=(slots - 0.5, -0.5))
    axes[-1, 0].set(xlabel=x_label, xlim=(0, None))
    figure.suptitle(finding, x=0.01, ha="left", fontsize=9.5)
    figure.legend(labels.values(), labels.keys(), loc="outside lower left", ncols=3, fontsize=8.5, frameon=False)
    columns = "run", "slot", "request", "from step", "to before step"
    return show(figure, alt=finding, table=dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True)))
