"""What a caller asks (:class:`SamplingParams`), what the engine tracks (:class:`Request`), what comes back. No torch.

One prompt with ``n`` choices becomes ``n`` requests that share ``request_id`` and differ in ``index``.
A request has three counters and no phase flags:

    known      |<------- prompt ------->|<-- output -->|      len(token_ids)
    computed   |==========================>                   num_computed_tokens (their K and V are cached)
    planned                                |-->|              ScheduledRequest.num_tokens of this step's plan

It is *prefilling* while computed lags known by more than one, *decoding* while it lags by exactly one.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any, Literal

from minillm.cache.blocks import BlockTable
from minillm.errors import InvalidRequest, shown
from minillm.measure.metrics import RequestMetrics

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Validated here, so a bad value never reaches the engine.

    Names and meanings are vLLM's. Lists are stored as tuples without repeats; ``stop`` accepts one string or several.

    Args:
        n: choices per prompt, from 1 to 1024; choice i draws its own randomness.
        temperature: 0 is greedy; must not be negative.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep tokens while the mass before them is below ``top_p``, in (0, 1].
        min_p: keep tokens at least ``min_p`` times as likely as the best, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output, > 0.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for output tokens; in [-2, 2].
        seed: any integer; equal seeds and prompts give equal tokens. ``None`` draws one from the engine's seed.
        max_tokens: hard cap on output tokens, at least 1; ``None`` runs to the context limit.
        min_tokens: until so many output tokens, every end-of-sequence id and ``stop_token_ids`` is masked.
        stop: strings that end the text; neither they nor anything after is delivered.
        stop_token_ids: ids that end the request, as end-of-sequence ids do.
        ignore_eos: end-of-sequence ids are ordinary tokens.
        logprobs: for each output token, also report so many most likely tokens (0: the chosen one alone).
        logit_bias: added to the logit of each id before filtering, in [-100, 100].
        skip_special_tokens: leave special tokens out of the text (stop strings still see them).

    Raises:
        InvalidRequest: naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        store = partial(object.__setattr__, self)       # the instance is frozen; plain Python values go in
        for name, (kind, low, high, allowed) in _NUMBERS.items():
            if (value := getattr(self, name)) is not None or getattr(SamplingParams, name) is not None:
                store(name, _checked_number(name, value, kind, low, high, allowed))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {shown(getattr(self, name))}", name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}", "min_tokens")
        store("stop", _stop_strings(self.stop))
        store("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        store("logit_bias", _logit_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0


_ABOVE_ZERO = math.ulp(0.0)
# name: (kind, lowest, highest, what is allowed); None is allowed where it is the default
_NUMBERS: dict[str, tuple[type[int] | type[float], float, float, str]] = {
    "n": (int, 1, 1024, "from 1 to 1024"),
    "temperature": (float, 0, math.inf, "0 (greedy) or more"),
    "top_k": (int, -1, math.inf, "0 or -1 (off), or at least 1"),
    "top_p": (float, _ABOVE_ZERO, 1, "above 0 and at most 1"),
    "min_p": (float, 0, 1, "from 0 to 1"),
    "repetition_penalty": (float, _ABOVE_ZERO, math.inf, "above 0"),
    "presence_penalty": (float, -2, 2, "from -2 to 2"),
    "frequency_penalty": (float, -2, 2, "from -2 to 2"),
    "seed": (int, -math.inf, math.inf, "any integer"),
    "max_tokens": (int, 1, math.inf, "at least 1"),
    "min_tokens": (int, 0, math.inf, "0 or more"),
    "logprobs": (int, 0, 100, "from 0 to 100"),
}


def _checked_number(name: str, value: object, kind: type[int] | type[float], low: float, high: float,
                    allowed: str) -> float:
    """``value`` as a plain ``int`` or ``float`` (numpy's scalars are numbers too; booleans and strings are not)."""
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        wanted = "a whole number" if kind is int else "a number"
        raise InvalidRequest(f"{name} must be {wanted}, got {shown(value)}", name)
    try:
        number = kind(value)
    except OverflowError:
        number = math.nan  # which is in no range
    if not low <= number <= high or number in (math.inf, -math.inf):
        raise InvalidRequest(f"{name} must be {allowed}, got {shown(value)}", name)
    return number


def _members(name: str, value: object) -> tuple:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        raise InvalidRequest(f"{name} must be a list, got {shown(value)}", name)
    return tuple(value)


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    strings = () if stop is None else (stop,) if isinstance(stop, str) else _members("stop", stop)
    for string in strings:
        if not isinstance(string, str):
            raise InvalidRequest(f"stop must hold strings, got {shown(string)}", "stop")
        if not string:
            raise InvalidRequest("stop must not hold an empty string: it would end every answer at once", "stop")
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise InvalidRequest(f"stop holds a lone surrogate, which no text contains: {shown(string)}", "stop")
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, ids: Sequence[int] | None) -> tuple[int, ...]:
    members = () if ids is None else _members(name, ids)
    for token_id in members:
        if isinstance(token_id, bool) or not isinstance(token_id, Integral) or token_id < 0:
            raise InvalidRequest(f"{name} must hold token ids (whole numbers from 0), got {shown(token_id)}", name)
    return tuple(dict.fromkeys(map(int, members)))


