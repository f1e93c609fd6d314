"""One batched sampler. (Signatures; body to follow.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from minillm.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits needs to become a token.

    ``position`` counts output tokens before this one; the draw depends on (``seed``, ``index``, ``position``) alone.
    ``stop_token_ids`` are all ids that would end the request (masked while ``position < min_tokens``).
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """``token_id`` is -1 and ``error`` says why when a row's logits are not usable.

    ``logprobs``: ``{token_id: (logprob, rank)}`` of the chosen and the ``params.logprobs`` most likely tokens.
    """

    token_id: int
    logprobs: dict[int, tuple[float, int]] | None = None
    error: str | None = None


class SamplerProtocol(Protocol):
    """What ``LLM(sampler=...)`` accepts."""

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """``logits`` float ``[N, vocab]``, row i for ``rows[i]``; returns N tokens. Must not change ``logits``."""
