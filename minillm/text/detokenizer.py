"""Ids to text as they arrive: no character cut in half, no part of a stop string delivered. No torch.

    text so far   The answer is 42.\\n\\nQue
                  |--- delivered --->|-held->|      "\\n\\nQue" may become the stop string "\\n\\nQuestion:"

Bytes go once through an incremental UTF-8 decoder, characters once through an automaton; what waits lies between two
offsets (delivered, decoded). So a token costs the same however long the text is, unlike decoding everything again.
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
        self._visible = StopMatcher(stop) if stop else None
        self._all = StopMatcher(stop) if stop and skip_special_tokens else None
        # For the text with hidden tokens in place: which of its last characters are visible.
        self._shown: deque[bool] = deque(maxlen=max(map(len, stop), default=0))

    def add(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that may be delivered now, ``""`` while all of it is held back."""
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            data = self._tokenizer.token_bytes(token_id)
            if self._skip_special_tokens and self._tokenizer.is_special(token_id):
                self._scan(data.decode(), visible=False)
            else:
                self._scan(self._decode(data), visible=True)
        return self._deliver(len(self._held) - self._num_waiting())

    def finish(self) -> str:
        """No more ids will come: the rest of the text, an unfinished character as U+FFFD."""
        if self.stop_string is None:
            self._scan(self._decoder.decode(b"", final=True), visible=True)
        return self._deliver(len(self._held))

    def _decode(self, data: bytes) -> str:
        if self._strip_leading_space and data:
            self._strip_leading_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def _deliver(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _scan(self, text: str, visible: bool) -> None:
        if self._visible is None:
            self._held += text if visible else ""
            return
        for char in text:
            found = []  # (visible characters of the stop string, the stop string)
            if visible:
                self._held += char
                if stop := self._visible.feed(char):
                    found.append((len(stop), stop))
            if self._all is not None:
                self._shown.append(visible)
                if stop := self._all.feed(char):
                    found.append((self._num_shown(len(stop)), stop))
            if found:
                count, self.stop_string = max(found)
                self._held = self._held[: len(self._held) - count]
                return

    def _num_shown(self, count: int) -> int:
        """How many of the last ``count`` characters, hidden ones included, are visible."""
        return sum(list(self._shown)[len(self._shown) - count:])

    def _num_waiting(self) -> int:
        """Visible characters at the end that may still turn out to begin a stop string."""
        if self._visible is None or self.stop_string is not None:
            return 0
        return max(self._visible.depth, self._num_shown(self._all.depth) if self._all is not None else 0)


class StopMatcher:
    """Finds strings in a stream of characters, each looked at once (Aho and Corasick, 1975).

    Nodes are the beginnings of stop strings, in a tree. The state is the longest one that ends the stream; a node's
    fallback is the next shorter one.

    Raises:
        InvalidRequest: an empty string, which would be found everywhere.
    """

    def __init__(self, strings: Sequence[str]):
        if "" in strings:
            raise InvalidRequest("stop must not hold an empty string: it would end every answer at once", "stop")
        self._children: list[dict[str, int]] = [{}]
        self._depths, self._fallback, self._state = [0], [0], 0
        self._found: list[str | None] = [None]  # the longest stop string that ends at a node
        for string in strings:
            self._insert(string)
        nodes = deque([0])
        while nodes:  # by depth, so that a fallback is ready before it is needed
            node = nodes.popleft()
            for char, child in self._children[node].items():
                self._fallback[child] = self._step(self._fallback[node], char) if node else 0
                self._found[child] = self._found[child] or self._found[self._fallback[child]]
                nodes.append(child)

    def _insert(self, string: str) -> None:
        node = 0
        for char in string:
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._depths.append(self._depths[node] + 1)
                self._fallback.append(0)
                self._found.append(None)
            node = self._children[node][char]
        self._found[node] = string

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(char, 0)

    @property
    def depth(self) -> int:
        """How many of the last characters begin a stop string."""
        return self._depths[self._state]

    def feed(self, char: str) -> str | None:
        """Take one character; returns the longest stop string that it completes."""
        self._state = self._step(self._state, char)
        return self._found[self._state]
