"""A scheduler's run as data: every call that it got, in order, and what it answered. Plain values, no torch.

:class:`~minillm.schedule.recording.RecordingScheduler` writes a :class:`History`. Kept as JSON lines, one event a line,
settings first, it can be read without minillm; replayed on a scheduler of the same kind
(:mod:`minillm.schedule.replay`), it gives every state that there was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

from minillm.request import FinishReason

FORMAT = "minillm history 1"
POOL_SETTINGS = ("num_blocks", "block_size", "caching")
SCHEDULER_SETTINGS = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "chunked", "watermark", "policy")


class Item(NamedTuple):
    """What a step computed of one request: ``num_tokens`` from position ``start``; ``stage`` as in a trace."""

    request: str
    start: int
    num_tokens: int
    stage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """A request was queued at ``time_s``; the other fields are :class:`~minillm.request.Request`'s.

    ``request`` is its name in the history: its id, and the choice's index where that isn't 0.
    """

    time_s: float
    request: str
    request_id: str
    index: int
    prompt_token_ids: list[int]
    max_total_tokens: int
    priority: int
    arrival_s: float
    eos_token_ids: list[int]
    stop_token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A step was planned; ``admitted`` began to run in it, ``preempted`` went back to the queue."""

    time_s: float
    items: list[Item]
    admitted: list[str]
    preempted: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The step planned last was computed; ``token_ids`` by request, those that got one."""

    time_s: float
    token_ids: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request ended. ``by_token``: with the token just committed; else the scheduler was told to (a stop string,
    a cancellation, an error)."""

    time_s: float
    request: str
    reason: FinishReason
    by_token: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """The prefix cache was emptied, see :meth:`~minillm.cache.blocks.BlockPool.forget`."""

    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """From here on the scheduler had these settings (:data:`SCHEDULER_SETTINGS`, those that changed)."""

    time_s: float
    settings: dict[str, Any]


Event = Added | Planned | Committed | Finished | Forgotten | Changed
_KINDS = {kind.__name__.lower(): kind for kind in get_args(Event)}


@dataclass(slots=True)
class History:
    """``settings`` of pool and scheduler (:data:`POOL_SETTINGS`, :data:`SCHEDULER_SETTINGS`), and all events."""

    settings: dict[str, Any]
    events: list[Event] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps planned."""
        return sum(isinstance(event, Planned) for event in self.events)

    def save(self, path: str | Path) -> Path:
        """Write JSON lines to ``path``."""
        path = Path(path)
        lines = [{"format": FORMAT, "settings": self.settings},
                 *({"event": type(event).__name__.lower(), **asdict(event)} for event in self.events)]
        path.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: naming the line that is no such event, or speaks of a request that was not added before.
        """
        known: set[str] = set()
        history = None
        for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
            try:
                values = json.loads(line.decode())
                if history is None:
                    history = cls(_settings_of(values))
                else:
                    history.events.append(_event_of(values, known))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}, is not of a history as History.save writes it: "
                                 f"{error}") from None
        if history is None:
            raise ValueError(f"{path} is empty, and a history begins with its settings")
        return history


def _settings_of(line: dict[str, Any]) -> dict[str, Any]:
    if line.get("format") != FORMAT:
        raise ValueError(f"the first line must have \"format\": \"{FORMAT}\"")
    settings, wanted = line["settings"], {*POOL_SETTINGS, *SCHEDULER_SETTINGS}
    if settings.keys() != wanted or not all(v is None or _setting(name, v) for name, v in settings.items()):
        raise ValueError(f"settings must be {', '.join(sorted(wanted))}, each of its type, got {settings}")
    return settings


def _event_of(line: dict[str, Any], known: set[str]) -> Event:
    kind = _KINDS.get(line.pop("event", ""))
    if kind is None:
        raise ValueError(f"\"event\" must be one of {', '.join(_KINDS)}")
    missing = {each.name for each in fields(kind)} ^ line.keys()
    if missing:
        raise ValueError(f"missing or unknown: {', '.join(sorted(missing))}")
    if kind is Planned:
        line["items"] = [Item(*item) for item in line["items"]]
    for name, value in line.items():
        if not _VALID[name](value):
            raise ValueError(f"{name} cannot be {value!r}")
    event = kind(**line)
    if kind is Added:
        if event.request in known:
            raise ValueError(f"{event.request} was added before")
        known.add(event.request)
    named = {line["request"]} if "request" in line else set(line.get("token_ids", ())).union(
        line.get("admitted", ()), line.get("preempted", ()), (item.request for item in line.get("items", ())))
    if unknown := named - known:
        raise ValueError(f"{', '.join(sorted(unknown))} was not added before")
    return event


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return (_whole(value) or isinstance(value, float)) and abs(value) <= sys.float_info.max  # NaN is not


def _text(value: object) -> bool:
    return isinstance(value, str)


def _setting(name: str, value: object) -> bool:
    kind = {"caching": bool, "chunked": bool, "policy": str}.get(name, int)
    return type(value) is kind or (name == "watermark" and value is None)


def _all(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda values: isinstance(values, list) and all(map(check, values))


_VALID: Mapping[str, Callable[[Any], bool]] = {
    "time_s": _number, "arrival_s": _number, "request": _text, "request_id": _text, "index": _whole,
    "max_total_tokens": _whole, "priority": _whole, "reason": lambda value: value in get_args(FinishReason),
    "by_token": lambda value: isinstance(value, bool), "settings": lambda value: isinstance(value, dict) and all(
        name in SCHEDULER_SETTINGS and _setting(name, own) for name, own in value.items()),
    "items": _all(lambda item: _text(item.request) and _text(item.stage) and _whole(item.start)
                  and _whole(item.num_tokens)),
    "token_ids": lambda value: isinstance(value, dict) and all(map(_whole, value.values())),
    **dict.fromkeys(("prompt_token_ids", "eos_token_ids", "stop_token_ids"), _all(_whole)),
    **dict.fromkeys(("admitted", "preempted"), _all(_text)),
}
