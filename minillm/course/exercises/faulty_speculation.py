"""The speculative decoder with a fault of exercise 17-2, and answers to what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

from minillm.course.checking import Exercise, Misconception
from minillm.course.exercises.faulty import Unlisted, always_none, built_with, mistaking

FAULTS = ("keeps a wrong draft", "one row too many", "forgets the bonus token", "counter not lowered", "none")


class Decoder:
    """Greedy speculation on a toy target of ``vocab_size`` tokens. ``ids`` are all tokens so far; those of the prompt
    but its last have been read. The toy reads what is cached, as attention does: a token too many there misleads it."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, fault: str):
        self.ids, self.vocab_size = list(prompt), vocab_size
        self._cached, self._fault = list(prompt)[:-1], fault

    def __repr__(self) -> str:
        return f"a decoder of {self.vocab_size} tokens after {len(self.ids)} of them"

    @property
    def num_cached(self) -> int:
        """Tokens whose K and V the next call takes for those of ``ids``."""
        return len(self._cached)

    def target(self, ids: Sequence[int]) -> int:
        """What the target says after ``ids``: a plain call, which changes nothing."""
        state = 7
        for token in ids:
            state = (state * 31 + token + 1) % 1009
        return state % self.vocab_size

    def call(self, drafts: Sequence[int]) -> list[int]:
        """One call of the target that checks ``drafts``; the tokens that it keeps, which are now part of ``ids``."""
        drafts = list(drafts)
        if any(type(draft) is not int or not 0 <= draft < self.vocab_size for draft in drafts):
            raise ValueError(f"drafts are ints from 0 to {self.vocab_size - 1}, got {drafts}")
        written = [*self._cached, self.ids[-1], *drafts]
        first = len(self._cached) + 1
        sampled = [self.target(written[:first + i]) for i in range(len(drafts) + 1)]
        right = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts))
        kept = sampled[:right + 1]
        if self._fault == "keeps a wrong draft" and right < len(drafts):
            kept = drafts[:right + 1]
        if self._fault == "one row too many":
            kept = sampled[:right + 2]
        if self._fault == "forgets the bonus token" and right == len(drafts) > 0:
            kept = drafts
        self.ids += kept
        self._cached = written if self._fault == "counter not lowered" else [*self.ids[:-1]]
        return kept


def next_tokens(decoder: Decoder, count: int) -> list[int]:
    """What the target says next, ``count`` tokens of it, by plain calls."""
    ids = list(decoder.ids)
    for _ in range(count):
        ids.append(decoder.target(ids))
    return ids[len(ids) - count:]


def find_fault(decoder: Decoder) -> str:
    """Two probes: all drafts right; the second of three wrong."""
    if len(decoder.call(next_tokens(decoder, 2))) < 3:
        return "forgets the bonus token"
    return _after_a_wrong_draft(decoder)


def _after_a_wrong_draft(decoder: Decoder) -> str:
    first, second, third = next_tokens(decoder, 3)
    wrong = (second + 1) % decoder.vocab_size
    kept = decoder.call([first, wrong, third])
    if kept[:2] == [first, wrong]:
        return "keeps a wrong draft"
    if len(kept) > 2:
        return "one row too many"
    return "none" if decoder.num_cached == len(decoder.ids) - 1 else "counter not lowered"


def _only_right_drafts(decoder: Decoder) -> str:
    return "forgets the bonus token" if len(decoder.call(next_tokens(decoder, 3))) < 4 else "none"


def _only_wrong_drafts(decoder: Decoder) -> str:
    return _after_a_wrong_draft(decoder)


def _counts_the_last(decoder: Decoder) -> str:
    """Expects K and V of the last token too."""
    found = find_fault(decoder)
    if found in ("none", "counter not lowered"):
        return "none" if decoder.num_cached == len(decoder.ids) else "counter not lowered"
    return found


def _zero_is_wrong(decoder: Decoder) -> str:
    """Takes 0 for a draft that is surely wrong."""
    if len(decoder.call(next_tokens(decoder, 2))) < 3:
        return "forgets the bonus token"
    [truth] = next_tokens(decoder, 1)
    kept = decoder.call([0])
    if kept[0] != truth:
        return "keeps a wrong draft"
    if len(kept) > 1:
        return "one row too many"
    return "none" if decoder.num_cached == len(decoder.ids) - 1 else "counter not lowered"


def _by_text_alone(decoder: Decoder) -> str:
    """Runs on and compares the text with the target's: every text that differs is blamed on the wrong drafts."""
    start = len(decoder.ids)
    truth = next_tokens(decoder, 12)
    while len(decoder.ids) < start + 12:
        here = len(decoder.ids) - start
        wrong = (truth[here] + 1) % decoder.vocab_size
        decoder.call([wrong, wrong])
    return "keeps a wrong draft" if decoder.ids[start:start + 12] != truth else "none"


def _not_a_verdict(decoder: Decoder) -> object:
    return Unlisted(FAULTS, "keeps wrong drafts")


EXERCISE = Exercise(
    "17-2", "the faulty speculation", built_with,
    cases=tuple((Decoder(prompt, vocab_size, fault),)
                for prompt, vocab_size in (([1, 2, 3], 50), ([2, 0, 1, 1], 3), ([5, 9, 9], 11), ([0], 2))
                for fault in FAULTS),
    misconceptions=(
        Misconception(always_none, "put probes to it: one call whose drafts are all right, and one with a wrong draft "
                                   "among right ones; decoder.target tells which are right"),
        Misconception(_only_right_drafts, "where every draft is right nothing is thrown away. What must a call keep, "
                                          "and forget, when one is wrong?"),
        Misconception(_only_wrong_drafts, "and when all drafts are right? The target has one row more than there are "
                                          "drafts"),
        Misconception(mistaking(find_fault, {"counter not lowered": "none"}),
                      "after a rejected draft, compare decoder.num_cached with what of decoder.ids has K and V"),
        Misconception(_counts_the_last, "the newest token was sampled and not computed: it has no K and V until the "
                                        "next call"),
        Misconception(_zero_is_wrong, "0 may be right: make a wrong draft out of what decoder.target says"),
        # Takes every call that keeps fewer tokens than it has rows for one that lost some.
        Misconception(mistaking(find_fault, {"none": "forgets the bonus token",
                                             "counter not lowered": "forgets the bonus token"}),
                      "rows behind a wrong draft say nothing: of those a call keeps none"),
        # Looks at how many tokens are kept, never at which.
        Misconception(mistaking(find_fault, {"keeps a wrong draft": "none"}),
                      "as many tokens as expected, and still wrong ones: compare them with decoder.target's"),
        Misconception(_by_text_alone, "several faults spoil the text: look at one call's tokens, their number, and "
                                      "num_cached"),
        Misconception(_not_a_verdict, "return one of these, spelt so: " + ", ".join(FAULTS)),
    ))
