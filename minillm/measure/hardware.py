"""What a machine can do at best: from a vendor's data sheet, or measured (the machine card). No torch.

``data/hardware.json`` holds the data sheets. FLOP rates there are *dense*: vendors often print the rate with 2:4
sparsity, which is twice that and which a language model's own weights do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from minillm.measure.card import MachineCard
from minillm.measure.results import read_strict_json, shipped_file


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """What real kernels reach on a machine, where the two straight lines of a roofline are too kind; measured by
    :func:`minillm.measure.bench.kernels.measure_kernels` with matrices of one size, whatever the model.

    Args:
        linear: ``(rows, seconds)`` in rising order of rows: seconds a linear layer takes per byte of its weights, which
            lie in memory and not in a cache. One row shows the bandwidth of the kernel, many rows its FLOP rate.
        kv_bytes_per_s: K and V read by attention with one query a sequence.
        attention_flops_per_s: attention of a whole prompt; only the pairs that the causal mask keeps count.
        call_s: one operator call as the decoder makes it, with the Python around it, from a decoder so narrow that its
            step is nothing but calls; 0 where it was not measured (the card's bare overhead stands in).
    """

    linear: tuple[tuple[int, float], ...]
    kv_bytes_per_s: float
    attention_flops_per_s: float
    call_s: float = 0.0

    def linear_seconds_per_byte(self, rows: float) -> float:
        """Between two measured row counts a straight line; beyond the last, time grows with the rows. More rows never
        take less time: where fewer were measured as slower, that was noise."""
        counts, seconds = zip(*self.linear)
        rising = np.maximum.accumulate(seconds)
        return float(np.interp(rows, counts, rising)) * max(1.0, rows / counts[-1])


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The ceilings of one device.

    Args:
        memory_bytes: what weights and cache must fit into; 0 where nobody said.
        read_bytes_per_s: memory bandwidth.
        flops_per_s: dense matmul rate by dtype name, a multiply and an add counted as two; a dtype that is missing has
            no hardware for it, or no published rate.
        operator_overhead_s: time to issue one operator; 0 in a data sheet, which knows no operators.
        is_async: operators are issued ahead while the device works (CUDA, MPS), so their overhead hides behind the
            work as long as it is shorter; on a CPU the same thread issues and works, so it adds.
        source: where the figures come from.
        kernels: by format name (see :data:`minillm.measure.roofline.FORMATS`), what real kernels reach; measured only.
    """

    name: str
    memory_bytes: float
    read_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    operator_overhead_s: float = 0.0
    is_async: bool = True
    source: str = ""
    kernels: Mapping[str, KernelRates] = field(default_factory=dict)

    @classmethod
    def named(cls, name: str) -> Hardware:
        """The data sheet of ``name``, one of :func:`known_hardware` in any case; ``ValueError`` names them all."""
        sheets = read_strict_json(shipped_file("hardware.json"))
        if name.lower() not in sheets:
            raise ValueError(f"unknown hardware {name!r}; known: {', '.join(sheets)}")
        return cls(**sheets[name.lower()])

    @classmethod
    def of_card(cls, card: MachineCard) -> Hardware:
        """The reader's own machine, as measured."""
        return cls(
            name=f"{card.device_name} ({card.device}, {card.num_threads} threads)",
            memory_bytes=card.memory_bytes, read_bytes_per_s=card.read_bytes_per_s, flops_per_s=card.flops_per_s,
            operator_overhead_s=card.operator_overhead_s, is_async=card.device != "cpu",
            source=f"machine card, measured {card.measured_at}",
            kernels={name: KernelRates(**{**rates, "linear": tuple(map(tuple, rates["linear"]))})
                     for name, rates in card.kernels.items()})


def known_hardware() -> tuple[str, ...]:
    """The names that :meth:`Hardware.named` takes."""
    return tuple(read_strict_json(shipped_file("hardware.json")))
