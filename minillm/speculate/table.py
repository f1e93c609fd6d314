"""A table of what mostly follows two or three tokens, counted over text of the target itself. No torch.

    newest tokens    ... a b c
    looked up        (a, b, c), else (b, c), else (c,): the id that followed most often

``data/draft/make_table.py`` has a model write the text, counts it and saves the table.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from minillm.errors import ModelError

LONGEST = 3


class NgramTable:
    """The most likely next id after one to three ids, a few bytes an entry.

    Args:
        vocab_size: ids are below it; three of them must fit into 63 bits.
        following: by length, the next id by the :func:`key` of the ids before it.
    """

    def __init__(self, vocab_size: int, following: Mapping[int, Mapping[int, int]]):
        self.vocab_size, self.following = vocab_size, following

    def next(self, token_ids: Sequence[int]) -> int | None:
        """The id that followed the newest of ``token_ids`` most often; None where they were never seen."""
        for length in range(min(LONGEST, len(token_ids)), 0, -1):
            found = self.following[length].get(key(token_ids[-length:], self.vocab_size))
            if found is not None:
                return found
        return None

    @classmethod
    def load(cls, path: str | Path) -> NgramTable:
        """From an ``.npz`` file: ``vocab_size``; by length n ``keys_n``, differences of sorted keys, and ``ids_n``.

        Raises:
            ModelError: no such file, or another kind of file.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                table = cls(int(file["vocab_size"]), {
                    length: dict(zip(np.cumsum(file[f"keys_{length}"]).tolist(), file[f"ids_{length}"].tolist(),
                                     strict=True)) for length in range(1, LONGEST + 1)})
            if any(not 0 <= token < table.vocab_size for after in table.following.values() for token in after.values()):
                raise ValueError("some of its ids are beyond its vocab_size")
            return table
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise ModelError(f"{path} is no table of n-grams, as data/draft/make_table.py writes it: {error}") from None


def key(token_ids: Sequence[int], vocab_size: int) -> int:
    """One number for a few ids."""
    number = 0
    for token_id in token_ids:
        number = number * vocab_size + token_id
    return number
