"""GGUF files: the same config and weights as the Hugging Face layout, and as transformers' own reader gives."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minillm.errors import ModelError
from minillm.model import converted
from minillm.model.checkpoint import split_rotary_pairs
from minillm.model.config import load_config
from minillm.model.gguf_file import read_gguf
from minillm.model.weights import expected_tensors, load_weights

Q4_1, Q8_0, F16 = (gguf.GGMLQuantizationType[name] for name in ("Q4_1", "Q8_0", "F16"))
FAMILIES = ("llama", "llama-biases", "mistral", "qwen2", "qwen3", "qwen3-biases", "mixtral", "qwen3_moe")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path / "cache"))


def load(path: Path) -> dict[str, torch.Tensor]:
    return load_weights(path, load_config(path))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_m06_a_gguf_gives_the_weights_and_config_of_the_folder(family, tied, tmp_path, tiny):
    model = tiny.make_model(family, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2)
    model.save_pretrained(tmp_path)
    ends = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    window = {"llama.attention.sliding_window": 4096} if family == "mistral" else {}
    path = tiny.write_gguf(tmp_path / "model.gguf", model, metadata=ends | window)
    tiny.assert_equal(load(path), tiny.canonical(model))
    theirs, ours = vars(load_config(tmp_path)), vars(load_config(path))
    assert ours.pop("rms_norm_eps") == pytest.approx(theirs.pop("rms_norm_eps"))  # kept as float32
    if "moe" in family:  # llama.cpp renormalizes in this family, whatever the config said
        theirs["norm_topk_prob"] = True
    assert ours == theirs


def test_m06_rotary_rows_are_put_back_with_the_head_count_of_q_and_of_k(tiny):
    q, k = np.arange(16 * 3.0).reshape(16, 3), np.arange(8 * 3.0).reshape(8, 3)
    for weight, heads in ((q, 4), (k, 2)):
        stored = torch.from_numpy(tiny.interleave_rotary_pairs(weight, heads))
        assert torch.equal(split_rotary_pairs(stored, heads), torch.from_numpy(weight))
    stored = torch.from_numpy(tiny.interleave_rotary_pairs(k, 2))
    assert not torch.equal(split_rotary_pairs(stored, 1), torch.from_numpy(k))


@pytest.mark.parametrize("kind", [Q4_1, Q8_0, F16, None])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_dequantized_values_are_those_of_transformers(family, kind, tmp_path, tiny):
    wide = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    model = tiny.make_model(family, **wide)
    path = tiny.write_gguf(tmp_path / "model.gguf", model, kind=kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    tiny.assert_equal(load(path), tiny.canonical(theirs))


def test_metadata_comes_as_plain_values(tmp_path, tiny):
    words = [f"word {i} é漢" for i in range(3000)]
    values = {"a.words": words, "a.numbers": [-1, 2, 3], "a.flags": [True, False], "a.text": "α", "a.real": 0.5}
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama"), metadata=values)
    metadata = read_gguf(path).metadata
    assert {key: metadata[key] for key in values} == values
    assert metadata["general.architecture"] == "llama" and type(metadata["llama.block_count"]) is int


def test_every_end_of_text_id_stops(tmp_path, tiny):
    ends = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("eos", "eot", "eom"), start=3)}
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama"), metadata=ends)
    assert load_config(path).eos_token_ids == (3, 4, 5)


def llama3_divisors(head_dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """As llama.cpp's converter computes them from low_freq_factor 1 and high_freq_factor 4."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / 4:
            divisors.append(1.0)
        elif wavelength > original:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_m02_rope_scaling_of_a_gguf(tmp_path, tiny):
    model = tiny.make_model("llama")
    keys = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 16}
    rope = load_config(tiny.write_gguf(tmp_path / "yarn.gguf", model, metadata=keys)).rope
    assert (rope.type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 16)
    assert rope.attention_factor is None
    keys["llama.rope.scaling.attn_factor"] = 2.0
    rope = load_config(tiny.write_gguf(tmp_path / "scaled.gguf", model, metadata=keys)).rope
    assert rope.attention_factor == pytest.approx(2 * 1.138629, abs=1e-6)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    rope = load_config(tiny.write_gguf(tmp_path / "linear.gguf", model, metadata=linear)).rope
    assert (rope.type, rope.factor) == ("linear", 2.0)


