"""A finished request in words and bars: its latency numbers, the bytes it read, where its time went. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minillm.measure.distribution import PERCENTILE_METHOD, percentile

if TYPE_CHECKING:  # these modules need this room themselves
    from minillm.measure.card import MachineCard
    from minillm.measure.metrics import RequestMetrics
    from minillm.measure.trace import Trace
    from minillm.model.config import ModelConfig
    from minillm.request import RequestOutput

BAR_WIDTH = 36
# Above these, other work on the machine is in a request's times (an idle machine has it wait next to nothing).
MAX_WAITED, MAX_ITL_P99_OVER_P50, MIN_GAPS = 0.15, 5.0, 20


def decode_bytes_per_token(model: Any, num_prompt_tokens: int, num_output_tokens: int,
                           item_bytes: float | None = None) -> float:
    """Bytes a decode step reads on average: all weights of the step, and K and V of every token before it.

    ``model`` is a :class:`~minillm.model.decoder.Decoder`; a number of K and V takes ``item_bytes``, by default those
    of its activations' type.
    """
    mean_context = num_prompt_tokens + num_output_tokens / 2
    return model.bytes_read_per_step + kv_bytes_read(model.config, mean_context, item_bytes or model.dtype.itemsize)


def kv_bytes_read(config: ModelConfig, context_tokens: float, item_bytes: float) -> float:
    """Bytes of K and V that attention reads for one token with ``context_tokens`` before it, windows respected."""
    tokens = sum(context_tokens if window is None else min(window, context_tokens) for window in config.windows)
    return 2 * config.num_kv_heads * config.head_dim * item_bytes * tokens


def format_report(output: RequestOutput, trace: Trace | None, *, bytes_per_token: float | None = None,
                  card: MachineCard | None = None, waited: float | None = None) -> str:
    """What there is to know about choice 0 of ``output``, in lines of at most 80 columns.

    ``bytes_per_token`` (see :func:`decode_bytes_per_token`) gives the bandwidth, ``card`` its share of the best, and
    ``waited`` (see :func:`minillm.measure.waiting.waited_share`) tells whether the times are the engine's alone.
    """
    lines = _latency_lines(output.metrics) + _bandwidth_lines(output.metrics, bytes_per_token, card)
    if others_ran(output.metrics, waited):
        share = f" (waited for a core {waited:.0%} of the time)" if waited else ""
        lines += [f"  other work ran on this machine meanwhile{share}:", "  these times are not the engine's alone"]
    if trace is not None:
        lines += ["", *stage_lines(trace.of(output.request_id))]
    return "\n".join(lines)


def _latency_lines(metrics: RequestMetrics) -> list[str]:
    gaps = "   ".join(f"p{p} {milliseconds(percentile(metrics.itl_s, p))}" for p in (50, 95, 99))
    speed = metrics.decode_tokens_per_s
    return [
        f"{metrics.num_prompt_tokens} prompt tokens, {metrics.num_output_tokens} new "
        f"({metrics.clock} clock; percentiles by {PERCENTILE_METHOD})",
        f"  TTFT         {milliseconds(metrics.ttft_s)}   arrival to first token",
        f"  TPOT         {milliseconds(metrics.tpot_s)}   a token after it, on average",
        f"  ITL          {gaps}",
        f"  end to end   {milliseconds(metrics.e2e_s)}",
        f"  decode       {'     n/a' if speed is None else f'{speed:8.1f}'} tokens/s",
    ]


def others_ran(metrics: RequestMetrics, waited: float | None = None) -> bool:
    """Whether other work is in these times: the process waited for its cores, or a few tokens took far longer."""
    gaps = metrics.itl_s
    uneven = len(gaps) >= MIN_GAPS and percentile(gaps, 99) > MAX_ITL_P99_OVER_P50 * percentile(gaps, 50)
    return uneven or waited is not None and waited > MAX_WAITED


def _bandwidth_lines(metrics: RequestMetrics, bytes_per_token: float | None, card: MachineCard | None) -> list[str]:
    if bytes_per_token is None or metrics.decode_tokens_per_s is None:
        return ["  memory read       n/a"]
    rate = bytes_per_token * metrics.decode_tokens_per_s
    share = "this machine has no card yet" if card is None else (
        f"{rate / card.read_bytes_per_s:.0%} of the {card.read_bytes_per_s / 1e9:.1f} GB/s this machine reads at best")
    lines, indent = [f"  memory read  {rate / 1e9:8.1f} GB/s ({share})"], " " * 15
    if card and card.busy:
        lines.append(f"{indent}(other work ran while that was measured: `minillm card` measures again)")
    elif card and rate > 1.01 * card.read_bytes_per_s:
        lines.append(f"{indent}above 100 %: the card is too low (measure it again: minillm card)")
        if bytes_per_token < 2 * card.cache_bytes:
            lines.append(f"{indent}or weights stayed in the {card.cache_bytes / 1e6:,.0f} MB cache")
    return lines


def stage_lines(trace: Trace) -> list[str]:
    """A bar a stage; ``other`` is the time between the first start and the last end that no stage took."""
    total_s = trace.duration_s
    if total_s <= 0:
        return ["where the time went: nothing was traced"]
    stages = trace.by_stage()
    counts = {stage: sum(span.stage == stage for span in trace.spans) for stage in stages}
    lines = [f"where the {milliseconds(total_s).strip()} went"]
    for stage, seconds in {**stages, "other": max(0.0, total_s - sum(stages.values()))}.items():
        times = f"{counts[stage]:5d} ×" if stage in counts else " " * 7
        lines.append(f"  {stage:<10} {milliseconds(seconds)} {seconds / total_s:6.1%} {times} "
                     f"{bar(seconds / total_s)}".rstrip())
    return lines


def format_bytes(num_bytes: float) -> str:
    """Bytes in decimal units: ``"96.6 MB"`` (1 MB is a million bytes; 1 MiB is 2**20)."""
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {name}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that suits: ``"1.35 s"``, ``"17.2 ms"``, ``"85 µs"``."""
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds, eleven characters wide; "n/a" where there is no value."""
    return "     n/a   " if seconds is None else f"{seconds * 1e3:8,.1f} ms"


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A bar of eighths of a character; its length is ``share`` (0 to 1) of ``width``."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows (the first is the heading) as aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