def as_token_id(token_id: object) -> int:
    """A plain integer from anything integral (numpy and torch scalars too); else :class:`InvalidRequest`."""
    try:
        if isinstance(token_id, bool) or getattr(token_id, "ndim", 0):
            raise TypeError
        return operator.index(token_id)
    except TypeError:
        raise InvalidRequest(f"a prompt is text or token ids (whole numbers), got {shown(token_id)}",
                             "prompt") from None


def _logit_bias(bias: Mapping[int, float] | None) -> dict[int, float]:
    bias = {} if bias is None else bias
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {shown(bias)}", "logit_bias")
    return {token_id: _checked_number("logit_bias", amount, float, -100, 100, "from -100 to 100")
            for token_id, amount in zip(_token_ids("logit_bias", list(bias)), bias.values())}


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One sequence on its way through the engine; the scheduler's unit. Compared by identity.

    ``token_ids`` is everything known (prompt, then output). ``seed`` is resolved: never ``None``.
    ``eos_token_ids`` are the model's; ``max_total_tokens`` is prompt plus the most output it may ever have.
    ``draft_token_ids`` are guesses at what follows, which the next step may check, ``draft_distributions`` what each
    was drawn from (none: they are certain).
    ``table`` holds its blocks of KV cache, which are the scheduler's to give and take.
    Times are ``time.perf_counter()`` seconds of the engine's clock: ``arrival_s`` when the caller asked, ``queued_s``
    when the tokenized request was queued.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    arrival_s: float = field(default_factory=time.perf_counter)
    queued_s: float = field(default_factory=time.perf_counter)
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    table: BlockTable = field(default_factory=BlockTable)
    draft_token_ids: Sequence[int] = ()
    draft_distributions: Sequence[Any] = ()
    admitted_s: float | None = None
    finished_s: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens whose ids are known."""
        return len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens that are not computed: 1 while decoding, more while prefilling."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated ids (a copy)."""
        return self.token_ids[len(self.prompt_token_ids):]

    @property
    def is_finished(self) -> bool:
        """True once a finish reason stands."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability (natural log, of the raw softmax) and its rank (1 is the most likely)."""

    logprob: float
    rank: int
    decoded_token: str = ""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a prompt. ``token_ids`` include the end-of-sequence id and the tokens that formed a stop string;
    ``text`` includes neither. ``logprobs`` has one ``{token_id: Logprob}`` a token when they were asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its ``n`` choices. ``metrics`` are those of choice 0 (each choice's in ``choice_metrics``)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    choice_metrics: list[RequestMetrics]

    @property
    def metrics(self) -> RequestMetrics:
        """Times and counts of choice 0, on the engine's clock."""
        return self.choice_metrics[0]


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """What one step added to one choice. The texts of a choice's pieces joined are its whole text."""

    text: str
    token_ids: list[int]
    index: int
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """``logprobs[i]``: natural log-probability of ``token_ids[i]`` given those before it; the first is ``None``."""

    token_ids: list[int]
    logprobs: list[float | None]
