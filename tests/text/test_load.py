"""Tokenizers from files: what is read, and what is refused."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from transformers import AutoTokenizer

from minillm.errors import ModelError
from minillm.text import pretokenize
from minillm.text.tokenizer import load_tokenizer


def rewritten(kind, folder, **changes):
    """A copy of a tokenizer.json with some sections replaced."""
    spec = json.loads((kind.folder / "tokenizer.json").read_text(encoding="utf-8"))
    spec["model"] |= changes.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(spec | changes), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("changes", "named"), [
    ({"pre_tokenizer": {"type": "Whitespace"}}, "'Whitespace'"),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Odd", "invert": False}}, "'Odd'"),
    ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]}},
     "ByteLevel"),
    ({"normalizer": {"type": "Lowercase"}}, "'Lowercase'"),
    ({"decoder": {"type": "WordPiece"}}, "'WordPiece'"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 0, "stop": 1}]}},
     "'Strip'"),
    ({"decoder": None}, "no decoder"),
    ({"post_processor": {"type": "BertProcessing"}}, "'BertProcessing'"),
    ({"model": {"type": "Unigram"}}, "'Unigram'"),
    ({"model": {"dropout": 0.1}}, "'dropout'"),
    ({"model": {"end_of_word_suffix": "</w>"}}, "'end_of_word_suffix'"),
    ({"model": {"merges": [["nobody", "knows"]]}}, "knows"),
    ({"model": {"merges": None}}, "needs 'merges'"), ({"model": {"vocab": []}}, "needs 'vocab'"),
])
def test_unknown_parts_are_refused_by_name(train_kind, tmp_path, changes, named):
    """T03"""
    with pytest.raises(ModelError, match=named):
        load_tokenizer(rewritten(train_kind("gpt2"), tmp_path, **changes))


def test_missing_and_broken_files_say_so(tmp_path):
    with pytest.raises(ModelError, match="tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("config", [
    {}, {"bos_token": "<|bos|>", "add_bos_token": True}, {"bos_token": "<|bos|>", "add_bos_token": False},
    {"bos_token": {"__type": "AddedToken", "content": "<|bos|>"}, "eos_token": "<|new|>", "add_eos_token": True},
])
@pytest.mark.parametrize("name", ["llama3", "qwen2"])
def test_a_folder_gives_the_ids_of_transformers(train_kind, tmp_path, name, config):
    """tokenizer_config.json may name tokens that tokenizer.json lacks; its add_bos_token has no say."""
    folder = rewritten(train_kind(name), tmp_path)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}), encoding="utf-8")
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    for text in ("hello <|new|> <|eos|>x", ""):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_chat_templates_are_found_wherever_they_are(train_kind, tmp_path):
    folder = rewritten(train_kind("gpt2"), tmp_path)
    config = folder / "tokenizer_config.json"
    for stored in ("A", [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]):
        config.write_text(json.dumps({"chat_template": stored}), encoding="utf-8")
        assert load_tokenizer(folder).chat_template == "A"
    (folder / "chat_template.jinja").write_text("C", encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "C"


def test_the_default_model_says_who_it_is(default_kind):
    tokenizer = default_kind.ours
    pad_token_id = tokenizer.added_tokens[tokenizer.named_tokens["pad_token"]]
    assert (tokenizer.vocab_size, tokenizer.eos_token_id, pad_token_id) == (49152, 2, 2)
    assert tokenizer.special_tokens["<|im_start|>"] == 1 and len(tokenizer.special_tokens) == 17
    assert "<|im_start|>" in tokenizer.chat_template
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special_tokens=False)


def write_gguf(path, kind, model: str, pre: str | None, scores: list[float] | None = None):
    """The vocabulary of ``kind`` as a GGUF file."""
    spec = json.loads((kind.folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = {**spec["model"]["vocab"], **{token["content"]: token["id"] for token in spec["added_tokens"]}}
    special = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    types = [special.get(i, 6 if token.startswith("<0x") else 1) for i, token in enumerate(tokens)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(1 if model == "llama" else 0)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if scores is None:
        writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    else:
        writer.add_token_scores(scores)
        writer.add_unk_token_id(0)
    writer.add_tensor("x", np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# The flags of added tokens and texts with them stay out: GGUF has no place for flags.
@pytest.mark.parametrize(("name", "pre"), [
    ("gpt2", "gpt-2"), ("smollm2", "smollm"), ("llama3", "llama-bpe"), ("qwen2", "qwen2"), ("mistral-tekken", "tekken"),
])
def test_byte_level_gguf_files_give_the_same_ids(train_kind, corpus, tmp_path, name, pre):
    """T03"""
    kind = train_kind(name)
    ours = load_tokenizer(write_gguf(tmp_path / "m.gguf", kind, "gpt2", pre))
    for text in [*corpus, "a<|im_end|> b", "<tool>x"]:
        assert ours.encode(text) == kind.oracle.encode(text).ids, text


def test_a_sentencepiece_gguf_file_merges_by_score(train_kind, corpus, tmp_path):
    """The vocabulary's own order as scores: the merges the trainer made, best first."""
    kind = train_kind("llama2")
    size = kind.ours.vocab_size
    ours = load_tokenizer(write_gguf(tmp_path / "m.gguf", kind, "llama", "default", [-float(i) for i in range(size)]))
    # Scores allow every split of a piece, the oracle's list the trained one: give it all of them.
    spec = json.loads(kind.oracle.to_str())
    vocab = spec["model"]["vocab"]
    normal = [t for t in sorted(vocab, key=vocab.get) if not t.startswith("<0x") and t not in ("<unk>", "<s>", "</s>")]
    known = set(normal)
    spec["model"]["merges"] = [[t[:cut], t[cut:]] for t in normal for cut in range(1, len(t))
                               if t[:cut] in known and t[cut:] in known]
    oracle = type(kind.oracle).from_str(json.dumps(spec))
    for text in [*corpus, "a</s> b", "<tool>x"]:
        assert ours.encode(text) == oracle.encode(text).ids, text
        plain = oracle.encode(text, add_special_tokens=False).ids
        assert ours.decode(plain) == oracle.decode(plain, skip_special_tokens=False)


