"""Exercises of notebook 01: merging, decoding, a tokenizer with a fault, and a history that must fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minillm.course.checking import Exercise, Misconception

Merges = Sequence[tuple[str, str]]


def pieces(word: str, merges: Merges) -> list[str]:
    """The pieces of a word: of the pairs present, the one that stands first in ``merges`` is joined, again and again.
    """
    parts = list(word)
    while found := [pair for pair in merges if pair in zip(parts, parts[1:])]:
        parts = _joined(parts, found[0])
    return parts


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    whole = False  # the last entry was joined just now
    for part in parts:
        whole = bool(out) and not whole and (out[-1], part) == pair
        out[-1:] = [out[-1] + part] if whole else [*out[-1:], part]
    return out


def _left_to_right(word: str, merges: Merges) -> list[str]:
    parts = list(word)
    while found := [i for i, pair in enumerate(zip(parts, parts[1:])) if pair in merges]:
        parts[found[0]:found[0] + 2] = ["".join(parts[found[0]:found[0] + 2])]
    return parts


def _one_merge_only(word: str, merges: Merges) -> list[str]:
    parts = list(word)
    present = [pair for pair in merges if pair in zip(parts, parts[1:])]
    return _joined(parts, present[0]) if present else parts


def _each_merge_once(word: str, merges: Merges) -> list[str]:
    parts = list(word)
    for pair in merges:
        places = [i for i, present in enumerate(zip(parts, parts[1:])) if present == pair]
        if places:
            parts[places[0]:places[0] + 2] = ["".join(pair)]
    return parts


def _longest_match(word: str, merges: Merges) -> list[str]:
    tokens, parts = {left + right for left, right in merges}, []
    while word:
        size = next(n for n in range(len(word), 0, -1) if n == 1 or word[:n] in tokens)
        parts.append(word[:size])
        word = word[size:]
    return parts


def _last_learned_first(word: str, merges: Merges) -> list[str]:
    return pieces(word, merges[::-1])


def _from_the_right(word: str, merges: Merges) -> list[str]:
    mirrored = [(right[::-1], left[::-1]) for left, right in merges]
    return [part[::-1] for part in pieces(word[::-1], mirrored)][::-1]


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


def _each_strict(token_bytes: Sequence[bytes], ids: Sequence[int]) -> str:
    return "".join(token_bytes[i].decode() for i in ids)


def _each_ignored(token_bytes: Sequence[bytes], ids: Sequence[int]) -> str:
    return "".join(token_bytes[i].decode("utf-8", "ignore") for i in ids)


def _still_bytes(token_bytes: Sequence[bytes], ids: Sequence[int]) -> bytes:
    return b"".join(token_bytes[i] for i in ids)


_START, _END = 300, 301


@dataclass(frozen=True)
class ToyTokenizer:
    """A byte tokenizer with the special tokens ``<s>`` (300) and ``</s>`` (301), and perhaps one fault.

    ``encode(text)`` is a whole prompt: it begins with 300, once, and text never becomes a special token. Text that
    spells ``<s>`` stays text whatever the fault.
    """

    name: str
    fault: str = "none"

    def __repr__(self) -> str:
        return f"tokenizer {self.name}"

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        data = text.strip() if self.fault == "not lossless" else text
        ids: list[int] = []
        for index, part in enumerate(data.split("</s>") if self.fault == "forged special token" else [data]):
            ids += [_END] * (index > 0) + list(part.encode())
        return [_START] * (2 if self.fault == "doubled start" else 1) + ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def find_fault(tokenizer: ToyTokenizer) -> str:
    """Probe it: the start token once, all text back, no special token out of text."""
    if tokenizer.encode("a").count(_START) != 1:
        return "doubled start"
    if _END in tokenizer.encode("x</s>y"):
        return "forged special token"
    probe = "  two spaces\n"
    return "none" if tokenizer.decode(tokenizer.encode(probe)) == probe else "not lossless"


def _plain_probe_only(tokenizer: ToyTokenizer) -> str:
    ids = tokenizer.encode("hello")
    if ids.count(_START) != 1:
        return "doubled start"
    return "none" if tokenizer.decode(ids) == "hello" else "not lossless"


def _another_spelling(tokenizer: ToyTokenizer) -> str:
    return find_fault(tokenizer).replace(" ", "-")


def _forgets_special(tokenizer: ToyTokenizer) -> str:
    found = find_fault(tokenizer)
    return "none" if found == "forged special token" else found


def _forgets_start(tokenizer: ToyTokenizer) -> str:
    found = find_fault(tokenizer)
    return "none" if found == "doubled start" else found


def _round_trip_of_special(tokenizer: ToyTokenizer) -> str:
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
        "01-1", "merge by rank", pieces,
        cases=(("hugs", [("u", "g"), ("h", "ug")]), ("abc", [("b", "c"), ("a", "b")]),
               ("then", [("e", "n"), ("t", "h"), ("h", "en"), ("th", "e")]), ("abab", [("a", "b")]),
               ("banana", [("a", "n"), ("an", "a"), ("b", "an")]), ("abc", [("a", "b"), ("b", "c"), ("a", "bc")]),
               ("abc", [("b", "c"), ("a", "bc"), ("a", "b")]), ("aaa", [("a", "a")]),
               ("aaaaa", [("a", "a"), ("aa", "aa")]), ("x", [("a", "b")]), ("", [("a", "b")])),
        misconceptions=(
            Misconception(_left_to_right, "of the pairs that are present, which did you join first, and where does it "
                                          "stand in `merges`?"),
            Misconception(_one_merge_only, "after one merge, look again: new neighbours may stand in `merges`"),
            Misconception(_each_merge_once, "a pair may stand in the word more than once"),
            Misconception(_longest_match, "the longest piece of the list may never arise: begin with single letters "
                                          "and follow the merges"),
            Misconception(_last_learned_first, "the first pair of `merges` has rank 0: is it joined before or after "
                                               "the others?"),
            Misconception(_from_the_right, "where the same pair overlaps itself, as in three equal letters, `my_join` "
                                           "begins on the left"),
        )),
    Exercise(
        "01-2", "ids to text", decode,
        cases=((_BYTES, [0, 1, 2]), (_BYTES, []), (_BYTES, [3, 4]), (_BYTES, [7, 3, 4, 8]), (_BYTES, [5, 6, 0]),
               (_BYTES, [0, 9, 2]), (_BYTES, [0, 3])),
        misconceptions=(
            Misconception(_each_alone, "a character may be spread over several tokens: join the bytes first, then "
                                       "decode once"),
            Misconception(_ignores, "an invalid byte must stay visible, as U+FFFD: errors='replace'"),
            Misconception(_strict, "a model may emit any bytes: decoding must not raise, use errors='replace'"),
            Misconception(_each_strict, "a token need not hold whole characters: what text is b'\\xc3' by itself?"),
            Misconception(_each_ignored, "a part of a character is lost there: put the parts together before you "
                                         "decode"),
            Misconception(_still_bytes, "those are the right bytes; asked for is their text"),
            Misconception(_latin, "the bytes are UTF-8: one character may take up to four of them"),
        )),
    Exercise(
        "01-3", "the faulty tokenizer", find_fault,
        cases=((ToyTokenizer("A"),), (ToyTokenizer("B", "doubled start"),), (ToyTokenizer("C", "not lossless"),),
               (ToyTokenizer("D", "forged special token"),)),
        misconceptions=(
            Misconception(_plain_probe_only, "a plain word shows few faults: try spaces at both ends, and a text that "
                                             "spells a special token"),
            Misconception(_another_spelling, "return one of the four names exactly as the text spells them"),
            Misconception(_forgets_special, "what does this tokenizer make of a text that spells </s>?"),
            Misconception(_forgets_start, "count the start token (300) in a prompt"),
            Misconception(_round_trip_of_special, "text is lost there because it became a special token (301): look at "
                                                  "the ids before you call it lossy"),
        )),
    Exercise(
        "01-4", "what fits", fit,
        cases=(([100, 50, 20], 5, 30, 200), ([100, 50, 20], 5, 30, 215), ([100, 50, 20], 5, 30, 110),
               ([10, 900, 10, 10], 5, 30, 500), ([], 5, 30, 20), ([400], 5, 30, 100), ([10, 10], 5, 30, 20),
               ([8, 8, 8], 0, 0, 16), ([8, 8, 8], 0, 5, 24), ([10, 10, 10], 5, 0, 40)),
        misconceptions=(
            Misconception(_oldest_first, "the newest messages are kept: begin at the end of the list"),
            Misconception(_no_overhead, "each message also brings its role and special tokens: `overhead` tokens"),
            Misconception(_overhead_once, "every message kept brings `overhead` tokens, not the chat as a whole"),
            Misconception(_no_fixed, "the system message and the opened answer take `fixed` tokens, always"),
            Misconception(_skips_what_is_too_long, "a history with a hole misleads the model: stop at the first "
                                                   "message that does not fit"),
            Misconception(_strictly_below, "a budget may be used up to its last token"),
        )),
)}
