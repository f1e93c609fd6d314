"""The decoder equals transformers: tiny random models of every family, in odd shapes.

Weights are random and large, so that logits vary and a slip in any switch shows in the first of them.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from torch import Tensor

from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import ContiguousAttention, UncachedAttention
from minillm.errors import ModelError
from minillm.loops import generate_with_cache
from minillm.model.config import ModelConfig, RopeConfig
from minillm.model.decoder import Decoder

VOCAB = 97
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
SMALL = dict(hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
ODD = dict(hidden_size=54, intermediate_size=37, num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3,
           head_dim=20)
ONE_KV_HEAD = dict(hidden_size=40, intermediate_size=100, num_hidden_layers=1, num_attention_heads=5,
                   num_key_value_heads=1, head_dim=8)
SHAPES = {"small": SMALL, "odd": ODD, "one_kv_head": ONE_KV_HEAD}

# family: (transformers' model type, its options)
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama2": ("llama", {}),
    "llama3": ("llama", dict(rope_parameters=dict(rope_theta=500_000.0, **LLAMA3))),
    "yarn": ("llama", dict(rope_parameters=dict(rope_theta=10_000.0, **YARN))),
    "linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=10_000.0, factor=4.0))),
    "dynamic": ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10_000.0, factor=4.0),
                              max_position_embeddings=24)),
    "smollm2": ("llama", dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e5))),
    "llama_bias": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral": ("mistral", dict(sliding_window=7)),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", dict(num_local_experts=5, num_experts_per_tok=2)),
    "qwen3_moe": ("qwen3_moe", dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=22,
                                    norm_topk_prob=True)),
    "qwen3_moe_mixed": ("qwen3_moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=22,
                                          norm_topk_prob=False, mlp_only_layers=[1])),
}
CASES = [(family, shape) for family in FAMILIES for shape in SHAPES
         if shape == "small" or (shape == "odd") or family in ("llama2", "qwen3", "mistral", "mixtral")]


def make_oracle(family: str, shape: str):
    """A random model by transformers, float32, deterministic; biases and norms are random too."""
    model_type, options = FAMILIES[family]
    options = {"vocab_size": VOCAB, "max_position_embeddings": 128, **SHAPES[shape], **options}
    if model_type == "qwen2":  # its head size is always hidden / heads
        options.pop("head_dim", None)
    config = transformers.AutoConfig.for_model(model_type, **options)
    torch.manual_seed(len(family) + len(shape))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=2.0 / parameter.shape[-1] ** 0.5)
    return model


def config_of(oracle) -> ModelConfig:
    """Our config of a transformers model, written out by hand (the loader's mappers have tests of their own)."""
    c = oracle.config
    rope = dict(c.rope_parameters)
    mlp_only = getattr(c, "mlp_only_layers", None) or []
    num_experts = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None) or 0
    kinds = getattr(c, "layer_types", None) or ["sliding_attention" if getattr(c, "sliding_window", None) else "full"
                                                ] * c.num_hidden_layers
    return ModelConfig(
        model_type=c.model_type, vocab_size=c.vocab_size, hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size, num_layers=c.num_hidden_layers, num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        max_position_embeddings=c.max_position_embeddings, rms_norm_eps=c.rms_norm_eps,
        rope=RopeConfig(theta=rope.pop("rope_theta"), type=rope.pop("rope_type"),
                        **{k: v for k, v in rope.items() if k in RopeConfig.__dataclass_fields__}),
        tie_word_embeddings=c.tie_word_embeddings,
        qkv_bias=c.model_type == "qwen2" or getattr(c, "attention_bias", False),
        o_bias=getattr(c, "attention_bias", False), mlp_bias=getattr(c, "mlp_bias", False),
        qk_norm=c.model_type.startswith("qwen3"),
        sliding_window=tuple(c.sliding_window if kind == "sliding_attention" else None for kind in kinds),
        sparse_layers=tuple(bool(num_experts) and i not in mlp_only for i in range(c.num_hidden_layers)),
        num_experts=num_experts, num_experts_per_token=getattr(c, "num_experts_per_tok", 0),
        moe_intermediate_size=getattr(c, "moe_intermediate_size", c.intermediate_size),
        norm_topk_prob=getattr(c, "norm_topk_prob", True),
    )