def test_m02_llama3_scaling_is_recognized_by_its_divisors_or_refused(tmp_path, tiny):
    model = tiny.make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    for factor in (8.0, 32.0):
        divisors = llama3_divisors(8, 5e5, factor, 8192)
        path = tiny.write_gguf(tmp_path / f"{factor}.gguf", model, extra={"rope_freqs.weight": divisors})
        rope = load_config(path).rope
        assert (rope.type, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", factor, 1.0, 4.0)
        assert rope.original_max_position_embeddings == 8192
        tiny.assert_equal(load(path), tiny.canonical(model))
    other = llama3_divisors(8, 5e5, 8.0, 4096)
    path = tiny.write_gguf(tmp_path / "other.gguf", model, extra={"rope_freqs.weight": other})
    with pytest.raises(ModelError, match="rope_freqs"):
        load_config(path)


@pytest.mark.parametrize(("metadata", "named"), [
    ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
    ({"llama.rope.scaling.type": "yarn"}, r"rope\.scaling\.factor"),
    ({"llama.expert_shared_count": 1}, "expert_shared_count"), ({"split.count": 2}, "split"),
    ({"llama.attn_logit_softcapping": 30.0}, "softcapping"), ({"split.count": "two"}, r"split\.count"),
    ({"llama.embedding_length": "32"}, "embedding_length"), ({"llama.rope.freq_base": -1.0}, r"rope\.freq_base"),
    ({"llama.attention.head_count": 0}, "head_count"), ({"tokenizer.ggml.eos_token_id": "x"}, "eos_token_id"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.0, "llama.rope.scaling.attn_factor": 2.0},
     "factor"),
])
def test_what_would_change_the_arithmetic_is_refused_by_name(metadata, named, tmp_path, tiny):
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama"), metadata=metadata)
    with pytest.raises(ModelError, match=named):
        load_config(path)


def test_damaged_files_are_refused_and_never_hang(tmp_path, tiny):
    whole = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama")).read_bytes()
    config = load_config(tmp_path / "model.gguf")
    bad = tmp_path / "bad.gguf"
    huge = whole[:16] + struct.pack("<Q", 2**60) + whole[24:]
    for content in (b"", b"GGUF", b"nonsense" * 9, whole[:4] + struct.pack("<I", 9) + whole[8:], huge,
                    *(whole[:n] for n in range(8, 1200, 37))):
        bad.write_bytes(content)
        with pytest.raises(ModelError, match=r"bad\.gguf"):
            load_config(bad)
    bad.write_bytes(whole[:-4000])
    with pytest.raises(ModelError, match="cut short"):
        load_weights(bad, config)


