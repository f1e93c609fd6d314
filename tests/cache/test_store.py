"""Where keys and values are kept: in 8 bit within half a scale, with nothing of what lay there before (N04)."""

from __future__ import annotations

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.attention.paged import PagedAttention
from minillm.attention.torch_backend import ContiguousAttention
from minillm.cache.blocks import BlockPool
from minillm.cache.store import BlockStore, Int8BlockStore
from minillm.model.config import ModelConfig
from minillm.schedule.scheduler import Scheduler

CONFIG = ModelConfig(model_type="llama", vocab_size=16, hidden_size=24, intermediate_size=8, num_layers=2, num_heads=6,
                     num_kv_heads=3, head_dim=4, max_position_embeddings=64)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def store_of(kind: type[BlockStore], dtype: torch.dtype, num_blocks: int = 4) -> BlockStore:
    return kind(CONFIG, num_blocks, 4, dtype=dtype, device="cpu")


def written(store: BlockStore, key: torch.Tensor, value: torch.Tensor, slots: list[int]) -> torch.Tensor:
    """What is read back of a write, ``[T, 2, kv_heads, head_dim]``."""
    store.write(1, torch.tensor(slots), key, value)
    return store.read(1, torch.arange(store.buffer.shape[1]))[slots]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1e-6, 3.0, 1e3, 6.5e4])
def test_n04_no_number_is_further_than_half_a_scale(size, dtype):
    """Zeros, constants, small and large rows; each token and head has a scale of its own."""
    for rows in (torch.full((3, 3, 4), size), random(3, 3, 4).clamp(-1, 1) * size):
        key, value = rows.to(dtype), (rows * 0.5).to(dtype)
        back = written(store_of(Int8BlockStore, dtype), key, value, [2, 3, 9])
        exact = torch.stack((key, value), 1)
        scale = (exact.abs().amax(-1, keepdim=True).double() * (1 + 2**-7) / 127).clamp(min=1e-30)
        rounding = 2**-10 * exact.abs().double() + torch.finfo(dtype).eps * exact.abs().double()
        assert back.dtype == dtype and ((back - exact).double().abs() <= scale / 2 + rounding).all()
    assert torch.equal(written(store_of(BlockStore, dtype), key, value, [2, 3, 9]), exact)


@pytest.mark.parametrize("kind", [BlockStore, Int8BlockStore])
def test_n04_what_lay_in_a_block_before_is_not_read(kind):
    """One token in a block of four, the rest of it unwritten: after ``begin`` the rest reads as zeros, not as NaN."""
    store = store_of(kind, torch.float32)
    for left in (store.buffer, getattr(store, "scales", store.buffer)):
        left.fill_(torch.nan if left.is_floating_point() else 77)
    store.begin(torch.tensor([1]))
    key = random(1, 3, 4).float()
    store.write(0, torch.tensor([4]), key, key)
    gathered = store.scratch(2)
    store.gather(0, torch.tensor([1, 1]), gathered)
    for block in (store.read(0, slice(4, 8)), store.read(0, torch.tensor([1])), *gathered):
        assert torch.allclose(block[0, 0], key[0], atol=0.02) and torch.equal(block[1:], torch.zeros(3, 2, 3, 4))


def test_all_ways_to_read_give_the_same_bits():
    store = store_of(Int8BlockStore, torch.float32)
    key, value = random(8, 3, 4).float(), random(8, 3, 4, seed=1).float()
    store.write(1, torch.tensor([12, 13, 14, 15, 4, 5, 6, 7]), key, value)
    gathered = store.scratch(2)
    store.gather(1, torch.tensor([3, 1]), gathered)
    read = store.read(1, torch.tensor([3, 1]))
    assert torch.equal(read, gathered.flatten(0, 1)) and torch.equal(read[:4], store.read(1, slice(12, 16)))


def test_a_rows_bits_do_not_depend_on_what_is_written_beside_it():
    key, value = random(5, 3, 4).float(), random(5, 3, 4, seed=1).float()
    together = written(store_of(Int8BlockStore, torch.float32), key, value, [0, 1, 2, 3, 8])
    alone = [written(store_of(Int8BlockStore, torch.float32), key[i:i + 1], value[i:i + 1], [3]) for i in range(5)]
    assert torch.equal(together, torch.cat(alone))


def test_the_option_really_changes_the_memory(tiny_model, byte_tok):
    """Half of float16's payload a token, and a scale of two bytes: the same bytes hold more blocks by that."""
    config = tiny_model.config
    per_token = {kind: kind.bytes_per_token(config, torch.float16) for kind in (BlockStore, Int8BlockStore)}
    heads = 2 * config.num_layers * config.num_kv_heads
    assert per_token[Int8BlockStore] == per_token[BlockStore] // 2 + 2 * heads
    budget = 2**20
    sizes = {}
    for kind in ("auto", "int8"):
        with LLM(tiny_model, tokenizer=byte_tok, kv_cache_memory_bytes=budget, kv_cache_dtype=kind) as llm:
            sizes[kind] = llm.engine.scheduler.pool.num_blocks
            assert 0 <= budget - llm.attention.num_bytes < llm.attention.num_bytes / sizes[kind]
    wide = BlockStore.bytes_per_token(config, tiny_model.dtype) / per_token[Int8BlockStore]
    assert sizes["int8"] / sizes["auto"] == pytest.approx(wide, rel=0.01)
    real = ModelConfig(**vars(CONFIG) | {"head_dim": 64})
    assert BlockStore.bytes_per_token(real, torch.bfloat16) / Int8BlockStore.bytes_per_token(real, torch.bfloat16) > 1.9


def test_tokens_are_those_of_a_loop_over_rounded_keys_and_values(tiny_model, byte_tok, simplest, int8_cache):
    """In blocks, shared prefixes, chunks, preemption and batches: eight requests that fight for a small pool."""
    pool = BlockPool(9, 4)
    options = {"dtype": tiny_model.dtype, "device": tiny_model.device}
    attention = PagedAttention(tiny_model.config, pool, store=Int8BlockStore, **options)
    scheduler = Scheduler(pool, max_num_seqs=5, max_num_batched_tokens=16, max_prefill_chunk=6)
    lengths = (9, 9, 8, 2, 9, 5, 9, 1)
    prompts = [[*range(1, 1 + length), *[10 + i] * (i % 3)] for i, length in enumerate(lengths)]
    params = [SamplingParams(temperature=float(i % 2), seed=i, max_tokens=6 + i, ignore_eos=True) for i in range(8)]
    with LLM(tiny_model, tokenizer=byte_tok, scheduler=scheduler, attention_backend=attention) as llm:
        outputs = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    assert scheduler.num_preempted > 0
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        assert output == simplest(prompt, own, 64, make_cache=int8_cache), (prompt, own)


def test_an_option_that_a_part_of_the_callers_own_makes_meaningless_is_refused(tiny_model, byte_tok):
    options = {"dtype": tiny_model.dtype, "device": tiny_model.device}
    for part in ({"attention_backend": ContiguousAttention(tiny_model.config, **options)},
                 {"attention_backend": PagedAttention(tiny_model.config, BlockPool(8, 4), **options)}):
        with pytest.raises(ValueError, match="kv_cache_dtype='int8' is for minillm's own"):
            LLM(tiny_model, tokenizer=byte_tok, kv_cache_dtype="int8", **part)
    with pytest.raises(ValueError, match="kv_cache_dtype must be 'auto' or 'int8'"):
        LLM(tiny_model, tokenizer=byte_tok, kv_cache_dtype="fp8")
