"""The cost model: the facts that the course teaches, the real decoder's bytes and calls, and what it refuses."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.attention.base import StepTensors
from minillm.attention.paged import PagedAttention
from minillm.attention.torch_backend import ContiguousAttention
from minillm.cache.blocks import BlockPool
from minillm.config import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS
from minillm.measure.bench.kernels import check_grid, measure_kernels, median_error
from minillm.measure.card import MachineCard
from minillm.measure.hardware import Hardware, KernelRates, known_hardware
from minillm.measure.roofline import (
    FORMATS,
    attended_pairs,
    crossover_batch,
    engine_options,
    estimate,
    experts_woken,
    kv_bytes_per_token,
    max_requests,
    mixed_step_cost,
    parameters,
    step_cost,
    weight_bytes_held,
)
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.shapes import find_config, known_models
from minillm.model.weights import expected_tensors

H100 = Hardware.named("h100")
PUBLISHED_BILLIONS = {  # each model's own card or paper
    "smollm2-135m": 0.1345, "llama-3.2-1b": 1.236, "llama-3-8b": 8.03, "llama-3.1-8b": 8.03, "llama-3-70b": 70.55,
    "mistral-7b": 7.24, "mixtral-8x7b": 46.7, "qwen2.5-7b": 7.616, "qwen3-0.6b": 0.596, "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.53,
}


def tiny(**keys) -> ModelConfig:
    sizes = dict(model_type="llama", vocab_size=67, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6,
                 num_kv_heads=2, head_dim=8, max_position_embeddings=64)
    return ModelConfig(**{**sizes, **keys})


SPARSE = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 20, "sparse_layers": (True, True)}
TINY = {
    "plain": {}, "tied": {"tie_word_embeddings": True}, "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk norm": {"qk_norm": True}, "experts": SPARSE, "mixed": {**SPARSE, "sparse_layers": (False, True)},
}


def random_decoder(config: ModelConfig, dtype: str = "float32", quantization: str | None = None) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in expected_tensors(config).items()}
    return Decoder.from_weights(config, weights, dtype=dtype, quantization=quantization)


@pytest.mark.parametrize("model", known_models())
def test_known_shapes_have_their_published_size(model: str) -> None:
    assert sum(parameters(find_config(model)).values()) / 1e9 == pytest.approx(PUBLISHED_BILLIONS[model], rel=2e-3)


@pytest.mark.parametrize("keys", TINY.values(), ids=TINY)
def test_parameters_by_part_add_up_to_the_tensors_of_the_files(keys: dict) -> None:
    config = tiny(**keys)
    assert sum(parameters(config).values()) == sum(map(math.prod, expected_tensors(config).values()))


def test_llama_3_8b_reads_15_gb_a_step_and_223_tokens_per_s_are_the_most() -> None:
    config = find_config("llama-3-8b")
    cost = step_cost(config)
    assert cost.weight_bytes / 1e9 == pytest.approx(15.0, abs=0.05)
    assert 1 / estimate(cost, H100).time_s == pytest.approx(223, abs=1)
    assert H100.read_bytes_per_s / weight_bytes_held(config) == pytest.approx(209, abs=1), "the rule of thumb"
    assert estimate(cost, H100).limit == "bytes" and cost.intensity == pytest.approx(1, abs=0.01)


def test_sixteen_requests_of_32k_hold_64_gib_and_are_most_of_the_bytes() -> None:
    config = find_config("llama-3-8b")
    assert kv_bytes_per_token(config) == 128 * 2**10
    assert 4000 * kv_bytes_per_token(config) == 500 * 2**20
    cost = step_cost(config, batch=16, context=32 * 2**10)
    assert cost.kv_bytes_read == 64 * 2**30
    assert cost.kv_bytes_read / (cost.kv_bytes_read + weight_bytes_held(config)) == pytest.approx(0.81, abs=0.005)
    assert weight_bytes_held(config) + cost.kv_bytes_read > H100.memory_bytes, "no 80 GB card holds both"
    assert max_requests(config, H100, context=32 * 2**10) == 14


def test_a_prompt_of_4000_tokens_costs_6e13_flops_and_attention_7_percent_more() -> None:
    cost = step_cost(find_config("llama-3-8b"), num_new=4000)
    thumb = 2 * 8e9 * 4000
    assert thumb == 6.4e13 and thumb / 346e12 == pytest.approx(0.185, abs=0.001)
    assert cost.parts["attention"].flops / thumb == pytest.approx(0.066, abs=0.002)
    assert cost.flops / thumb == pytest.approx(0.94, abs=0.01), "the embedding is not multiplied; the head for one row"
    all_rows = step_cost(find_config("llama-3-8b"), num_new=4000, logits="all")
    assert all_rows.parts["head"].flops == 4000 * cost.parts["head"].flops
    assert step_cost(find_config("llama-3-8b"), num_new=4000, logits="none").parts["head"] == (0, 0, 0)


def test_smollm2_multiplies_106_to_135_million_parameters() -> None:
    config = find_config("smollm2-135m")
    with_head, without = (step_cost(config, logits=which).flops / 2 / 1e6 for which in ("last", "none"))
    assert (round(without), round(with_head)) == (106, 135)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("keys", TINY.values(), ids=TINY)
def test_weight_bytes_of_one_token_are_those_the_decoder_says_it_reads(keys: dict, dtype: str) -> None:
    config = tiny(**keys)
    cost = step_cost(config, dtype=dtype)
    embedding_row = cost.parts["embedding"].num_bytes
    assert cost.weight_bytes - embedding_row == random_decoder(config, dtype).bytes_read_per_step


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantized_weights_read_what_the_decoder_says_but_for_the_scales_of_rows(quantization: str, tied: bool) -> None:
    config = tiny(hidden_size=256, intermediate_size=512, vocab_size=512, head_dim=32, tie_word_embeddings=tied)
    cost = step_cost(config, dtype=quantization)
    model = random_decoder(config, **engine_options(quantization))
    read = cost.weight_bytes - cost.parts["embedding"].num_bytes
    assert model.bytes_read_per_step == pytest.approx(read, rel=0.01)
    assert model.bytes_read_per_step >= read


def test_int8_keys_and_values_take_a_byte_each_and_a_scale_a_head() -> None:
    config = find_config("llama-3-8b")
    wide, narrow = (kv_bytes_per_token(config, "bfloat16", kind) for kind in KV_CACHE_DTYPES)
    assert (wide, narrow) == (2 * 32 * 8 * 128 * 2, 2 * 32 * 8 * (128 + 2))
    costs = [step_cost(config, context=1000, kv_cache_dtype=kind).kv_bytes_read for kind in KV_CACHE_DTYPES]
    assert costs == [1000 * wide, 1000 * narrow]
    fit = [max_requests(config, H100, context=8192, kv_cache_dtype=kind) for kind in KV_CACHE_DTYPES]
    assert fit[1] / fit[0] == pytest.approx(256 / 130, rel=0.03)
    with pytest.raises(ValueError, match="kv_cache_dtype 'int4'"):
        kv_bytes_per_token(config, kv_cache_dtype="int4")


def test_every_dtype_and_quantization_of_the_engine_has_its_bytes() -> None:
    assert set(FORMATS) == {*DTYPES, *QUANTIZATIONS}


@pytest.mark.parametrize(("num_new", "context", "window"), [
    (1, 0, None), (7, 0, None), (3, 5, None), (7, 0, 3), (1, 9, 4), (4, 2, 5), (6, 2, 5), (3, 9, 1)])
def test_attended_pairs_are_those_under_the_mask(num_new: int, context: int, window: int | None) -> None:
    queries = range(context, context + num_new)
    pairs = [(q, k) for q in queries for k in range(q + 1) if window is None or k > q - window]
    assert attended_pairs(num_new, context, window) == len(pairs)


class CallCounter(TorchDispatchMode):
    """Counts every operator call, views included."""

    def __init__(self):
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("batch", "num_new", "context"), [
    (1, 1, 6), (3, 1, 6), (1, 1, 0), (1, 5, 0), (2, 5, 0), (2, 3, 4)])
@pytest.mark.parametrize("keys", [{}, {"qk_norm": True}, SPARSE], ids=["plain", "qk norm", "experts"])
def test_operators_are_those_the_decoder_really_calls(keys: dict, batch: int, num_new: int, context: int) -> None:
    config = tiny(**{**keys, "num_layers": 6, "sparse_layers": (True,) * 6 if keys is SPARSE else ()})
    model = random_decoder(config)
    attention = ContiguousAttention(config, dtype=model.dtype, device=model.device, capacity=32)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(67, (batch, context + num_new), generator=generator).tolist()
    if context:
        model.forward(StepTensors.of([row[:context] for row in ids], [0] * batch, range(batch)), attention)
    step = StepTensors.of([row[context:] for row in ids], [context] * batch, range(batch))
    with CallCounter() as counter:
        model.forward(step, attention)
    # Experts are woken as the router likes; the model counts what an even router would wake.
    tolerance = 0.15 if keys is SPARSE else 0.03
    expected = step_cost(config, batch=batch, num_new=num_new, context=context, dtype="float32").operators
    assert expected == pytest.approx(counter.calls.total(), rel=tolerance)


@pytest.mark.parametrize("sequences", [
    [(1, 6)], [(1, 6), (1, 3)], [(1, 6)] * 8, [(5, 0)], [(3, 4)], [(5, 0), (6, 2)], [(5, 0), (1, 6)],
    [(2, 6)] * 8, [(3, 4), (3, 2)], [(3, 4), (3, 2), (9, 0), (9, 1), (1, 6), (1, 3)], [(10, 0), (10, 1)],
    [(6, 0), (1, 3), (1, 6)], [(4, 4), (5, 0), (1, 5), (1, 6), (1, 2)]], ids=str)
def test_operators_over_blocks_are_those_the_decoder_really_calls(sequences: list[tuple[int, int]]) -> None:
    config = tiny(num_layers=6)
    model, size = random_decoder(config), 16
    attention = PagedAttention(config, BlockPool(len(sequences), size), dtype=model.dtype, device=model.device)
    tables = [[index] for index in range(len(sequences))]
    for (_, context), table in zip(sequences, tables):
        if context:
            model.forward(StepTensors.of([[1] * context], [0], [0], block_tables=[table]), attention)
    step = StepTensors.of([[1] * num_new for num_new, _ in sequences], [context for _, context in sequences],
                          tables[0] * len(tables), block_tables=tables)
    with CallCounter() as counter:
        model.forward(step, attention)
    cost = mixed_step_cost(config, Counter(sequences), logit_rows=len(sequences), dtype="float32", paged=True)
    assert cost.operators == pytest.approx(counter.calls.total(), rel=0.03)


def test_a_mixed_step_reads_weights_once_and_adds_the_rest_by_sequence() -> None:
    config = find_config("mistral-7b")
    chunk, decodes = step_cost(config, num_new=512, context=4000), step_cost(config, batch=7, context=9000)
    both = mixed_step_cost(config, {(512, 4000): 1, (1, 9000): 7}, logit_rows=8)
    assert both.kv_bytes_read == chunk.kv_bytes_read + decodes.kv_bytes_read
    assert both.flops == pytest.approx(chunk.flops + decodes.flops)
    for name in ("qkv", "output", "mlp"):
        assert both.parts[name].num_bytes == chunk.parts[name].num_bytes == decodes.parts[name].num_bytes
    assert mixed_step_cost(config, {(512, 4000): 1, (1, 9000): 7}, logit_rows=0).parts["head"] == (0, 0, 0)


def test_experts_woken_grow_from_the_tokens_own_to_all() -> None:
    assert experts_woken(8, 2, 1) == pytest.approx(2)
    assert experts_woken(128, 8, 16) == pytest.approx(128 * (1 - (15 / 16) ** 16))
    assert experts_woken(8, 2, 1000) == pytest.approx(8)
    torch.manual_seed(0)
    drawn = [len({int(e) for _ in range(5) for e in torch.randperm(8)[:2]}) for _ in range(2000)]
    assert sum(drawn) / len(drawn) == pytest.approx(experts_woken(8, 2, 5), rel=0.02)


def test_a_batch_wakes_more_experts_so_a_sparse_step_reads_more() -> None:
    config = find_config("mixtral-8x7b")
    one, many = (step_cost(config, batch=batch).weight_bytes for batch in (1, 64))
    assert one / 1e9 == pytest.approx(2 * 12.9 - 2 * 0.13, abs=0.2), "12.9 billion parameters a token, embedding aside"
    assert many == pytest.approx(weight_bytes_held(config) - 2 * 0.13e9, rel=0.01)


def test_a_sliding_window_bounds_what_is_read_and_multiplied() -> None:
    config = find_config("mistral-7b")
    short, long = (step_cost(config, context=context) for context in (4096, 30_000))
    assert short.kv_bytes_read == long.kv_bytes_read == 4096 * kv_bytes_per_token(config)
    full = replace(config, sliding_window=())
    assert step_cost(full, context=30_000).kv_bytes_read == 30_000 * kv_bytes_per_token(config)
    assert long.parts["attention"].flops < step_cost(full, context=30_000).parts["attention"].flops / 7


def test_kernels_follow_one_another_and_within_one_reading_and_multiplying_overlap() -> None:
    config = tiny()
    machine = Hardware(name="x", memory_bytes=1e9, read_bytes_per_s=1e9, flops_per_s={"float32": 1e10})
    cost = step_cost(config, batch=4, context=10, dtype="float32")
    best = estimate(cost, machine)
    assert best.time_s == pytest.approx(sum(max(p.num_bytes / 1e9, p.flops / 1e10) for p in cost.parts.values()))
    assert max(best.bytes_s, best.flops_s) <= best.time_s <= best.bytes_s + best.flops_s


def test_operators_add_on_a_cpu_and_hide_behind_the_work_on_a_gpu() -> None:
    cost = step_cost(tiny(), dtype="float32")
    sheet = Hardware(name="x", memory_bytes=1e9, read_bytes_per_s=1e9, flops_per_s={"float32": 1e12})
    work_s = estimate(cost, sheet).time_s
    slow = {"operator_overhead_s": 1.0}
    assert estimate(cost, replace(sheet, **slow, is_async=False)).time_s == cost.operators + work_s
    assert estimate(cost, replace(sheet, **slow)).time_s == cost.operators
    assert estimate(cost, replace(sheet, **slow)).limit == "operators"
    assert estimate(cost, replace(sheet, operator_overhead_s=1e-12)).time_s == work_s


@pytest.mark.parametrize(("model", "context"), [("llama-3-8b", 0), ("llama-3-70b", 1000), ("mixtral-8x7b", 0)])
def test_the_crossover_is_the_first_batch_that_multiplies_longer_than_it_reads(model: str, context: int) -> None:
    config = find_config(model)
    batch = crossover_batch(config, H100, context=context)
    before, at = (estimate(step_cost(config, batch=b, context=context), H100) for b in (batch - 1, batch))
    assert before.flops_s < before.bytes_s and at.flops_s >= at.bytes_s


def test_a_dense_model_crosses_at_half_the_flops_per_byte_and_a_long_context_never() -> None:
    config = find_config("llama-3-8b")
    ridge = H100.flops_per_s["bfloat16"] / H100.read_bytes_per_s  # 2 FLOPs and 2 bytes a weight: rows = FLOPs per byte
    assert crossover_batch(config, H100) == pytest.approx(ridge, rel=0.01)
    assert crossover_batch(config, H100, context=8192) is None
    assert crossover_batch(config, Hardware.named("m4-max")) is None, "no FLOP rate published"


@pytest.mark.parametrize("name", known_hardware())
def test_every_data_sheet_is_dense_sourced_and_plausible(name: str) -> None:
    machine = Hardware.named(name.upper())
    assert machine.source.partition("https://")[2] and machine.memory_bytes >= 16e9
    assert 1e11 <= machine.read_bytes_per_s < 1e13 and machine.is_async and not machine.operator_overhead_s
    assert all(rate < 1e15 for rate in machine.flops_per_s.values()), "above that it is a rate with sparsity"


def test_unknown_names_and_absurd_values_are_refused_by_what_exists() -> None:
    with pytest.raises(ValueError, match="h200"):
        Hardware.named("h2000")
    with pytest.raises(ValueError, match="bfloat16"):
        step_cost(tiny(), dtype="int3")
    for keys in ({"batch": 0}, {"num_new": 0}, {"context": -1}):
        with pytest.raises(ValueError, match="at least"):
            step_cost(tiny(), **keys)
    with pytest.raises(ValueError, match="logits"):
        step_cost(tiny(), logits="first")


RATES = KernelRates(linear=((1, 1.0), (4, 2.0), (8, 10.0)), kv_bytes_per_s=5.0, attention_flops_per_s=7.0)


@pytest.mark.parametrize(("rows", "seconds"), [(0.5, 1.0), (1, 1.0), (2.5, 1.5), (4, 2.0), (8, 10.0), (16, 20.0)])
def test_linear_time_between_measured_rows_is_a_straight_line(rows: float, seconds: float) -> None:
    assert RATES.linear_seconds_per_byte(rows) == pytest.approx(seconds)


def test_measured_kernels_replace_the_straight_lines_of_their_dtype() -> None:
    cost = step_cost(tiny(), batch=4, context=10, dtype="float32")
    machine = Hardware(name="x", memory_bytes=1e9, read_bytes_per_s=1e9, flops_per_s={"float32": 1e12},
                       kernels={"float32": RATES})
    parts, got = cost.parts, estimate(cost, machine).parts_s
    assert got["qkv"] == parts["qkv"].num_bytes * 2.0
    assert got["attention"] == max(parts["attention"].num_bytes / 5, parts["attention"].flops / 7)
    ideal = estimate(cost, replace(machine, kernels={}))
    assert estimate(cost, machine, ideal=True) == ideal
    assert estimate(replace(cost, dtype="bfloat16"), machine).parts_s["qkv"] == ideal.parts_s["qkv"]


def test_a_card_keeps_its_kernels_and_memory_and_becomes_hardware(tmp_path) -> None:
    card = MachineCard(
        device="cpu", device_name="chip", num_threads=2, read_bytes_per_s=3e10, flops_per_s={"float32": 1e11},
        operator_overhead_s=1e-6, noise=0.1, buffer_bytes=1, memory_bytes=64, kernels={"auto": {
            "linear": [[1, 1.0], [4, 2.0], [8, 10.0]], "kv_bytes_per_s": 5.0, "attention_flops_per_s": 7.0}})
    loaded = MachineCard.load(card.save(tmp_path / "card.json"))
    machine = Hardware.of_card(loaded)
    assert loaded == card and machine.memory_bytes == 64 and machine.kernels == {"auto": RATES}
    assert machine.operator_overhead_s == 1e-6 and not machine.is_async
    assert Hardware.of_card(replace(card, device="cuda")).is_async


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_kernels_are_measured_and_the_grid_compares_real_steps(dtype: str) -> None:
    rates = measure_kernels(dtype, buffer_bytes=2**20, seconds=0.1)
    assert [rows for rows, _ in rates.linear] == sorted(rows for rows, _ in rates.linear)
    assert min(seconds for _, seconds in rates.linear) > 0
    assert rates.linear[-1][1] > rates.linear[0][1], "256 rows take longer than one"
    machine = Hardware(name="x", memory_bytes=1e9, read_bytes_per_s=1e10, flops_per_s={"float32": 1e11},
                       kernels={dtype: rates})
    points = check_grid(random_decoder(tiny(), dtype), machine, dtype, batches=(1, 2), contexts=(8,), prompts=(8,),
                        seconds=0.01)
    assert [(p.phase, p.batch, p.num_new, p.context) for p in points] == [
        ("decode", 1, 1, 8), ("decode", 2, 1, 8), ("prefill", 1, 8, 0)]
    assert all(p.measured_s > 0 and p.ratio == p.measured_s / p.estimated_s for p in points)
    off = sorted(abs(p.estimated_s / p.measured_s - 1) for p in points)
    assert median_error(points) == off[1]


def test_a_dozen_numbers_by_hand() -> None:
    """Llama 3 8B: 32 layers, 4096 wide, 14336 inside, 32 heads and 8 KV heads of 128, 128256 ids; in 16 bit."""
    cost = step_cost(find_config("llama-3-8b"), batch=3, context=1000)
    parts = {name: (part.num_bytes, part.flops) for name, part in cost.parts.items()}
    qkv, output, mlp, head = 32 * 4096 * (4096 + 2 * 1024), 32 * 4096**2, 32 * 3 * 4096 * 14336, 128256 * 4096
    for name, weights in (("qkv", qkv), ("output", output), ("mlp", mlp), ("head", head)):
        assert parts[name] == (2 * weights, 2 * weights * 3)
    assert parts["embedding"] == (3 * 4096 * 2, 0) and parts["norms"] == ((32 * 2 + 1) * 4096 * 4, 0)
    assert parts["attention"] == (3 * 1001 * 2 * 32 * 1024 * 2, 3 * 32 * 1001 * 4 * 32 * 128)
    assert estimate(cost, H100).bytes_s == cost.num_bytes / 3.35e12
    assert estimate(cost, H100).flops_s == cost.flops / 989.4e12


def test_of_mixtral_each_token_multiplies_with_two_experts_of_eight() -> None:
    part = step_cost(find_config("mixtral-8x7b"), batch=5).parts["mlp"]
    router, expert = 8 * 4096, 3 * 4096 * 14336
    assert part.flops == 32 * 2 * 5 * (router + 2 * expert)
    assert part.num_bytes == pytest.approx(32 * 2 * (router + 8 * (1 - 0.75**5) * expert))


MACHINES = [
    H100, Hardware.named("m4-max"),
    Hardware(name="cpu", memory_bytes=8e9, read_bytes_per_s=3e10, flops_per_s={"float32": 1e11, "bfloat16": 2e11},
             operator_overhead_s=1e-6, is_async=False),
    Hardware(name="measured", memory_bytes=8e9, read_bytes_per_s=3e10, flops_per_s={"bfloat16": 1e11}, kernels={
        "bfloat16": KernelRates(linear=((1, 5e-11), (2, 4e-11), (4, 6e-11), (64, 5.9e-11), (256, 2e-10)),
                                kv_bytes_per_s=2e10, attention_flops_per_s=5e10)}),
]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("model", ["llama-3-8b", "mistral-7b", "mixtral-8x7b", "qwen3-30b-a3b"])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(load=st.tuples(st.integers(1, 300), st.integers(1, 5000), st.integers(1, 40_000)), more=st.integers(1, 5000),
       which=st.sampled_from(["batch", "num_new", "context"]))
def test_more_never_reads_less_nor_takes_less_time(model: str, machine: Hardware, load: tuple[int, int, int], more: int,
                                                   which: str) -> None:
    smaller = dict(zip(("batch", "num_new", "context"), load))
    larger = {**smaller, which: smaller[which] + more}
    costs = [step_cost(find_config(model), **keys) for keys in (smaller, larger)]
    times = [estimate(cost, machine) for cost in costs]
    for measure in ("num_bytes", "weight_bytes", "flops", "kv_bytes_read", "operators"):
        assert getattr(costs[0], measure) <= getattr(costs[1], measure)
    assert times[0].time_s <= times[1].time_s * (1 + 1e-12)
    for cost, best in zip(costs, times):
        ideal = estimate(cost, machine, ideal=True)
        assert ideal.time_s >= max(ideal.bytes_s, ideal.flops_s or 0, ideal.operators_s) * (1 - 1e-12)
        assert best.time_s >= cost.num_bytes / 3.36e12


def test_rows_measured_as_quicker_than_fewer_are_noise() -> None:
    noisy = KernelRates(linear=((1, 2.0), (2, 1.0), (4, 3.0)), kv_bytes_per_s=5.0, attention_flops_per_s=7.0)
    assert [noisy.linear_seconds_per_byte(rows) for rows in (1, 2, 3, 4, 8)] == [2.0, 2.0, 2.5, 3.0, 6.0]
