"""Streamed text equals the whole, characters come whole, and stop strings never show."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minillm.errors import InvalidRequest
from minillm.text.detokenizer import Detokenizer

relaxed = settings(max_examples=100, deadline=None, derandomize=True,
                   suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(tokenizer, ids, *, stop=(), skip_special_tokens=True) -> tuple[list[str], Detokenizer]:
    """The delivered pieces, one id at a time, the flush last."""
    detokenizer = Detokenizer(tokenizer, stop=stop, skip_special_tokens=skip_special_tokens)
    return [detokenizer.add([i]) for i in ids] + [detokenizer.finish()], detokenizer


@pytest.mark.parametrize(("data", "pieces"), [
    ("f09fa69921", ["", "", "", "🦙", "!", ""]),
    ("c48f", ["", "ď", ""]),
    ("e8aebf", ["", "", "访", ""]),
    ("f09f91a8e2808df09f91a9", ["", "", "", "👨", "", "", "\u200d", "", "", "", "👩", ""]),
    ("4869f09f", ["H", "i", "", "", "\ufffd"]),
    ("68ff69", ["h", "\ufffd", "i", ""]),
    ("eda08041", ["", "", "\ufffd\ufffd\ufffd", "A", ""]),  # half a surrogate pair
    ("9f988041", ["\ufffd", "\ufffd", "\ufffd", "A", ""]),
])
def test_characters_arrive_whole_and_invalid_bytes_delay_nothing(byte_level, data, pieces):
    """D01, D02"""
    delivered, _ = stream(byte_level, bytes.fromhex(data))
    assert delivered == pieces
    assert "".join(delivered) == byte_level.decode(list(bytes.fromhex(data)))


@relaxed
@given(data=st.data(), skip=st.booleans())
def test_pieces_joined_equal_the_full_decode(kind, data, skip):
    """D01, D02: any ids of any kind of tokenizer, in any grouping, with a stop string that never comes."""
    ids = data.draw(st.lists(st.integers(0, kind.ours.vocab_size - 1), max_size=30))
    stop = data.draw(st.sampled_from([(), ("\x01 never",)]))
    detokenizer, text, position = Detokenizer(kind.ours, stop=stop, skip_special_tokens=skip), "", 0
    while position < len(ids):
        size = data.draw(st.integers(1, 4))
        text += detokenizer.add(ids[position: position + size])
        position += size
    assert text + detokenizer.finish() == kind.ours.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == len(ids)


@relaxed
@given(data=st.binary(max_size=12), specials=st.lists(st.tuples(st.integers(0, 12), st.integers(256, 260)), max_size=3),
       skip=st.booleans())
def test_any_bytes_equal_the_full_decode(byte_level, data, specials, skip):
    """D02: special tokens in the middle of a character included."""
    ids = list(data)
    for position, special in specials:
        ids.insert(position, special)
    delivered, _ = stream(byte_level, ids, skip_special_tokens=skip)
    assert "".join(delivered) == byte_level.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(("text", "stop", "expected", "found", "num_tokens"), [
    ("ABCDEFGHIJKL", ["DEFGHIJ"], "ABC", "DEFGHIJ", 10),
    ("ABCDEFGHIX", ["DEFGHIJ"], "ABCDEFGHIX", None, 10),
    ("Paris", ["Pari"], "", "Pari", 4),
    ("abcd", ["bcd", "b"], "a", "b", 2),
    ("xxabc", ["abc", "bc"], "xx", "abc", 5),
    ("ABCDEF", ["DEFGHIJ"], "ABCDEF", None, 6),
    ("aaab", ["aab"], "a", "aab", 4),
    ("héllo", ["llo"], "hé", "llo", 6),
    ("abcd", [], "abcd", None, 4),
])
def test_stop_strings(byte_level, text, stop, expected, found, num_tokens):
    """P01, P02: found across token borders, near misses whole, held text flushed; no stops stop nothing."""
    delivered, detokenizer = stream(byte_level, text.encode(), stop=stop)
    assert "".join(delivered) == expected
    assert (detokenizer.stop_string, detokenizer.num_tokens) == (found, num_tokens)
    together = Detokenizer(byte_level, stop=stop)
    assert together.add(list(text.encode())) + together.finish() == expected
    assert together.num_tokens == num_tokens


def test_a_hidden_special_token_can_be_a_stop_string(byte_level):
    """P03"""
    delivered, detokenizer = stream(byte_level, [72, 105, 259, 88, 88], stop=["<|im_end|>"])
    assert "".join(delivered) == "Hi"
    assert (detokenizer.stop_string, detokenizer.num_tokens) == ("<|im_end|>", 3)


@pytest.mark.parametrize(("ids", "stop", "expected"), [
    ([72, 105, 259, 88], "i<|im_end|>X", "H"),       # part visible, part hidden
    ([72, 105, 259, 88], "iX", "H"),                 # the visible text alone
    ([72, 105, 259, 89], "i<|im_end|>X", "HiY"),     # a near miss
    ([0xC4, 259, 0x8F, 88], "<|im_end|>ď", ""),      # a character around a hidden token
])
def test_stop_strings_around_hidden_tokens(byte_level, ids, stop, expected):
    """P03"""
    assert "".join(stream(byte_level, ids, stop=[stop])[0]) == expected


@relaxed
@given(text=st.text("abc", max_size=20), stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stop_strings_against_searching_the_whole(byte_level, text, stop):
    """P01: cut before the stop string that is complete first; nothing of it was delivered before."""
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    longest = max((s for s in stop if text[:ends[0]].endswith(s)), key=len) if ends else None
    expected = text if longest is None else text[: ends[0] - len(longest)]
    delivered, detokenizer = stream(byte_level, text.encode(), stop=stop)
    assert "".join(delivered) == expected
    assert detokenizer.stop_string == longest


def test_an_empty_stop_string_is_refused(byte_level):
    """P02"""
    with pytest.raises(InvalidRequest, match="empty"):
        Detokenizer(byte_level, stop=["x", ""])


def test_held_text_is_no_longer_than_the_match_in_progress(byte_level):
    detokenizer = Detokenizer(byte_level, stop=["\n\nQ"])
    assert [detokenizer.add([i]) for i in b"a\nb\n\nR"] == ["a", "", "\nb", "", "", "\n\nR"]