@pytest.mark.parametrize(("model", "pre", "named"), [
    ("gpt2", None, "None"), ("gpt2", "default", "'default'"), ("gpt2", "martian", "'martian'"), ("bert", "x", "'bert'"),
])
def test_unknown_gguf_tokenizers_are_refused_by_name(train_kind, tmp_path, model, pre, named):
    """T03"""
    with pytest.raises(ModelError, match=named):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", train_kind("gpt2"), model, pre))


def test_a_gguf_tokenizer_without_merges_names_the_missing_key(train_kind, tmp_path):
    with pytest.raises(ModelError, match=r"lacks the key tokenizer\.ggml\.merges"):
        load_tokenizer(write_gguf(tmp_path / "m.gguf", train_kind("gpt2"), "gpt2", "gpt-2", scores=[0.0] * 10))


@pytest.mark.parametrize(("file", "content"), [
    ("tokenizer.json", "[]"), ("tokenizer.json", "{}"),
    ("tokenizer.json", '{"model": {"vocab": {"a": "0"}, "merges": []}, "decoder": {"type": "ByteLevel"}}'),
    ("tokenizer.json", '{"model": {"vocab": {"a": -5}, "merges": []}, "decoder": {"type": "ByteLevel"}}'),
    ("tokenizer_config.json", '{"chat_template": 5}'), ("tokenizer_config.json", '{"bos_token": 5}'),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}'), ("tokenizer_config.json", "[1]"),
])
def test_damaged_tokenizer_files_are_a_model_error(train_kind, tmp_path, file, content):
    """Whatever the damage is, the message says which model it is in."""
    rewritten(train_kind("gpt2"), tmp_path)
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=tmp_path.name):
        load_tokenizer(tmp_path)


def test_split_behaviors_equal_the_oracle():
    from tokenizers import Regex, pre_tokenizers

    names = {"removed": "Removed", "isolated": "Isolated", "merged_with_previous": "MergedWithPrevious",
             "merged_with_next": "MergedWithNext", "contiguous": "Contiguous"}
    for theirs, name in names.items():
        for invert in (False, True):
            split = pre_tokenizers.Split(Regex(r"\d"), theirs, invert)
            spec = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": name, "invert": invert}
            ours = pretokenize.build_pre_tokenizer(spec)
            for text in ("a1b22c", "12", "ab", "1a", "a1", "11a11"):
                assert ours(text, True) == [piece for piece, _ in split.pre_tokenize_str(text)], (name, invert, text)
