"""Numbers with units, as readers type them: "4.8 ms", "15 GB", "512 MiB", "60 tokens/s", "12 %"."""

from __future__ import annotations

import re

from minillm.measure.report import format_bytes, format_seconds

__all__ = ["format_bytes", "format_seconds", "parse_quantity"]

# unit: (what it measures, size in the base unit of that kind)
_UNITS: dict[str, tuple[str, float]] = {
    "s": ("time", 1.0), "ms": ("time", 1e-3), "us": ("time", 1e-6), "µs": ("time", 1e-6),
    "b": ("bytes", 1.0), "bytes": ("bytes", 1.0), "kb": ("bytes", 1e3), "mb": ("bytes", 1e6), "gb": ("bytes", 1e9),
    "kib": ("bytes", 2.0**10), "mib": ("bytes", 2.0**20), "gib": ("bytes", 2.0**30),
    "gb/s": ("bandwidth", 1e9), "tb/s": ("bandwidth", 1e12), "mb/s": ("bandwidth", 1e6),
    "tokens/s": ("rate", 1.0), "token/s": ("rate", 1.0), "tok/s": ("rate", 1.0),
    "tokens": ("tokens", 1.0), "token": ("tokens", 1.0), "steps": ("steps", 1.0), "step": ("steps", 1.0),
    "times": ("ratio", 1.0), "x": ("ratio", 1.0), "×": ("ratio", 1.0), "%": ("ratio", 0.01),
}
_DECIMAL_COMMA = re.compile(r"[-+]?(\d+,(\d{1,2}|\d{4,})|0,\d+)")  # "4,8"; three digits are thousands: "1,000"
_QUANTITY = re.compile(r"\s*([-+]?[\d,_]*\.?\d+(?:[eE][-+]?\d+)?)\s*(.*?)\s*\Z")


def parse_quantity(given: str | float, unit: str) -> float:
    """``given`` as a number in ``unit``; a number without a unit is taken to be in ``unit`` already.

    Raises:
        ValueError: when there is no number in it, or its unit measures something else.
    """
    if isinstance(given, (int, float)):
        return float(given)
    match = _QUANTITY.match(given)
    if not match:
        raise ValueError(f"Write a number, such as 12 {unit}")
    comma = "." if _DECIMAL_COMMA.fullmatch(match[1]) else ""
    value = float(match[1].replace(",", comma).replace("_", ""))
    name = match[2].lower()
    if not name or name == unit.lower():
        return value
    kind, size = _UNITS.get(name, ("", 0.0))
    wanted_kind, wanted_size = _UNITS.get(unit.lower(), (None, 1.0))
    if kind != wanted_kind:
        raise ValueError(f"The answer is asked for in {unit}; {match[2]!r} is not a unit of that kind")
    return value * size / wanted_size
