"""Timing done right, and the machine card measured with it.

The rules: warm up first (allocation, code paths, clocks); wait for the device before the clock starts and before it
stops; repeat; report the median and the spread, never the best or a single run.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from minillm.measure.card import MachineCard
from minillm.measure.distribution import Spread
from minillm.measure.results import cpu_model, package_versions
from minillm.model.device import free_bytes, resolve_device

_MIN_BUFFER, _DEFAULT_CACHE = 256 * 2**20, 64 * 2**20


def synchronize(device: str) -> None:
    """Wait until the device has done all it was given; a CPU always has."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def time_repeated(work: Callable[[], object], device: str = "cpu", seconds: float = 1.0, min_rounds: int = 5,
                  warmup: int = 2) -> list[float]:
    """Seconds of each of at least ``min_rounds`` calls of ``work``, repeated until ``seconds`` have passed."""
    for _ in range(warmup):
        work()
    synchronize(device)
    samples: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(samples) < min_rounds or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        work()
        synchronize(device)
        samples.append(time.perf_counter() - start_s)
    return samples


def current_card(device: str = "auto", *, measure: bool = True, again: bool = False) -> MachineCard | None:
    """The saved card if it still holds for this device, thread count and torch; else a new one, measured (about ten
    seconds), or ``None`` with ``measure=False``. ``ValueError``: a device that cannot be used.

    A new card is saved unless other work ran meanwhile (``busy``): its ceilings would be too low for good. A busy card
    in the file is not trusted either; ``measure=False`` gives it all the same. ``again`` measures in any case.
    """
    device = resolve_device(device)
    card = MachineCard.load()
    if card and card.stale(device=device, num_threads=torch.get_num_threads(), torch_version=torch.__version__):
        card = None
    if not measure or (card and not card.busy and not again):
        return card
    card = measure_card(device)
    if not card.busy:
        card.save()
    return card


def measure_card(device: str = "auto", seconds: float = 6.0) -> MachineCard:
    """Measure this machine in about ``seconds`` (and a second or two to set up).

    Raises:
        ValueError: it has no such device.
    """
    device = resolve_device(device)
    cache_bytes = last_level_cache_bytes(device)
    buffer_bytes = _buffer_bytes(device, cache_bytes)
    read_rate, read_noise, cpu_share = _measure_read(device, buffer_bytes, seconds * 0.4)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    matmuls = {str(dtype).removeprefix("torch."): _measure_matmul(device, dtype, seconds * 0.15) for dtype in dtypes}
    overhead_s = _measure_overhead(device, seconds * 0.1)
    return MachineCard(
        device=device, device_name=torch.cuda.get_device_name(device) if "cuda" in device else cpu_model(),
        num_threads=torch.get_num_threads(), read_bytes_per_s=read_rate,
        flops_per_s={name: rate for name, (rate, _) in matmuls.items()}, operator_overhead_s=overhead_s,
        noise=max(read_noise, *(noise for _, noise in matmuls.values())), buffer_bytes=buffer_bytes,
        cpu_share=cpu_share, cache_bytes=cache_bytes, memory_bytes=_memory_bytes(device),
        versions=package_versions() | {"torch": torch.__version__},
    )


def _measure_read(device: str, num_bytes: int, seconds: float) -> tuple[float, float, float]:
    """Bytes read per second, its noise, and the share of its threads' time that the process got meanwhile.

    The faster of two readers that touch each byte of the buffer once and write next to nothing counts: a matrix times
    a vector (what decoding does), and a sum of whole numbers.
    """
    width = 4096
    matrix = torch.ones(num_bytes // (4 * width), width, device=device)
    vector = torch.ones(width, device=device)
    integers = matrix.view(torch.int64)
    readers = [lambda: torch.mv(matrix, vector), lambda: torch.sum(integers)]
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    spreads = [Spread.of(time_repeated(reader, device, seconds / len(readers))) for reader in readers]
    threads_s = (time.perf_counter() - start_s) * torch.get_num_threads()
    cpu_share = min(1.0, (time.process_time() - start_cpu_s) / threads_s) if device == "cpu" else 1.0
    best = min(spreads, key=lambda spread: spread.median)
    return matrix.numel() * 4 / best.median, best.relative, cpu_share


def _measure_matmul(device: str, dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """FLOPs per second and noise of a square matmul, as large as lets it repeat at least 8 times in ``seconds``."""
    size = 1024 if device == "cpu" else 8192
    while True:
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        trial_s = min(time_repeated(partial(torch.matmul, left, right), device, 0, min_rounds=1, warmup=1))
        if trial_s * 8 <= seconds or size <= 128:
            break
        size //= 2
    spread = Spread.of(time_repeated(lambda: left @ right, device, seconds))
    return 2 * size**3 / spread.median, spread.relative


def _measure_overhead(device: str, seconds: float) -> float:
    """Seconds a call of an addition of four numbers, issued in a row and waited for once."""
    calls = 1000
    left, right = (torch.ones(4, device=device) for _ in range(2))

    def many_calls() -> None:
        for _ in range(calls):
            torch.add(left, right)

    return Spread.of(time_repeated(many_calls, device, seconds)).median / calls


def last_level_cache_bytes(device: str = "cpu") -> int:
    """Size of the largest cache as the system reports it; 0 where it does not."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if match:
            sizes.append(int(match.group(1)) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match.group(2)])
    return max(sizes)


def _buffer_bytes(device: str, cache_bytes: int) -> int:
    """Four times the cache, so that little of one pass is left in it for the next; at most a quarter of free memory."""
    wanted = max(4 * (cache_bytes or _DEFAULT_CACHE), _MIN_BUFFER)
    return min(wanted, max(free_bytes(device) // 4, 2**20))


def _memory_bytes(device: str) -> int:
    return torch.cuda.mem_get_info(device)[1] if torch.device(device).type == "cuda" else _pages("SC_PHYS_PAGES")


def _pages(name: str) -> int:
    """Bytes in the pages that the system counts under ``name``; 0 where it does not (macOS, Windows)."""
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
