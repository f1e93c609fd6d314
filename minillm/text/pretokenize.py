"""Normalizers and pre-tokenizers, built from the specs in a ``tokenizer.json``. No torch.

A normalizer rewrites text; a pre-tokenizer cuts it into pieces that byte pair encoding never merges across. Both are
part of the model: with another pattern everything still decodes, but the ids are not those it was trained on. So what
is not known here is refused by name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import regex

from minillm.errors import ModelError
from minillm.text.unicode_age import cut_as_unicode_16

Normalizer = Callable[[str], str]
PreTokenizer = Callable[[str, bool], list[str]]  # (text, whether it starts the whole text) -> pieces
_Step = Callable[[list[str], bool], list[str]]

GPT2_PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
QWEN2_PATTERN = (r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"""
                 r"""|\s*[\r\n]+|\s+(?!\S)|\s+""")
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN_PATTERN = (r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
                  r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"""
                  r"""|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""")


def build_normalizer(spec: Mapping[str, Any] | None) -> Normalizer:
    """The function a ``normalizer`` section describes.

    Raises:
        ModelError: naming a kind that is not known here.
    """
    return _in_turn([_normalizer_step(step) for step in flatten(spec, "normalizers")])


def build_pre_tokenizer(spec: Mapping[str, Any] | None) -> PreTokenizer:
    """The function a ``pre_tokenizer`` section describes. ``ByteLevel`` cuts only: the encoder turns text into bytes.

    Raises:
        ModelError: naming a kind or option that is not known here.
    """
    steps = flatten(spec, "pretokenizers")
    if any(step["type"] == "ByteLevel" for step in steps[:-1]):
        raise ModelError("pre-tokenizer 'ByteLevel' before another one is not supported: use another model")
    cut = _in_turn([_pre_tokenizer_step(step) for step in steps])
    return lambda text, at_start: cut_as_unicode_16(text, lambda known: cut([known], at_start))


def flatten(spec: Mapping[str, Any] | None, member: str) -> list[Mapping[str, Any]]:
    """The steps of a spec, with every ``Sequence`` (whose list is under ``member``) laid out flat."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [step for part in spec[member] for step in flatten(part, member)]
    return [spec]


def _in_turn(steps: Sequence[Callable]) -> Callable:
    def run(value: Any, *options: Any) -> Any:
        for step in steps:
            value = step(value, *options)
        return value

    return run


def _normalizer_step(spec: Mapping[str, Any]) -> Normalizer:
    kind = spec["type"]
    match kind:
        case "NFC" | "NFD" | "NFKC" | "NFKD":
            return lambda text: text if text.isascii() else unicodedata.normalize(kind, text)
        case "Prepend":
            return lambda text: spec["prepend"] + text if text else text
        case "Replace":
            pattern = _pattern(spec["pattern"])
            return lambda text: pattern.sub(lambda _: spec["content"], text)
        case "Strip":
            ends = [end for end, wanted in ((r"\A\s+", spec["strip_left"]), (r"\s+\Z", spec["strip_right"])) if wanted]
            pattern = regex.compile("|".join(ends) or r"(?!)")
            return lambda text: pattern.sub("", text)
    raise ModelError(f"unknown normalizer {kind!r}: this tokenizer cannot be reproduced exactly, use another model")


def _pre_tokenizer_step(spec: Mapping[str, Any]) -> _Step:
    match spec["type"]:
        case "ByteLevel":
            return _spaced(spec, " ", GPT2_PATTERN if spec.get("use_regex", True) else None)
        case "Digits":
            pattern = regex.compile(r"\p{N}" if spec["individual_digits"] else r"\p{N}+")
            return lambda pieces, _: _cut(pieces, pattern, "Isolated")
        case "Split":
            split, behavior, invert = _pattern(spec["pattern"]), spec["behavior"], spec.get("invert", False)
            if behavior not in tuple(_JOINS):  # a tuple may be asked for anything, a dictionary not for a list
                raise ModelError(f"unknown behavior {behavior!r} of pre-tokenizer 'Split': use another model")
            return lambda pieces, _: _cut(pieces, split, behavior, invert)
        case "Metaspace":
            mark = spec["replacement"]
            # A piece is any first character (a mark, where there is one) and what follows up to the next mark.
            return _spaced(spec, mark, f"(?s:.)[^{regex.escape(mark)}]*" if spec.get("split", True) else None)
    raise ModelError(f"unknown pre-tokenizer {spec['type']!r}: its ids cannot be reproduced, use another model")


def _pattern(spec: Mapping[str, str]) -> regex.Pattern:
    return regex.compile(spec["Regex"] if "Regex" in spec else regex.escape(spec["String"], special_only=True))


def _spaced(spec: Mapping[str, Any], mark: str, pattern: str | None) -> _Step:
    """Spaces become ``mark``, one is put before the pieces that ``spec`` chooses, and the matches of ``pattern``, whose
    alternatives must cover every character, are the pieces."""
    scheme = spec.get("prepend_scheme", "always" if spec.get("add_prefix_space", True) else "never")
    find = regex.compile(pattern).findall if pattern else None

    def step(pieces: list[str], at_start: bool) -> list[str]:
        pieces = [piece.replace(" ", mark) for piece in pieces]
        for i, piece in enumerate(pieces):
            if not piece.startswith(mark) and (scheme == "always" or (scheme == "first" and at_start and i == 0)):
                pieces[i] = mark + piece
        return [found for piece in pieces for found in find(piece)] if find else pieces

    return step


# Which parts join the part before them, by the behavior of a split: (is that one a match, is this one).
_JOINS = {
    "Isolated": (), "Removed": (), "Contiguous": ((True, True), (False, False)),
    "MergedWithPrevious": ((False, True),), "MergedWithNext": ((True, False),),
}


def _cut(pieces: list[str], pattern: regex.Pattern, behavior: str, invert: bool = False) -> list[str]:
    """Cut pieces at the matches of ``pattern``; ``behavior`` says where a match goes, ``invert`` swaps the roles."""
    result: list[str] = []
    for piece in pieces:
        position, before = 0, None
        spans = [found.span() for found in pattern.finditer(piece) if found.group()]
        for start, end in [*spans, (len(piece), len(piece))]:
            for text, is_match in ((piece[position:start], invert), (piece[start:end], not invert)):
                if not text or (is_match and behavior == "Removed"):
                    continue
                if (before, is_match) in _JOINS[behavior]:
                    result[-1] += text
                else:
                    result.append(text)
                before = is_match
            position = end
    return result
