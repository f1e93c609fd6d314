"""From a plan of integers to tokens: build the step's tensors, run the model, sample the rows that need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.attention.base import AttentionBackend, StepTensors
from minillm.attention.torch_backend import ContiguousAttention
from minillm.model.decoder import Decoder
from minillm.request import Request
from minillm.sample import SampledToken, SamplerProtocol, SamplingRow
from minillm.schedule.plan import StepPlan


class Runner:
    """Runs one plan at a time; keeps no state of requests but the K and V in its attention backend."""

    def __init__(self, model: Decoder, attention: AttentionBackend, sampler: SamplerProtocol):
        self.model, self.attention, self.sampler = model, attention, sampler
        self.taps: Sequence[int] | None = None  # whoever sets it finds ``states`` after a step:
        self.states: Tensor | None = None  # [S, taps + 1, hidden] of the sampled rows

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[SampledToken]:
        """One forward pass over the flat batch; for each item of ``plan.sampling``, in order, a token sampled after its
        last known one and after each of its drafts."""
        rows = [row_of(item.request, item.draft_token_ids, count) for item in plan.sampling
                for count in range(1 + len(item.draft_token_ids))]
        step = self.tensors_of(plan)
        if self.taps is None:
            logits = self.model.forward(step, self.attention)
        else:
            states = self.model.hidden_states(step, self.attention, self.taps)
            self.states, logits = torch.stack(states, 1), self.model.logits(states[-1])
        return self.sampler(logits, rows) if rows else []

    def tensors_of(self, plan: StepPlan) -> StepTensors:
        """The plan as tensors on the model's device; logits are wanted for the sampled items alone."""
        items = plan.scheduled
        return StepTensors.of([item.token_ids for item in items], [item.start for item in items],
                              [item.request for item in items], device=self.model.device,
                              logits_for=[item.samples and 1 + len(item.draft_token_ids) for item in items],
                              block_tables=[item.request.table.blocks for item in items])

    @torch.inference_mode()
    def score(self, token_ids: list[int], *, chunk_tokens: int = 256) -> list[float]:
        """Natural log-probability of each id after the first, given all before it: ``len(token_ids) - 1`` floats.

        Read in chunks, so that the logits held at once are ``[chunk_tokens, vocab]``, into a cache of its own: blocks
        are for requests, and a score must not depend on what others have left in theirs.
        """
        model, logprobs = self.model, []
        cache = ContiguousAttention(model.config, dtype=model.dtype, device=model.device)
        for start in range(0, len(token_ids) - 1, chunk_tokens):
            chunk = token_ids[start:min(start + chunk_tokens, len(token_ids) - 1)]
            step = StepTensors.of([chunk], [start], ["score"], device=model.device, logits="all")
            logits = model.forward(step, cache)
            targets = torch.tensor(token_ids[start + 1:start + 1 + len(chunk)], device=logits.device)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            logprobs += logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
        return logprobs


def row_of(request: Request, drafts: Sequence[int] = (), count: int = 0) -> SamplingRow:
    """What the sampler needs to know to choose the request's next token, or the one after ``count`` of its drafts."""
    eos = () if request.params.ignore_eos else request.eos_token_ids
    output, draft = [*request.output_token_ids, *drafts[:count]], None
    if count < len(drafts):
        distributions = request.draft_distributions
        draft = drafts[count], distributions[count] if distributions else None
    return SamplingRow(request.params, request.seed, request.index, len(output), request.prompt_token_ids, output,
                       (*eos, *request.params.stop_token_ids), draft)
