"""Merging by rank, training, and the text around both."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.errors import InvalidRequest
from minillm.text.bpe import alphabet_to_bytes, bytes_to_alphabet, merge, merges_from_scores, train_merges
from minillm.text.pretokenize import GPT2_PATTERN, LLAMA3_PATTERN, QWEN2_PATTERN
from minillm.text.tokenizer import train_bpe


def pre_tokens(pattern: str, text: str) -> list[str]:
    return regex.findall(pattern, text)


def test_gpt2_pre_tokens_keep_every_space():
    """T01"""
    assert pre_tokens(GPT2_PATTERN, "  Hello World.") == [" ", " Hello", " World", "."]
    assert pre_tokens(GPT2_PATTERN, "    if x:\n") == ["   ", " if", " x", ":", "\n"]


@pytest.mark.parametrize("text", ["  Hello World.", "hello\nworld", "    if x:\n", "\n\n\n", " "])
def test_whitespace_survives(byte_level, default_kind, text):
    """T01"""
    for tokenizer in (byte_level, default_kind.ours):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_lowest_rank_merges_first():
    """T02 a"""
    a, b, c, bc, ab = range(5)
    assert merge([a, b, c], {(b, c): (0, bc), (a, b): (1, ab)}) == [a, bc]


def test_training_counts_and_ties():
    """T02 b: first seen wins a tie; ``aaa`` holds ``aa`` once."""
    tokenizer = train_bpe("aaabdaaabac", 3)
    assert train_merges([b"aaabdaaabac"], 3, 256) == [(97, 97), (256, 97), (257, 98)]
    assert tokenizer.encode("aaabdaaabac") == [258, 100, 258, 97, 99]
    # aa occurs twice without overlap (3 times with), xy three times:
    assert train_merges([b"aaaa", b"xy", b"xy", b"xy"], 1, 256) == [(120, 121)]


def test_training_does_not_depend_on_the_hash_seed():
    """T02 c"""
    code = ("from minillm.text.bpe import train_merges; "
            "print(train_merges([w.encode() for w in 'the cat sat on the mat with that hat'.split()], 20, 256))")
    runs = [subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
                           capture_output=True, check=True).stdout for seed in "01"]
    assert runs[0] == runs[1] != ""


def test_training_never_crosses_pre_token_borders():
    """T02 d"""
    tokenizer = train_bpe("ab ab ab", 10)
    learned = [tokenizer.token_bytes(i).decode() for i in range(256, tokenizer.vocab_size)]
    assert learned == ["ab", " ab"]
    assert all(len(pre_tokens(GPT2_PATTERN, token)) == 1 for token in learned)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(words=st.lists(st.text("ab", max_size=7), max_size=6))
def test_training_equals_counting_again_from_nothing(words):
    expected, now = [], [list(word.encode()) for word in words]
    for new_id in range(256, 261):
        counts: dict[tuple[int, int], int] = {}
        for word in now:
            for pair in dict.fromkeys(zip(word, word[1:])):
                counts[pair] = counts.get(pair, 0) + len(word) - len(merge(word, {pair: (0, new_id)}))
        if max(counts.values(), default=0) < 2:
            break
        expected.append(max(counts, key=counts.get))  # the first of the most frequent
        now = [merge(word, {expected[-1]: (0, new_id)}) for word in now]
    assert train_merges([word.encode() for word in words], 5, 256) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ids=st.lists(st.integers(0, 3), max_size=24), seed=st.integers(0, 2**16))
def test_merging_equals_rescanning(ids, seed):
    """The heap gives what the plain definition gives: join the best pair, leftmost first, and look again."""
    chance = random.Random(seed)
    pairs = [(a, b) for a in range(10) for b in range(10)]
    table = {pair: (rank, 4 + rank) for rank, pair in enumerate(chance.sample(pairs, 6))}
    expected = list(ids)
    while ranked := [(table[pair][0], i) for i, pair in enumerate(zip(expected, expected[1:])) if pair in table]:
        _, i = min(ranked)
        expected[i: i + 2] = [table[expected[i], expected[i + 1]][1]]
    assert merge(ids, table) == expected


def test_merging_a_long_piece_is_not_quadratic():
    """A million ids at quadratic cost would take hours."""
    table = {(0, 0): (0, 1), (1, 1): (1, 2), (2, 2): (2, 3)}
    start = time.perf_counter()
    assert merge([0] * 200_000, table) == [3] * 25_000
    assert time.perf_counter() - start < 20


def test_scores_order_merges():
    vocab = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4, "abc": 5}
    table = merges_from_scores(vocab, [0, 0, 0, -2.0, -1.0, -3.0])
    assert merge([0, 1, 2], table) == [5]
    del table[0, 4]
    assert merge([0, 1, 2], table) == [0, 4]


@pytest.mark.parametrize(("text", "gpt2", "llama3", "qwen2"), [
    ("3333333", ["3333333"], ["333", "333", "3"], ["3"] * 7),
    ("user\n\nWrite", ["user", "\n", "\n", "Write"], ["user", "\n\n", "Write"], ["user", "\n\n", "Write"]),
    ("CAT'S", ["CAT", "'", "S"], ["CAT", "'S"], ["CAT", "'S"]),
    ("tab\tx", ["tab", "\t", "x"], ["tab", "\tx"], ["tab", "\tx"]),
])
def test_patterns_of_the_families(text, gpt2, llama3, qwen2):
    """T03"""
    assert pre_tokens(GPT2_PATTERN, text) == gpt2
    assert pre_tokens(LLAMA3_PATTERN, text) == llama3
    assert pre_tokens(QWEN2_PATTERN, text) == qwen2


def test_spaces_around_special_tokens_stay(byte_level):
    """T05"""
    ids = byte_level.encode("x <|im_end|>  y")
    assert ids == [120, 32, 259, 32, 32, 121]
    for text in ("x <|im_end|>  y", "hello !", "I 'm", "   leading"):
        assert byte_level.decode(byte_level.encode(text)) == text


def test_lone_surrogates_are_refused(byte_level, default_kind):
    """T06"""
    for tokenizer in (byte_level, default_kind.ours):
        with pytest.raises(InvalidRequest, match="surrogate"):
            tokenizer.encode("hi \ud800 x")
    with pytest.raises(InvalidRequest, match="surrogate"):
        train_bpe("\udfff", 1)


def test_odd_bytes_round_trip(byte_level):
    """T06"""
    assert byte_level.encode("\U0001f600") == [0xF0, 0x9F, 0x98, 0x80]
    assert byte_level.decode(byte_level.encode("a\x00b")) == "a\x00b"
    assert byte_level.decode([0xFF, 0xFE]) == "\ufffd\ufffd"


@pytest.mark.parametrize("token_id", [-1, 261, 10**9])
def test_ids_outside_the_vocabulary_are_refused(byte_level, token_id):
    with pytest.raises(InvalidRequest, match="vocabulary"):
        byte_level.decode([token_id])


def test_the_byte_alphabet_is_reversible():
    data = bytes(range(256))
    assert alphabet_to_bytes(bytes_to_alphabet(data)) == data
    assert bytes_to_alphabet(b" \n") == "ĠĊ"
    assert alphabet_to_bytes("<| x|>") == b"<| x|>"
