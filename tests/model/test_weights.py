"""Weights: equal tensor by tensor to transformers' from every file format, or refused by name before any compute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.errors import ModelError
from minillm.model.config import load_config
from minillm.model.weights import expected_tensors, load_weights

FAMILIES = (
    "llama", "llama-biases", "mistral", "qwen2", "qwen3", "qwen3-biases", "mixtral", "qwen3_moe", "qwen3_moe-mixed",
)


def load(folder: Path) -> dict[str, torch.Tensor]:
    return load_weights(folder, load_config(folder))


def edit(folder: Path, change) -> None:
    """Rewrite the one safetensors file of ``folder`` after ``change(tensors)``."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.fixture
def llama(tmp_path, tiny):
    tiny.make_model("llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_transformers_weights(family, tied, tmp_path, tiny):
    model = tiny.make_model(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    weights = load(tmp_path)
    tiny.assert_equal(weights, tiny.canonical(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    assert shapes == expected_tensors(load_config(tmp_path))


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
def test_a_sharded_folder_gives_the_same_and_a_missing_shard_is_named(family, tmp_path, tiny):
    model = tiny.make_model(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    tiny.assert_equal(load(tmp_path), tiny.canonical(model))
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        load(tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_read_one_by_one_and_fused(family, tmp_path, tiny):
    model = tiny.make_model(family)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    tiny.assert_equal(load(tmp_path), tiny.canonical(model))
    model.save_pretrained(tmp_path, save_original_format=True)
    names = set(load_file(tmp_path / "model.safetensors"))
    matrix = "block_sparse_moe.experts.2.w1" if family == "mixtral" else "mlp.experts.2.gate_proj"
    assert f"model.layers.1.{matrix}.weight" in names
    tiny.assert_equal(load(tmp_path), tiny.canonical(model))
    edit(tmp_path, lambda tensors: tensors.pop(f"model.layers.1.{matrix}.weight"))
    with pytest.raises(ModelError, match=matrix):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_m07_weights_keep_the_precision_of_the_file(dtype, tmp_path, tiny):
    model = tiny.make_model("llama").to(dtype)
    model.save_pretrained(tmp_path)
    tiny.assert_equal(load(tmp_path), tiny.canonical(model))


def test_m04_a_tied_head_is_the_embedding_with_and_without_a_key_in_the_file(tmp_path, tiny):
    tiny.make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
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


def test_old_rotary_buffers_and_a_missing_prefix_do_no_harm(llama, tiny):
    before = load(llama)
    edit(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    tiny.assert_equal(load(llama), before)

    def strip(tensors):
        tensors.pop("model.layers.0.self_attn.rotary_emb.inv_freq")
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit(llama, strip)
    tiny.assert_equal(load(llama), before)


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


def test_an_index_that_promises_a_tensor_its_shard_lacks_is_refused(tmp_path, tiny):
    tiny.make_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    shard = tmp_path / json.loads(index.read_text())["weight_map"]["model.norm.weight"]
    save_file({name: t for name, t in load_file(shard).items() if name != "model.norm.weight"}, shard)
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json"):
        load(tmp_path)
    shutil.rmtree(tmp_path)
