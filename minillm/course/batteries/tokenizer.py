"""Cases for a tokenizer's encoder: ids against merging by rescanning, borders, repetition, and the way back to text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from minillm.course.batteries import Case, differs
from minillm.text.bpe import BYTE_TO_CHAR, BytePairEncoder, bytes_to_alphabet
from minillm.text.tokenizer import Tokenizer

_EDGES = ("a", " ", "\n", "\0", "aa", "aaa", "aaaa", "aaaaa", "abab", "ababa", "  ", "\t \n", "é", "ß", "日本語", "🙂",
          "e\u0301", "👩\u200d👩\u200d👧", "don't", "1234567", "\u2028", "\ufeff", "\u00a0", "the the", "Zürich")
_ALPHABETS = ("ab", "ab ", "etaoin shr", "the cat sat on ", "éü日🙂a ", "0123456789.,", " \n\t{}()=:_", "".join(
    map(chr, range(1, 256))))
_NUM_RANDOM, _LONGEST = 160, 40


def cases(tokenizer: Tokenizer, reference: Any) -> Iterator[Case]:
    """Every case of :func:`~minillm.course.batteries.prove_tokenizer`; ``reference`` has ``vocab`` and ``merges``."""
    if not (hasattr(reference, "vocab") and hasattr(reference, "merges")
            and {BYTE_TO_CHAR[byte] for byte in b"a z"} <= set(reference.vocab)):
        raise TypeError("prove_tokenizer needs a byte-level vocabulary and merges to compare with: pass like=, the "
                        "tokenizer whose encoder yours replaces")
    generator = random.Random(0)
    words = _words(tokenizer, reference)
    texts = [*_EDGES, *(_text(generator, words) for _ in range(_NUM_RANDOM))]
    texts = [known for text in texts if (known := _known(reference, text))]
    for text in texts:
        yield Case(f"one piece, {text!r}", len(text), lambda text=text: _ids(tokenizer, reference, [text]))
        yield Case(f"encode and decode {text!r}", len(text), lambda text=text: _survives(tokenizer, text))
    spelled = [word for word in words if len(word) <= _LONGEST][:3000]
    yield Case("each token of the vocabulary as a piece of its own", 150, lambda: _ids(tokenizer, reference, spelled))
    for text in (_known(reference, text) for text in ("ab the cat " * 60, "a" * 500)):
        yield Case(f"one piece of {len(text)} letters, {text[:11]!r} again and again", len(text),
                   lambda text=text: _ids(tokenizer, reference, [text]))
    letters = [chr(code) for code in range(0x800)]
    known = [letter for letter in letters if _known(reference, letter)]
    yield Case("each character below U+0800 whose bytes have ids", 200, lambda: _ids(tokenizer, reference, known))
    for letter in [letter for letter in letters if letter not in known][:3]:
        yield Case(f"{'a' + letter!r}: a byte without an id is left out", 2,
                   lambda letter=letter: _ids(tokenizer, reference, ["a" + letter]))
    for word in words[:37]:
        halves = [word[:len(word) // 2], word[len(word) // 2:]]
        yield Case(f"pieces {halves!r}, which would merge if they were one", len(word) + 1,
                   lambda halves=halves: _ids(tokenizer, reference, halves))
    for size in (2, 3, 5):
        for start in range(0, len(texts) - size, 9):
            pieces = texts[start:start + size]
            yield Case(f"pieces {pieces!r}, one after the other", sum(map(len, pieces)) + size,
                       lambda pieces=pieces: _ids(tokenizer, reference, pieces))
    yield from _habits(tokenizer, reference)
    yield from _specials(tokenizer)


def rescan(ids: Sequence[int], merges: dict[tuple[int, int], tuple[float, int]], *,
           from_left: bool = False) -> list[int]:
    """The slowest right way: look at every pair, join the leftmost of the lowest rank, begin again.

    Args:
        from_left: whatever its rank, join the leftmost: the usual mistake.
    """
    ids = list(ids)
    while found := [(merges[pair][0], i) for i, pair in enumerate(zip(ids, ids[1:])) if pair in merges]:
        _, i = found[0] if from_left else min(found)
        ids[i:i + 2] = [merges[ids[i], ids[i + 1]][1]]
    return ids


def _expected(reference: BytePairEncoder, piece: str, *, from_left: bool = False) -> list[int]:
    text = bytes_to_alphabet(piece.encode())
    if getattr(reference, "ignore_merges", False) and text in reference.vocab:
        return [reference.vocab[text]]
    return rescan([reference.vocab[char] for char in text if char in reference.vocab], reference.merges,
                  from_left=from_left)


def _known(reference: Any, text: str) -> str:
    """``text`` without the characters some byte of which has no id (a real vocabulary may lack control characters)."""
    return "".join(char for char in text if set(bytes_to_alphabet(char.encode())) <= reference.vocab.keys())


def _words(tokenizer: Tokenizer, reference: Any) -> list[str]:
    """The texts of merged tokens, so that merges happen; those that are no whole characters are left out."""
    texts = (tokenizer.token_bytes(merged).decode("utf-8", "ignore") for _, merged in reference.merges.values())
    return [text for text in texts if len(text) > 1]


def _text(generator: random.Random, words: list[str]) -> str:
    """A random text: a few of the vocabulary's own words, so that merges happen, or letters of a small alphabet."""
    if words and generator.random() < 0.4:
        return "".join(generator.choices(words, k=generator.randint(1, 4)))[:_LONGEST]
    alphabet = generator.choice(_ALPHABETS)
    return "".join(generator.choices(alphabet, k=generator.randint(1, _LONGEST)))


