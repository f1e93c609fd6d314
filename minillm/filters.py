"""Temperature, top-k, top-p and min-p: which tokens stay in the race. Exact, batched, without sorting the vocabulary.

Top-k and top-p ask one question. Walk the tokens from the largest logit down (among equals the lowest id first) and
keep each one while what has passed before it stays below a limit:

    top-k: every token weighs 1,          the limit is k
    top-p: a token weighs its probability, the limit is p times the whole

:func:`keep_while_below` answers it with one histogram of weights over logits: buckets above the one in which the limit
falls stay whole, buckets below go whole, and only that one bucket is sorted. Weights are integers, since sums of
integers do not depend on the order of addition: neither batch nor thread count can move a border.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.request import SamplingParams

TOLERANCE = 1e-6
"""Relative slack at the borders of top-p and min-p, since float32 probabilities are no finer: a mass this close below
``top_p`` has reached it, a token this close below ``min_p`` stays."""

MASS_SCALE = 2.0**40
"""The most likely token's mass when probabilities are counted as integers."""

BUCKETS_PER_UNIT, NUM_BUCKETS = 64, 4096
"""The histogram resolves 1/64 of a logit (a bucket holds few tokens) over 64 below the best; the last takes the rest.
"""


def filtered_scores(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores ``[N, V]`` after temperature, top-k, top-p, min-p: unnormalized log-probabilities, ``-inf`` if removed.

    ``softmax`` of a row is exactly the distribution that is sampled. ``params[i]`` (temperature above 0) is row i's.
    The order is that of Hugging Face transformers: ``top_p`` is a share of what temperature and ``top_k`` leave.
    """
    scores = scale_by_temperature(logits, [p.temperature for p in params])
    keep = None
    if any(0 < p.top_k < logits.shape[1] for p in params):
        keep = keep_top_k(logits, [p.top_k for p in params])
    if any(p.top_p < 1 for p in params):
        left = scores if keep is None else scores.where(keep, -math.inf)
        keep = keep_top_p(logits, left, [p.top_p for p in params])
    if any(p.min_p > 0 for p in params):
        likely = keep_min_p(scores, [p.min_p for p in params])
        keep = likely if keep is None else keep & likely
    return scores if keep is None else scores.where(keep, -math.inf)


def scale_by_temperature(logits: Tensor, temperature: Sequence[float]) -> Tensor:
    """``(logits - best) / temperature``, ``[N, V]``: the best token scores 0, the others less.

    Taking the best off first keeps every temperature safe: dividing 11.0 by 1e-38 overflows, 0 by 1e-38 is 0, and
    the rest may go to ``-inf``, which is the greedy limit.
    """
    info = torch.finfo(logits.dtype)
    divisor = _column([min(max(t, info.tiny), info.max) for t in temperature], logits.dtype, logits.device)
    return (logits - logits.amax(-1, keepdim=True)).div_(divisor)


def keep_top_k(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    """True for each row's ``top_k`` largest logits, bool ``[N, V]``; a ``top_k`` below 1 or above V keeps all."""
    size = logits.shape[1]
    limit = _column([k if 0 < k < size else size for k in top_k], torch.int64, logits.device)
    return keep_while_below(logits, torch.ones_like(logits, dtype=torch.int64), limit)


def keep_top_p(logits: Tensor, scores: Tensor, top_p: Sequence[float]) -> Tensor:
    """True for tokens with a probability mass of less than ``top_p`` before them, bool ``[N, V]``; the first always.

    ``logits`` give the order and ``scores`` (log-probabilities up to a constant, the best 0, ``-inf`` for a token
    already removed, which stays removed) the mass: softmax rounds, so it may not decide what is a tie.
    Holtzman et al., "The curious case of neural text degeneration" (2020).
    """
    mass = scores.exp().mul_(MASS_SCALE).long()
    share = _column([p * (1 - TOLERANCE) for p in top_p], torch.float64, logits.device)
    limit = (mass.sum(-1, keepdim=True) * share).ceil().long()
    off = _column([p >= 1 for p in top_p], torch.bool, logits.device)
    return (keep_while_below(logits, mass, limit) | off) & (scores > -math.inf)


def keep_min_p(scores: Tensor, min_p: Sequence[float]) -> Tensor:
    """True for tokens at least ``min_p`` times as likely as the best, bool ``[N, V]``; the best scores 0.

    Nguyen et al., "Turning up the heat: min-p sampling" (2024).
    """
    floor = [math.log(p) - TOLERANCE if p > 0 else -math.inf for p in min_p]
    return scores >= _column(floor, scores.dtype, scores.device)


def keep_while_below(logits: Tensor, weights: Tensor, limit: Tensor) -> Tensor:
    """True for each token whose predecessors weigh less than ``limit`` together; bool ``[N, V]``.

    Predecessors have a larger logit, or an equal one and a lower id. ``logits`` hold no NaN; ``weights`` are int64
    ``[N, V]``, not negative; ``limit`` is int64 ``[N, 1]``, at least 1 so that the first token always stays.
    """
    gap = logits.amax(-1, keepdim=True) - logits
    bucket = gap.mul_(BUCKETS_PER_UNIT).clamp_(max=NUM_BUCKETS - 1).long()
    totals = weights.new_zeros(len(weights), NUM_BUCKETS).scatter_add_(1, bucket, weights)
    before = totals.cumsum(1) - totals
    border = (before < limit).sum(1, keepdim=True) - 1
    kept = bucket < border
    # The border's bucket: sort its tokens by row, then logit, then id, and add up their weights row by row.
    row, token = (bucket == border).nonzero(as_tuple=True)
    order = logits[row, token].argsort(descending=True, stable=True)
    order = order[row[order].argsort(stable=True)]
    row, token = row[order], token[order]
    weight, in_bucket = weights[row, token], totals.gather(1, border).squeeze(1)
    passed = weight.cumsum(0) - weight - (in_bucket.cumsum(0) - in_bucket)[row]
    kept[row, token] = passed < (limit - before.gather(1, border)).squeeze(1)[row]
    return kept


def _column(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
