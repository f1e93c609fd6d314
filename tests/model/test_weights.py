"""Weights: equal tensor by tensor to transformers' from every file format, or refused by name before any compute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from minillm.errors import ModelError
from minillm.model.config import load_config
from minillm.model.weights import expected_tensors, load_weights

SIZES = {"vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
         "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 64}
SPARSE = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
FAMILIES = {
    "llama": {"head_dim": 8}, "llama-biases": {"attention_bias": True, "mlp_bias": True}, "mistral": {},
    "qwen2": {}, "qwen3": {"head_dim": 16}, "qwen3-biases": {"attention_bias": True, "head_dim": 4},
    "mixtral": {"num_local_experts": 3}, "qwen3_moe": {"num_experts": 3, "head_dim": 8, **SPARSE},
    "qwen3_moe-mixed": {"num_experts": 3, "head_dim": 8, "mlp_only_layers": [0], **SPARSE},
}


def make_model(name: str, **keys):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition("-")[0], **SIZES, **FAMILIES[name], **keys)
    model = AutoModelForCausalLM.from_config(config, dtype=keys.get("dtype", torch.float32))
    for parameter in model.parameters():  # norms and biases start as ones and zeros, which would hide a mix-up
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def canonical(model) -> dict[str, torch.Tensor]:
    """What :func:`load_weights` must give, from the tensors transformers computes with."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        name = name.removeprefix("model.").replace("mlp.gate.weight", "mlp.router.weight")
        if name.endswith("gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            tensors[stem + "gate_proj"], tensors[stem + "up_proj"] = tensor.chunk(2, dim=1)
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            tensors[name] = tensor
    return tensors


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name


def load(folder: Path) -> dict[str, torch.Tensor]:
    return load_weights(folder, load_config(folder))


def edit(folder: Path, change) -> None:
    """Rewrite the one safetensors file of ``folder`` after ``change(tensors)``."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def llama(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_transformers_weights(family, tied, tmp_path):
    model = make_model(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    weights = load(tmp_path)
    assert_equal(weights, canonical(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert shapes == expected_tensors(load_config(tmp_path))


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_a_sharded_folder_gives_the_same_and_a_missing_shard_is_named(family, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert_equal(load(tmp_path), canonical(model))
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        load(tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_read_one_by_one_and_fused(family, tmp_path):
    model = make_model(family)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    assert_equal(load(tmp_path), canonical(model))
    model.save_pretrained(tmp_path, save_original_format=True)
    names = set(load_file(tmp_path / "model.safetensors"))
    matrix = "block_sparse_moe.experts.2.w1" if family == "mixtral" else "mlp.experts.2.gate_proj"
    assert f"model.layers.1.{matrix}.weight" in names
    assert_equal(load(tmp_path), canonical(model))
    edit(tmp_path, lambda tensors: tensors.pop(f"model.layers.1.{matrix}.weight"))
    with pytest.raises(ModelError, match=matrix):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_m07_weights_keep_the_precision_of_the_file(dtype, tmp_path):
    model = make_model("llama").to(dtype)
    model.save_pretrained(tmp_path)
    assert_equal(load(tmp_path), canonical(model))


def test_m04_a_tied_head_is_the_embedding_with_and_without_a_key_in_the_file(tmp_path):
    make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    without = load(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    with_key = load(tmp_path)
    assert "lm_head.weight" not in without and "lm_head.weight" not in with_key
    assert torch.equal(with_key["embed_tokens.weight"], without["embed_tokens.weight"])


def test_m04_an_untied_head_is_required_and_kept_apart(llama):
    weights = load(llama)
    assert not torch.equal(weights["lm_head.weight"], weights["embed_tokens.weight"])
    edit(llama, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"lm_head\.weight.*tie_word_embeddings"):
        load(llama)


@pytest.mark.parametrize(("change", "named"), [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"layers\.1\.mlp\.up_proj\.weight.*missing"),
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}), r"q_proj\.bias"),
    (lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.zeros(24)}), r"layers\.2\.input_layernorm"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(25)}), r"norm\.weight.*\[25\].*\[24\]"),
    (lambda t: t.update({"model.norm.weight": torch.zeros(24, dtype=torch.int8)}), r"norm\.weight.*I8"),
])
def test_a_missing_extra_misshapen_or_quantized_tensor_is_named(change, named, llama):
    edit(llama, change)
    with pytest.raises(ModelError, match=named):
        load(llama)


def test_nothing_is_read_before_the_whole_is_checked(llama, monkeypatch):
    edit(llama, lambda tensors: tensors.pop("lm_head.weight"))
    monkeypatch.setattr("minillm.model.checkpoint.HFCheckpoint.read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ModelError):
        load(llama)


def test_old_rotary_buffers_and_a_missing_prefix_do_no_harm(llama):
    before = load(llama)
    edit(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_equal(load(llama), before)

    def strip(tensors):
        tensors.pop("model.layers.0.self_attn.rotary_emb.inv_freq")
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit(llama, strip)
    assert_equal(load(llama), before)


def test_damaged_or_pickled_files_are_refused_by_name(llama):
    path = llama / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-100], b"", b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            load(llama)
    path.unlink()
    with pytest.raises(ModelError, match="safetensors"):
        load(llama)
    (llama / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled"):
        load(llama)


def test_an_index_that_promises_a_tensor_its_shard_lacks_is_refused(tmp_path):
    make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    shard = tmp_path / json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    save_file({name: t for name, t in load_file(shard).items() if name != "model.norm.weight"}, shard)
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json"):
        load(tmp_path)
    shutil.rmtree(tmp_path)
