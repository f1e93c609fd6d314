"""Decode steps by the format of the weights: a model in each, the time of its step, and the figure of both runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from minillm.course.display import MARKERS, PALETTE, Shown, canvas, show
from minillm.course.live import EMPTY_PANEL

if TYPE_CHECKING:
    from minillm.course.session import Session
    from minillm.measure.card import MachineCard
    from minillm.model.decoder import Decoder

Times = Mapping[str, Sequence[float]]


def decoder_in(session: Session, *, dtype: str = "auto", quantization: str | None = None) -> Decoder:
    """The model that measuring cells run, in a format: the default one on a CPU. On CUDA one of
    ``session.measure_shape`` with random weights, in 4 bit by minmax: quickest to find.
    """
    from minillm.assemble import load_decoder
    from minillm.course.measuring import give_memory_back, random_decoder
    from minillm.model.hub import DEFAULT_MODEL, resolve
    from minillm.model.quantize import SCHEMES
    from minillm.model.shapes import find_config

    give_memory_back()  # of the format before
    if session.measure_device == "cpu":
        return load_decoder(resolve(DEFAULT_MODEL), dtype=dtype, device="cpu", quantization=quantization)
    scheme = replace(SCHEMES["int4"], fit="minmax") if quantization == "int4" else quantization
    return random_decoder(find_config(session.measure_shape), device=session.measure_device, dtype=dtype,
                          quantization=scheme)


def int4_by_card(shape: str, card: MachineCard, batches: Sequence[int], context: int = 64) -> list[float]:
    """What the cost model expects of int4's step over float32's, by batch, on the machine of ``card``."""
    from minillm.measure.hardware import Hardware
    from minillm.measure.roofline import estimate, step_cost
    from minillm.model.shapes import find_config

    config, machine = find_config(shape), Hardware.of_card(card)
    few, plain = ([estimate(step_cost(config, batch=batch, context=context, dtype=dtype), machine).time_s
                   for batch in batches] for dtype in ("int4", "float32"))
    return [one / other for one, other in zip(few, plain)]


def describe_formats(who: str, run: Mapping[str, Any], batches: Sequence[int], *, base: str) -> str:
    """A line for each format: how many times as fast as ``base`` by batch; then the quickest of each batch."""
    times: Times = run["times_s"]
    lines = [f"{who}, times as fast as {base}, by requests:".ljust(46) + "".join(f"{batch:7}" for batch in batches)]
    lines += [f"  {name}".ljust(46) + "".join(f"{one / own:7.2f}" for one, own in zip(times[base], times[name]))
              for name in times if name != base]
    quickest = [min(times, key=lambda name: times[name][i]) for i in range(len(batches))]  # noqa: B023
    lines += ["  quickest: " + ", ".join(f"{batch} {name}" for batch, name in zip(batches, quickest)),
              f"  the engine with int4, one request: {run['tokens_per_s']:.0f} tokens/s"]
    return "\n".join(lines)


def format_curves(batches: Sequence[int], recorded: Times, yours: Times | None, *, base: str, finding: str,
                  recorded_label: str, law: tuple[str, Mapping[str, Sequence[float]]]) -> Shown:
    """Step times by format over those of ``base`` at the same batch: a panel for each run, on one logarithmic scale.

    Args:
        recorded, yours: seconds of a step by format, a value for each of ``batches``; ``yours`` None: not measured.
        law: what it is, and for ``"recorded"`` (and ``"yours"``) the ratio that the cost model expects.
    """
    figure, panels = canvas(7.5, 3.6, ncols=2, sharey=True)
    runs, table = {"recorded": recorded, "yours": yours}, {"requests": list(batches)}
    names = [name for name in recorded if name != base]
    for ax, (who, times) in zip(panels, runs.items()):
        ax.set_title(f"recorded: {recorded_label}" if who == "recorded" else "yours", fontsize=8.5)
        ax.axhline(1, color="#555555", linewidth=1)
        ax.annotate(base, (batches[len(batches) // 3], 1), (0, 3), textcoords="offset points", fontsize=8.5)
        ax.set(xscale="log", yscale="log", xlabel="requests in the step")
        ax.set_xticks(batches, [*map(str, batches)])
        ax.minorticks_off()
        if times is None:
            ax.text(0.5, 0.2, EMPTY_PANEL, ha="center", transform=ax.transAxes, color="#666666", style="italic",
                    fontsize=8.5)
            continue
        table |= {f"{who}: {name} (ms)": [round(s * 1e3, 2) for s in own] for name, own in times.items()}
        for i, name in enumerate(names):
            ratios = [own / one for own, one in zip(times[name], times[base])]
            ax.plot(batches, ratios, MARKERS[i], color=PALETTE[i], label=name,
                    linestyle="--" if who == "recorded" else "-",
                    markerfacecolor="white" if who == "recorded" else PALETTE[i])
        ax.plot(batches, law[1][who], ":", color="#555555", label=law[0])
        table |= {f"{who}: {law[0]}": [round(ratio, 3) for ratio in law[1][who]]}
    _times_axis(panels[0], base, [own / one for times in runs.values() if times for name in names
                                  for own, one in zip(times[name], times[base])])
    figure.suptitle("\n".join(wrap(finding, 100)), x=0.01, ha="left", fontsize=9.5)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=8.5,
                  frameon=False)
    return show(figure, alt=finding, table=table)


def _times_axis(axes: Any, base: str, ratios: Sequence[float]) -> None:
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if min(ratios) / 2.5 < tick < max(ratios) * 2.5]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel(f"step / {base}'s step (below 1: faster)")
