"""Chat messages to a prompt, by the model's own Jinja template in a sandbox. No torch.

Text of a message never becomes a control token, though the template mixes both into one string. Before rendering, a
*guard* (a private-use character that occurs nowhere else) is put inside every special token that a message spells:

    message   hi<|im_end|>          guarded   hi<▪|im_end|>
    rendered  <|im_start|>user\\nhi<▪|im_end|><|im_end|>\\n
    ids       special tokens are found in the rendered text, where the guarded one isn't; then the guard is taken out

The guard survives trimming, slicing and joining by the template, and text without it takes the path of any text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minillm.errors import InvalidRequest, ModelError
from minillm.text.tokenizer import Tokenizer, check_text

Message = Mapping[str, Any]
_PRIVATE_USE = range(0xE000, 0xF900)


def render_chat(tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True,
                continue_final_message: bool = False) -> str:
    """The prompt's text, for looking at. (:func:`encode_chat` knows which parts of it are a message's own text.)

    Raises:
        InvalidRequest: see :func:`encode_chat`.
    """
    text, guard = _render(tokenizer, messages, add_generation_prompt, continue_final_message)
    return text.replace(guard, "")


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True,
                continue_final_message: bool = False) -> list[int]:
    """The prompt's ids: the special tokens are exactly those that the template writes.

    Args:
        messages: ``{"role": ..., "content": text, None or [{"type": "text", "text": ...}, ...]}``, oldest first.
        add_generation_prompt: end with the header of the assistant's turn.
        continue_final_message: leave the last message open, so that the model goes on with it.

    Raises:
        InvalidRequest: no template, both flags at once, a message of the wrong shape, or a template that refuses the
            messages (with its own words).
        ModelError: the template is broken.
    """
    text, guard = _render(tokenizer, messages, add_generation_prompt, continue_final_message)
    return tokenizer.encode(text, add_special_tokens=False, guard=guard)


def _render(tokenizer: Tokenizer, messages: Sequence[Message], add_generation_prompt: bool,
            continue_final_message: bool) -> tuple[str, str]:
    """The prompt's text with guards in it, and the guard."""
    if tokenizer.chat_template is None:
        raise InvalidRequest("this model has no chat template: send a plain prompt instead of messages", "messages")
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest("add_generation_prompt and continue_final_message exclude each other: set one of them to "
                             "false", "continue_final_message")
    try:
        plain = _plain_messages(messages)
    except RecursionError:
        raise InvalidRequest("the messages are nested too deeply: send plain objects", "messages") from None
    used = set(tokenizer.chat_template).union(*_strings(plain))
    unused = (char for char in map(chr, _PRIVATE_USE) if char not in used)
    guard, end_mark = next(unused, ""), next(unused, "")
    if not end_mark:
        raise InvalidRequest("the messages use every private-use character; leave two unused", "messages")
    guarded = _guard_all(plain, Guard(tokenizer, guard))
    if continue_final_message:
        # With a space behind it, the mark also shows whether the template trims.
        guarded[-1]["content"] += end_mark + " "
    text = _run_template(tokenizer, guarded, add_generation_prompt)
    return (_cut_at(text, end_mark) if continue_final_message else text), guard


def _plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Checked copies whose content is one string."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", "messages")
    plain = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f'{where} must be an object with a "role" and "content"', where)
        plain.append({**message, "content": _content_text(message.get("content"), f"{where}.content")})
        for text in _strings(plain[-1]):
            check_text(text, where)
    return plain


def _content_text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be text, null or a list of text parts", where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequest(f"{where} holds a part of type {kind!r}; only text parts are supported", where)
    return "".join(part["text"] for part in content)


def _strings(value: Any) -> Iterator[str]:
    """Every string in a nest of lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


class Guard:
    """Puts ``mark`` where text spells a special token, or begins or ends so that its surroundings could complete one.

    Args:
        tokenizer: whose special tokens.
        mark: one character, which the text doesn't hold.
    """

    def __init__(self, tokenizer: Tokenizer, mark: str):
        self.mark = mark
        self.tokens = sorted(tokenizer.special_tokens, key=len, reverse=True)
        # Tuples, as startswith and endswith take them.
        self._heads = tuple({token[:cut] for token in self.tokens for cut in range(1, len(token))})
        self._tails = tuple({token[cut:] for token in self.tokens for cut in range(1, len(token))})

    def __call__(self, text: str) -> str:
        """``text`` with the marks that it needs."""
        for token in self.tokens:
            while token in text:  # again, as one occurrence may overlap the next
                if len(token) == 1:
                    raise InvalidRequest(f"a message holds the model's control token {token!r}", "messages")
                text = text.replace(token, token[0] + self.mark + token[1:])
        inner = text.strip()  # templates trim, so what counts is the first and last visible character
        if inner.startswith(self._tails):
            text = text.replace(inner, self.mark + inner, 1)
        if inner.endswith(self._heads):
            end = len(text.rstrip())
            text = text[:end] + self.mark + text[end:]
        return text


def _guard_all(value: Any, guard: Guard) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        for token in guard.tokens:  # templates look keys up, so a mark in one would hide it
            if any(token in str(key) for key in value):
                raise InvalidRequest(f"a key in a message holds the model's control token {token!r}", "messages")
        return {key: _guard_all(item, guard) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guard_all(item, guard) for item in value]
    return value


def _cut_at(text: str, mark: str) -> str:
    if mark not in text:
        raise InvalidRequest("the chat template leaves out the final message, so it cannot be continued", "messages")
    head, _, tail = text.rpartition(mark)
    return head if tail.startswith(" ") else head.rstrip()


class TemplateRefusal(jinja2.TemplateError):
    """What ``raise_exception`` in a template raises."""


def _run_template(tokenizer: Tokenizer, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    try:
        # Templates test tools and documents against none, as if they were always passed.
        return _compile(tokenizer.chat_template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None,
            **tokenizer.named_tokens)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the model's chat template is broken: {error}") from error
    except TemplateRefusal as error:
        raise InvalidRequest(str(error), "messages") from error
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise InvalidRequest(f"the chat template cannot render these messages: {error}", "messages") from error


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(message)


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the assistant says, for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


# With the options and functions that model authors rely on (those of transformers' ``apply_chat_template``).
_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
_ENVIRONMENT.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
_ENVIRONMENT.globals |= {"raise_exception": _raise_exception,
                         "strftime_now": lambda format: datetime.now().strftime(format)}
_compile = lru_cache(maxsize=16)(_ENVIRONMENT.from_string)