def weights_of(oracle) -> dict[str, Tensor]:
    """The oracle's weights under this project's names."""
    result = {}
    for name, tensor in oracle.state_dict().items():
        if name == "lm_head.weight" and oracle.config.tie_word_embeddings:
            continue
        name = name.removeprefix("model.").replace("block_sparse_moe", "mlp").replace("mlp.gate.weight",
                                                                                     "mlp.router.weight")
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            gate, up = tensor.chunk(2, 1)
            result |= {f"{stem}gate_proj": gate.clone(), f"{stem}up_proj": up.clone()}
        else:
            result[name] = tensor.clone()
    return result


def decoder_of(oracle, dtype: str = "float32") -> Decoder:
    return Decoder.from_weights(config_of(oracle), weights_of(oracle), dtype=dtype)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(model: Decoder, pieces: list[list[int]], attention) -> Tensor:
    """All logits of a text that is computed piece by piece."""
    logits, start = [], 0
    for piece in pieces:
        logits.append(model.forward(StepTensors.of([piece], [start], ["s"], logits="all"), attention))
        start += len(piece)
    return torch.cat(logits)


def contiguous(model: Decoder, **options) -> ContiguousAttention:
    return ContiguousAttention(model.config, dtype=model.dtype, device=model.device, **options)


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_logits_and_64_greedy_tokens_equal_transformers(family: str, shape: str) -> None:
    """M03, M04: GQA in several head counts; tied and untied heads."""
    oracle = make_oracle(family, shape)
    model = decoder_of(oracle)
    ids = prompt(33)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0]
    logits = run(model, [ids], UncachedAttention(model.config))
    assert expected.std() > 0.5, "the oracle's logits vary too little to prove anything"
    assert (logits - expected).abs().max() < 1e-4

    generated = oracle.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False, eos_token_id=-1,
                                pad_token_id=0, attention_mask=torch.ones(1, len(ids), dtype=torch.int64))
    assert generate_with_cache(model, ids, max_tokens=64) == generated[0, len(ids):].tolist()
    assert len(set(generated[0].tolist())) > 5


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "dynamic"])
def test_chunks_and_single_tokens_equal_the_whole(family: str) -> None:
    """K01: every split of a text gives the logits of the whole."""
    model = decoder_of(make_oracle(family, "odd"), dtype="float64")
    ids = prompt(16)
    whole = run(model, [ids], UncachedAttention(model.config))
    for cuts in ([7], [1, 2, 15], list(range(1, 16))):
        pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)])]
        assert (run(model, pieces, contiguous(model, capacity=4)) - whole).abs().max() < 1e-5


def test_a_batch_of_any_mix_equals_each_alone() -> None:
    """One step holds a prefill, a chunk and a decode of three texts; nobody changes anybody's logits."""
    model = decoder_of(make_oracle("mistral", "odd"), dtype="float64")
    texts = [prompt(9, 1), prompt(12, 2), prompt(14, 3)]
    done = [0, 5, 13]
    attention = contiguous(model)
    for name, text, n in zip("abc", texts, done):
        if n:
            model.forward(StepTensors.of([text[:n]], [0], [name]), attention)
    step = StepTensors.of([text[n:] for text, n in zip(texts, done)], done, list("abc"))
    together = model.forward(step, attention)
    for row, text in zip(together, texts, strict=True):
        alone = run(model, [text], UncachedAttention(model.config))[-1]
        assert (row - alone).abs().max() < 1e-10


def test_dynamic_ntk_in_a_batch_equals_each_alone() -> None:
    model = decoder_of(make_oracle("dynamic", "small"), dtype="float64")
    texts = [prompt(50, 1), prompt(9, 2), prompt(30, 3)]
    together = model.forward(StepTensors.of(texts, [0, 0, 0], list("abc")), contiguous(model))
    for row, text in zip(together, texts, strict=True):
        assert (row - run(model, [text], UncachedAttention(model.config))[-1]).abs().max() < 1e-6


