"""The plan of one step: which requests run, from which position, how many tokens. Plain integers, no torch.

One shape covers prefill, decode, chunk, prefix hit and draft: they differ only in *how many tokens from where*.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minillm.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """``num_tokens`` of ``request``'s known tokens, from position ``start``, are computed in this step.

    ``samples`` is True when the step reaches the last known token, so that its logits give the next one. It is fixed
    when the plan is made: the request's counters move on, the plan does not. ``draft_token_ids`` are guesses behind
    the last known token; they are computed too, and sampled after, and are not known until they prove right.
    """

    request: Request
    start: int
    num_tokens: int
    draft_token_ids: tuple[int, ...] = ()
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", self.end == self.request.num_known_tokens)

    @property
    def end(self) -> int:
        """Position after the last known one computed; also the number of cached tokens once the step is done."""
        return self.start + self.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The ids to compute, drafts last."""
        return [*self.request.token_ids[self.start:self.end], *self.draft_token_ids]

    @property
    def stage(self) -> str:
        """``"prefill"`` while any prompt token is computed, else ``"decode"`` (a name for traces, not a state)."""
        return "prefill" if self.start < len(self.request.prompt_token_ids) else "decode"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that one forward pass computes, in the order of the flat token batch."""

    scheduled: tuple[ScheduledRequest, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the flat batch."""
        return sum(item.num_tokens + len(item.draft_token_ids) for item in self.scheduled)

    @property
    def sampling(self) -> list[ScheduledRequest]:
        """The items whose last known token is sampled after, in order; and so are their drafts."""
        return [item for item in self.scheduled if item.samples]
