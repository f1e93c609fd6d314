"""Ids to text as they arrive: no character cut in half, no part of a stop string delivered. No torch.

    text so far   The answer is 42.\\n\\nQue
                  |--- delivered --->|-held->|      "\\n\\nQue" may become the stop string "\\n\\nQuestion:"

Bytes go once through an incremental UTF-8 decoder, and stop strings are looked for in the last characters alone. So a
token costs the same however long the text is, unlike decoding everything again.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from minillm.errors import InvalidRequest
from minillm.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one choice, piece by piece. Joined, the pieces equal ``tokenizer.decode`` of all the ids.

    Args:
        tokenizer: whose ids are added.
        stop: strings that end the text, none empty. They are looked for in the visible text and in the text with
            hidden special tokens in place; the one completed first wins, the longest among those completed together.
        skip_special_tokens: special tokens are no part of the text.

    Attributes:
        stop_string: the stop string that was found; nothing is delivered after it.
        num_tokens: tokens taken, up to and including the one that completed the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_special_tokens: bool = True):
        self.stop_string: str | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strip_leading_space = tokenizer.strip_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # visible characters decoded and not delivered
        # The visible text, and the text with hidden special tokens in place.
        self._tails = [StopFinder(stop) for _ in range(1 + skip_special_tokens)] if stop else []

    def add(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that may be delivered now, ``""`` while all of it is held back."""
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            data = self._tokenizer.token_bytes(token_id)
            if self._skip_special_tokens and self._tokenizer.is_special(token_id):
                self._scan(data.decode("utf-8", "replace"), visible=False)
                continue
            if self._strip_leading_space and data:
                self._strip_leading_space = False
                data = data.removeprefix(b" ")
            self._scan(self._decoder.decode(data), visible=True)
        # Visible characters at the end that may still turn out to begin a stop string are held back.
        num_waiting = max((tail.num_waiting for tail in self._tails), default=0)
        return self._deliver(len(self._held) - num_waiting)

    def finish(self) -> str:
        """No more ids will come: the rest of the text, an unfinished character as U+FFFD."""
        if self.stop_string is None:
            self._scan(self._decoder.decode(b"", final=True), visible=True)
        return self._deliver(len(self._held))

    def _deliver(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _scan(self, text: str, visible: bool) -> None:
        for char in text:
            if visible:
                self._held += char
            found = [tail.feed(char, visible) for tail in (self._tails if visible else self._tails[1:])]
            if any(found):
                count, self.stop_string = max(filter(None, found))
                self._held = self._held[: len(self._held) - count]
                self._tails = []  # nothing is looked for any more, so nothing waits
                return


class StopFinder:
    """Finds strings in a stream of characters, of which it keeps as many as the longest string has.

    Raises:
        InvalidRequest: an empty string, which would be found everywhere.
    """

    def __init__(self, strings: Sequence[str]):
        if "" in strings:
            raise InvalidRequest("stop must not hold an empty string: it would end every answer at once", "stop")
        self._longest_first = sorted(strings, key=len, reverse=True)
        self._text, self._visible = "", deque(maxlen=len(self._longest_first[0]))
        self._depth = 0  # how many of the last characters begin a string

    def feed(self, char: str, visible: bool) -> tuple[int, str] | None:
        """Take one character; the longest string that it completes, behind how many of its characters are visible."""
        self._visible.append(visible)
        self._text = (self._text + char)[-self._visible.maxlen:]
        depth = min(self._depth + 1, len(self._text))  # what begins a string now began one before this character
        while depth and not any(string.startswith(self._text[-depth:]) for string in self._longest_first):
            depth -= 1
        self._depth = depth
        found = next((string for string in self._longest_first if self._text.endswith(string)), None)
        return None if found is None else (self._num_visible(len(found)), found)

    @property
    def num_waiting(self) -> int:
        """How many visible characters at the end may belong to a string that is not complete yet."""
        return self._num_visible(self._depth)

    def _num_visible(self, count: int) -> int:
        return sum(list(self._visible)[len(self._visible) - count:])
