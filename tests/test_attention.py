"""The three torch backends against attention written out with loops, and the traps of masks and positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from minillm.attention import torch_backend
from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import (
    ContiguousAttention,
    PaddedAttention,
    UncachedAttention,
    causal_attention,
    causal_mask,
)
from minillm.cache.kv import ContiguousCache
from minillm.model.config import ModelConfig


def make_config(num_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 5, layers: int = 2,
                window: int | None = None) -> ModelConfig:
    return ModelConfig(
        model_type="llama", vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=layers, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, max_position_embeddings=64, sliding_window=(window,) * layers,
    )


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_hand(query: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None = None) -> Tensor:
    """``query`` [n, heads, d] at positions from ``start``; ``keys``, ``values`` [length, kv_heads, d]; plain loops."""
    out = torch.zeros_like(query)
    group = query.shape[1] // keys.shape[1]
    for row in range(len(query)):
        position = start + row
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(query.shape[1]):
            seen = range(first, position + 1)
            scores = [torch.dot(query[row, head], keys[p, head // group]) / math.sqrt(query.shape[2]) for p in seen]
            weights = torch.softmax(torch.stack(scores), 0)
            out[row, head] = sum(w * values[p, head // group] for w, p in zip(weights, seen, strict=True))
    return out


def test_the_mask_is_aligned_to_the_last_key() -> None:
    """K01: with more keys than queries the last query sees all keys."""
    assert causal_mask(2, 5, None).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(1, 5, None).int().tolist() == [[1, 1, 1, 1, 1]]
    assert causal_mask(3, 5, 2).int().tolist() == [[0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 5), (2, 5), (5, 5), (4, 9)])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (4, 1)])
def test_causal_attention_equals_loops(heads: tuple[int, int], num_queries: int, num_keys: int,
                                       window: int | None) -> None:
    """K01 with every head layout: all queries at once, a chunk, one token, windows shorter and longer than the text."""
    query, keys, values = random(num_queries, heads[0], 5), random(num_keys, heads[1], 5), random(num_keys, heads[1], 5)
    result = causal_attention(query, keys.transpose(0, 1), values.transpose(0, 1), window)
    torch.testing.assert_close(result, by_hand(query, keys, values, num_keys - num_queries, window))


def test_query_heads_read_their_group_in_order() -> None:
    """M03: KV heads [A, B] under four query heads read A, A, B, B, never A, B, A, B."""
    values = torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 3, 4)
    for num_queries in (1, 2, 3):
        out = causal_attention(random(num_queries, 4, 4, dtype=torch.float32),
                               random(2, 3, 4, dtype=torch.float32), values)
        assert out[:, :, 0].round().tolist() == [[1, 1, 2, 2]] * num_queries


@pytest.mark.parametrize("window", [None, 3])
def test_contiguous_equals_uncached_for_a_mixed_batch(window: int | None) -> None:
    """Prefill, chunk and decode of three sequences in one step; both layers; buffers that have to grow."""
    config = make_config(window=window)
    keys, values, query = (random(3, 12, heads, 5, seed=i) for i, heads in enumerate((2, 2, 6)))
    lengths, done = [4, 9, 12], [0, 3, 11]
    attention = ContiguousAttention(config, dtype=torch.float64, device="cpu", capacity=2)
    for layer in range(2):
        for s in (1, 2):
            step = StepTensors.of([[0] * done[s]], [0], [s])
            attention.write(layer, keys[s, :done[s]] + layer, values[s, :done[s]] + layer, step)
    step = StepTensors.of([[0] * (n - d) for n, d in zip(lengths, done)], done, [0, 1, 2])
    flat = [torch.cat([x[s, d:n] for s, (n, d) in enumerate(zip(lengths, done))]) for x in (query, keys, values)]
    for layer in range(2):
        attention.write(layer, flat[1] + layer, flat[2] + layer, step)
        out = attention.attend(layer, flat[0], step)
        assert out.shape == flat[0].shape
        for s, (start, end) in enumerate(zip(step.query_starts, step.query_starts[1:])):
            n, d = lengths[s], done[s]
            torch.testing.assert_close(
                out[start:end], by_hand(query[s, d:n], keys[s, :n] + layer, values[s, :n] + layer, d, window))


def test_free_forgets_one_sequence_and_knows_no_strangers() -> None:
    """K02: after free the same key starts from nothing; other sequences stay."""
    config = make_config(layers=1)
    attention = ContiguousAttention(config, dtype=torch.float64, device="cpu", capacity=4)
    kv = random(3, 2, 5)
    attention.write(0, torch.cat((kv, kv)), torch.cat((kv, kv)), StepTensors.of([[0] * 3] * 2, [0, 0], ["a", "b"]))
    assert attention.num_tokens == 6 and attention.num_bytes == 2 * (2 * 2 * 4 * 5 * 8)
    attention.free("a")
    attention.free("a")
    attention.free("stranger")
    assert attention.num_tokens == 3
    with pytest.raises(ValueError, match="only 0 tokens"):
        attention.write(0, kv[:1], kv[:1], StepTensors.of([[0]], [3], ["a"]))


def test_a_rewound_sequence_overwrites_what_it_had() -> None:
    """K02: the plan's position rules, so writing from an earlier one replaces what lay there."""
    config = make_config(num_heads=2, layers=1)
    attention = ContiguousAttention(config, dtype=torch.float64, device="cpu")
    kv, query = random(6, 2, 5), random(1, 2, 5, seed=1)
    attention.write(0, kv[:5] + 7, kv[:5] + 7, StepTensors.of([[0] * 5], [0], ["a"]))
    attention.write(0, kv[:4], kv[:4], StepTensors.of([[0] * 4], [0], ["a"]))
    step = StepTensors.of([[0]], [4], ["a"])
    attention.write(0, kv[4:5], kv[4:5], step)
    torch.testing.assert_close(attention.attend(0, query, step), by_hand(query, kv[:5], kv[:5], 4))