def test_missing_extra_and_unknown_types_are_refused_by_name(tmp_path, tiny):
    model = tiny.make_model("llama")
    path = tiny.write_gguf(tmp_path / "extra.gguf", model, extra={"blk.0.attn_q.scale": np.ones(3, np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.scale"):
        load(path)
    whole = tiny.write_gguf(tmp_path / "model.gguf", model).read_bytes()
    (tmp_path / "renamed.gguf").write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight"):
        load(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match="gpt2"):
        (tmp_path / "other.gguf").write_bytes(whole.replace(b"\5\0\0\0\0\0\0\0llama", b"\4\0\0\0\0\0\0\0gpt2", 1))
        load_config(tmp_path / "other.gguf")
    integers = tiny.write_gguf(tmp_path / "int.gguf", model, extra={"rope_freqs.weight": np.ones(4, np.int32)})
    with pytest.raises(ModelError, match="rope_freqs"):
        load_config(integers)


@pytest.fixture
def kept(tmp_path, tiny):
    """A GGUF file, and the file that holds its converted weights."""
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama"), kind=F16)
    load(path)
    (place,) = (tmp_path / "cache" / "converted").rglob("*.f32")
    return path, place


def test_converted_weights_are_kept_and_used_in_place_of_dequantizing(kept, monkeypatch, tiny):
    path, _ = kept
    config = load_config(path)
    kept_weights = load_weights(path, config)
    monkeypatch.setattr("minillm.model.weights.load_converted", lambda *_: None)
    tiny.assert_equal(kept_weights, load_weights(path, config))
    monkeypatch.undo()


def test_kept_weights_are_read_without_touching_the_gguf_data(kept, monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path / "cache"))
    path, _ = kept
    monkeypatch.setattr("minillm.model.weights.open_checkpoint", lambda *_: pytest.fail("dequantized again"))
    weights = load(path)
    weights["norm.weight"].zero_()  # the file on disk is not ours to change
    assert load(path)["norm.weight"].abs().sum() > 0


def test_damaged_kept_weights_are_made_again(kept, tiny):
    path, place = kept
    good, whole = {name: tensor.clone() for name, tensor in load(path).items()}, place.read_bytes()
    for damage in (whole[:-10], b"", whole[:8], whole + b"x"):
        place.write_bytes(damage)
        tiny.assert_equal(load(path), good)
        assert place.read_bytes() == whole


@pytest.mark.parametrize("error", [FileNotFoundError, ValueError])  # removed, or cut short
def test_kept_weights_that_vanish_while_they_are_read_are_made_again(error, kept, tiny, monkeypatch):
    """Not a part of them is taken: another process may replace the file at any moment."""
    path, _ = kept
    good, whole, calls = {name: tensor.clone() for name, tensor in load(path).items()}, np.memmap, []

    def gone(*args, **options):
        calls.append(args)
        if len(calls) == 3:
            raise error
        return whole(*args, **options)

    monkeypatch.setattr("minillm.model.converted.np.memmap", gone)
    tiny.assert_equal(load(path), good)


def test_a_changed_file_or_format_is_converted_anew_and_the_old_one_removed(kept, monkeypatch, tiny):
    path, place = kept
    other = tiny.make_model("llama")
    for parameter in other.parameters():
        parameter.data += 1
    tiny.write_gguf(path, other)
    os.utime(path, ns=(1, 1))
    tiny.assert_equal(load(path), tiny.canonical(other))
    (second,) = place.parent.glob("*.f32")
    assert second != place
    monkeypatch.setattr(converted, "FORMAT_VERSION", 10_000)
    load(path)
    (third,) = place.parent.glob("*")
    assert third != second


def test_a_cache_that_cannot_be_written_or_is_too_full_costs_nothing_but_time(tmp_path, monkeypatch, tiny):
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama"), kind=F16)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path / "file"))
    assert set(load(path)) == set(expected_tensors(load_config(path)))
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path / "full"))
    monkeypatch.setattr(converted, "MAX_SHARE_OF_FREE_DISK", 0.0)
    load(path)
    assert not list((tmp_path / "full").rglob("*.f32"))


def test_reading_is_the_same_as_the_gguf_package_reads(tmp_path, tiny):
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("qwen3"), metadata={"a.b": ["x", ""]})
    file, reader = read_gguf(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == fields
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(file.dequantize(tensor.name).ravel(), tensor.data.ravel())


@pytest.mark.parametrize("kind", [kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits])
def test_every_type_the_gguf_package_dequantizes_is_read(kind, tmp_path):
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (5, 3 * block_bytes), np.uint8)  # small: no NaN among the scales
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("odd", np.ones(7, np.float32))  # so that alignment matters
    writer.add_tensor("weight", raw, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    file = read_gguf(tmp_path / "model.gguf")
    values = file.dequantize("weight")
    assert values.shape == file.tensors["weight"].shape == (5, 3 * block_elements)
    assert values.dtype == np.float32 and values.flags.writeable
    assert np.array_equal(values, gguf.quants.dequantize(raw, kind))
