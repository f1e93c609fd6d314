"""The machine card: what this machine can do at best, measured once and kept. No torch.

Every estimate starts from it: bytes / read bandwidth, FLOPs / FLOP rate, operators x overhead. It is measured by
:func:`minillm.measure.bench.machine.measure_card`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minillm.measure.results import now, read_strict_json, write_strict_json

NOISY, LEAST_CPU_SHARE = 0.25, 0.8


@dataclass(frozen=True, kw_only=True)
class MachineCard:
    """Ceilings of one device.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"mps"``; ``device_name`` is the product.
        num_threads: CPU threads torch computes with.
        read_bytes_per_s: memory read in a stream, of a buffer far larger than the last cache (``buffer_bytes``).
        flops_per_s: large square matmul by dtype name, a multiply and an add counted as two.
        operator_overhead_s: time per call of an operator that has next to nothing to compute.
        noise: relative spread (interquartile range over median) of the same work repeated; a difference of two single
            measurements below about twice that says nothing.
        cpu_share: how much of its threads' time this process really got while it read; well below 1, others ran too.
        cache_bytes: the last-level cache as the system reports it; 0 where it does not.
        memory_bytes: the device's memory; 0 where the system does not tell.
        kernels: by dtype option, what real kernels reach (the fields of
            :class:`~minillm.measure.hardware.KernelRates`); empty until measured.
    """

    device: str
    device_name: str
    num_threads: int
    read_bytes_per_s: float
    flops_per_s: dict[str, float]
    operator_overhead_s: float
    noise: float
    buffer_bytes: int
    cpu_share: float = 1.0
    cache_bytes: int = 0
    memory_bytes: int = 0
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    measured_at: str = field(default_factory=now)

    def save(self, path: str | Path | None = None) -> Path:
        """Write the card as JSON (default: :func:`card_path`); returns where."""
        return write_strict_json(path or card_path(), asdict(self))

    @classmethod
    def load(cls, path: str | Path | None = None) -> MachineCard | None:
        """The saved card; ``None`` when there is none, or none that can be read and used (measure again)."""
        from minillm.measure.hardware import Hardware

        try:
            card = cls(**read_strict_json(path or card_path()))
            Hardware.of_card(card)
            usable = min([card.read_bytes_per_s, *card.flops_per_s.values()]) > 0 <= min(card.operator_overhead_s,
                                                                                         card.memory_bytes)
        except (OSError, ValueError, TypeError, AttributeError, LookupError):
            return None
        return card if usable else None

    def stale(self, *, device: str, num_threads: int, torch_version: str) -> str | None:
        """Why the card no longer holds, in words; ``None`` while it does."""
        changes = [("device", self.device, device), ("number of threads", self.num_threads, num_threads),
                   ("torch version", self.versions.get("torch"), torch_version)]
        return "; ".join(f"{name} was {was} and is {now_is}" for name, was, now_is in changes if was != now_is) or None

    @property
    def busy(self) -> bool:
        """True when other work ran while the card was measured, so that the ceilings are too low."""
        return self.noise > NOISY or self.cpu_share < LEAST_CPU_SHARE

    def describe(self) -> str:
        """The card in a few lines."""
        rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in self.flops_per_s.items())
        lines = [
            f"machine card: {self.device_name} ({self.device}, {self.num_threads} threads), {self.measured_at}",
            f"  reads memory at   {self.read_bytes_per_s / 1e9:,.1f} GB/s  "
            f"(buffer {self.buffer_bytes / 1e6:,.0f} MB, last-level cache {self.cache_bytes / 1e6:,.0f} MB)",
            f"  multiplies at     {rates} GFLOP/s",
            f"  operator overhead {self.operator_overhead_s * 1e6:.2f} µs a call",
            f"  noise             {self.noise:.0%} (middle half of repeated runs)",
        ]
        if self.busy:
            lines.append("  other work ran meanwhile, so these ceilings are too low: measure again on an idle machine\n"
                         "  (`minillm card`, or in a notebook session.card(again=True)) before you trust them")
        return "\n".join(lines)


def card_path() -> Path:
    """Where the card is kept: ``card.json`` in the cache folder."""
    from minillm.model.hub import cache_dir

    return cache_dir() / "card.json"
