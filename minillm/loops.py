"""The simplest correct generation loops. Everything faster must give the same tokens.

    no cache       step t computes the whole text again: 1 + 2 + ... tokens, so time grows with the square
    cache          the prompt once (prefill), then one token a step (decode)
    static batch   several prompts side by side, padded to one length, until the last of them has ended
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import ContiguousAttention, PaddedAttention, UncachedAttention
from minillm.cache.kv import ContiguousCache, SequenceCache
from minillm.model.decoder import Decoder

Choose = Callable[[Tensor, int], list[int]]
"""Logits ``[N, vocab_size]`` and the output position (from 0) to N token ids."""


def greedy(logits: Tensor, position: int) -> list[int]:
    """The most likely token of each row; of equal ones the lowest id."""
    return logits.argmax(-1).tolist()


def generate_without_cache(model: Decoder, prompt_ids: Sequence[int], *, max_tokens: int,
                           eos_token_ids: Collection[int] = (), choose: Choose = greedy) -> list[int]:
    """The generated ids, at most ``max_tokens``; an id of ``eos_token_ids`` is the last."""
    attention, token_ids, output = UncachedAttention(model.config), list(prompt_ids), []
    while len(output) < max_tokens:
        step = StepTensors.of([token_ids], [0], [0], device=model.device)
        [token] = choose(model.forward(step, attention), len(output))
        output.append(token)
        token_ids.append(token)
        if token in eos_token_ids:
            break
    return output


def generate_with_cache(model: Decoder, prompt_ids: Sequence[int], *, max_tokens: int,
                        eos_token_ids: Collection[int] = (), choose: Choose = greedy,
                        make_cache: Callable[..., SequenceCache] = ContiguousCache) -> list[int]:
    """As :func:`generate_without_cache`, in one prefill and one decode step for each token after the first."""
    attention = ContiguousAttention(model.config, dtype=model.dtype, device=model.device, make_cache=make_cache)
    new_ids, num_computed, output = list(prompt_ids), 0, []
    while len(output) < max_tokens:
        step = StepTensors.of([new_ids], [num_computed], [0], device=model.device)
        [token] = choose(model.forward(step, attention), len(output))
        output.append(token)
        num_computed += len(new_ids)
        new_ids = [token]
        if token in eos_token_ids:
            break
    return output


def generate_static_batch(model: Decoder, prompts: Sequence[Sequence[int]], *, max_tokens: int,
                          eos_token_ids: Collection[int] = (), choose: Choose = greedy,
                          pad_token_id: int = 0) -> list[list[int]]:
    """The generated ids of each prompt, as if it ran alone. A finished row idles until the last one has finished."""
    width = max(len(prompt) for prompt in prompts)
    num_padding = [width - len(prompt) for prompt in prompts]
    attention = PaddedAttention(model.config, num_padding, max_columns=width + max_tokens, dtype=model.dtype,
                                device=model.device)
    columns = [[pad_token_id] * padding + list(prompt) for padding, prompt in zip(num_padding, prompts)]
    outputs: list[list[int]] = [[] for _ in prompts]
    finished, num_computed = [False] * len(prompts), 0
    for position in range(max_tokens):
        step = padded_step(columns, num_computed, num_padding, model.device)
        tokens = choose(model.forward(step, attention), position)
        for row, token in enumerate(tokens):
            if not finished[row]:
                outputs[row].append(token)
                finished[row] = token in eos_token_ids
        if all(finished):
            break
        num_computed += len(columns[0])
        columns = [[token] for token in tokens]
    return outputs


def padded_step(columns: Sequence[Sequence[int]], first_column: int, num_padding: Sequence[int],
                device: torch.device | str = "cpu") -> StepTensors:
    """The step that computes the same columns of every row; a position is the column less the row's padding."""
    step = StepTensors.of(columns, [first_column] * len(columns), range(len(columns)), device=device)
    shift = torch.tensor(num_padding, device=device).repeat_interleave(len(columns[0]))
    step.positions.sub_(shift).clamp_(min=0)  # padding has no position; any will do, nobody sees it
    return step
