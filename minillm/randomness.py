"""Counter-based randomness: noise as a pure function of (seed, choice index, output position, token id).

No generator, so nothing to keep, restore or share: preemption, batching and speculation cannot change a draw.
The counter-based idea is from Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    (seed, index, position) --BLAKE2b--> two 32-bit words, the draw's key      (a row; plain Python)
    token id --32-bit mixing with that key--> 32 random bits --> uniform --> Gumbel noise    (a row times vocabulary)

All integer steps wrap modulo 2^32 and are the same on every device; the two logarithms may differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import unpack

import torch
from torch import Tensor

LARGEST_BELOW_ONE = 1 - 2.0**-24
"""The largest float32 below 1."""


def draw_key(seed: int, index: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit words that name one draw. ``seed`` is any integer, negative or of any length.

    A cryptographic hash leaves neighbouring seeds, choices and positions with nothing in common.
    """
    if int(seed).bit_length() > 8192:  # Python writes no decimals of numbers of several thousand digits
        seed = int.from_bytes(blake2b(hex(seed).encode()).digest(), "big")
    digest = blake2b(f"{int(seed)}/{int(index)}/{int(position)}".encode(), digest_size=8).digest()
    return unpack("<ii", digest)


def uniform_noise(keys: Sequence[tuple[int, int]], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Independent uniform numbers strictly between 0 and 1, float32 ``[len(keys), vocab_size]``.

    Near 0 they keep full relative precision, down to 2^-32: that end decides who wins a Gumbel race.
    """
    words = torch.tensor(keys, dtype=torch.int32, device=device).view(-1, 2)
    bits = _token_words(vocab_size, torch.device(device)) ^ words[:, :1]
    bits = _mix(bits, words[:, 1:]).bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    return bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_BELOW_ONE)


def gumbel_noise(keys: Sequence[tuple[int, int]], vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise ``-log(-log(1 - u))``, float32 ``[len(keys), vocab_size]``, between -2.9 and 22.2.

    ``argmax(log p + noise)`` is an exact draw from ``p`` (Gumbel, 1954; Maddison et al., "A* sampling", 2014).
    """
    return uniform_noise(keys, vocab_size, device).neg_().log1p_().neg_().log_().neg_()


@lru_cache(maxsize=8)
def _token_words(vocab_size: int, device: torch.device) -> Tensor:
    """A fixed 32-bit word for each token id, int32 ``[vocab_size]``, so that neighbouring ids share no pattern."""
    return _mix(torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(0x9E3779B9), 0)


def _mix(words: Tensor, key: Tensor | int) -> Tensor:
    """MurmurHash3's 32-bit finalizer (Appleby; public domain) with a second key word added half way, in place."""
    words ^= _shift_right(words, 16)
    words *= _signed(0x85EBCA6B)
    words += key
    words ^= _shift_right(words, 13)
    words *= _signed(0xC2B2AE35)
    words ^= _shift_right(words, 16)
    return words


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Shift as if unsigned: torch shifts signed integers arithmetically, so the copies of the sign are cut off."""
    return (words >> count).bitwise_and_((1 << (32 - count)) - 1)


def _signed(word: int) -> int:
    """The signed 32-bit integer with the bits of ``word``."""
    return word - (1 << 32) if word >= 1 << 31 else word
