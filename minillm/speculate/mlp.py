"""Drafts from what the target has computed: a small network on its hidden states. (Needs torch.)

    state     hidden states of the row that sampled the newest token: after some layers, and after the final norm
    context   the two newest tokens, and three candidates: what followed the newest tokens when they were last seen
              (of the longest match, and of a shorter one that disagrees), and what a table of n-grams says
    network   [state | context] ─ linear ─ + MLP ─ + MLP ─ next state;  next state x head rows = logits of a draft

The next draft is made the same way from the state before, so one draft costs one pass through the network, and the
target is not run. (MLP speculator: Wertheimer et al. 2024, arXiv:2404.19124; hidden states of several layers: Li et
al. 2025, EAGLE-3, arXiv:2503.01840.) ``data/draft/train_speculator.py`` trains one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from minillm.errors import ModelError
from minillm.model.decoder import Decoder
from minillm.model.layers import WeightReader
from minillm.model.quantize import SCHEMES
from minillm.model.quantized import Int4PackLinear, has_packed_kernel
from minillm.request import Request
from minillm.runner import Runner
from minillm.speculate.draft import SamplingProposer
from minillm.speculate.propose import seen_before
from minillm.speculate.table import NgramTable

LONGEST, NUM_CANDIDATES, NUM_MLPS = 4, 3, 2


def context_of(token_ids: Sequence[int], table: NgramTable) -> list[int]:
    """What the network is told of a text of two or more tokens: the newest, the one before, three candidates (-1: no
    such), and how many tokens the first candidate's match has."""
    found: dict[int, int] = {}
    for length, place in seen_before(token_ids, LONGEST, 1):
        found.setdefault(token_ids[place], length)
    copies, guess = [*found][:2], table.next(token_ids)
    return [token_ids[-1], token_ids[-2], *copies, *[-1] * (2 - len(copies)), -1 if guess is None else guess,
            next(iter(found.values()), 0)]


def shapes_of(hidden: int, num_taps: int, wide: int) -> dict[str, tuple[int, int]]:
    """The weights ``[out, in]`` of a network, by name; ``num_taps`` counts the state after the final norm too."""
    mlp = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    return {"first": (hidden, (num_taps + 2 + NUM_CANDIDATES) * hidden),
            "later": (hidden, (3 + NUM_CANDIDATES) * hidden), "lengths": (LONGEST + 1, hidden)} | {
                f"{name}_{number}": shape for number in range(NUM_MLPS) for name, shape in mlp.items()}


class Network:
    """The network of the drawing above, with whatever computes its linear layers.

    Args:
        linear: by name, ``[B, in]`` to ``[B, out]``, see :func:`shapes_of`; "first" is used with a state of the target,
            "later" with one of its own.
        lengths: what is added for the length of a match, ``[LONGEST + 1, hidden]``.
        embed: ids ``[...]`` to the target's embedding ``[..., hidden]``.
    """

    def __init__(self, linear: Mapping[str, Callable[[Tensor], Tensor]], lengths: Tensor,
                 embed: Callable[[Tensor], Tensor]):
        self.linear, self.lengths, self.embed = linear, lengths, embed

    def __call__(self, state: Tensor, context: Tensor) -> Tensor:
        """The next state ``[B, hidden]``.

        Args:
            state: of the target ``[B, taps, hidden]``, or this network's last ``[B, hidden]``.
            context: int64 ``[B, 3 + NUM_CANDIDATES]``, see :func:`context_of`.
        """
        first = self.linear["first" if state.dim() == 3 else "later"]
        hidden = first(self.inputs(state, context)) + self.lengths[context[:, -1]]
        for number in range(NUM_MLPS):
            normed = _unit(hidden)
            gated = silu(self.linear[f"gate_{number}"](normed)) * self.linear[f"up_{number}"](normed)
            hidden = hidden + self.linear[f"down_{number}"](gated)
        return hidden

    def inputs(self, state: Tensor, context: Tensor) -> Tensor:
        """Of the first linear layer: ``[B, (taps or 1) x hidden + 5 x hidden]``."""
        ids = context[:, :-1]
        tokens = _unit(self.embed(ids.clamp(min=0)).to(state.dtype)) * (ids >= 0).unsqueeze(-1)
        return torch.cat([_unit(state).flatten(1), tokens.flatten(1)], 1)


def _unit(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], eps=1e-6)


