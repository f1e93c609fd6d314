"""The definitions of the field's latency numbers, in one place. (Signatures; more to follow.) No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request on one clock (seconds), and what follows from them.

    ``token_times_s[i]`` is when output token i existed; tokens of one arrival share a time.
    """

    arrival_s: float
    admitted_s: float | None = None
    finished_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    clock: str = "engine"

    @property
    def first_token_s(self) -> float | None:
        """When the first token existed."""
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: arrival to first generated token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s
