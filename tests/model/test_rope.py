"""RoPE equals transformers' values for every type, and turns pairs as its definition says."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minillm.attention.base import StepTensors
from minillm.errors import ModelError
from minillm.model.config import ModelConfig, RopeConfig
from minillm.model.rope import RotaryEmbedding, attention_factor, inverse_frequencies, rotate

OPTIONS: dict[str, dict] = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "llama3": dict(rope_type="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=512),
    "llama3 narrow": dict(rope_type="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=3.0,
                          original_max_position_embeddings=256),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
    "yarn betas": dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=256, beta_fast=16.0,
                       beta_slow=2.0, truncate=False),
    "yarn mscale": dict(rope_type="yarn", factor=40.0, original_max_position_embeddings=128, mscale=0.707,
                        mscale_all_dim=1.3),
    "yarn explicit": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.7),
}


def make_config(rope: RopeConfig, head_dim: int = 64, max_positions: int = 2048) -> ModelConfig:
    return ModelConfig(
        model_type="llama", vocab_size=10, hidden_size=3 * head_dim, intermediate_size=8, num_layers=1, num_heads=3,
        num_kv_heads=1, head_dim=head_dim, max_position_embeddings=max_positions, rope=rope,
    )


def oracle(options: dict, theta: float, head_dim: int, length: int | None) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig(
        hidden_size=3 * head_dim, num_attention_heads=3, head_dim=head_dim, max_position_embeddings=2048,
        rope_parameters={"rope_theta": theta, **options},
    )
    return ROPE_INIT_FUNCTIONS[options["rope_type"]](config, seq_len=length)


def ours(options: dict, theta: float) -> RopeConfig:
    return RopeConfig(theta=theta, type=options["rope_type"], **{k: v for k, v in options.items() if k != "rope_type"})


@pytest.mark.parametrize("head_dim", [8, 20, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_frequencies_and_factor_equal_transformers(name: str, theta: float, head_dim: int) -> None:
    """M02: every scaled type, several bases and head sizes; "dynamic" below and above the trained length."""
    rope = ours(OPTIONS[name], theta)
    for length in (None, 100, 2048, 5000):
        expected, factor = oracle(OPTIONS[name], theta, head_dim, length)
        result = inverse_frequencies(make_config(rope, head_dim), length)
        torch.testing.assert_close(result, expected, rtol=2e-6, atol=0)
        assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("options", "expected"), [
    (dict(factor=4.0), 1.138629), (dict(factor=16.0), 1.277259), (dict(factor=1.0), 1.0),
    (dict(factor=16.0, mscale=1.0, mscale_all_dim=1.0), 1.0), (dict(factor=16.0, attention_factor=0.25), 0.25),
])
def test_yarn_attention_factor(options: dict, expected: float) -> None:
    """M02: the published values; equal mscales cancel out; an explicit factor wins."""
    assert attention_factor(RopeConfig(type="yarn", original_max_position_embeddings=64, **options)) == pytest.approx(
        expected, abs=1e-6)


def test_an_unknown_type_is_refused_by_name() -> None:
    """M02."""
    with pytest.raises(ModelError, match="'foo'"):
        RotaryEmbedding(make_config(RopeConfig(type="foo")))  # type: ignore[arg-type]


def test_theta_is_used() -> None:
    """M02: 500000 and 10000 give their own frequencies: theta ** (-2 i / head_dim)."""
    for theta in (500_000.0, 10_000.0):
        frequencies = inverse_frequencies(make_config(RopeConfig(theta=theta)))
        expected = [theta ** (-2 * i / 64) for i in range(32)]
        torch.testing.assert_close(frequencies, torch.tensor(expected), rtol=1e-5, atol=0)


def test_rotate_turns_each_pair_by_its_angle() -> None:
    """Pair i of a head is (x[i], x[i + D/2]); by hand, with complex numbers."""
    rotary = RotaryEmbedding(make_config(RopeConfig(), head_dim=8))
    step = StepTensors.of([[1, 2, 3]], [5], ["a"])
    heads = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    result = rotate(heads, *rotary(step, torch.float64))
    for row, position in enumerate((5, 6, 7)):
        for pair in range(4):
            turn = complex(math.cos(angle := position * 10_000.0 ** (-pair / 4)), math.sin(angle))
            for head in range(2):
                a, b = heads[row, head, pair].item(), heads[row, head, pair + 4].item()
                turned = complex(a, b) * turn
                assert result[row, head, pair].item() == pytest.approx(turned.real, abs=1e-5)
                assert result[row, head, pair + 4].item() == pytest.approx(turned.imag, abs=1e-5)


def test_scores_depend_on_distance_alone() -> None:
    rotary = RotaryEmbedding(make_config(RopeConfig(), head_dim=16))
    query, key = torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        tables = rotary(StepTensors.of([[0], [0]], [query_position, key_position], ["q", "k"]), torch.float64)
        turned = rotate(torch.stack((query, key)), *tables)
        return (turned[0] * turned[1]).sum().item()

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-4)
    assert score(3, 1) != pytest.approx(score(4, 1), abs=1e-2)


def test_dynamic_uses_the_length_of_each_rows_own_sequence() -> None:
    """Two sequences in one step, one below and one beyond the trained length: each has its own frequencies."""
    config = make_config(RopeConfig(type="dynamic", factor=2.0), head_dim=8, max_positions=4)
    rotary = RotaryEmbedding(config)
    both, _ = rotary(StepTensors.of([[0] * 3, [0] * 6], [0, 0], ["short", "long"]), torch.float32)
    short, _ = rotary(StepTensors.of([[0] * 3], [0], ["short"]), torch.float32)
    long, _ = rotary(StepTensors.of([[0] * 6], [0], ["long"]), torch.float32)
    assert torch.equal(both, torch.cat((short, long)))
    assert not torch.equal(short, long[:3])