def test_only_the_asked_rows_get_logits() -> None:
    model = decoder_of(make_oracle("llama2", "small"))
    step = StepTensors.of([prompt(5), prompt(3)], [0, 0], ["a", "b"])
    assert model.forward(step, contiguous(model)).shape == (2, VOCAB)
    everything = dataclasses.replace(step, logit_rows=torch.arange(8))
    some = dataclasses.replace(step, logit_rows=torch.tensor([6, 1]))
    rows = model.forward(everything, UncachedAttention(model.config))[[6, 1]]
    torch.testing.assert_close(model.forward(some, UncachedAttention(model.config)), rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_step_that_samples_nothing_gives_no_logits(dtype: str) -> None:
    """A middle chunk of a prompt asks for none: an empty matrix, in every kernel."""
    model = decoder_of(make_oracle("llama2", "small"), dtype=dtype)
    step = StepTensors.of([prompt(5)], [0], ["a"], logits_for=[False])
    assert model.forward(step, contiguous(model)).shape == (0, VOCAB)


def test_a_missing_an_extra_and_a_misshapen_weight_are_named() -> None:
    """M04 (decoder side): an untied head without its tensor, and a tied one with a tensor too many."""
    oracle = make_oracle("llama2", "small")
    config, weights = config_of(oracle), weights_of(oracle)
    with pytest.raises(ModelError, match="lm_head.weight"):
        Decoder.from_weights(config, {k: v for k, v in weights.items() if k != "lm_head.weight"})
    with pytest.raises(ModelError, match="lm_head.weight"):
        Decoder.from_weights(dataclasses.replace(config, tie_word_embeddings=True), dict(weights))
    with pytest.raises(ModelError, match="layers.1.mlp.down_proj.weight.*shape"):
        Decoder.from_weights(config, weights | {"layers.1.mlp.down_proj.weight": torch.zeros(3, 3)})


def test_a_tied_head_shares_the_embedding_and_an_untied_does_not() -> None:
    """M04 (a) and (d): tied is one storage, counted once; untied keeps two different tensors."""
    tied, untied = decoder_of(make_oracle("smollm2", "small")), decoder_of(make_oracle("llama2", "small"))
    table = VOCAB * 32 * 4
    layers = untied.num_bytes - 2 * table
    assert untied.bytes_read_per_step == layers + table
    assert tied.bytes_read_per_step == layers + tied.head.bytes_read
    if tied.head.kernel == "dense":
        assert tied.head.weight is tied.embedding and tied.num_bytes == layers + table
    else:  # a packed head is a copy, and counted
        assert tied.num_bytes == layers + table + tied.head.num_bytes
    assert torch.equal(tied.head.weight, tied.embedding)


def test_weights_are_taken_out_of_the_mapping() -> None:
    """So a model is never held twice while it loads."""
    oracle = make_oracle("qwen3", "small")
    weights = weights_of(oracle)
    Decoder.from_weights(config_of(oracle), weights)
    assert not weights


def test_experts_count_only_what_a_token_reads() -> None:
    model = decoder_of(make_oracle("mixtral", "small"))
    one_expert = 3 * 32 * 44 * 4
    embedding = 0 if model.head.weight is model.embedding else model.embedding.nbytes
    assert model.num_bytes - embedding - model.bytes_read_per_step == len(model.layers) * (5 - 2) * one_expert


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["auto", "float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "mixtral"])
def test_every_stored_type_runs_in_every_dtype_on_the_cpu(family: str, dtype: str, stored: torch.dtype) -> None:
    """M07: nothing is "not implemented for 'Half'", logits are float32 or wider and near those of float32."""
    oracle = make_oracle(family, "small")
    reference = decoder_of(oracle)
    weights = {name: tensor.to(stored) for name, tensor in weights_of(oracle).items()}
    model = Decoder.from_weights(config_of(oracle), weights, dtype=dtype)
    logits, expected = (run(m, [prompt(9)], contiguous(m)) for m in (model, reference))
    assert logits.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    correlation = torch.corrcoef(torch.stack((logits.flatten().float(), expected.flatten())))[0, 1]
    assert correlation > (0.98 if torch.bfloat16 in (stored, model.dtype) or dtype == "bfloat16" else 0.9999)
