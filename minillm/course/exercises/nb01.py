"""Exercises of notebook 01: decoding, a tokenizer with a fault, and a history that must fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.course.checking import Exercise, Misconception

_BYTES = ([b"Stra", b"\xc3\x9f", b"e", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99\x82", b" caf", b"<|im_end|>", b"\xff"])


def decode(token_bytes: Sequence[bytes], ids: Sequence[int]) -> str:
    """The text of ids: their bytes first, characters afterwards."""
    return b"".join(token_bytes[i] for i in ids).decode("utf-8", "replace")


def _each_alone(token_bytes: Sequence[bytes], ids: Sequence[int]) -> str:
    return "".join(token_bytes[i].decode("utf-8", "replace") for i in ids)


def _ignores(token_bytes: Sequence[bytes], ids: Sequence[int]) -> str:
    return b"".join(token_bytes[i] for i in ids).decode("utf-8", "ignore")


def _strict(token_bytes: Sequence[bytes], ids: Sequence[int]) -> str:
    return b"".join(token_bytes[i] for i in ids).decode("utf-8")


def _latin(token_bytes: Sequence[bytes], ids: Sequence[int]) -> str:
    return b"".join(token_bytes[i] for i in ids).decode("latin-1")


_START, _END = 300, 301


@dataclass(frozen=True)
class ToyTokenizer:
    """A byte tokenizer with the control tokens ``<s>`` (300) and ``</s>`` (301), and perhaps one fault.

    ``encode(text)`` is a whole prompt: it begins with 300, once, and text never becomes a control token.
    """

    name: str
    fault: str = "none"

    def __repr__(self) -> str:
        return f"tokenizer {self.name}"

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        data = text.strip() if self.fault == "not lossless" else text
        ids: list[int] = []
        for index, part in enumerate(data.split("</s>") if self.fault == "forged control token" else [data]):
            ids += [_END] * (index > 0) + list(part.encode())
        return [_START] * (2 if self.fault == "doubled start" else 1) + ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens left out."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def find_fault(tokenizer: ToyTokenizer) -> str:
    """Probe it: the start token once, all text back, no control token out of text."""
    if tokenizer.encode("a").count(_START) != 1:
        return "doubled start"
    if _END in tokenizer.encode("x</s>y"):
        return "forged control token"
    probe = "  two spaces\n"
    return "none" if tokenizer.decode(tokenizer.encode(probe)) == probe else "not lossless"


def _plain_probe_only(tokenizer: ToyTokenizer) -> str:
    ids = tokenizer.encode("hello")
    if ids.count(_START) != 1:
        return "doubled start"
    return "none" if tokenizer.decode(ids) == "hello" else "not lossless"


def _another_spelling(tokenizer: ToyTokenizer) -> str:
    return find_fault(tokenizer).replace(" ", "-")


def _forgets_control(tokenizer: ToyTokenizer) -> str:
    found = find_fault(tokenizer)
    return "none" if found == "forged control token" else found


def _forgets_start(tokenizer: ToyTokenizer) -> str:
    found = find_fault(tokenizer)
    return "none" if found == "doubled start" else found


def _round_trip_of_control(tokenizer: ToyTokenizer) -> str:
    if tokenizer.encode("a").count(_START) != 1:
        return "doubled start"
    for probe in ("x</s>y", "  two spaces\n"):
        if tokenizer.decode(tokenizer.encode(probe)) != probe:
            return "not lossless"
    return "none"


def fit(message_tokens: Sequence[int], overhead: int, fixed: int, budget: int) -> int:
    """How many of the newest messages fit."""
    used = fixed
    for kept, tokens in enumerate(reversed(message_tokens)):
        used += tokens + overhead
        if used > budget:
            return kept
    return len(message_tokens)


def _oldest_first(message_tokens: Sequence[int], overhead: int, fixed: int, budget: int) -> int:
    return fit(message_tokens[::-1], overhead, fixed, budget)


def _no_overhead(message_tokens: Sequence[int], overhead: int, fixed: int, budget: int) -> int:
    return fit(message_tokens, 0, fixed, budget)


def _overhead_once(message_tokens: Sequence[int], overhead: int, fixed: int, budget: int) -> int:
    return fit(message_tokens, 0, fixed + overhead, budget)


def _no_fixed(message_tokens: Sequence[int], overhead: int, fixed: int, budget: int) -> int:
    return fit(message_tokens, overhead, 0, budget)


def _skips_what_is_too_long(message_tokens: Sequence[int], overhead: int, fixed: int, budget: int) -> int:
    used, kept = fixed, 0
    for tokens in reversed(message_tokens):
        if used + tokens + overhead <= budget:
            used, kept = used + tokens + overhead, kept + 1
    return kept


def _strictly_below(message_tokens: Sequence[int], overhead: int, fixed: int, budget: int) -> int:
    return fit(message_tokens, overhead, fixed, budget - 1)


EXERCISES = {task.id: task for task in (
    Exercise(
        "01-1", "ids to text", decode,
        cases=((_BYTES, [0, 1, 2]), (_BYTES, []), (_BYTES, [3, 4]), (_BYTES, [7, 3, 4, 8]), (_BYTES, [5, 6, 0]),
               (_BYTES, [0, 9, 2]), (_BYTES, [0, 3])),
        misconceptions=(
            Misconception(_each_alone, "a character may be spread over several tokens: join the bytes first, then "
                                       "decode once"),
            Misconception(_ignores, "an invalid byte must stay visible, as U+FFFD: errors='replace'"),
            Misconception(_strict, "a model may emit any bytes: decoding must not raise, use errors='replace'"),
            Misconception(_latin, "the bytes are UTF-8: one character may take up to four of them"),
        )),
    Exercise(
        "01-2", "the faulty tokenizer", find_fault,
        cases=((ToyTokenizer("A"),), (ToyTokenizer("B", "doubled start"),), (ToyTokenizer("C", "not lossless"),),
               (ToyTokenizer("D", "forged control token"),)),
        misconceptions=(
            Misconception(_plain_probe_only, "this probe shows neither spaces lost at the ends of a text nor control "
                                             "tokens forged by it: one probe a fault"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
            Misconception(_forgets_control, "what does this tokenizer make of a text that spells </s>?"),
            Misconception(_forgets_start, "count the start token (300) in a prompt"),
            Misconception(_round_trip_of_control, "text is lost there because it became a control token (301): look at "
                                                  "the ids before you call it lossy"),
        )),
    Exercise(
        "01-3", "what fits", fit,
        cases=(([100, 50, 20], 5, 30, 200), ([100, 50, 20], 5, 30, 215), ([100, 50, 20], 5, 30, 110),
               ([10, 900, 10, 10], 5, 30, 500), ([], 5, 30, 20), ([400], 5, 30, 100), ([8, 8, 8], 0, 0, 16),
               ([8, 8, 8], 0, 5, 24), ([10, 10, 10], 5, 0, 40)),
        misconceptions=(
            Misconception(_oldest_first, "the newest messages are kept: begin at the end of the list"),
            Misconception(_no_overhead, "each message also brings its role and markers: `overhead` tokens"),
            Misconception(_overhead_once, "every message kept brings `overhead` tokens, not the chat as a whole"),
            Misconception(_no_fixed, "the system message and the opened answer take `fixed` tokens, always"),
            Misconception(_skips_what_is_too_long, "a history with a hole misleads the model: stop at the first "
                                                   "message that does not fit"),
            Misconception(_strictly_below, "a budget may be used up to its last token"),
        )),
)}
