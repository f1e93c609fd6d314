"""What the decoder may ask of attention, and the tensors of one step that it may rely on.

All requests of a step lie behind one another in a flat batch of T tokens; no row is padding:

    request          A A A | B | C C              num_seqs = 3
    token_ids        a0 a1 a2 b7 c0 c1            T = 6
    positions        0  1  2  7  0  1
    query_starts     0        3  4    6           rows of request s: query_starts[s] .. query_starts[s + 1]
    context_lengths  3        8  2                keys that s has once this step's are written
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step as tensors.

    ``token_ids``, ``positions``: int64 ``[T]`` on the model's device.
    ``query_starts``: ``num_seqs + 1`` integers. ``context_lengths``: ``num_seqs`` integers.
    ``sequences``: ``num_seqs`` keys that tell the backend whose cache a row belongs to (hashable, its own to define).
    ``logit_rows``: int64 ``[S]``, the flat rows whose logits are wanted.
    ``block_tables``: for a backend whose cache is paged, each sequence's blocks in the order of its tokens.
    """

    token_ids: Tensor
    positions: Tensor
    query_starts: tuple[int, ...]
    context_lengths: tuple[int, ...]
    sequences: tuple[object, ...]
    logit_rows: Tensor
    block_tables: tuple[Sequence[int], ...] = ()

    @classmethod
    def of(cls, token_ids: Sequence[Sequence[int]], starts: Sequence[int], sequences: Sequence[object],
           *, device: torch.device | str = "cpu", logits: str = "last", logits_for: Sequence[int] | None = None,
           block_tables: Sequence[Sequence[int]] = ()) -> StepTensors:
        """The step that computes ``token_ids[s]`` of each sequence from position ``starts[s]`` on.

        ``logits`` is ``"last"`` (the last row of each sequence) or ``"all"`` (every row). ``logits_for`` says how many
        last rows of each instead: a prompt read in part has no use for logits, a token with drafts for several.
        """
        flat = [token for ids in token_ids for token in ids]
        positions = [start + offset for ids, start in zip(token_ids, starts, strict=True) for offset in range(len(ids))]
        query_starts = [0, *accumulate(map(len, token_ids))]
        wanted = logits_for or [len(ids) if logits == "all" else 1 for ids in token_ids]
        rows = [row for end, want in zip(query_starts[1:], wanted, strict=True) for row in range(end - want, end)]
        as_tensor = lambda values: torch.tensor(values, dtype=torch.int64, device=device)  # noqa: E731
        return cls(as_tensor(flat), as_tensor(positions), tuple(query_starts),
                   tuple(start + len(ids) for ids, start in zip(token_ids, starts, strict=True)),
                   tuple(sequences), as_tensor(rows), tuple(block_tables))


class AttentionBackend(Protocol):
    """Keeps K and V of past positions and attends over them. The plan is passed explicitly; there is no global state.

    For each layer in order the decoder calls ``write`` and then ``attend``, once a step. Keys arrive with their
    rotary embedding applied. A query at position p sees keys at positions 0..p of its own sequence (and, with a
    ``sliding_window`` of w, only the last w of them), whatever else is in the batch.
    """

    def write(self, layer: int, key: Tensor, value: Tensor, step: StepTensors) -> None:
        """Store ``key`` and ``value``, ``[T, num_kv_heads, head_dim]``, at each row's sequence and position."""

    def attend(self, layer: int, query: Tensor, step: StepTensors) -> Tensor:
        """``query`` ``[T, num_heads, head_dim]`` to the attention output, same shape and dtype.

        Query head h reads KV head ``h // (num_heads // num_kv_heads)``. Scale is ``head_dim ** -0.5``.
        """

    def free(self, sequence: object) -> None:
        """Forget all keys and values of ``sequence``; unknown sequences are no error."""
