"""What an engine is put together from: options, parts of the caller's own, and one pool of blocks for both."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from minillm import InvalidRequest, QueueFull, SamplingParams, assemble
from minillm.attention.paged import PagedAttention
from minillm.attention.torch_backend import ContiguousAttention
from minillm.cache.blocks import BlockPool
from minillm.model import device
from minillm.schedule.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class FirstOnly:
    """The least that meets ``SchedulerProtocol``: one request at a time, no blocks."""

    def __init__(self):
        self.waiting, self.running = [], []
        self._own = Scheduler(BlockPool(64, caching=False), max_num_seqs=1)

    def __getattr__(self, name):
        if name in ("add", "schedule", "commit", "finish"):
            self.waiting, self.running = self._own.waiting, self._own.running
            return getattr(self._own, name)
        raise AttributeError(name)


def contiguous(model):
    return ContiguousAttention(model.config, dtype=model.dtype, device="cpu")


def test_by_default_blocks_are_paged_and_a_prompt_reuses_what_another_has_computed(tiny_llm):
    llm, prompt = tiny_llm(block_size=4), list(range(20))
    first, second = llm.generate([prompt], GREEDY)[0], llm.generate([prompt + [99]], GREEDY)[0]
    assert isinstance(llm.attention, PagedAttention) and llm.attention.pool is llm.engine.scheduler.pool
    assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 20)
    stats = llm.stats()
    assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (41, 20)
    assert stats.num_free_blocks == stats.num_blocks == 8 * 64 // 4  # max_num_seqs x max_model_len / block_size


def test_a_prefix_cache_that_was_reset_gives_no_hit(tiny_llm):
    llm, prompt = tiny_llm(block_size=4), list(range(20))
    running = llm.stream(list(range(100, 120)), GREEDY)
    next(running)
    hits = []
    for _ in range(2):
        hits += [llm.generate([prompt], GREEDY)[0].metrics.num_cached_tokens for _ in range(2)]
        llm.reset_prefix_cache()
    assert hits == [0, 16, 0, 16] and len(list(running)) == 3
    assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_without_prefix_caching_nothing_is_reused(tiny_llm):
    llm, prompt = tiny_llm(enable_prefix_caching=False), list(range(40))
    outputs = [llm.generate([prompt], GREEDY)[0] for _ in range(2)]
    assert [out.metrics.num_cached_tokens for out in outputs] == [0, 0]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_a_backend_without_blocks_or_a_scheduler_without_a_pool_gives_the_same_tokens(tiny_llm, tiny_model):
    prompts = [list(range(30)), list(range(30)), [7]]
    expected = [out.outputs[0].token_ids for out in tiny_llm().generate(prompts, GREEDY)]
    paged = PagedAttention(tiny_model.config, BlockPool(40, 4), dtype=torch.float64, device="cpu")
    counted = Scheduler(BlockPool(40, 4, caching=False))
    for parts in ({"attention_backend": contiguous(tiny_model)}, {"scheduler": FirstOnly()},
                  {"scheduler": Scheduler(BlockPool(40, 4))}, {"attention_backend": paged},
                  {"attention_backend": contiguous(tiny_model), "scheduler": counted}):
        llm = tiny_llm(**parts)
        outputs = llm.generate(prompts, GREEDY)
        assert [out.outputs[0].token_ids for out in outputs] == expected, parts
        is_paged = getattr(llm.attention, "pool", 0) is getattr(llm.engine.scheduler, "pool", 1)
        assert isinstance(llm.attention, PagedAttention) == is_paged, parts


def test_a_pool_serves_one_backend_as_long_as_that_lives_and_no_other_what_it_has_written(tiny_llm, tiny_model):
    """Two would take what the other has published for their own."""
    pool = BlockPool(40, 4)
    one = tiny_llm(scheduler=Scheduler(pool))
    with pytest.raises(ValueError, match="another backend has written, or will: make a new BlockPool"):
        tiny_llm(scheduler=Scheduler(pool))
    one.generate([list(range(20))], GREEDY)
    one.close()
    del one
    gc.collect()
    with pytest.raises(ValueError, match="another backend has written"):
        tiny_llm(scheduler=Scheduler(pool))
    pool.forget()
    assert tiny_llm(scheduler=Scheduler(pool)).generate([[1]], GREEDY)


def test_an_option_that_a_part_of_ones_own_makes_meaningless_is_refused_by_name(tiny_llm, tiny_model):
    pool, other = BlockPool(8), BlockPool(8)
    paged = PagedAttention(tiny_model.config, pool, dtype=torch.float64, device="cpu")
    for parts, words in (
            ({"scheduler": Scheduler(pool), "max_num_seqs": 2}, "max_num_seqs is what your own scheduler brings"),
            ({"scheduler": Scheduler(pool), "num_kv_blocks": 9}, "num_kv_blocks is what your own scheduler"),
            ({"attention_backend": paged, "block_size": 4}, "block_size is what your own scheduler or attention"),
            ({"attention_backend": contiguous(tiny_model), "enable_prefix_caching": True}, "needs an attention_b"),
            ({"attention_backend": contiguous(tiny_model), "scheduler": Scheduler(other)}, "needs a scheduler over"),
            ({"attention_backend": paged, "scheduler": Scheduler(other)}, "over different pools")):
        with pytest.raises(ValueError, match=words):
            tiny_llm(**parts)


def test_the_pool_is_as_large_as_the_memory_it_was_given(tiny_llm, monkeypatch):
    block = 2 * 2 * 2 * 8 * 8 * 16  # K and V, layers, KV heads, head_dim, bytes, tokens
    assert tiny_llm(kv_cache_memory_bytes=5 * block + 1).stats().num_blocks == 5
    with pytest.raises(ValueError, match=f"holds no block: one of 16 tokens takes {block} bytes"):
        tiny_llm(kv_cache_memory_bytes=block - 1)
    for free, expected in ((10**9, 8 * 4), (4 * block * 6, 6), (0, 4)):  # all that can be used, a quarter, one request
        monkeypatch.setattr(assemble, "free_bytes", lambda _, free=free: free)
        llm = tiny_llm()
        assert llm.stats().num_blocks == expected
        assert llm.attention.num_bytes == expected * block


def test_free_memory_is_what_the_container_leaves(tmp_path: Path):
    for name, text in (("memory.max", "1000"), ("memory.current", "400")):
        (tmp_path / name).write_text(text)
    assert device._container_bytes(tmp_path) == 600
    (tmp_path / "memory.max").write_text("max")
    assert device._container_bytes(tmp_path) is None and device._container_bytes(tmp_path / "none") is None
    assert device.free_bytes("cpu") > 0


def test_a_pool_that_memory_cannot_hold_is_refused_by_name(tiny_llm, monkeypatch):
    """Before the pool itself is made, whose lists would fill the memory."""
    monkeypatch.setattr(assemble, "BlockPool", None)
    for options in ({"num_kv_blocks": 64, "block_size": 2**30}, {"num_kv_blocks": 10**9, "block_size": 2**20},
                    {"kv_cache_memory_bytes": 2**60}):
        with pytest.raises(ValueError, match="lower num_kv_blocks or kv_cache_memory_bytes"):
            tiny_llm(**options)


def test_max_waiting_turns_requests_away_before_anything_of_them_runs(tiny_llm):
    llm = tiny_llm(max_num_seqs=1, max_waiting=1)
    streams = [llm.stream([1, 2, 3], GREEDY) for _ in range(2)]  # one place and one that waits
    with pytest.raises(QueueFull, match="2 requests wait already, 1 can start, and max_waiting is 1. Try again later"):
        llm.stream([1, 2, 3], GREEDY)
    with pytest.raises(QueueFull):
        llm.generate([[1], [2]], GREEDY)
    assert [len([token for piece in stream for token in piece.token_ids]) for stream in streams] == [4, 4]
    stats = llm.stats()
    assert (stats.num_waiting, stats.num_running, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    with pytest.raises(QueueFull):  # n requests of one prompt count as n
        llm.stream([1], SamplingParams(n=3, max_tokens=1))
    assert len(tiny_llm(max_num_seqs=1, max_waiting=0).generate([[1]], GREEDY)) == 1


def test_priorities_decide_who_runs_first_where_the_policy_heeds_them(tiny_llm):
    llm = tiny_llm(max_num_seqs=1, scheduling_policy="priority")
    outputs = llm.generate([[1], [2], [3]], GREEDY, priority=[1, 0, -1])
    first_s = [out.metrics.first_token_s for out in outputs]
    assert first_s == sorted(first_s, reverse=True)
    for engine, priority, words in ((tiny_llm(), 1, "needs an engine with scheduling_policy='priority'"),
                                    (llm, 1.5, "must be a whole number"), (llm, True, "must be a whole number")):
        with pytest.raises(InvalidRequest, match=f"prompt 0: priority {words}"):
            engine.generate([[1], [2]], GREEDY, priority=priority)
    with pytest.raises(InvalidRequest, match="2 prompts, 1 values of priority"):
        llm.generate([[1], [2]], GREEDY, priority=[1])


def test_a_score_reads_and_leaves_nothing_in_the_blocks_of_requests(tiny_llm):
    llm, text = tiny_llm(block_size=4), list(range(30))
    fresh = llm.score([text])[0].logprobs
    llm.generate([text], GREEDY)
    used = llm.engine.scheduler.pool.num_cached
    llm.attention.store.buffer.fill_(torch.nan)
    assert llm.score([text])[0].logprobs == fresh and llm.engine.scheduler.pool.num_cached == used
