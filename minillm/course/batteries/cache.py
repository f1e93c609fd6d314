"""Cases for a KV cache: against plain Python lists, in the attention backend, and under a tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import ContiguousAttention, causal_attention
from minillm.cache.kv import SequenceCache
from minillm.course.batteries import Case, differs
from minillm.loops import generate_without_cache
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.model.weights import expected_tensors
from minillm.parts import check_part

MakeCache = Callable[..., SequenceCache]
Write = tuple[int, int]  # (start, number of tokens)
_SHAPES = ((1, 1, 2), (2, 1, 4), (2, 3, 4), (3, 2, 8))  # layers, KV heads, head dimension
# From the smallest to the oddest; (start, n) with a start below what is cached is a rewind.
_EDGES: tuple[tuple[Write, ...], ...] = (
    ((0, 1),), ((0, 1), (1, 1)), ((0, 3), (3, 1), (4, 1)), ((0, 4), (4, 4)), ((0, 5), (5, 7), (12, 1), (13, 11)),
    ((0, 2), (1, 1)), ((0, 3), (2, 2), (4, 1)), ((0, 9), (0, 3), (3, 1)), ((0, 6), (4, 5), (9, 1), (2, 1), (3, 8)),
    ((0, 17), (17, 1), (18, 1)), ((0, 150), (150, 1), (151, 150), (301, 1)))


def cases(make_cache: MakeCache) -> Iterator[Case]:
    """Every case of :func:`~minillm.course.batteries.prove_cache`."""
    generator = random.Random(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for layers, heads, width in _SHAPES:
            config = tiny_config(layers=layers, num_kv_heads=heads, head_dim=width)
            for writes in (*_EDGES, *(_random_writes(generator) for _ in range(8))):
                for capacity in (1, 4):
                    yield _direct(make_cache, config, dtype, capacity, writes)
    config = tiny_config()
    for name, fault in (("two caches, written in turn", _two_caches),
                        ("the caller overwrites its tensors after write()", _reused_tensors)):
        yield Case(name, 60, lambda fault=fault: fault(make_cache, config))
    for seed in range(12):
        yield Case(f"{2 + seed % 3} sequences in turn in ContiguousAttention, workload {seed}", 100 + seed,
                   lambda seed=seed: _interleaved(make_cache, config, seed))
    yield from _end_to_end(make_cache)


def tiny_config(**changes: int) -> ModelConfig:
    """A model of 2 layers and 4 heads over 261 bytes and special tokens."""
    shape = {"layers": 2, "num_kv_heads": 2, "head_dim": 8} | changes
    return ModelConfig(
        model_type="llama", vocab_size=261, hidden_size=32, intermediate_size=48, num_layers=shape["layers"],
        num_heads=2 * shape["num_kv_heads"], num_kv_heads=shape["num_kv_heads"], head_dim=shape["head_dim"],
        max_position_embeddings=128, eos_token_ids=(257,))


def tiny_decoder(seed: int = 0) -> Decoder:
    """Random weights, in float64 and large enough that its greedy tokens vary."""
    generator, config = torch.Generator().manual_seed(seed), tiny_config()
    return Decoder.from_weights(config, {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.4
        for name, shape in expected_tensors(config).items()}, dtype="float64")


def _random_writes(generator: random.Random) -> tuple[Write, ...]:
    """A prompt, then chunks of odd sizes and single tokens, now and then from an earlier position."""
    writes, length = [], 0
    for _ in range(generator.randint(2, 8)):
        start = generator.randrange(length) if length and generator.random() < 0.3 else length
        writes.append((start, generator.choice((1, 1, 1, 2, 3, 5, 7, 13))))
        length = sum(writes[-1])
    return tuple(writes)


def _direct(make_cache: MakeCache, config: ModelConfig, dtype: torch.dtype, capacity: int,
            writes: tuple[Write, ...]) -> Case:
    name = str(dtype).removeprefix("torch.")
    chunks = ", ".join(f"{n} at position {start}" for start, n in writes)
    size = sum(n for _, n in writes) + 10 * len(writes) + config.num_layers * config.num_kv_heads
    return Case(f"{name}, capacity {capacity}, {config.num_layers} layers of {config.num_kv_heads} KV heads of "
                f"{config.head_dim}; tokens written: {chunks}", size,
                lambda: _follow_lists(_made(make_cache, config, capacity, dtype), config, dtype, writes))


def _made(make_cache: MakeCache, config: ModelConfig, capacity: int, dtype: torch.dtype) -> SequenceCache:
    cache = make_cache(config, capacity=capacity, dtype=dtype, device="cpu")
    check_part("what make_cache makes", cache, SequenceCache)
    return cache


class Lists:
    """The oracle: for each layer a Python list of each position's key and value, ``[num_kv_heads, head_dim]``."""

    def __init__(self, num_layers: int):
        self.layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Forget what lies from ``start`` on, and add."""
        self.layers[layer][start:] = list(zip(key.clone(), value.clone()))

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """``[num_kv_heads, end - start, head_dim]`` of keys and of values."""
        keys, values = zip(*self.layers[layer][start:end])
        return torch.stack(keys, 1), torch.stack(values, 1)


def _follow_lists(cache: SequenceCache, config: ModelConfig, dtype: torch.dtype, writes: Sequence[Write]) -> str:
    """Write the same to cache and lists, and read everything back after every step."""
    lists, generator = Lists(config.num_layers), torch.Generator().manual_seed(1)
    for start, n in writes:
        for layer in range(config.num_layers):
            pair = _random_pair(config, n, dtype, generator)
            cache.write(layer, start, *pair)
            lists.write(layer, start, *pair)
            if why := _read_differs(cache, lists, layer, 0, start + n):  # attention reads between the layers' writes
                return why
        for layer in range(config.num_layers):
            for first, end in {(0, start + n), (start, start + n), (start + n - 1, start + n), (0, start + n - 1)}:
                if first < end and (why := _read_differs(cache, lists, layer, first, end)):
                    return why
        least = 2 * config.num_layers * config.num_kv_heads * (start + n) * config.head_dim * dtype.itemsize
        if why := differs(f"num_tokens after writing up to position {start + n}", cache.num_tokens, start + n):
            return why
        if not isinstance(cache.num_bytes, int) or cache.num_bytes < least:
            return f"num_bytes is {cache.num_bytes!r}; {start + n} tokens take at least {least}"
    return ""


def _random_pair(config: ModelConfig, n: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (2, n, config.num_kv_heads, config.head_dim)
    key, value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return key, value


def _read_differs(cache: SequenceCache, lists: Lists, layer: int, start: int, end: int) -> str:
    for name, got, expected in zip(("keys", "values"), cache.read(layer, start, end), lists.read(layer, start, end)):
        where = f"read(layer {layer}, {start}, {end}): {name}"
        if (got.shape, got.dtype) != (expected.shape, expected.dtype):
            return f"{where} are {got.dtype} {list(got.shape)}, expected {expected.dtype} {list(expected.shape)}"
        wrong = (got != expected).any(-1).any(0).nonzero().flatten().tolist()
        if wrong:
            return f"{where} differ at position {start + wrong[0]}"
    return ""


def _two_caches(make_cache: MakeCache, config: ModelConfig) -> str:
    caches = [_made(make_cache, config, 4, torch.float32) for _ in range(2)]
    lists, generator = [Lists(config.num_layers) for _ in range(2)], torch.Generator().manual_seed(2)
    for start in range(0, 12, 3):
        for i in range(2):
            for layer in range(config.num_layers):
                pair = _random_pair(config, 3, torch.float32, generator)
                caches[i].write(layer, start, *pair)
                lists[i].write(layer, start, *pair)
        for i in range(2):
            if why := _read_differs(caches[i], lists[i], 0, 0, start + 3):
                return f"one cache changes the other: {why}"
    return ""


def _reused_tensors(make_cache: MakeCache, config: ModelConfig) -> str:
    cache, lists = _made(make_cache, config, 4, torch.float32), Lists(config.num_layers)
    for layer in range(config.num_layers):
        pair = _random_pair(config, 3, torch.float32, torch.Generator().manual_seed(layer))
        cache.write(layer, 0, *pair)
        lists.write(layer, 0, *pair)
        for tensor in pair:
            tensor.fill_(7.0)
    return next((why for layer in range(config.num_layers) if (why := _read_differs(cache, lists, layer, 0, 3))), "")


def _interleaved(make_cache: MakeCache, config: ModelConfig, seed: int) -> str:
    """Steps of several sequences; some rewind, some are freed and begin again under the same name."""
    attention = ContiguousAttention(config, dtype=torch.float32, device="cpu", capacity=2, make_cache=make_cache)
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lists = {name: Lists(config.num_layers) for name in "abcd"[:2 + seed % 3]}
    for _ in range(6):
        names = chance.sample(sorted(lists), chance.randint(1, len(lists)))
        starts, sizes = [], [chance.choice((1, 1, 2, 5)) for _ in names]
        for name in names:
            if chance.random() < 0.2:
                attention.free(name)
                lists[name] = Lists(config.num_layers)
            length = len(lists[name].layers[0])
            starts.append(chance.randrange(length) if length and chance.random() < 0.2 else length)
        step = StepTensors.of([[0] * n for n in sizes], starts, names)
        for layer in range(config.num_layers):
            if why := _attend_differs(attention, lists, config, layer, step, generator):
                return why
    held = sum(len(own.layers[0]) for own in lists.values())
    return differs("the number of tokens cached", attention.num_tokens, held)


def _attend_differs(attention: ContiguousAttention, lists: dict[str, Lists], config: ModelConfig, layer: int,
                    step: StepTensors, generator: torch.Generator) -> str:
    num_tokens = len(step.token_ids)
    key, value = _random_pair(config, num_tokens, torch.float32, generator)
    query = torch.randn(num_tokens, config.num_heads, config.head_dim, generator=generator)
    attention.write(layer, key, value, step)
    got = attention.attend(layer, query, step)
    for i, name in enumerate(step.sequences):
        rows = slice(step.query_starts[i], step.query_starts[i + 1])
        start = step.context_lengths[i] - (rows.stop - rows.start)
        lists[name].write(layer, start, key[rows], value[rows])
        expected = causal_attention(query[rows], *lists[name].read(layer, 0, step.context_lengths[i]))
        if not torch.allclose(got[rows], expected, atol=1e-5):
            return (f"attention of sequence {name!r} in layer {layer}, {rows.stop - rows.start} tokens from position "
                    f"{start}, differs from attention over plain lists")
    return ""


def _end_to_end(make_cache: MakeCache) -> Iterator[Case]:
    """A tiny model's greedy tokens, alone and together, against the loop that keeps nothing."""
    from minillm.llm import LLM
    from minillm.request import SamplingParams
    from minillm.text.tokenizer import byte_tokenizer

    prompts, model = ([65], [66, 67, 68], list(range(40, 59))), tiny_decoder()

    def together(chosen: Sequence[list[int]]) -> str:
        attention = ContiguousAttention(model.config, dtype=model.dtype, device="cpu", capacity=2,
                                        make_cache=make_cache)
        with LLM(model, tokenizer=byte_tokenizer(), attention_backend=attention) as llm:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            got = [out.outputs[0].token_ids for out in llm.generate(list(chosen), params)]
        expected = [generate_without_cache(model, prompt, max_tokens=8) for prompt in chosen]
        return differs("the model's tokens", got, expected) or \
            differs("tokens still cached after the last request", attention.num_tokens, 0)

    for chosen in (*([prompt] for prompt in prompts), prompts):
        yield Case(f"a tiny model answers {len(chosen)} prompts of {[len(p) for p in chosen]} tokens", 500,
                   lambda chosen=chosen: together(chosen))
