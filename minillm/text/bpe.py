"""Byte pair encoding: merging by rank, and training. No torch.

Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016), on bytes as in Radford et al.,
"Language Models are Unsupervised Multitask Learners" (2019), or on characters with byte fallback as in
Kudo and Richardson, "SentencePiece" (2018).

    "h u g s"   the pair with the lowest rank anywhere in the piece is joined first, then the next, until none is left
    "h ug s"    rank 0: u+g
    "hug s"     rank 7: h+ug
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Pair = tuple[int, int]

_CACHE_ENTRIES = 1 << 16
_CACHE_LONGEST_PIECE = 64


# GPT-2's printable stand-in for each byte: printable Latin-1 stands for itself, the rest from U+0100 on.
BYTE_TO_CHAR = {byte: chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))}
BYTE_TO_CHAR |= {byte: chr(256 + n) for n, byte in enumerate(sorted(set(range(256)) - BYTE_TO_CHAR.keys()))}
_CHAR_TO_BYTE = {ord(char): byte for byte, char in BYTE_TO_CHAR.items()}
_ALPHABET = frozenset(BYTE_TO_CHAR.values())


def bytes_to_alphabet(data: bytes) -> str:
    """Each byte as its character in GPT-2's byte alphabet (a space is ``Ġ``)."""
    return data.decode("latin-1").translate(BYTE_TO_CHAR)


def alphabet_to_bytes(token: str) -> bytes:
    """The bytes a byte-level vocabulary entry stands for; an entry with other characters is its own UTF-8 text."""
    if not _ALPHABET.issuperset(token):
        return token.encode()
    return token.translate(_CHAR_TO_BYTE).encode("latin-1")


class PieceEncoder(Protocol):
    """What ``Tokenizer.with_encoder`` accepts: the part of a tokenizer that turns pre-tokens into ids."""

    def encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        """The ids of pre-tokens, plain text each, one after the other. Nothing merges across a border between pieces.

        Pieces are never empty and hold no added tokens; joined, they are a stretch of the text.
        """


@dataclass(slots=True)
class BytePairEncoder:
    """Turns one pre-token into ids. A :class:`PieceEncoder`.

    Args:
        vocab: text of each token (in the byte alphabet when ``byte_level``) to its id.
        merges: ``(left id, right id) -> (rank, merged id)``; the lowest rank merges first, the leftmost among equals.
        byte_level: pieces are read as UTF-8 bytes; else as characters.
        byte_fallback: a character without an id becomes its bytes' ``<0xNN>`` tokens.
        unknown_id: stands for what has no id at all; ``None`` drops it, as the ``tokenizers`` library does.
        fuse_unknown: a run of unknown characters is one unknown id.
        ignore_merges: a piece that is a token as a whole is taken at once (Llama 3).
    """

    vocab: dict[str, int]
    merges: dict[Pair, tuple[float, int]]
    byte_level: bool = True
    byte_fallback: bool = False
    unknown_id: int | None = None
    fuse_unknown: bool = False
    ignore_merges: bool = False
    _cache: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def encode_pieces(self, pieces: Iterable[str]) -> list[int]:
        """The ids of pre-tokens, one after the other."""
        ids: list[int] = []
        for piece in pieces:
            ids += self._cache.get(piece) or self._encode_piece(piece)
        return ids

    def _encode_piece(self, piece: str) -> tuple[int, ...]:
        text = bytes_to_alphabet(piece.encode()) if self.byte_level else piece
        whole = self.vocab.get(text) if self.ignore_merges else None
        ids = (whole,) if whole is not None else tuple(merge(self._symbols(text), self.merges))
        if len(piece) <= _CACHE_LONGEST_PIECE:
            if len(self._cache) >= _CACHE_ENTRIES:
                self._cache.clear()  # bounded, and cheaper than keeping track of who was used last
            self._cache[piece] = ids
        return ids

    def _symbols(self, text: str) -> list[int]:
        ids: list[int] = []
        in_unknown_run = False
        for char in text:
            found = [self.vocab.get(char)]
            if found == [None] and self.byte_fallback:
                found = [self.vocab.get(f"<0x{byte:02X}>") for byte in char.encode()]
            if None not in found:
                ids += found
            elif self.unknown_id is not None and not (in_unknown_run and self.fuse_unknown):
                ids.append(self.unknown_id)
            in_unknown_run = None in found
        return ids


