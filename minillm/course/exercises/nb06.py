"""Exercises of notebook 06: room that grows, a cache with a fault, and how many requests fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minillm.course.checking import Exercise, Misconception

Room = list[str | None]


def write(room: Room, start: int, new: list[str]) -> tuple[Room, int]:
    """The room with ``new`` at ``start`` and nothing after it, doubled where it is full; and how many items moved."""
    end = start + len(new)
    size = len(room) if end <= len(room) else max(end, 2 * len(room))
    return [*room[:start], *new, *[None] * (size - end)], 0 if size == len(room) else start


def _exact_room(room: Room, start: int, new: list[str]) -> tuple[Room, int]:
    items, moved = write(room, start, new)
    return (items[:start + len(new)], moved) if moved else (items, moved)


def _only_doubles(room: Room, start: int, new: list[str]) -> tuple[Room, int]:
    items, moved = write(room, start, new)
    return items[:2 * len(room)], moved


def _always_doubles(room: Room, start: int, new: list[str]) -> tuple[Room, int]:
    items, _ = write(room, start, new)
    return ([*items, *[None] * len(room)], start) if len(items) == len(room) else (items, start)


def _moves_each_time(room: Room, start: int, new: list[str]) -> tuple[Room, int]:
    return write(room, start, new)[0], start


def _moves_all(room: Room, start: int, new: list[str]) -> tuple[Room, int]:
    items, moved = write(room, start, new)
    return items, len(room) if len(items) > len(room) else moved


def _counts_the_new(room: Room, start: int, new: list[str]) -> tuple[Room, int]:
    items, moved = write(room, start, new)
    return items, start + len(new) if len(items) > len(room) else moved


def _appends(room: Room, start: int, new: list[str]) -> tuple[Room, int]:
    return write(room, sum(item is not None for item in room), new)


def _keeps_the_rest(room: Room, start: int, new: list[str]) -> tuple[Room, int]:
    items, moved = write(room, start, new)
    return (items, moved) if len(items) > len(room) else ([*room[:start], *new, *room[start + len(new):]], moved)


def _room_alone(room: Room, start: int, new: list[str]) -> Room:
    return write(room, start, new)[0]


@dataclass
class ToyCache:
    """Keys and values of one layer as lists, with room for a few tokens at first, and perhaps one fault."""

    name: str
    fault: str = "none"
    room: int = 2
    keys: list[int] = field(default_factory=list, repr=False)
    values: list[int] = field(default_factory=list, repr=False)
    length: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self.keys, self.values = [0] * self.room, [0] * self.room

    def __repr__(self) -> str:
        return f"cache {self.name}"

    def write(self, start: int, keys: Sequence[int], values: Sequence[int]) -> None:
        """Store at positions ``start`` and later; what stood there is replaced, what came after is forgotten."""
        start = self.length if self.fault == "ignores start" else start
        end = start + len(keys)
        if end > len(self.keys):
            room = [0] * 2 * end
            old = 0 if self.fault == "loses on growth" else start
            self.keys, self.values = [*self.keys[:old], *room[old:]], [*self.values[:old], *room[old:]]
        self.keys[start:end], self.values[start:end], self.length = keys, values, end

    def read(self, start: int, end: int) -> tuple[list[int], list[int]]:
        """Keys and values at positions ``start`` to ``end``."""
        pair = self.keys[start:end], self.values[start:end]
        return (pair[1], pair[0]) if self.fault == "swaps keys and values" else pair


def find_fault(cache: ToyCache) -> str:
    """Write, read; grow, read the old; write again at an earlier position, read."""
    cache.write(0, [1, 2], [-1, -2])
    if cache.read(0, 2) != ([1, 2], [-1, -2]):
        return "swaps keys and values"
    cache.write(2, [3] * 80, [-3] * 80)
    if cache.read(0, 2) != ([1, 2], [-1, -2]):
        return "loses on growth"
    cache.write(2, [9], [-9])
    return "none" if cache.read(0, 3) == ([1, 2, 9], [-1, -2, -9]) else "ignores start"


def _never_grows(cache: ToyCache) -> str:
    found = find_fault(cache)
    return "none" if found == "loses on growth" else found


def _never_rewinds(cache: ToyCache) -> str:
    found = find_fault(cache)
    return "none" if found == "ignores start" else found


def _equal_keys_and_values(cache: ToyCache) -> str:
    found = find_fault(cache)
    return "none" if found == "swaps keys and values" else found


def _one_write(cache: ToyCache) -> str:
    cache.write(0, [1] * 80, [-1] * 80)
    found = cache.read(0, 1)
    return "none" if found == ([1], [-1]) else "swaps keys and values"


def _another_spelling(cache: ToyCache) -> str:
    return find_fault(cache).replace(" ", "-")


def requests_that_fit(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    """Whole requests in what weights and spare room leave."""
    left = memory * (1 - spare) - weights
    return max(0, int(left // (token_bytes * context)))


def _weights_forgotten(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return requests_that_fit(memory, 0, token_bytes, context, spare)


def _no_spare(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return requests_that_fit(memory, weights, token_bytes, context, 0.0)


def _rounded(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return max(0, round((memory * (1 - spare) - weights) / (token_bytes * context)))


def _not_rounded(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> float:
    return max(0.0, (memory * (1 - spare) - weights) / (token_bytes * context))


def _negative(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return int((memory * (1 - spare) - weights) // (token_bytes * context))


def _negative_part(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> float:
    return (memory * (1 - spare) - weights) / (token_bytes * context)


def _spare_of_the_rest(memory: int, weights: int, token_bytes: int, context: int, spare: float) -> int:
    return max(0, int((memory - weights) * (1 - spare) // (token_bytes * context)))


EXERCISES = {task.id: task for task in (
    Exercise(
        "06-1", "room that grows", write,
        cases=((["a", "b"], 2, ["c"]), ([None, None], 0, ["a"]), (["a", "b", "c", None], 1, ["d"]),
               (["a", "b", None], 2, ["c", "d"]), (["a", "b", "c"], 1, ["d", "e", "f"]),
               (["a", None], 1, ["b", "c", "d", "e", "f"]), (["a", "b"], 0, ["c", "d", "e"]),
               (["a", "b", None, None], 2, ["c", "d"])),
        misconceptions=(
            Misconception(_exact_room, "with no more room than needed the next write must move all of it again"),
            Misconception(_only_doubles, "twice the room may still be too little for many new items"),
            Misconception(_always_doubles, "the room grows only when the new items do not fit"),
            Misconception(_moves_each_time, "nothing moves while there is room"),
            Misconception(_moves_all, "free places need not be moved, nor what is forgotten"),
            Misconception(_counts_the_new, "new items are written, not moved: count the old ones"),
            Misconception(_appends, "`start` says where to write; it need not be the end"),
            Misconception(_keeps_the_rest, "what stood after the new items is forgotten: those places are free again"),
            Misconception(_room_alone, "return two things: the room, and how many items moved"),
        )),
    Exercise(
        "06-2", "the faulty cache", find_fault,
        cases=((ToyCache("A"),), (ToyCache("B", "loses on growth"),), (ToyCache("C", "ignores start"),),
               (ToyCache("D", "swaps keys and values"),), (ToyCache("E", room=7),),
               (ToyCache("F", "loses on growth", room=7),), (ToyCache("G", "ignores start", room=16),)),
        misconceptions=(
            Misconception(_never_grows, "write a few, then in a second write far more than there can be room for, and "
                                        "read the first ones again"),
            Misconception(_one_write, "one write shows little: a growth can only lose what an earlier write left, and "
                                      "a position can only be ignored where something stands already"),
            Misconception(_never_rewinds, "write at a position that is taken already: what stands there afterwards?"),
            Misconception(_equal_keys_and_values, "write values that differ from the keys, or a swap cannot show"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
        )),
    Exercise(
        "06-3", "requests that fit", requests_that_fit,
        cases=((100, 40, 1, 10, 0.0), (100, 40, 1, 10, 0.1), (100, 99, 1, 10, 0.1), (100, 41, 1, 20, 0.0),
               (80 * 10**9, 16 * 10**9, 131_072, 8192, 0.1), (80 * 10**9, 16 * 10**9, 131_072, 32_768, 0.1)),
        misconceptions=(
            Misconception(_weights_forgotten, "the weights lie in the same memory"),
            Misconception(_no_spare, "`spare` of the whole memory is kept free for everything else"),
            Misconception(_rounded, "half a request does not fit: round down"),
            Misconception(_not_rounded, "a part of a request does not fit: round down to a whole number"),
            Misconception(_negative_part, "a part of a request does not fit, and fewer than none cannot"),
            Misconception(_negative, "fewer than none cannot fit: return 0"),
            Misconception(_spare_of_the_rest, "`spare` is a share of the whole memory, not of what the weights leave"),
        )),
)}
