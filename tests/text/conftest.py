"""Tokenizers of every kind, small and trained here, each beside the ``tokenizers`` library's own: the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from minillm.errors import DownloadError
from minillm.model.gguf_file import read_gguf
from minillm.model.hub import resolve
from minillm.text import pretokenize
from minillm.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WHITESPACE_AND_CONTROLS = [
    "", " ", "  ", "\n", "\n\n\n", "\t", " \t \n", "\r\n", "\r\r\n \n", "a\r\nb", "   x", "x   ", "\n  x\n\n   y  \n",
    "\u00a0x\u00a0\u00a0y", "\u2003 \u2009x", "\u3000x", "\u200bx\u200d", "\ufeffx", "\u2028x\u2029", "a\x00b",
    "\x1c\x1d\x1e\x1f x", "\x85x", "\x0b\x0c", "".join(map(chr, range(32))), "".join(map(chr, range(127, 161))),
    "\ufffd\ufffe\uffff", "\U0010ffff", "\ue000", "x" + " " * 300 + "y", "\n" * 70, " \u0301x", "user\n\nWrite",
    "tab\tx",
]


class Kind(NamedTuple):
    """Ours and the oracle, of one kind of tokenizer."""

    name: str
    ours: Tokenizer
    oracle: tokenizers.Tokenizer
    folder: Path


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Prose in two dozen scripts, code, numbers, emoji, odd characters, whitespace and control characters."""
    text = Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8")
    return [text, *text.split("\n\n"), *WHITESPACE_AND_CONTROLS]


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """The BYTE tokenizer of the field cases, with a ChatML template."""
    return byte_tokenizer(chat_template=CHATML)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])


def _byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None,
                bos: str | None = None, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True) if bos is None else processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, 0)]),
    ])
    return tokenizer


def _sentencepiece(metaspace: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B",
                                                             special_tokens=[("<s>", 1)])
    return tokenizer


_BYTE_LEVEL_SPECIALS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
_KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2-prefix-space": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "smollm2": lambda: _byte_level(pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
    "llama3": lambda: _byte_level(_split(pretokenize.LLAMA3_PATTERN), bos="<|bos|>", ignore_merges=True),
    "qwen2": lambda: _byte_level(_split(pretokenize.QWEN2_PATTERN), normalizers.NFC()),
    "mistral-tekken": lambda: _byte_level(_split(pretokenize.TEKKEN_PATTERN), bos="<|bos|>", ignore_merges=True),
    "llama2": lambda: _sentencepiece(metaspace=False),
    "mistral": lambda: _sentencepiece(metaspace=True),
}


def _with_byte_tokens(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The trainer knows no byte tokens: add the 256 that byte fallback needs to the vocabulary."""
    spec = json.loads(tokenizer.to_str())
    vocab = spec["model"]["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _train(name: str, folder: Path, corpus: list[str]) -> Kind:
    tokenizer = _KINDS[name]()
    sentencepiece = name in ("llama2", "mistral")
    trainer = trainers.BpeTrainer(
        vocab_size=700 if sentencepiece else 900, show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>"] if sentencepiece else _BYTE_LEVEL_SPECIALS,
        initial_alphabet=[] if sentencepiece else pre_tokenizers.ByteLevel.alphabet(),
        limit_alphabet=250 if sentencepiece else 1000,  # SentencePiece kinds get something to fall back from
    )
    # Whole paragraphs have no border inside for the SentencePiece kinds; words keep training quick.
    tokenizer.train_from_iterator(corpus[0].split() if sentencepiece else [corpus[0]], trainer)
    if sentencepiece:
        tokenizer = _with_byte_tokens(tokenizer)
    tokenizer.add_tokens([
        tokenizers.AddedToken("<tool>", normalized=False),
        tokenizers.AddedToken("<norm>", normalized=True),
        tokenizers.AddedToken("<l>", lstrip=True, normalized=False),
        tokenizers.AddedToken("<r>", rstrip=True, normalized=False),
        tokenizers.AddedToken("<lr>", lstrip=True, rstrip=True, normalized=False),
        tokenizers.AddedToken("word", single_word=True, normalized=False),
        tokenizers.AddedToken("<tool>x", normalized=False),
    ])
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return Kind(name, load_tokenizer(folder), tokenizers.Tokenizer.from_file(str(file)), folder)


@pytest.fixture(scope="session", params=_KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> Kind:
    """One of every kind of tokenizer that a supported model family uses."""
    return _train(request.param, tmp_path_factory.mktemp(request.param), corpus)


@pytest.fixture(scope="session")
def train_kind(tmp_path_factory: pytest.TempPathFactory, corpus: list[str]) -> Callable[[str], Kind]:
    """Trains the kind of that name."""
    return lambda name: _train(name, tmp_path_factory.mktemp(name), corpus)


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The default model's GGUF file; fetched where the machine doesn't have it yet."""
    try:
        return resolve("smollm2-135m")
    except DownloadError as error:
        pytest.skip(f"the default model cannot be fetched: {error}")


@pytest.fixture(scope="session")
def default_kind(default_model: Path) -> Kind:
    """The default model's own vocabulary, ours from the GGUF and the oracle built from its lists."""
    data = read_gguf(default_model).metadata
    tokens, merges = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.merges"]
    oracle = tokenizers.Tokenizer(models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[tuple(merge.split(" ")) for merge in merges]))
    oracle.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    oracle.decoder = decoders.ByteLevel()
    types = data["tokenizer.ggml.token_type"]
    oracle.add_special_tokens([token for token, kind in zip(tokens, types) if kind == 3])
    return Kind(default_model.stem, load_tokenizer(default_model), oracle, default_model)
