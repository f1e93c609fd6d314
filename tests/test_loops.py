"""The three loops agree with each other, position by position and token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minillm.attention.base import StepTensors
from minillm.loops import (
    generate_static_batch,
    generate_with_cache,
    generate_without_cache,
    greedy,
    padded_step,
)
from minillm.model.config import ModelConfig, RopeConfig
from minillm.model.decoder import Decoder
from minillm.model.weights import expected_tensors

PROMPTS = [[5, 1, 8, 3, 9], [7, 2], [4, 4, 4, 11, 0, 1, 2, 3]]


def make_model(**options) -> Decoder:
    """A tiny random model in float64, whose greedy text varies."""
    config = ModelConfig(**{
        **dict(model_type="llama", vocab_size=41, hidden_size=24, intermediate_size=20, num_layers=2, num_heads=6,
               num_kv_heads=2, head_dim=6, max_position_embeddings=128, tie_word_embeddings=False),
        **options,
    })
    generator = torch.Generator().manual_seed(3)
    weights = {}
    for name, shape in expected_tensors(config).items():
        spread = 0.3 if name.startswith("embed") else 3.0 / shape[-1] ** 0.5  # small embeddings: context decides
        weights[name] = torch.randn(shape, generator=generator) * spread
        if len(shape) == 1:
            weights[name] = 0.5 + torch.rand(shape, generator=generator)
    return Decoder.from_weights(config, weights, dtype="float64")


class Recorder:
    """A model that notes the positions of every step."""

    def __init__(self, model: Decoder):
        self.model, self.config, self.device, self.dtype = model, model.config, model.device, model.dtype
        self.positions: list[list[int]] = []

    def forward(self, step: StepTensors, attention) -> Tensor:
        self.positions.append(step.positions.tolist())
        return self.model.forward(step, attention)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model()


@pytest.mark.parametrize("options", [
    {}, dict(sliding_window=(4, None)), dict(qk_norm=True), dict(rope=RopeConfig(type="yarn", factor=4.0)),
    dict(sparse_layers=(True, False), num_experts=4, num_experts_per_token=2, moe_intermediate_size=10),
])
def test_the_three_loops_give_the_same_tokens(options: dict) -> None:
    """K03: rows of an unequal batch give what they give alone, whatever the padding id."""
    model = make_model(**options)
    alone = [generate_without_cache(model, prompt, max_tokens=40) for prompt in PROMPTS]
    assert [generate_with_cache(model, prompt, max_tokens=40) for prompt in PROMPTS] == alone
    for pad_token_id in (0, 4):
        assert generate_static_batch(model, PROMPTS, max_tokens=40, pad_token_id=pad_token_id) == alone
    assert all(len(set(tokens)) > 5 for tokens in alone)


def test_positions_go_on_by_one(model: Decoder) -> None:
    """K02: 0..5 in the prefill, then 6, 7, 8, each once."""
    recorder = Recorder(model)
    output = generate_with_cache(recorder, [1, 2, 3, 4, 5, 6], max_tokens=4)
    assert recorder.positions == [[0, 1, 2, 3, 4, 5], [6], [7], [8]]
    assert len(output) == 4  # one prefill and three decode steps


def test_a_second_call_equals_the_first_even_after_one_broke_off(model: Decoder) -> None:
    """K02: nothing is left over between calls."""
    first = generate_with_cache(model, PROMPTS[0], max_tokens=12)

    def stop_half_way(logits: Tensor, position: int) -> list[int]:
        if position == 5:
            raise KeyboardInterrupt
        return greedy(logits, position)

    with pytest.raises(KeyboardInterrupt):
        generate_with_cache(model, PROMPTS[0], max_tokens=12, choose=stop_half_way)
    assert generate_with_cache(model, PROMPTS[0], max_tokens=12) == first


def test_left_padding_leaves_positions_alone() -> None:
    """K03: lengths 5 and 2 have positions 0..4 and 0, 1; the next tokens 5 and 2."""
    prefill = padded_step([[1] * 5, [0, 0, 0, 1, 1]], 0, [0, 3])
    assert prefill.positions.tolist()[:5] == [0, 1, 2, 3, 4] and prefill.positions.tolist()[8:] == [0, 1]
    assert prefill.positions.min() >= 0  # an embedding of positions, or a table, has no row -3
    assert padded_step([[1], [1]], 5, [0, 3]).positions.tolist() == [5, 2]


def test_rows_finish_separately_and_the_end_is_in_the_output(model: Decoder) -> None:
    """An end-of-sequence id is the last one of its row; a pad id that equals it neither stops nor hides it (K03)."""
    whole = [generate_with_cache(model, prompt, max_tokens=40) for prompt in PROMPTS]
    ends = {whole[0][10], whole[1][3]}
    for eos in (ends, set(PROMPTS[1]) | ends):
        expected = []
        for tokens in whole:
            stops = [i for i, token in enumerate(tokens) if token in eos]
            expected.append(tokens[: stops[0] + 1] if stops else tokens)
        assert len({len(row) for row in expected}) > 1
        for pad in eos:
            assert generate_static_batch(model, PROMPTS, max_tokens=40, eos_token_ids=eos, pad_token_id=pad) == expected
        assert [generate_with_cache(model, p, max_tokens=40, eos_token_ids=eos) for p in PROMPTS] == expected
        assert [generate_without_cache(model, p, max_tokens=40, eos_token_ids=eos) for p in PROMPTS] == expected


def test_choose_gets_logits_and_the_output_position(model: Decoder) -> None:
    calls = []

    def second_best(logits: Tensor, position: int) -> list[int]:
        calls.append((tuple(logits.shape), position))
        return logits.topk(2).indices[:, 1].tolist()

    with_cache = [generate_with_cache(model, prompt, max_tokens=5, choose=second_best) for prompt in PROMPTS]
    assert calls[:5] == [((1, 41), position) for position in range(5)]
    assert generate_static_batch(model, PROMPTS, max_tokens=5, choose=second_best) == with_cache
    assert calls[-1] == ((3, 41), 4)
    assert generate_without_cache(model, PROMPTS[0], max_tokens=5, choose=second_best) == with_cache[0]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert greedy(torch.tensor([[1.0, 3.0, 3.0], [0.0, 0.0, 0.0]]), 0) == [1, 0]
