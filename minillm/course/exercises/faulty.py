"""What the exercises about faulty parts share: the verdict expected of a part, and one that is none of the list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any


class Unlisted:
    """Equal to whatever is not one of ``faults``: it stands for every misspelt verdict, and for none at all; shown as
    ``example``."""

    def __init__(self, faults: Collection[str], example: str):
        self._faults, self._example = faults, example

    def __eq__(self, other: object) -> bool:
        return other not in self._faults

    def __repr__(self) -> str:
        return repr(self._example)


def built_with(part: Any) -> str:
    """The fault that a part was made with: what is expected comes from no probe, which could be wrong itself."""
    return part._fault


def mistaking(find_fault: Callable[[Any], str], verdicts: Mapping[str, str]) -> Callable[[Any], str]:
    """A wrong solution whose probes cannot tell some faults: it says what ``verdicts`` has for these, and is right
    otherwise."""
    def wrong(part: Any) -> str:
        found = find_fault(part)
        return verdicts.get(found, found)
    return wrong


def always_none(part: Any) -> str:
    """A wrong solution that never looks."""
    return "none"
