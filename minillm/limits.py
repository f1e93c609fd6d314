"""What the engine accepts: a request that can never run is refused before anything runs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral

from minillm.errors import InvalidRequest, shown
from minillm.request import SamplingParams, as_token_id


@dataclass(slots=True)
class Limits:
    """At most ``max_model_len`` tokens in all, of ids below ``vocab_size``, from ``bos_token_id`` where a prompt is
    empty.

    ``why_never`` says why the scheduler can never run a prompt of so many tokens, ``""`` when it can;
    ``heeds_priority`` whether it looks at priorities.
    """

    max_model_len: int
    vocab_size: int
    bos_token_id: int | None
    why_never: Callable[[int], str]
    heeds_priority: bool

    def prompt(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> list[int]:
        """The prompt's ids, fit to run.

        Raises:
            InvalidRequest: an empty prompt for a model without a beginning-of-sequence token, a prompt that leaves no
                room for a token, or an id out of range in prompt, ``stop_token_ids`` or ``logit_bias``.
        """
        token_ids = [as_token_id(token_id) for token_id in prompt_token_ids]
        if not token_ids and self.bos_token_id is not None:
            token_ids = [self.bos_token_id]
        if not token_ids:
            raise InvalidRequest("the prompt is empty, and this model has no token to begin from", "prompt")
        self.ids("prompt", token_ids)
        self.ids("stop_token_ids", params.stop_token_ids)
        self.ids("logit_bias", params.logit_bias)
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens; with max_model_len {self.max_model_len} at most "
                f"{self.max_model_len - 1} leave room for an answer. Shorten it or raise max_model_len", "prompt")
        if why := self.why_never(len(token_ids)):
            raise InvalidRequest(f"the prompt has {len(token_ids)} tokens; {why}", "prompt")
        return token_ids

    def ids(self, name: str, token_ids: Iterable[int]) -> None:
        """Raise :class:`InvalidRequest` naming the first id that this model does not have."""
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"{name} holds id {shown(wrong)}; this model's go up to {self.vocab_size - 1}", name)

    def priority(self, priority: int) -> int:
        """A plain integer; :class:`InvalidRequest` where it is none, or the scheduler would not heed it."""
        if isinstance(priority, bool) or not isinstance(priority, Integral):
            raise InvalidRequest(f"priority must be a whole number, got {shown(priority)}", "priority")
        if priority and not self.heeds_priority:
            raise InvalidRequest("priority needs an engine with scheduling_policy='priority'", "priority")
        return int(priority)
