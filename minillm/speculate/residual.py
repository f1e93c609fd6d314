"""Checking drafts by accept or residual, the rule of Leviathan et al. 2023 (arXiv:2211.17192). (Needs torch.)

    a draft d was drawn from q; the target's distribution, after all filters, is p
    accept d with probability min(1, p(d) / q(d)), else draw from max(0, p - q), scaled to sum 1

Either way the token is a draw from p: what q gave too often is refused that often, and what it gave too rarely is made
up for. The tokens follow the same distribution as without speculation, but are not the same tokens; a draft is accepted
with probability sum(min(p, q)), which no rule can exceed. (minillm's own rule keeps the tokens: the target draws with
the noise that it would have drawn with anyway, and a draft is right if it is that token.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minillm.randomness import draw_key, gumbel_noise, uniform_noise
from minillm.request import Request
from minillm.sample import SampledToken, Sampler, SamplingRow
from minillm.speculate.draft import DraftModelProposer

# Draws that are not the target's have streams of their own: choices count from 0, these from here downward.
_ACCEPT, _DRAFT = -1, -(2**32)


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """``max(0, target - draft)`` scaled to sum 1, for distributions ``[V]``; zeros where they are equal."""
    left = (target - draft).clamp(min=0)
    return left / left.sum().clamp(min=torch.finfo(left.dtype).tiny)


class ResidualSampler(Sampler):
    """``LLM(sampler=ResidualSampler(vocab_size), ...)``: rows whose draft is checked follow the rule above.

    Give it a proposer whose guesses are certain (n-grams), or :class:`IndependentDraftProposer`.
    """

    def with_noise(self, scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """See :class:`~minillm.sample.Sampler`."""
        checked = [i for i, row in enumerate(rows) if row.draft is not None]
        targets = [scores[i].double().softmax(-1) for i in checked]
        result = super().with_noise(scores, rows)
        for i, target in zip(checked, targets):
            result[i] = self._checked(target, rows[i]).to(result.dtype)
        return result

    def _checked(self, target: Tensor, row: SamplingRow) -> Tensor:
        """Values ``[V]`` whose argmax is the draft, or else a draw from the residual."""
        token, drawn_from = row.draft
        draft = torch.zeros_like(target)
        if drawn_from is None:
            draft[token] = 1.0
        else:
            draft[:len(drawn_from)] = drawn_from[:len(target)]
        accept_key = draw_key(row.seed, _ACCEPT - row.index, row.position)
        if uniform_noise([accept_key], 1).item() * draft[token] < target[token]:
            return torch.zeros_like(target).index_fill_(0, torch.tensor(token, device=target.device), 1.0)
        noise = gumbel_noise([draw_key(row.seed, row.index, row.position)], len(target), target.device)[0]
        return residual(target, draft).log() + noise


class IndependentDraftProposer(DraftModelProposer):
    """A draft model that draws with noise of its own and tells what it drew from, as the rule assumes."""

    def propose(self, requests: Sequence[Request], num_tokens: int) -> list[list[int]]:
        """See :class:`~minillm.speculate.propose.ProposerProtocol`; sets ``Request.draft_distributions`` too."""
        for request in requests:
            request.draft_distributions = []
        return super().propose(requests, num_tokens)

    def drawn(self, requests: Sequence[Request], logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """See :class:`~minillm.speculate.draft.SamplingProposer`."""
        tokens = self.sampler(logits, [replace(row, index=_DRAFT - row.index) for row in rows])
        for request, row, token, own in zip(requests, rows, tokens, logits):
            certain = row.params.greedy or token.token_id < 0
            request.draft_distributions.append(
                None if certain else self.sampler.distributions(own.unsqueeze(0), [row])[0])
        return tokens
