"""Drafts that are sampled: here from a second, smaller model that speaks the same tokens. (Needs torch.)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import ContiguousAttention
from minillm.errors import ModelError
from minillm.model.decoder import Decoder
from minillm.request import Request
from minillm.runner import row_of
from minillm.sample import SampledToken, SamplerProtocol, SamplingRow, usable_tokens
from minillm.text.tokenizer import Tokenizer


class SamplingProposer(ABC):
    """Samples one draft after the other as the target does and with the same noise, so that both choose alike where
    they think alike.

    Args:
        sampler: the target's.
        vocab_size: ids are below it.
        longest: no drafts for a text beyond so many tokens.
    """

    def __init__(self, sampler: SamplerProtocol, vocab_size: int, longest: int):
        self.sampler, self.vocab_size, self.longest = sampler, vocab_size, longest

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], num_tokens: int) -> list[list[int]]:
        """See :class:`~minillm.speculate.propose.ProposerProtocol`."""
        drafts: dict[Request, list[int]] = {request: [] for request in requests}
        for count in range(num_tokens):
            going = [request for request in requests if request.num_known_tokens + count <= self.longest]
            if not going:
                break
            logits = self.logits(going, [drafts[request] for request in going])
            rows = [row_of(request, drafts[request], count) for request in going]
            tokens = usable_tokens(self.drawn(going, logits, rows), len(rows), self.vocab_size)
            for request, token in zip(going, tokens):
                drafts[request].append(max(0, token.token_id))  # -1: its logits are of no use, any guess will do
        return [drafts[request] for request in requests]

    @abstractmethod
    def logits(self, requests: Sequence[Request], drafts: Sequence[list[int]]) -> Tensor:
        """``[B, vocab_size]`` of the next draft of each of ``requests``, behind its ``drafts`` so far."""

    def drawn(self, requests: Sequence[Request], logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """A draft for each of ``requests`` from its row of ``logits``."""
        return self.sampler(logits, rows)

    @abstractmethod
    def free(self, request: Request) -> None:
        """Forget a request; an unknown one is no error."""


class DraftModelProposer(SamplingProposer):
    """Generates with ``model``.

    Keeps a cache a request, of which only what the request's tokens still agree with is used; what is missing is read
    in the next call, however much it is. Reads its own weights once for each draft; its caches are beside the engine's
    blocks.

    Args:
        model: the draft, see :func:`check_same_tokens`.
        sampler: the target's.
    """

    def __init__(self, model: Decoder, sampler: SamplerProtocol):
        super().__init__(sampler, model.config.vocab_size, model.config.max_position_embeddings)
        self.model = model
        self.attention = ContiguousAttention(model.config, dtype=model.dtype, device=model.device)
        self._read: dict[Request, tuple[int, list[int]]] = {}  # ids that are cached; how many were known: these stay

    def logits(self, requests: Sequence[Request], drafts: Sequence[list[int]]) -> Tensor:
        """See :class:`SamplingProposer`; whatever is not in the cache is read first."""
        starts, new, texts = [], [], []
        for request, own in zip(requests, drafts, strict=True):
            ids = [*request.token_ids, *own]
            known, read = self._read.get(request, (0, []))
            most = min(len(read), len(ids) - 1)
            agreed = next((i for i in range(known, most) if read[i] != ids[i]), most)
            starts.append(agreed)
            new.append(ids[agreed:])
            texts.append((request.num_known_tokens, ids))
        step = StepTensors.of(new, starts, requests, device=self.model.device)
        logits = self.model.forward(step, self.attention)
        self._read |= zip(requests, texts)
        return logits

    def free(self, request: Request) -> None:
        """Forget its cache."""
        self._read.pop(request, None)
        self.attention.free(request)


def check_same_tokens(draft: Tokenizer, target: Tokenizer) -> None:
    """Raise unless every id is the same token to both; a model's head may have more rows than its tokenizer has ids.

    Raises:
        ModelError: naming the sizes, or the first id that differs.
    """
    if draft.vocab_size != target.vocab_size:
        raise ModelError(f"a draft model must speak the target's tokens: its tokenizer has {draft.vocab_size} ids, the "
                         f"target's {target.vocab_size}")
    for token_id in range(target.vocab_size):
        ours, theirs = (tokenizer.token_bytes(token_id) for tokenizer in (draft, target))
        if ours != theirs:
            raise ModelError(f"a draft model must speak the target's tokens: id {token_id} is {ours!r} to it and "
                             f"{theirs!r} to the target")