def test_a_prompt_longer_than_the_capacity_gets_a_buffer_that_fits_at_once() -> None:
    attention = ContiguousAttention(make_config(layers=1), dtype=torch.float32, device="cpu", capacity=2)
    kv = random(11, 2, 5, dtype=torch.float32)
    attention.write(0, kv, kv, StepTensors.of([[0] * 11], [0], ["a"]))
    assert attention.caches["a"].capacity == 11


def test_a_growing_buffer_keeps_what_it_holds() -> None:
    cache = ContiguousCache(make_config(layers=1), capacity=1, dtype=torch.float64, device="cpu")
    kv = random(20, 2, 5)
    for position in range(20):
        cache.write(0, position, kv[position : position + 1], -kv[position : position + 1])
    keys, values = cache.read(0, 0, 20)
    assert torch.equal(keys, kv.transpose(0, 1)) and torch.equal(values, -kv.transpose(0, 1))
    assert 20 <= cache.capacity < 40


def test_uncached_attention_refuses_a_step_that_needs_a_past() -> None:
    attention = UncachedAttention(make_config())
    step = StepTensors.of([[0]], [3], ["a"])
    attention.write(0, random(1, 2, 5), random(1, 2, 5), step)
    with pytest.raises(ValueError, match="position 0"):
        attention.attend(0, random(1, 6, 5), step)


def test_padding_is_never_seen_and_gives_zeros() -> None:
    """K03: rows of padding see no key; they give zeros, not NaN and not the mean of the values."""
    config = make_config(layers=1, num_heads=4)
    lengths, width = [5, 2], 5
    attention = PaddedAttention(config, [0, 3], max_columns=8, dtype=torch.float64, device="cpu")
    query, keys, values = (random(2, 6, heads, 5, seed=i) for i, heads in enumerate((4, 2, 2)))
    keys[1, :3] = values[1, :3] = 1e6  # padding holds anything
    for first, end in ((0, width), (width, width + 1)):
        step = StepTensors.of([[0] * (end - first)] * 2, [first] * 2, [0, 1])
        attention.write(0, keys[:, first:end].flatten(0, 1), values[:, first:end].flatten(0, 1), step)
        out = attention.attend(0, query[:, first:end].flatten(0, 1), step).unflatten(0, (2, -1))
        for row, length in enumerate(lengths):
            padding = width - length
            begin = max(first, padding)
            expected = by_hand(query[row, begin:end], keys[row, padding:end], values[row, padding:end],
                               begin - padding)
            torch.testing.assert_close(out[row, begin - first :], expected)
            assert torch.equal(out[row, : begin - first], torch.zeros_like(out[row, : begin - first]))


def textbook_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention by its formula, whose softmax over nothing is NaN."""
    scores = query.float() @ keys.float().mT * query.shape[-1] ** -0.5
    return (scores.masked_fill(~mask, -math.inf).softmax(-1) @ values.float()).to(query.dtype)


@pytest.mark.parametrize("kernel", ["torch", "textbook"])
def test_a_row_with_every_key_masked_is_zero_in_every_dtype(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K03: whether or not the kernel guards itself against rows that see nothing."""
    if kernel == "textbook":
        monkeypatch.setattr(torch_backend, "scaled_dot_product_attention", textbook_attention)
    config = make_config(layers=1, num_heads=2)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        attention = PaddedAttention(config, [0, 4], max_columns=4, dtype=dtype, device="cpu")
        step = StepTensors.of([[0] * 4] * 2, [0, 0], [0, 1])
        kv = random(8, 2, 5, dtype=dtype)
        attention.write(0, kv, kv, step)
        out = attention.attend(0, kv, step)
        assert out.dtype == dtype and out.isfinite().all()
        assert not out[4:].any() and out[:4].any()
