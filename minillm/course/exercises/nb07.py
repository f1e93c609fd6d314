"""Exercises of notebook 07: what to hold back, a stream with a fault, and how a request ends."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from minillm.course.checking import Exercise, Misconception


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def _always_the_longest(text: str, stops: Sequence[str]) -> int:
    return min(len(text), max((len(stop) - 1 for stop in stops), default=0))


def _first_stop_alone(text: str, stops: Sequence[str]) -> int:
    return held_back(text, stops[:1])


def _shortest_match(text: str, stops: Sequence[str]) -> int:
    return min((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def _one_character(text: str, stops: Sequence[str]) -> int:
    return int(any(text.endswith(stop[0]) and len(stop) > 1 for stop in stops))


def _whole_stop_too(text: str, stops: Sequence[str]) -> int:
    return max((n for stop in stops for n in range(1, len(stop) + 1) if text.endswith(stop[:n])), default=0)


@dataclass(frozen=True)
class ToyStream:
    """Delivers text while tokens (bytes) arrive, up to a stop string, perhaps with one fault."""

    name: str
    fault: str = "none"

    def __repr__(self) -> str:
        return f"stream {self.name}"

    def __call__(self, tokens: Sequence[bytes], stop: str) -> list[str]:
        """The pieces delivered, one a token and one at the end."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces, held = [], ""
        for token in tokens:
            held += token.decode("utf-8", "replace") if self.fault == "splits characters" else decoder.decode(token)
            if stop in held:
                return [*pieces, held[: held.index(stop)]]
            keep = 0 if self.fault == "leaks the stop string" else held_back(held, [stop])
            pieces.append(held[: len(held) - keep])
            held = held[len(held) - keep:]
        return [*pieces, "" if self.fault == "loses the end" else held + decoder.decode(b"", final=True)]


def find_fault(stream: ToyStream) -> str:
    """A character over two tokens; a stop string over two tokens; an end that looks like the start of one."""
    if "".join(stream([b"\xc3", b"\xa9"], "#")) != "\xe9":
        return "splits characters"
    if "".join(stream([b"ab", b"cd"], "bc")) != "a":
        return "leaks the stop string"
    return "none" if "".join(stream([b"xb"], "bc")) == "xb" else "loses the end"


def _stop_in_one_token(stream: ToyStream) -> str:
    found = find_fault(stream)
    return "none" if found == "leaks the stop string" else found


def _ascii_alone(stream: ToyStream) -> str:
    found = find_fault(stream)
    return "none" if found == "splits characters" else found


def _never_a_near_miss(stream: ToyStream) -> str:
    found = find_fault(stream)
    return "none" if found == "loses the end" else found


def _another_spelling(stream: ToyStream) -> str:
    return find_fault(stream).replace(" ", "_")


def ending(ids: Sequence[int], eos: Collection[int], max_tokens: int) -> tuple[str, int, int]:
    """What the model would emit -> (finish reason, output tokens, decode steps after prefill)."""
    for number, token in enumerate(ids[:max_tokens], 1):
        if token in eos:
            return "stop", number, number - 1
    return "length", max_tokens, max_tokens - 1


def _length_wins(ids: Sequence[int], eos: Collection[int], max_tokens: int) -> tuple[str, int, int]:
    reason, number, steps = ending(ids, eos, max_tokens)
    return ("length" if number == max_tokens else reason), number, steps


def _end_is_no_token(ids: Sequence[int], eos: Collection[int], max_tokens: int) -> tuple[str, int, int]:
    reason, number, steps = ending(ids, eos, max_tokens)
    return reason, number - (reason == "stop"), steps


def _a_step_a_token(ids: Sequence[int], eos: Collection[int], max_tokens: int) -> tuple[str, int, int]:
    reason, number, steps = ending(ids, eos, max_tokens)
    return reason, number, steps + 1


def _one_end_alone(ids: Sequence[int], eos: Collection[int], max_tokens: int) -> tuple[str, int, int]:
    return ending(ids, list(eos)[:1], max_tokens)


def _one_step_less(ids: Sequence[int], eos: Collection[int], max_tokens: int) -> tuple[str, int, int]:
    reason, number, steps = ending(ids, eos, max_tokens)
    return reason, number, steps - (reason == "stop")


EXERCISES = {task.id: task for task in (
    Exercise(
        "07-1", "what to hold back", held_back,
        cases=(("answer", ["END"]), ("the E", ["END"]), ("the EN", ["END"]), ("an", ["\n\n", "nope"]),
               ("a\n", ["\n\n"]), ("aa", ["aab"]), ("xaba", ["abab", "b"]), ("", ["END"]), ("text", []),
               ("my END", ["END"])),
        misconceptions=(
            Misconception(_always_the_longest, "hold back only what may really become a stop string: else text waits "
                                               "for nothing"),
            Misconception(_first_stop_alone, "any of the stop strings may begin here"),
            Misconception(_shortest_match, "several beginnings may fit: the longest must be held"),
            Misconception(_one_character, "two or more characters of a stop string may have arrived"),
            Misconception(_whole_stop_too, "a stop string that is complete is found, not held back"),
        )),
    Exercise(
        "07-2", "the faulty stream", find_fault,
        cases=((ToyStream("A"),), (ToyStream("B", "splits characters"),), (ToyStream("C", "leaks the stop string"),),
               (ToyStream("D", "loses the end"),)),
        misconceptions=(
            Misconception(_stop_in_one_token, "let the stop string begin in one token and end in the next"),
            Misconception(_ascii_alone, "send the two bytes of one character as two tokens"),
            Misconception(_never_a_near_miss, "end the tokens in the middle of a stop string: what was held must still "
                                              "come"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
        )),
    Exercise(
        "07-3", "how a request ends", ending,
        cases=(([5, 6, 2, 9], [2], 10), ([5, 6, 7, 9], [2], 3), ([5, 6, 2, 9], [2], 3), ([2, 5], [2], 1),
               ([5, 0, 2], [2, 0], 10), ([5, 6, 2], [2], 2), ([7], [2], 1)),
        misconceptions=(
            Misconception(_length_wins, "an end token exactly at the limit still ends the request by itself"),
            Misconception(_end_is_no_token, "the end token is an output token, though its text is hidden"),
            Misconception(_a_step_a_token, "prefill is a forward pass too: which token does it make?"),
            Misconception(_one_end_alone, "a model may have several end tokens"),
            Misconception(_one_step_less, "the end token is emitted by a step like any other"),
        )),
)}
