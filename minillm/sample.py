"""One batched sampler: logits ``[N, vocab]`` in, N tokens out.

    logits -> penalties, bias, mask -> temperature -> top-k -> top-p -> min-p -> + Gumbel noise -> argmax
    (greedy rows go from the mask straight to the argmax)

No step loops over requests for vocabulary-sized work, none sorts the vocabulary, and a row's token is bit for bit the
same alone and in any batch: the noise is a function of (seed, choice, position, token), and sums that decide are sums
of integers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minillm.errors import shown
from minillm.filters import filtered_scores, keep_top_k
from minillm.randomness import draw_key, gumbel_noise
from minillm.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row of logits needs to become a token.

    ``position`` counts output tokens before this one; the draw depends on (``seed``, ``index``, ``position``) alone.
    ``stop_token_ids`` are all ids that would end the request (masked while ``position < min_tokens``).
    ``draft``: the guess at this token, if one is checked, and the distribution float ``[vocab]`` from which it was
    drawn (None: it was certain). minillm's sampler does not look at it, see :mod:`minillm.speculate.residual`.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    stop_token_ids: Sequence[int] = ()
    draft: tuple[int, Tensor | None] | None = None


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


def usable_tokens(tokens: Sequence[SampledToken], num_rows: int, vocab_size: int) -> list[SampledToken]:
    """What any sampler returned for ``num_rows`` rows; a token that is no id becomes an error of its row alone.

    Raises:
        TypeError: it is no list of ``num_rows`` :class:`SampledToken`, so that nobody's token is known.
    """
    if not isinstance(tokens, (list, tuple)) or [type(token) for token in tokens] != [SampledToken] * num_rows:
        raise TypeError(f"the sampler must return a list of {num_rows} SampledToken, one for each row of logits; it "
                        f"returned {tokens!r:.200}")
    return [token if token.error or type(token.token_id) is int and 0 <= token.token_id < vocab_size else SampledToken(
        -1, error=f"the sampler chose {shown(token.token_id)}; an id is an int from 0 to {vocab_size - 1}")
            for token in tokens]


class Sampler:
    """The engine's sampler. Keeps no state between calls.

    Args:
        vocab_size: ids the tokenizer knows. A model's head may be wider (padding); those ids are never emitted.
    """

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """One token for each row of ``logits``, float ``[N, at least vocab_size]``, any dtype and device.

        16-bit logits are computed in float32. A row that holds NaN or plus infinity, or nothing finite, gives an
        error token, and the others go on. Raises ``ValueError`` unless ``rows`` has one entry a row of ``logits``.
        """
        if logits.dim() != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits must be [{len(rows)}, vocab], a row for each request, got {list(logits.shape)}")
        if not rows:
            return []
        raw = logits[:, :self.vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
        adjusted = adjust_logits(raw, rows)
        best = raw.amax(-1)     # NaN wins every maximum, so one number tells about a whole row
        usable = best.isfinite() if adjusted is raw else best.isfinite() & adjusted.amax(-1).isfinite()
        if not usable.all():
            adjusted = adjusted.where(usable.unsqueeze(1), 0.0)
        ids = lowest_argmax(self.race(adjusted, rows)).where(usable, -1).tolist()
        reports = _logprobs(raw, rows, ids)
        return [SampledToken(token_id, reports.get(i)) if token_id >= 0 else
                SampledToken(-1, error=_why_unusable(best[i].item())) for i, token_id in enumerate(ids)]

    def distributions(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """What each row's token is drawn from, after all penalties and filters, float64 ``[N, V]``; for rows that are
        not greedy."""
        raw = logits[:, :self.vocab_size].to(torch.promote_types(logits.dtype, torch.float32))
        adjusted = adjust_logits(raw, rows)
        return filtered_scores(adjusted, [row.params for row in rows]).double().softmax(-1)

    def race(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Values whose argmax is the token: a greedy row's logits as they are, a random row's scores plus its noise."""
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not drawn:
            return logits
        everyone = len(drawn) == len(rows)
        scores = filtered_scores(logits if everyone else logits[drawn], [rows[i].params for i in drawn])
        scores = self.with_noise(scores, [rows[i] for i in drawn])
        return scores if everyone else logits.index_copy(0, torch.tensor(drawn, device=logits.device), scores)

    def with_noise(self, scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """``scores`` ``[N, V]``, log-probabilities but for a constant, plus the Gumbel noise of each row's draw."""
        keys = [draw_key(row.seed, row.index, row.position) for row in rows]
        return scores.add_(gumbel_noise(keys, scores.shape[1], scores.device))


def lowest_argmax(values: Tensor) -> Tensor:
    """Index of each row's largest value, the lowest one among equals: ``[N, V]`` gives int64 ``[N]``."""
    return values.max(-1).indices   # torch.max promises the first of several maxima


def _why_unusable(best: float) -> str:
    if math.isnan(best):
        return "the model's logits hold NaN; try dtype='float32'"
    if best == math.inf:
        return "the model's logits hold infinity; try dtype='float32'"
    return "no token is left to choose: the model, logit_bias or min_tokens rule out every one"


def adjust_logits(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Logits ``[N, V]`` after the repetition penalty, then presence and frequency penalties, bias and mask.

    The same object when no row asks for any, else a new one; only the cells of the tokens concerned change.
    """
    logits = penalize_repetition(logits, [_repetition_penalties(row) for row in rows])
    return add_to_logits(logits, [_additions(row) for row in rows])


def _repetition_penalties(row: SamplingRow) -> dict[int, float]:
    """``{token_id: penalty}`` of every token seen in prompt or output: once, however often it was seen."""
    penalty = row.params.repetition_penalty
    return {} if penalty == 1 else dict.fromkeys((*row.prompt_token_ids, *row.output_token_ids), penalty)


def _additions(row: SamplingRow) -> dict[int, float]:
    """``{token_id: amount}`` to add: bias, minus presence and frequency penalties of output tokens; the mask is -inf.
    """
    params = row.params
    amounts = dict(params.logit_bias or {})
    if params.presence_penalty or params.frequency_penalty:
        for token_id, count in Counter(row.output_token_ids).items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            amounts[token_id] = amounts.get(token_id, 0.0) - penalty
    if row.position < params.min_tokens:
        amounts.update(dict.fromkeys(row.stop_token_ids, -math.inf))
    return amounts


def penalize_repetition(logits: Tensor, penalties: Sequence[Mapping[int, float]]) -> Tensor:
    """Divide positive logits by the penalty and multiply negative ones: above 1 always makes a token less likely.

    ``logits`` are ``[N, V]``, ``penalties[i]`` is row i's ``{token_id: penalty}``. Keskar et al., "CTRL" (2019), with
    the sign taken into account.
    """
    if not any(penalties):
        return logits
    info = torch.finfo(logits.dtype)
    at, penalty = _cells(logits, penalties)
    penalty = penalty.clamp(info.tiny, info.max)
    values = logits[at]
    return logits.index_put(at, torch.where(values > 0, values / penalty, values * penalty).clamp(max=info.max))


def add_to_logits(logits: Tensor, amounts: Sequence[Mapping[int, float]]) -> Tensor:
    """Add ``amounts[i]``, ``{token_id: amount}``, to row i of ``logits`` ``[N, V]``."""
    if not any(amounts):
        return logits
    at, amount = _cells(logits, amounts)
    return logits.index_put(at, amount, accumulate=True)


def _cells(logits: Tensor, amounts: Sequence[Mapping[int, float]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Row and column indices of the cells named, and their amounts. Ids outside the vocabulary name no cell."""
    size = logits.shape[1]
    cells = [(i, token_id, amount) for i, row in enumerate(amounts) for token_id, amount in row.items()
             if 0 <= token_id < size]
    at_rows, at_ids, values = zip(*cells) if cells else ((), (), ())
    at = tuple(torch.tensor(indices, dtype=torch.long, device=logits.device) for indices in (at_rows, at_ids))
    return at, torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _logprobs(raw: Tensor, rows: Sequence[SamplingRow], ids: Sequence[int]) -> dict[int, dict[int, tuple[float, int]]]:
    """``{row: logprobs}`` of :class:`SampledToken` for the rows that asked and got a token."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and ids[i] >= 0]
    if not asked:
        return {}
    raw = raw[asked]
    logprobs = torch.log_softmax(raw, -1)
    chosen = torch.tensor([[ids[i]] for i in asked], device=raw.device)
    top = most_likely(raw, max(rows[i].params.logprobs for i in asked))
    listed = torch.cat([chosen, top], 1)
    listed_ids, values = listed.tolist(), logprobs.gather(1, listed).tolist()
    ranks = [[first, *range(1, top.shape[1] + 1)] for first in _ranks(raw, chosen).tolist()]
    reports = {}
    for j, i in enumerate(asked):
        wanted = slice(1 + rows[i].params.logprobs)
        reports[i] = dict(zip(listed_ids[j][wanted], zip(values[j][wanted], ranks[j][wanted])))
    return reports


def most_likely(logits: Tensor, count: int) -> Tensor:
    """Ids of each row's ``count`` largest logits, best first, the lowest id first among equals.

    ``[N, V]`` gives int64 ``[N, min(count, V)]``.
    """
    count = min(count, logits.shape[1])
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)
    ids = keep_top_k(logits, [count] * len(logits)).nonzero()[:, 1].view(-1, count)
    order = logits.gather(1, ids).argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, order)


def _ranks(logits: Tensor, chosen: Tensor) -> Tensor:
    """1 plus how many tokens come before the chosen one (``[N, 1]``), in the order of :func:`most_likely`; ``[N]``."""
    value = logits.gather(1, chosen)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return 1 + ((logits > value) | ((logits == value) & (ids < chosen))).sum(1)