class MLPProposer(SamplingProposer):
    """Drafts of :class:`Network` on the hidden states that ``runner`` has kept of its last step.

    Its weights are read once a draft, so they are kept in 4 bit where there is a kernel for it (whatever the target's
    are: a draft need not be exact), but not beside a target in float64. Nothing is cached but the states of each
    request's newest row, so a request that was preempted, or begins within a cached prefix, is drafted for like any
    other.

    Args:
        path: a ``.safetensors`` file, as ``data/draft/train_speculator.py`` writes it; the table of n-grams lies beside
            it under the same name as ``.npz``.
    Raises:
        ModelError: another kind of file, one for a model of other sizes, or a model that is no Decoder of minillm's.
    """

    def __init__(self, path: Path, runner: Runner, vocab_size: int):
        model = runner.model
        if getattr(type(model), "forward", None) is not Decoder.forward:
            raise ModelError("a speculator needs the hidden states of minillm's own Decoder, and its forward")
        super().__init__(runner.sampler, vocab_size, model.config.max_position_embeddings)
        self.table, self.runner = NgramTable.load(path.with_suffix(".npz")), runner
        self.embed = lambda ids: model.embed(ids.flatten()).unflatten(0, ids.shape)
        try:
            with safe_open(path, "pt") as file:
                weights = {name: file.get_tensor(name).to(model.device) for name in file.keys()}  # noqa: SIM118
                self.taps = tuple(map(int, file.metadata()["taps"].split()))
            self.head_ids, wide = weights.pop("head_ids").long(), len(weights["up_0"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path} is no speculator, as data/draft/train_speculator.py writes it: {error}") from None
        shapes, ids = {name: tuple(weight.shape) for name, weight in weights.items()}, self.head_ids
        fits = shapes == shapes_of(model.config.hidden_size, len(self.taps) + 1, wide) and ids.dim() == 1 and len(ids)
        if not (fits and self.taps == tuple(number for number in range(len(model.layers)) if number in self.taps)
                and 0 <= int(ids.min()) <= int(ids.max()) < vocab_size == self.table.vocab_size
                and model.config.tie_word_embeddings):
            raise ModelError(f"{path} was trained for another kind of model: sizes, layers or ids differ")
        narrow = model.dtype != torch.float64 and has_packed_kernel(Int4PackLinear, model.device)
        self.dtype = torch.bfloat16 if narrow else model.dtype
        reader = WeightReader({}, dtype=str(self.dtype).removeprefix("torch."), device=model.device,
                              quantization=SCHEMES["int4"] if narrow else None)
        lengths, self.head = weights.pop("lengths").to(self.dtype), reader.make([self.embed(self.head_ids).float()])
        self.network = Network({name: reader.make([weight.float()]) for name, weight in weights.items()}, lengths,
                               self.embed)
        self._states: dict[Request, Tensor] = {}
        runner.taps = self.taps

    def see(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
        """The newest token of each of ``requests`` was sampled from that row of the runner's last step."""
        self._states |= zip(requests, self.runner.states[rows])

    def propose(self, requests: Sequence[Request], num_tokens: int) -> list[list[int]]:
        """See :class:`~minillm.speculate.propose.ProposerProtocol`; none for a request that has no token yet, as when
        one token of its prompt is left."""
        self._later = dict(self._states)
        seen = [request for request in requests if request in self._states]
        drafts = dict(zip(seen, super().propose(seen, num_tokens)))
        self._later = {}
        return [drafts.get(request, []) for request in requests]

    def logits(self, requests: Sequence[Request], drafts: Sequence[list[int]]) -> Tensor:
        """See :class:`SamplingProposer`; minus infinity for ids that are neither in the head nor candidates."""
        context = torch.tensor([context_of([*request.token_ids, *own], self.table)
                                for request, own in zip(requests, drafts, strict=True)], device=self.head_ids.device)
        states = torch.stack([self._later[request] for request in requests]).to(self.dtype)
        state = self.network(states, context)
        self._later |= zip(requests, state)
        candidates = context[:, 2:2 + NUM_CANDIDATES].clamp(min=0)  # where there is none, the first id will do
        of_candidates = (state.unsqueeze(1) * self.embed(candidates).to(state.dtype)).sum(-1)
        logits = torch.full((len(state), self.vocab_size), -torch.inf, device=state.device)
        logits[:, self.head_ids] = self.head(state).float()
        return logits.scatter_(1, candidates, of_candidates.float())

    def free(self, request: Request) -> None:
        """Forget its states."""
        self._states.pop(request, None)
