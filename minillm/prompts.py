"""From what a caller gives to what the engine takes: prompts listed, tokenized and validated. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from minillm.errors import InvalidRequest, shown
from minillm.limits import Limits
from minillm.request import SamplingParams, as_token_id
from minillm.text.chat import Message, encode_chat
from minillm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Message]
OneOrEach = SamplingParams | Sequence[SamplingParams] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A prompt fit to run: its ids, and its text where that was given.

    Times are ``time.perf_counter()`` seconds: ``arrival_s`` when the caller asked, ``start_s`` and ``end_s`` when its
    tokenizing began and ended.
    """

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    priority: int
    arrival_s: float
    start_s: float
    end_s: float


class Prompts:
    """Makes jobs of prompts for one model. Callable from any thread; it touches nothing of the engine."""

    def __init__(self, tokenizer: Tokenizer, limits: Limits):
        self.tokenizer, self.limits = tokenizer, limits

    def listed(self, prompts: Prompt | Sequence[Prompt], params: OneOrEach, priority: int | Sequence[int], *,
               arrival_s: float | None = None) -> list[Job]:
        """Jobs of one prompt or several; ``params`` and ``priority`` are one for all, or one for each.

        ``arrival_s``: when the caller asked, where that was before now.

        Raises:
            InvalidRequest: naming the first bad prompt's index.
        """
        return self._jobs(_listed(prompts), self._encode, params, priority, arrival_s)

    def chats(self, messages: Messages | Sequence[Messages], params: OneOrEach, priority: int | Sequence[int], *,
              arrival_s: float | None = None, **options: bool) -> list[Job]:
        """Jobs of one conversation or several, as :meth:`listed`; ``options`` are those of ``encode_chat``."""
        several = isinstance(messages, (list, tuple)) and messages and not isinstance(messages[0], Mapping)
        return self._jobs(list(messages) if several else [messages], partial(self._encode_chat, **options), params,
                          priority, arrival_s)

    def one(self, prompt: Prompt | Messages, params: SamplingParams | None, priority: int, *,
            arrival_s: float | None = None) -> Job:
        """The job of one prompt: text, ids, or the messages of a chat."""
        is_chat = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        return self._job(prompt, self._encode_chat if is_chat else self._encode, params, priority,
                         arrival_s or time.perf_counter())

    def texts(self, texts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        """The ids of texts to be scored.

        Raises:
            InvalidRequest: naming the index of a text that is empty or longer than the context.
        """
        encoded = []
        for index, text in enumerate(_listed(texts)):
            with _naming(f"text {index}"):
                ids = [as_token_id(token_id) for token_id in self._encode(text)[1]]
                self.limits.ids("prompt", ids)
                if not 0 < len(ids) <= self.limits.max_model_len:
                    raise InvalidRequest(f"it has {len(ids)} tokens; from 1 to {self.limits.max_model_len} can be "
                                         "scored", "prompt")
                encoded.append(ids)
        return encoded

    def _jobs(self, prompts: Sequence[Any], encode: Callable[[Any], tuple[str | None, list[int]]], params: OneOrEach,
              priority: int | Sequence[int], arrival_s: float | None) -> list[Job]:
        arrival_s, jobs = arrival_s or time.perf_counter(), []
        each = _one_each("params", params, len(prompts)), _one_each("priority", priority, len(prompts))
        for index, (prompt, own, place) in enumerate(zip(prompts, *each, strict=True)):
            with _naming(f"prompt {index}"):
                jobs.append(self._job(prompt, encode, own, place, arrival_s))
        return jobs

    def _job(self, prompt: Any, encode: Callable[[Any], tuple[str | None, list[int]]], params: SamplingParams | None,
             priority: int, arrival_s: float) -> Job:
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params must be SamplingParams(...), got {shown(params)}", "params")
        params, start_s = params or SamplingParams(), time.perf_counter()
        text, ids = encode(prompt)
        return Job(text=text, token_ids=self.limits.prompt(ids, params), params=params, arrival_s=arrival_s,
                   priority=self.limits.priority(priority), start_s=start_s, end_s=time.perf_counter())

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            self._check_size(prompt)
            return prompt, self.tokenizer.encode(prompt)
        return None, _members(prompt, "a prompt is text or a list of token ids")

    def _check_size(self, text: object) -> None:
        """Refuse unread what cannot fit: a megabyte takes seconds to tokenize."""
        most = self.tokenizer.most_bytes(self.limits.max_model_len)
        if isinstance(text, str) and len(text) > most:
            raise InvalidRequest(f"the text has {len(text):,} characters; max_model_len {self.limits.max_model_len} "
                                 f"tokens hold at most {most:,}. Shorten it or raise max_model_len", "prompt")

    def _encode_chat(self, messages: Messages, **options: bool) -> tuple[str, list[int]]:
        for message in messages if isinstance(messages, (list, tuple)) else ():
            self._check_size(message.get("content") if isinstance(message, Mapping) else None)
        ids = encode_chat(self.tokenizer, messages, **options)
        return self.tokenizer.decode(ids), ids


def _listed(prompts: object) -> list[Any]:
    """One prompt (text, or ids in anything that can be indexed) or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    listed = _members(prompts, "prompts are text, a list of token ids, or a list of such prompts")
    of_ids = listed and hasattr(listed[0], "__index__") and not getattr(listed[0], "ndim", 0)
    return [listed] if of_ids and hasattr(prompts, "__getitem__") else listed


def _members(value: object, wanted: str) -> list[Any]:
    """The members of a list, an array or a generator; of nothing else that Python happens to iterate over."""
    try:
        if isinstance(value, (bytes, bytearray, memoryview, Mapping, Set)):
            raise TypeError
        members = iter(value)
    except TypeError:
        raise InvalidRequest(f"{wanted}, got {shown(value)}", "prompt") from None
    return list(members)


def _one_each(name: str, given: object, count: int) -> Sequence[Any]:
    """What was given for each of ``count`` prompts, or the one value for all of them."""
    listed = given if isinstance(given, (list, tuple)) else [given] * count
    if len(listed) != count:
        raise InvalidRequest(f"{count} prompts, {len(listed)} values of {name}: give one, or as many", name)
    return listed


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Put ``what`` in front of an :class:`InvalidRequest`'s message."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{what}: {error}", error.param) from None
