"""Attention over blocks: what contiguous caches give, wherever the blocks lie and whatever was in them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.attention import FEW
from minillm.attention.base import StepTensors
from minillm.attention.paged import PagedAttention
from minillm.attention.torch_backend import ContiguousAttention
from minillm.cache.blocks import BlockPool, BlockTable
from minillm.schedule.scheduler import Scheduler


def paged_llm(model, tokenizer, *, blocks: int, size: int, caching: bool = True, **options) -> LLM:
    """An LLM over one pool."""
    pool = BlockPool(blocks, size, caching=caching)
    attention = PagedAttention(model.config, pool, dtype=model.dtype, device="cpu")
    return LLM(model, tokenizer=tokenizer, scheduler=Scheduler(pool, **options), attention_backend=attention)


def scattered(pool: BlockPool, draw: random.Random) -> None:
    """Free blocks in any order, so that no table is one run."""
    draw.shuffle(pool._free)


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("in_order", [True, False])
def test_the_output_of_contiguous_caches_for_any_mix_of_prompts_chunks_and_decodes(tiny_model, size, window, in_order):
    config = replace(tiny_model.config, sliding_window=(window, None))
    draw, pool = random.Random(size), BlockPool(400, size)
    if not in_order:
        scattered(pool, draw)
    options = {"dtype": torch.float64, "device": "cpu"}
    paged, contiguous = PagedAttention(config, pool, **options), ContiguousAttention(config, **options)
    paged.store.buffer.fill_(torch.nan)  # what others left there
    tables, lengths = [BlockTable() for _ in range(5)], [0] * 5
    torch.manual_seed(0)
    for _ in range(12):
        chosen = [index for index in range(5) if draw.random() < 0.7] or [0]
        widths = [draw.choice((1, 1, 1, 2, 4, 9, FEW + 3) if lengths[index] < 40 else (1, 3)) for index in chosen]
        for index, width in zip(chosen, widths, strict=True):
            assert pool.allocate(tables[index], lengths[index] + width)
        step = StepTensors.of([[0] * width for width in widths], [lengths[index] for index in chosen], chosen,
                              block_tables=[tables[index].blocks for index in chosen])
        for layer in range(2):
            key, value = torch.randn(2, sum(widths), 2, 8, dtype=torch.float64)
            query = torch.randn(sum(widths), 4, 8, dtype=torch.float64)
            for backend in (paged, contiguous):
                backend.write(layer, key, value, step)
            torch.testing.assert_close(paged.attend(layer, query, step), contiguous.attend(layer, query, step))
        for index, width in zip(chosen, widths, strict=True):
            lengths[index] += width
    assert max(lengths) > 20 and paged.num_tokens >= sum(lengths)


def test_nan_of_a_request_that_failed_does_not_reach_who_gets_its_block(tiny_model, byte_tok):
    llm = paged_llm(tiny_model, byte_tok, blocks=6, size=4, caching=False)
    params = [SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True) for most in (6, 4)]
    expected = [out.outputs[0].token_ids for out in llm.generate([[1, 2, 3], [4, 5, 6, 7, 8]], params)]
    llm.attention.store.buffer.fill_(torch.nan)
    outputs = llm.generate([[1, 2, 3], [4, 5, 6, 7, 8]], params)
    assert [out.outputs[0].token_ids for out in outputs] == expected
    assert all(out.outputs[0].error is None for out in outputs)


def test_a_step_without_block_tables_is_refused_by_name(tiny_model):
    paged = PagedAttention(tiny_model.config, BlockPool(4), dtype=torch.float64, device="cpu")
    with pytest.raises(ValueError, match="needs a block table for each sequence"):
        tiny_model.forward(StepTensors.of([[1, 2]], [0], ["a"]), paged)


def test_k04_a_prompt_that_is_cached_whole_gives_the_same_tokens_again(tiny_model, byte_tok):
    """K04: the last token is computed at its own position, on every hit."""
    llm = paged_llm(tiny_model, byte_tok, blocks=32, size=4)
    for length in (1, 4, 5, 8):
        prompt, params = [20 * length + place for place in range(length)], SamplingParams(temperature=0.0, max_tokens=6)
        runs = [llm.generate([prompt], params)[0] for _ in range(3)]
        assert len({tuple(run.outputs[0].token_ids) for run in runs}) == 1
        assert [run.metrics.num_cached_tokens for run in runs] == [0, *[(length - 1) // 4 * 4] * 2]


def test_a_range_is_a_block_table_as_a_list_is(tiny_model):
    """Of two sequences that are gathered together, and of unequal length."""
    logits = []
    for kind in (range, lambda *ends: [*range(*ends)]):
        attention = PagedAttention(tiny_model.config, BlockPool(8, 4, caching=False), dtype=tiny_model.dtype,
                                   device=tiny_model.device)
        tables = [kind(0, 3), kind(3, 5)]
        for ids, starts in (([[1] * 9, [2] * 5], [0, 0]), ([[3], [4]], [9, 5])):
            step = StepTensors.of(ids, starts, range(2), block_tables=tables)
            logits.append(tiny_model.forward(step, attention))
    assert torch.equal(logits[1], logits[3])
