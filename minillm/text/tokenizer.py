"""Text to ids and back, exactly as the model's own tokenizer does it. No torch.

    text ──► cut out added tokens ──► normalize ──► pre-tokenize ──► byte pair encoding ──► add BOS, EOS ──► ids
    ids ──► each token's bytes ──► joined ──► UTF-8, invalid bytes as U+FFFD ──► text
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import regex

from minillm.errors import InvalidRequest, ModelError
from minillm.parts import check_part
from minillm.text.added import AddedToken, AddedTokenSplitter
from minillm.text.bpe import BYTE_TO_CHAR, BytePairEncoder, PieceEncoder, train_merges
from minillm.text.pretokenize import GPT2_PATTERN, Normalizer, PreTokenizer, build_normalizer, build_pre_tokenizer


class Tokenizer:
    """A byte pair encoding tokenizer with everything around it. Immutable, and safe to share between threads.

    Made by :func:`load_tokenizer`, :func:`byte_tokenizer` or :func:`train_bpe`.

    Args:
        token_bytes: the bytes each id stands for, ``b""`` where an id is unused.
        encoder: pre-tokens to ids.
        added: added tokens, special or not.
        normalizer, pre_tokenizer: see :mod:`minillm.text.pretokenize`.
        prefix_ids, suffix_ids: what ``add_special_tokens`` puts around a text.
        strip_leading_space: decoding drops one leading space (SentencePiece puts one before every text).
        named_tokens: ``{"bos_token": "<s>", ...}``, as chat templates see them.
        chat_template: Jinja source, or ``None``.
    """

    def __init__(self, token_bytes: Sequence[bytes], encoder: PieceEncoder, *,
                 added: Iterable[AddedToken] = (), normalizer: Normalizer | None = None,
                 pre_tokenizer: PreTokenizer | None = None, prefix_ids: Sequence[int] = (),
                 suffix_ids: Sequence[int] = (), strip_leading_space: bool = False,
                 named_tokens: Mapping[str, str] | None = None, chat_template: str | None = None):
        self._token_bytes = list(token_bytes)
        self.encoder = encoder
        added = list(added)
        self.added_tokens: dict[str, int] = {token.content: token.id for token in added}
        self.special_tokens: dict[str, int] = {token.content: token.id for token in added if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self._normalize = normalizer or build_normalizer(None)
        self._pre_tokenize = pre_tokenizer or build_pre_tokenizer(None)
        self._raw_splitter = AddedTokenSplitter(token for token in added if not token.normalized)
        self._splitter = AddedTokenSplitter((token for token in added if token.normalized), self._normalize)
        self._prefix_ids, self._suffix_ids = list(prefix_ids), list(suffix_ids)
        self.strip_leading_space = strip_leading_space
        self.named_tokens = dict(named_tokens or {})
        self.chat_template = chat_template
        swallowing = any(token.lstrip or token.rstrip for token in added)
        self._longest = math.inf if normalizer or swallowing else max(map(len, self._token_bytes), default=0)

    def with_encoder(self, encoder: PieceEncoder) -> Tokenizer:
        """The same tokenizer with another part that turns pre-tokens into ids.

        Raises:
            TypeError: ``encoder`` has no ``encode_pieces``.
        """
        check_part("encoder", encoder, PieceEncoder)
        other = copy.copy(self)
        other.encoder = encoder
        return other

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self._token_bytes)

    @property
    def bos_token_id(self) -> int | None:
        """The id that starts a text, where the model has one."""
        return self.added_tokens.get(self.named_tokens.get("bos_token", ""))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence id (a model's configuration may name more)."""
        return self.added_tokens.get(self.named_tokens.get("eos_token", ""))

    def most_bytes(self, num_tokens: int) -> float:
        """The most bytes of a text that ``num_tokens`` ids can stand for; infinite where a normalizer or an added token
        that takes the space beside it may shorten texts."""
        return num_tokens * self._longest

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True,
               guard: str = "") -> list[int]:
        """The ids of ``text``.

        Args:
            add_special_tokens: put the model's own BOS or EOS around it, as its tokenizer does.
            parse_special: special tokens written in the text become their ids; else they are ordinary text.
            guard: a character that keeps special tokens from being found in ``text`` where it interrupts them. It is
                taken out before the text is cut into pieces (see :mod:`minillm.text.chat`).

        Raises:
            InvalidRequest: the text holds half of a surrogate pair, which no valid Unicode text does.
        """
        check_text(text)
        ids: list[int] = []
        at_start = True
        for part in self._raw_splitter.split(text, parse_special):
            inner = [part] if isinstance(part, int) else self._splitter.split(self._normalize(part), parse_special)
            for piece in inner:
                if isinstance(piece, int):
                    ids.append(piece)
                elif piece := piece.replace(guard, ""):
                    found = self.encoder.encode_pieces(self._pre_tokenize(piece, at_start))
                    if not isinstance(found, list):
                        raise TypeError(f"the encoder's encode_pieces must return a list of ids, it returned {found!r}")
                    ids += found
                at_start = False
        return self._prefix_ids + ids + self._suffix_ids if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ``token_ids``: their bytes joined, each invalid UTF-8 sequence as U+FFFD. No clean-up.

        Raises:
            InvalidRequest: an id outside the vocabulary.
        """
        shown = (i for i in token_ids if not (skip_special_tokens and i in self._special_ids))
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, perhaps a part of a character only; a special token's are its text.

        Raises:
            InvalidRequest: the id is outside the vocabulary.
        """
        if not 0 <= token_id < len(self._token_bytes):
            raise InvalidRequest(f"token id {token_id} is outside the vocabulary (0 to {self.vocab_size - 1})")
        return self._token_bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which ``skip_special_tokens`` hides."""
        return token_id in self._special_ids


def check_text(text: str, param: str | None = None) -> None:
    """Refuse text that UTF-8 cannot hold.

    Raises:
        InvalidRequest: naming the position of a lone surrogate, or the type of what is no text at all.
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"a text must be a string, got {type(text).__name__}", param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text holds half of a surrogate pair at character {error.start}: send valid Unicode",
                             param) from None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model: a Hugging Face folder with ``tokenizer.json``, or a ``.gguf`` file.

    Raises:
        ModelError: a file is missing or broken, or a part of the tokenizer is not known here; it is named.
    """
    from minillm.text.load import tokenizer_from_folder, tokenizer_from_gguf

    path = Path(path)
    try:
        return tokenizer_from_gguf(path) if path.suffix == ".gguf" else tokenizer_from_folder(path)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, MemoryError, regex.error) as error:
        raise ModelError(f"{path}: the tokenizer is damaged or of an unknown form ({error!r}): fetch the model again"
                         ) from error


def byte_tokenizer(*, chat_template: str | None = None) -> Tokenizer:
    """The smallest tokenizer: ids 0 to 255 are bytes, nothing merges, and five special tokens follow: ``<|bos|>``,
    ``<|eos|>``, ``<|im_start|>``, ``<|im_end|>`` and ``<|eot|>``. None is added to a text by itself."""
    special_tokens = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|eot|>")
    return train_bpe((), 0, special_tokens=special_tokens, chat_template=chat_template)


def train_bpe(texts: str | Iterable[str], num_merges: int, *, special_tokens: Sequence[str] = (),
              chat_template: str | None = None) -> Tokenizer:
    """Train byte-level byte pair encoding: ids 0 to 255 are bytes, then one id a merge, then the special tokens.

    Args:
        texts: one text or several; their order matters for ties alone (see :func:`minillm.text.bpe.train_merges`).
        num_merges: most merges to learn; fewer when no pair of tokens occurs twice.
        special_tokens: ``<|bos|>`` or ``<|eos|>`` takes that part; neither is added to a text by itself.
        chat_template: Jinja source, or ``None``.
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    for text in texts:
        check_text(text)
    pieces = (piece.encode() for text in texts for piece in regex.findall(GPT2_PATTERN, text))
    merges = train_merges(pieces, num_merges, 256)
    token_bytes = [bytes([byte]) for byte in range(256)]
    for left, right in merges:
        token_bytes.append(token_bytes[left] + token_bytes[right])
    table = {pair: (float(rank), 256 + rank) for rank, pair in enumerate(merges)}
    added = [AddedToken(len(token_bytes) + i, text, special=True) for i, text in enumerate(special_tokens)]
    return Tokenizer(
        token_bytes + [token.content.encode() for token in added],
        BytePairEncoder({char: byte for byte, char in BYTE_TO_CHAR.items()}, table),
        added=added, chat_template=chat_template,
        pre_tokenizer=build_pre_tokenizer({"type": "ByteLevel", "add_prefix_space": False}),
        named_tokens={f"{name}_token": f"<|{name}|>" for name in ("bos", "eos") if f"<|{name}|>" in special_tokens})