def _ids(tokenizer: Tokenizer, reference: Any, pieces: list[str]) -> str:
    got = tokenizer.encoder.encode_pieces(iter(pieces))  # an iterator, as the tokenizer itself gives
    if not isinstance(got, list) or not all(type(token_id) is int for token_id in got):
        return f"encode_pieces must return a list of int, it returned {type(got).__name__}: {got!r:.120}"
    for i, piece in enumerate(pieces):  # the first piece whose ids are wrong tells more than the whole list
        alone = tokenizer.encoder.encode_pieces([piece])
        if why := differs(f"piece {i}, {piece!r}:" if len(pieces) > 1 else "its ids:", alone,
                          _expected(reference, piece)):
            merged_from_left = alone == _expected(reference, piece, from_left=True)
            return why + (": merged from left to right, while the pair of the lowest rank comes first, wherever it "
                          "stands" if merged_from_left else "")
    joined = [token_id for piece in pieces for token_id in _expected(reference, piece)]
    return differs("nothing merges across a border between pieces; the result", got, joined)


def _survives(tokenizer: Tokenizer, text: str) -> str:
    return differs("the text that comes back", tokenizer.decode(tokenizer.encode(text)), text)


def _habits(tokenizer: Tokenizer, reference: Any) -> Iterator[Case]:
    """No pieces, the same piece again, and a caller that changes the list it was given."""
    yield Case("no pieces at all", 0, lambda: differs("the result", tokenizer.encoder.encode_pieces([]), []))

    def twice() -> str:
        tokenizer.encoder.encode_pieces(["the"]).append(0)
        return differs("the second time its ids", tokenizer.encoder.encode_pieces(["the"]),
                       _expected(reference, "the"))

    # first without the change, so that a wrong merge is not called a spoilt list
    yield Case("one piece, 'the'", 3, lambda: _ids(tokenizer, reference, ["the"]))
    yield Case("the piece 'the' again, after the caller has changed the first list", 3, twice)
    yield Case("the piece 'ab' twice in one call", 4, lambda: _ids(tokenizer, reference, ["ab", "ab"]))


def _specials(tokenizer: Tokenizer) -> Iterator[Case]:
    """Added tokens are found around the encoder's pieces, and their text is plain text where it is not to be parsed."""
    for content, token_id in tokenizer.special_tokens.items():
        text = f"ab{content}ab"

        def parsed(text: str = text, token_id: int = token_id) -> str:
            ids = tokenizer.encode(text, add_special_tokens=False)
            around = tokenizer.encode("ab", add_special_tokens=False)
            return differs("its ids", ids, [*around, token_id, *around]) or _survives(tokenizer, text)

        def plain(text: str = text, token_id: int = token_id) -> str:
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
            return "its text became the special token" if token_id in ids else \
                differs("the text that comes back", tokenizer.decode(ids), text)

        yield Case(f"the special token in {text!r}", len(text), parsed)
        yield Case(f"the special token's text in {text!r}, not parsed", len(text), plain)
