"""Tokenizers from files: a Hugging Face folder or a GGUF file. No torch.

The formats: https://huggingface.co/docs/tokenizers and the GGUF specification of ggml (``docs/gguf.md``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minillm.errors import ModelError
from minillm.model.config import read_json
from minillm.model.gguf_file import read_gguf
from minillm.text import pretokenize
from minillm.text.added import AddedToken
from minillm.text.bpe import BytePairEncoder, Pair, alphabet_to_bytes, merges_from_scores
from minillm.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"
_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """Read ``tokenizer.json``, and beside it ``tokenizer_config.json``, ``special_tokens_map.json`` and
    ``chat_template.jinja`` where they exist.

    Raises:
        ModelError: ``tokenizer.json`` is missing or broken, or names a part that is not known here.
    """
    spec = read_json(path / "tokenizer.json")
    if spec is None:
        raise ModelError(f"{path} has no tokenizer.json: save the tokenizer with transformers' save_pretrained first")
    config = read_json(path / "tokenizer_config.json") or {}
    names = (read_json(path / "special_tokens_map.json") or {}) | config
    named = {name: text for name in _NAMES if (text := _text(names.get(name)))}
    model = spec["model"]
    _check_model(model)
    added = _added_tokens(spec, config, named, model["vocab"])
    special_ids = frozenset(token.id for token in added if token.special)
    prefix_ids, suffix_ids = _template(spec.get("post_processor"))
    return _build(spec, list(model["vocab"].items()), _merges(model, model["vocab"], special_ids), special_ids,
                  added=added, prefix_ids=prefix_ids, suffix_ids=suffix_ids, named_tokens=named,
                  chat_template=_chat_template(path, config))


def _build(spec: Mapping[str, Any], tokens: list[tuple[str, int]], merges: dict[Pair, tuple[float, int]],
           no_text: frozenset[int], *, added: list[AddedToken], **options: Any) -> Tokenizer:
    """The tokenizer that the sections of a tokenizer.json describe; ids in ``no_text`` are never made of plain text."""
    model, pre_tokenizer = spec["model"], spec.get("pre_tokenizer")
    to_bytes, strip_leading_space = _decoder(spec.get("decoder"))
    encoder = BytePairEncoder(
        {text: token_id for text, token_id in tokens if token_id not in no_text}, merges,
        byte_level=any(step["type"] == "ByteLevel" for step in pretokenize.flatten(pre_tokenizer, "pretokenizers")),
        byte_fallback=bool(model.get("byte_fallback")), ignore_merges=bool(model.get("ignore_merges")),
        unknown_id=dict(tokens).get(model.get("unk_token")), fuse_unknown=bool(model.get("fuse_unk")))
    table = [b""] * (1 + max([*(i for _, i in tokens), *(token.id for token in added)], default=-1))
    for text, token_id in tokens:
        table[token_id] = to_bytes(text)
    normalizer = spec.get("normalizer") and pretokenize.build_normalizer(spec["normalizer"])
    for token in added:  # one that is looked for in normalized text stands for what was found there
        table[token.id] = to_bytes(normalizer(token.content)) if normalizer and token.normalized else \
            token.content.encode()
    return Tokenizer(
        table, encoder, added=added, strip_leading_space=strip_leading_space, normalizer=normalizer,
        pre_tokenizer=pretokenize.build_pre_tokenizer(pre_tokenizer), **options)


def _check_model(model: Mapping[str, Any]) -> None:
    if (kind := model.get("type", "BPE")) != "BPE":
        raise ModelError(f"unknown tokenizer model {kind!r}: only byte pair encoding (BPE) is supported")
    for key, form in (("vocab", dict), ("merges", list)):
        if not isinstance(model.get(key), form):
            raise ModelError(f"the tokenizer's BPE model needs {key!r}, which is missing or damaged: fetch it again")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ModelError(f"tokenizer option {option!r} = {model[option]!r} is not supported: use another model")


def _merges(model: Mapping[str, Any], vocab: dict[str, int],
            special_ids: frozenset[int]) -> dict[Pair, tuple[float, int]]:
    """Pairs of token texts, best first, as ``(left id, right id) -> (rank, merged id)``.

    A merge that would make a control token is left out: plain text never becomes one.
    """
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
    try:
        return {(vocab[left], vocab[right]): (rank, merged) for rank, (left, right) in enumerate(pairs)
                if (merged := vocab[left + right]) not in special_ids}
    except (KeyError, ValueError) as error:
        raise ModelError(f"a merge of the tokenizer names a token that is not in its vocabulary: {error}") from error


def _text(token: str | Mapping[str, Any] | None) -> str | None:
    return token["content"] if isinstance(token, Mapping) else token


def _added_tokens(spec: Mapping[str, Any], config: Mapping[str, Any], named: Mapping[str, str],
                  vocab: Mapping[str, int]) -> list[AddedToken]:
    """Those of tokenizer.json, then those that only tokenizer_config.json knows, then named ones that neither lists."""
    by_id = config.get("added_tokens_decoder", {}).items()
    added: dict[str, AddedToken] = {}
    for entry in (*spec.get("added_tokens", ()), *({"id": int(token_id), **token} for token_id, token in by_id)):
        known = {name: entry[name] for name in AddedToken.__slots__ if name in entry}
        added.setdefault(entry["content"], AddedToken(**known))
    for text in named.values():
        next_id = 1 + max([*vocab.values(), *(token.id for token in added.values())], default=-1)
        added.setdefault(text, AddedToken(vocab.get(text, next_id), text, special=True))
    return list(added.values())


def _decoder(spec: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """A token's bytes, and whether one leading space of a whole text is dropped.

    Bytes of byte-fallback tokens are joined before they are read as UTF-8, as SentencePiece does.
    """
    steps = pretokenize.flatten(spec, "decoders")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return alphabet_to_bytes, False
    replaced: list[tuple[str, str]] = []
    strip = False
    for i, step in enumerate(steps):
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if "Fuse" not in kinds[:i]:
                replaced.append((old, new))
            case {"type": "Metaspace", "replacement": old}:
                replaced.append((old, " "))
                strip = step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if "Fuse" in kinds[:i]:
                strip = bool(start)
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise ModelError(f"unknown decoder {dict(step)!r}: this tokenizer cannot be reproduced exactly")
    if not steps:
        raise ModelError("the tokenizer has no decoder, so its tokens cannot become text: use another model")

    def to_bytes(token: str) -> bytes:
        if "ByteFallback" in kinds and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(found[1])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes, strip


def _template(spec: Mapping[str, Any] | None) -> tuple[list[int], list[int]]:
    """The ids before and after a text. (``add_bos_token`` in tokenizer_config.json is older, and has no say.)"""
    prefix: list[int] = []
    suffix: list[int] = []
    for step in pretokenize.flatten(spec, "processors"):
        if step["type"] == "TemplateProcessing":
            side = prefix
            for item in step["single"]:
                if "Sequence" in item:
                    side = suffix
                else:
                    side += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
        elif step["type"] != "ByteLevel":  # that one moves offsets, not ids
            raise ModelError(f"unknown post-processor {step['type']!r}: use another model")
    return prefix, suffix


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{path}: the chat template is no text: fetch the model again")
    return template


# GGUF's name of a pre-tokenizer: (pattern, digits cut one by one first, normalizer, whole tokens first, BOS by default)
_GGUF_PRE_TOKENIZERS: dict[str, tuple[str, bool, str | None, bool, bool]] = {
    **dict.fromkeys(("gpt-2", "phi-2"), (pretokenize.GPT2_PATTERN, False, None, False, False)),
    **dict.fromkeys(("smollm", "starcoder"), (pretokenize.GPT2_PATTERN, True, None, False, False)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), (pretokenize.LLAMA3_PATTERN, False, None, True, True)),
    "qwen2": (pretokenize.QWEN2_PATTERN, False, "NFC", False, False),
    "tekken": (pretokenize.TEKKEN_PATTERN, False, None, True, True),
}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """Read the tokenizer from the metadata of a GGUF file.

    Raises:
        ModelError: no tokenizer inside, or a model or pre-tokenizer name that is not known here.
    """
    prefix = "tokenizer.ggml."
    metadata = read_gguf(path).metadata
    data = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    kind, tokens = data.get("model"), data.get("tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise ModelError(f"{path}: unknown GGUF tokenizer model {kind!r}; known: 'gpt2' and 'llama'")
    describe, order = (_gguf_byte_level, "merges") if kind == "gpt2" else (_gguf_sentencepiece, "scores")
    if order not in data:
        raise ModelError(f"{path} lacks the key tokenizer.ggml.{order}: fetch the model again")
    if kind == "gpt2" and (pre := data.get("pre")) not in _GGUF_PRE_TOKENIZERS:
        raise ModelError(f"{path}: unknown GGUF pre-tokenizer {pre!r}; known: {', '.join(_GGUF_PRE_TOKENIZERS)}")
    types = data.get("token_type") or [_NORMAL] * len(tokens)
    added = [AddedToken(i, text, special=types[i] == _CONTROL)
             for i, text in enumerate(tokens) if types[i] in (_CONTROL, _USER_DEFINED)]
    ids = {name: token_id for name, key in zip(_NAMES, ("bos", "eos", "unknown", "padding"))
           if (token_id := data.get(f"{key}_token_id")) is not None and token_id < len(tokens)}
    spec, merges, no_text, add_bos = describe(data, {text: i for i, text in enumerate(tokens)}, types)
    return _build(spec, list(zip(tokens, range(len(tokens)))), merges, no_text, added=added,
                  prefix_ids=[ids["bos_token"]] if "bos_token" in ids and data.get("add_bos_token", add_bos) else [],
                  suffix_ids=[ids["eos_token"]] if "eos_token" in ids and data.get("add_eos_token") else [],
                  named_tokens={name: tokens[token_id] for name, token_id in ids.items()},
                  chat_template=metadata.get("tokenizer.chat_template"))


# What tokenizer.json would say (see _build), its merges, the ids that text never becomes, and whether BOS is added.
_Described = tuple[dict[str, Any], dict[Pair, tuple[float, int]], frozenset[int], bool]


def _gguf_byte_level(data: Mapping[str, Any], vocab: dict[str, int], types: list[int]) -> _Described:
    pattern, digits, normalizer, ignore_merges, add_bos = _GGUF_PRE_TOKENIZERS[data["pre"]]
    spec = {
        "model": {"ignore_merges": ignore_merges},
        "normalizer": {"type": normalizer} if normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            *([{"type": "Digits", "individual_digits": True}] if digits else []),
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]},
        "decoder": {"type": "ByteLevel"},
    }
    control = frozenset(i for i, kind in enumerate(types) if kind == _CONTROL)
    return spec, _merges(data, vocab, control), control, add_bos


def _gguf_sentencepiece(data: Mapping[str, Any], vocab: dict[str, int], types: list[int]) -> _Described:
    unknown, prefixed = data.get("unknown_token_id"), data.get("add_space_prefix", True)
    spec = {
        "model": {"byte_fallback": _BYTE in types, "fuse_unk": True,
                  "unk_token": None if unknown is None else data["tokens"][unknown]},
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": _SPACE_MARK if prefixed else ""},
            {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK},
        ]},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": int(prefixed), "stop": 0},
        ]},
    }
    merges = merges_from_scores({text: i for text, i in vocab.items() if types[i] == _NORMAL}, data["scores"])
    return spec, merges, frozenset(i for i, kind in enumerate(types) if kind not in (_NORMAL, _BYTE)), True
