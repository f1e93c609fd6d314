"""What a sampling row asks for, in plain Python: the oracle of the sampler's cases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from minillm.request import SamplingParams
from minillm.sample import SamplingRow

_NO_BORDER = 1e-3  # how far, as a share of the mass, a border must lie from every token: rounding may not decide


def row(seed: int = 0, index: int = 0, position: int = 0, prompt: Sequence[int] = (), output: Sequence[int] = (),
        **params: Any) -> SamplingRow:
    """A row of a batch; ``params`` go to :class:`~minillm.request.SamplingParams`."""
    return SamplingRow(SamplingParams(**params), seed, index, position, tuple(prompt), tuple(output))


def probabilities(logits: Sequence[float], item: SamplingRow) -> list[float] | None:
    """The distribution that a row asks for, in plain Python; ``None`` where a border is too close to a token to say."""
    params, values = item.params, _penalized(logits, item)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.greedy:
        return [float(i == order[0]) for i in range(len(values))]
    weights = [math.exp((value - values[order[0]]) / params.temperature) for value in values]
    order = order[:params.top_k] if params.top_k > 0 else order
    total, passed, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if params.top_p < 1 and passed and abs(passed / total - params.top_p) < _NO_BORDER:
            return None
        if passed < params.top_p * total and weights[i] >= params.min_p:
            kept.append(i)
        passed += weights[i]
    if params.min_p and any(abs(weight - params.min_p) < _NO_BORDER for weight in weights if weight < 1):
        return None
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(values))]


def _penalized(logits: Sequence[float], item: SamplingRow) -> list[float]:
    params, values = item.params, list(logits)
    for i in {*item.prompt_token_ids, *item.output_token_ids}:
        values[i] *= 1 / params.repetition_penalty if values[i] > 0 else params.repetition_penalty
    for i, count in Counter(item.output_token_ids).items():
        values[i] -= params.presence_penalty + params.frequency_penalty * count
    return values


def told(logits: Sequence[float], item: SamplingRow) -> str:
    """A case in words: its logits, and what its row asks for."""
    defaults, params = SamplingParams(), item.params
    asked = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                                                      "presence_penalty", "frequency_penalty")}
    words = [f"{name} {value:g}" for name, value in asked.items()
             if name == "temperature" or value != getattr(defaults, name)]
    seen = "".join(f", {name} {list(ids)}" for name, ids in (("prompt", item.prompt_token_ids),
                                                             ("output", item.output_token_ids)) if ids)
    return f"logits {[round(value, 3) for value in logits]}, {', '.join(words)}{seen}"
