"""Is what the reader built the same as what the engine does? :func:`agree` proves it, case by case.

Whole numbers, text, truth values and everything built of them must be equal. Floating-point values may differ by
what their format can hold: :data:`TOLERANCES` is the only place where that is written.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# Largest |mine - theirs| allowed: absolute + relative * |theirs|. About 8 to 80 roundings of each format.
TOLERANCES: dict[str, tuple[float, float]] = {
    "float64": (1e-9, 1e-9),
    "float32": (1e-5, 1e-5),
    "float16": (1e-2, 1e-2),
    "bfloat16": (8e-2, 8e-2),
    "logits": (1e-4, 1e-4),  # float32 through a whole model: roundings of every layer add up
}
_COARSE_FIRST = ("bfloat16", "float16", "float32", "float64")


class Disagreement(AssertionError):
    """Two functions gave different results; the message shows the smallest case where they do."""


def agree(mine: Callable[..., Any], theirs: Callable[..., Any], cases: Iterable[Any], *,
          dtype: str | None = None) -> None:
    """Call both functions on every case and demand the same results. Prints one line when they agree.

    Args:
        mine, theirs: functions of the same arguments.
        cases: each a tuple of arguments; anything that is not a tuple is one argument.
        dtype: take this row of :data:`TOLERANCES` instead of that of the values' own format.
    Raises:
        Disagreement: showing the smallest failing case.
        ValueError: when there is no case: nothing would be proved.
    """
    cases = list(cases)
    if not cases:
        raise ValueError("agree() needs at least one case; with none it would prove nothing")
    failures, slack = [], 0.0
    for case in cases:
        expected, got = call(theirs, case), call(mine, case)
        slack = max(slack, allowed(expected, dtype))
        why = difference(got, expected, dtype)
        if why:
            failures.append((size(case), case, got, expected, why))
    if failures:
        _, case, got, expected, why = min(failures, key=lambda failure: failure[0])
        raise Disagreement(f"{len(failures)} of {len(cases)} cases differ. The smallest:\n"
                           f"  input    {show_value(case)}\n  theirs   {show_value(expected)}\n"
                           f"  mine     {show_value(got)}\n  because  {why}")
    verdict = f"equal within {slack:g}" if slack else "no difference"
    print(f"agree: {len(cases)} {'case' if len(cases) == 1 else 'cases'}, {verdict}")


def allowed(value: Any, dtype: str | None = None) -> float:
    """The largest difference that :func:`difference` lets pass anywhere in ``value``; 0 where all must be equal."""
    if _is_array(value):
        name = str(value.dtype).removeprefix("torch.")
        return TOLERANCES[dtype or name][0] if dtype or name in TOLERANCES else 0.0
    if isinstance(value, Mapping) or dataclasses.is_dataclass(value):
        value = list((value if isinstance(value, Mapping) else _fields(value)).values())
    if _is_list(value):
        return max((allowed(item, dtype) for item in value), default=0.0)
    return TOLERANCES[dtype or "float64"][0] if isinstance(value, float) else 0.0


def call(function: Callable[..., Any], case: Any) -> Any:
    """``function`` on its own copy of the case's arguments, so that no call can spoil the next."""
    arguments = copy.deepcopy(case)
    return function(*arguments) if isinstance(arguments, tuple) else function(arguments)


def difference(mine: Any, theirs: Any, dtype: str | None = None, where: str = "result") -> str:
    """Why the two values differ, or ``""`` when they are the same. ``where`` names the place inside them."""
    if _is_array(mine) or _is_array(theirs):
        return _array_difference(mine, theirs, dtype, where)
    if dataclasses.is_dataclass(theirs) and type(mine) is type(theirs):
        return difference(_fields(mine), _fields(theirs), dtype, where)
    if isinstance(theirs, Mapping) and isinstance(mine, Mapping):
        if set(mine) != set(theirs):
            return f"{where} has keys {sorted(map(repr, mine))}, expected {sorted(map(repr, theirs))}"
        return _first(difference(mine[key], theirs[key], dtype, f"{where}[{key!r}]") for key in theirs)
    if _is_list(theirs) and _is_list(mine):
        if len(mine) != len(theirs):
            return f"{where} has length {len(mine)}, expected {len(theirs)}"
        pairs = enumerate(zip(mine, theirs, strict=True))
        return _first(difference(a, b, dtype, f"{where}[{i}]") for i, (a, b) in pairs)
    if isinstance(theirs, float) and isinstance(mine, (int, float)) and not isinstance(mine, bool):
        absolute, relative = TOLERANCES[dtype or "float64"]
        same = mine == theirs or (math.isnan(mine) and math.isnan(theirs)) or (
            math.isfinite(theirs) and abs(mine - theirs) <= absolute + relative * abs(theirs))
        return "" if same else f"{where} is {mine!r}, expected {theirs!r}"
    if isinstance(mine, bool) != isinstance(theirs, bool) or mine != theirs:
        return f"{where} is {show_value(mine)}, expected {show_value(theirs)}"
    return ""


def _array_difference(mine: Any, theirs: Any, dtype: str | None, where: str) -> str:
    import numpy

    formats = {str(value.dtype).removeprefix("torch.") for value in (mine, theirs) if _is_array(value)}
    a, b = _as_array(mine), _as_array(theirs)
    if a.shape != b.shape:
        return f"{where} has shape {list(a.shape)}, expected {list(b.shape)}"
    floats = [name for name in _COARSE_FIRST if name in formats]
    if not floats and not dtype:
        wrong = a != b
    else:
        absolute, relative = TOLERANCES[dtype or floats[0]]
        wrong = ~numpy.isclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
    if not wrong.any():
        return ""
    place = tuple(int(i) for i in numpy.argwhere(wrong)[0])
    at = "".join(f"[{i}]" for i in place)
    return f"{where}{at} is {a[place].item()!r}, expected {b[place].item()!r} "\
           f"({int(wrong.sum())} of {wrong.size} differ)"


def _as_array(value: Any) -> Any:
    import numpy

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return (value.double() if value.is_floating_point() else value).numpy()
    return numpy.asarray(value)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _first(reasons: Iterable[str]) -> str:
    return next((reason for reason in reasons if reason), "")


def size(value: Any) -> int:
    """How much there is to read in a value: elements of arrays and lists, characters of text."""
    if _is_array(value):
        return int(math.prod(value.shape))
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(1 + size(item) for item in value.values())
    if _is_list(value):
        return sum(1 + size(item) for item in value)
    return abs(value) if isinstance(value, int) and not isinstance(value, bool) else 1


def show_value(value: Any, limit: int = 200) -> str:
    """A value on one line, cut to ``limit`` characters; arrays with their shape and format."""
    if _is_array(value) and value.shape:
        flat = _as_array(value).reshape(-1)[:6].tolist()
        kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        return f"{kind} {flat}{' ...' if math.prod(value.shape) > 6 else ''}"
    if isinstance(value, tuple) and any(_is_array(item) for item in value):
        return "(" + ", ".join(show_value(item) for item in value) + ")"
    text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 4] + " ..."