def merge(ids: Sequence[int], merges: dict[Pair, tuple[float, int]]) -> list[int]:
    """Join neighbours, lowest rank first and leftmost among equals, until no pair of neighbours has a rank.

    A heap of candidates over a doubly linked list: O(n log n) for n ids, where rescanning would be O(n^2).
    """
    ids = [*ids, -1]  # at the end, as at every id that was joined to its left: no pair with -1 has a rank
    after = list(range(1, len(ids) + 1))
    before = list(range(-1, len(ids) - 1))
    heap = [(found[0], i, found[1]) for i, pair in enumerate(zip(ids, ids[1:])) if (found := merges.get(pair))]
    heapq.heapify(heap)
    while heap:
        _, left, merged = heapq.heappop(heap)
        right = after[left]
        # A candidate is stale when a neighbour has been joined meanwhile and the pair gives another token, or none.
        if merges.get((ids[left], ids[right]), (0, -1))[1] != merged:
            continue
        ids[left], ids[right] = merged, -1
        after[left] = after[right]
        before[after[left]] = left
        for i in (before[left], left):
            if i >= 0 and (found := merges.get((ids[i], ids[after[i]]))):
                heapq.heappush(heap, (found[0], i, found[1]))
    return [token_id for token_id in ids if token_id >= 0]


def merges_from_scores(vocab: dict[str, int], scores: Sequence[float]) -> dict[Pair, tuple[float, int]]:
    """SentencePiece keeps no merge list: any two tokens may join whose text together is a token, best score first."""
    return {(vocab[token[:cut]], vocab[token[cut:]]): (-scores[token_id], token_id)
            for token, token_id in vocab.items() for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab}


def train_merges(pieces: Iterable[Sequence[int]], num_merges: int, first_new_id: int) -> list[Pair]:
    """Learn up to ``num_merges`` pairs; the i-th gets id ``first_new_id + i``.

    Each round takes the pair that a merge would replace most often (so ``aaa`` holds the pair ``aa`` once, not twice);
    among equals, the one seen first in the text. It stops early when no pair occurs twice. Nothing merges across
    pieces, and the result depends on the input alone.
    """
    counted = Counter(tuple(piece) for piece in pieces)  # in order of first appearance
    words, times = [list(word) for word in counted], list(counted.values())
    totals: Counter[Pair] = Counter()
    found_in: defaultdict[Pair, set[int]] = defaultdict(set)

    def account(index: int, sign: int) -> None:
        for pair, count in _count_pairs(words[index]).items():
            totals[pair] += sign * count * times[index]
            (found_in[pair].add if sign > 0 else found_in[pair].discard)(index)

    for index in range(len(words)):
        account(index, +1)
    merges: list[Pair] = []
    while len(merges) < num_merges and (most := max(totals.values(), default=0)) >= 2:
        word = words[min(min(found_in[pair]) for pair, total in totals.items() if total == most)]
        best = next(pair for pair in zip(word, word[1:]) if totals[pair] == most)  # the first seen in the text
        for index in sorted(found_in[best]):
            account(index, -1)
            words[index] = merge(words[index], {best: (0, first_new_id + len(merges))})
            account(index, +1)
        merges.append(best)
    return merges


def _count_pairs(word: Sequence[int]) -> Counter[Pair]:
    """How often each pair occurs in ``word`` without overlapping itself."""
    counts: Counter[Pair] = Counter()
    last_start: dict[Pair, int] = {}
    for i, pair in enumerate(zip(word, word[1:])):
        if last_start.get(pair) != i - 1:
            counts[pair] += 1
            last_start[pair] = i
    return counts
