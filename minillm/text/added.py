"""Added tokens: whole strings with an id of their own, found in the text before anything else. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import regex

_SPACE = regex.compile(r"\s")
_WORD = regex.compile(r"\w")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A string that is one token wherever it stands in the text.

    Args:
        special: a control token: hidden from the output by ``skip_special_tokens``, never made from a message's text.
        lstrip, rstrip: the whitespace before or after belongs to it.
        normalized: looked for in normalized text instead of the text as given.
        single_word: only found where no word character touches it.
    """

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


class AddedTokenSplitter:
    """Cuts text at added tokens: the leftmost first, the longest of those that start together.

    ``text_of`` gives the text by which a token is looked for (its normalized content for normalized tokens).
    """

    def __init__(self, tokens: Iterable[AddedToken], text_of: Callable[[str], str] = str):
        self._tokens = {text: token for token in tokens if (text := text_of(token.content))}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        pattern = "|".join(regex.escape(text, special_only=True) for text in longest_first)
        self._pattern = regex.compile(pattern or r"\A(?!)")  # without tokens nothing is found, at once

    def split(self, text: str, parse_special: bool = True) -> list[str | int]:
        """The text between added tokens, and their ids. Special ones stay text unless ``parse_special``."""
        parts: list[str | int] = []
        position = 0
        for found in self._pattern.finditer(text):
            token = self._tokens[found.group()]
            start, end = found.span()
            beside = text[max(start - 1, 0):start] + text[end:end + 1]
            if (token.special and not parse_special) or (token.single_word and _WORD.search(beside)):
                continue
            while token.lstrip and start > position and _SPACE.match(text, start - 1):
                start -= 1
            while token.rstrip and _SPACE.match(text, end):
                end += 1
            parts += [text[position:start], token.id]
            position = end
        return [part for part in (*parts, text[position:]) if part != ""]
