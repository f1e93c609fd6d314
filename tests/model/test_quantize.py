"""Quantized weights: the nearest codes, fits that lose less, kernels that compute what the codes stand for."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch.nn.functional import linear

from minillm import LLM
from minillm.assemble import load_decoder
from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import UncachedAttention
from minillm.config import EngineConfig
from minillm.errors import ModelError
from minillm.model.config import load_config
from minillm.model.decoder import Decoder
from minillm.model.gguf_file import read_gguf
from minillm.model.quantize import FITS, SCHEMES, QuantizedTensor, Scheme, pack, quantize
from minillm.model.quantized import (
    Int4PackLinear,
    Int8PackLinear,
    UnpackedLinear,
    has_packed_kernel,
    make_quantized_linear,
)
from minillm.model.weights import load_weights

CPU = torch.device("cpu")
INT4 = {fit: Scheme("int4", group_size=32, fit=fit) for fit in FITS}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def squared_error(weight: torch.Tensor, scheme: Scheme) -> float:
    return (quantize(weight, scheme).dequantize() - weight).square().mean().item()


def all_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model.forward(StepTensors.of([ids], [0], [0], logits="all"), UncachedAttention(model.config)).double()


# ---- codes, scales, middles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs, inputs, size, num_groups", [
    (288, 288, 256, 2), (3, 4304, 32, 135), (5, 7, 1, 7), (4, 288, 512, 1), (4, 288, None, 1), (1, 1, 32, 1)])
@pytest.mark.parametrize("name", ["absmax", "minmax", "least-squares", "int8"])
def test_n01_a_group_that_does_not_divide_is_shorter_and_no_code_is_further_than_half_a_scale(
        name, outputs, inputs, size, num_groups):
    """The tail has a group of its own, and its scale is of what is in it. Rounding scale and middle to bfloat16 may
    leave the ends of a group outside by that much; a least-squares fit leaves them outside on purpose."""
    scheme = Scheme("int8", size) if name == "int8" else Scheme("int4", size, name)
    weight = random(outputs, inputs)
    weight[:, -1] /= 100
    result = quantize(weight, scheme)
    assert result.shape == weight.shape and result.scales.shape == (outputs, num_groups)
    error, scale = (result.dequantize() - weight).abs(), result.dequantize() * 0 + spread(result, result.scales)
    middle = 0 if result.middles is None else spread(result, result.middles).abs()
    outside = 2**-8 * (middle + 127 * scale if name == "int8" else middle + 8 * scale)
    inner = (result.codes != 0) & (result.codes != 15) if name == "least-squares" else slice(None)
    assert (error <= scale / 2 + outside + 1e-7)[inner].all()


@pytest.mark.parametrize("fit", FITS)
def test_n01_the_scale_of_a_tail_is_of_what_is_in_it(fit):
    weight = random(4, 40).abs() + 5
    alone = quantize(weight[:, 32:].contiguous(), Scheme("int4", 8, fit))
    assert torch.equal(quantize(weight, Scheme("int4", 32, fit)).scales[:, -1:], alone.scales)


def spread(result: QuantizedTensor, by_group: torch.Tensor) -> torch.Tensor:
    return by_group.float().repeat_interleave(result.group_size, 1)[:, :result.num_inputs]


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), *INT4.values()], ids=str)
def test_zeros_stay_zeros_and_one_number_stays_that_number(scheme):
    assert torch.equal(quantize(torch.zeros(3, 50), scheme).dequantize(), torch.zeros(3, 50))
    for value in (3.1, -1e-30, 7e4):
        same = torch.full((2, 33), value)
        torch.testing.assert_close(quantize(same, scheme).dequantize(), same, rtol=2**-7, atol=0)


@pytest.mark.parametrize("scheme", [*SCHEMES.values(), *INT4.values()], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e4, 2e14])
def test_a_tiny_row_keeps_its_values_to_within_one_step_and_all_are_finite(scheme, size):
    weight = random(4, 64) * torch.tensor([[size], [1.0], [0.0], [size]])
    result = quantize(weight, scheme)
    assert result.dequantize().isfinite().all()
    step = spread(result, result.scales)
    assert ((result.dequantize() - weight).abs() <= 1.05 * step).all() and (step[0] < size).all()


def test_each_fit_loses_less_than_the_one_before():
    """On normal weights and on weights that lean to one side: least squares leaves little more than half of absmax's
    squared error."""
    for weight in (random(300, 576), random(300, 576).exp()):
        absmax, minmax, fitted = (squared_error(weight, INT4[fit]) for fit in FITS)
        assert fitted < 0.9 * minmax and fitted < 0.6 * absmax and minmax < absmax


def test_smaller_groups_lose_less_and_take_more_bytes():
    weight, results = random(64, 512), []
    for size in (None, 256, 128, 64, 32, 16):
        scheme = Scheme("int4", size, "least-squares")
        results.append((squared_error(weight, scheme), quantize(weight, scheme).nbytes))
    assert results == sorted(results, key=lambda pair: (-pair[0], pair[1]))
    assert results[4][1] == 64 * (512 // 2 + 2 * 2 * 512 // 32)  # half a byte a code, bfloat16 scale and middle a group


def test_an_outlier_costs_its_group_and_no_other():
    weight = random(1, 64)
    plain, weight[0, 3] = quantize(weight, INT4["absmax"]).dequantize(), 50.0
    result = quantize(weight, INT4["absmax"])
    assert (result.codes[0, :32] == 8).sum() == 31 and torch.equal(result.dequantize()[0, 32:], plain[0, 32:])


@pytest.mark.parametrize("inputs", [1, 2, 7, 64])
def test_two_codes_in_a_byte_come_back(inputs):
    codes = torch.randint(0, 16, (5, inputs), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = QuantizedTensor(pack(codes), torch.ones(5, 1), torch.zeros(5, 1), inputs, inputs)
    assert packed.stored.shape == (5, -(-inputs // 2)) and torch.equal(packed.codes, codes)


def test_what_cannot_be_quantized_is_refused():
    for weight, words in ((random(3), "only a matrix"), (torch.tensor([[1.0, torch.inf]]), "inf or nan"),
                          (torch.tensor([[torch.nan]]), "inf or nan"), (torch.tensor([[1e39]]).double(), "larger ones"),
                          (torch.tensor([[-1e20]]), "larger ones")):
        with pytest.raises(ValueError, match=words):
            quantize(weight, SCHEMES["int8"])
    for arguments, words in (
            ({"name": "int3"}, "int8.*int4"), ({"name": ["int8"]}, "int8.*int4"),
            ({"name": "int4", "group_size": 0}, "group_size"), ({"name": "int4", "group_size": True}, "group_size"),
            ({"name": "int4", "fit": "best"}, "fit"), ({"name": "int8", "fit": "minmax"}, "fit")):
        with pytest.raises(ValueError, match=words):
            Scheme(**arguments)
    for value in ("int3", "", 8, True):
        with pytest.raises(ValueError, match="quantization must be 'int8', 'int4' or None"):
            EngineConfig(quantization=value)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scheme", [*SCHEMES.values(), Scheme("int4", 128, "minmax")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_kernel_computes_what_the_codes_stand_for_at_any_row_count(scheme, dtype, with_bias):
    weight, bias = quantize(random(48, 256), scheme), random(48, seed=1).to(dtype) if with_bias else None
    layer = make_quantized_linear(weight, bias, dtype=dtype, device=CPU)
    kind = {"int8": Int8PackLinear, "int4": Int4PackLinear}[scheme.name]
    taken = dtype == torch.bfloat16 and has_packed_kernel(kind, CPU)
    assert type(layer) is (kind if taken else UnpackedLinear)
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-4}[dtype]
    for rows in (0, 1, 2, 5, 33, 130):
        x = random(rows, 256, seed=rows).to(dtype)
        expected = linear(x.double(), weight.dequantize().double(), None if bias is None else bias.double())
        result = layer(x)
        assert result.dtype == dtype and result.shape == (rows, 48)
        assert torch.equal(layer(x.repeat(1, 2)[:, :256]), result)  # a view with longer strides
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(layer.weight.float(), weight.dequantize(), rtol=2**-7, atol=1e-2)
    assert layer.num_bytes == weight.nbytes + (0 if bias is None else bias.nbytes)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_row_of_a_batch_changes_anothers_result(scheme, dtype):
    """Bit for bit, whatever the others hold (an activation scale shared by a batch would not pass)."""
    layer = make_quantized_linear(quantize(random(48, 256), scheme), None, dtype=dtype, device=CPU)
    for rows in (2, 5, 32, 130):
        x = random(rows, 256, seed=rows).to(dtype)
        others = torch.cat((x[:1], 1e3 * random(rows - 1, 256, seed=1).to(dtype)))
        assert torch.equal(layer(x)[0], layer(others)[0])


@pytest.mark.parametrize("outputs, inputs", [(16, 63), (33, 8), (7, 100), (1, 40), (17, 50), (40, 64)])
def test_a_shape_that_a_kernel_would_read_beyond_stays_unpacked(outputs, inputs):
    """``_weight_int8pack_mm`` reads past rows whose inputs are no multiple of 16 (torch 2.13): garbage, or a crash."""
    for scheme in SCHEMES.values():
        weight = quantize(random(outputs, inputs), scheme)
        layer = make_quantized_linear(weight, None, dtype=torch.bfloat16, device=CPU)
        for rows in (1, 3, 9):
            x = random(rows, inputs, seed=rows).bfloat16()
            torch.testing.assert_close(layer(x).float(), linear(x.float(), weight.dequantize()), rtol=2e-2, atol=0.2)
        assert inputs % 16 == 0 or layer.kernel == "unpacked"


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, dtype", [
    *((family, "float32") for family in ("llama", "llama-biases", "qwen3", "mixtral", "qwen3_moe")),
    ("llama", "bfloat16")])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_n03_a_quantized_model_is_the_model_of_the_weights_that_its_codes_stand_for(name, tied, family, dtype, tiny):
    """Every family, odd sizes, in bfloat16 the packed kernels; routers and norms stay as they are; a tied table is
    quantized once and counted once, an untied one is kept beside."""
    model = tiny.make_model(family, tie_word_embeddings=tied, **(WIDE if dtype == "bfloat16" else {}))
    config, weights = config_and_weights(model, tiny)
    scheme = SCHEMES[name]
    quantized = Decoder.from_weights(config, dict(weights), quantization=name, dtype=dtype)
    stand_ins = {key: stand_in(key, weight, scheme, tied) for key, weight in weights.items()}
    plain = Decoder.from_weights(config, stand_ins)
    ids = [3, 60, 5, 5, 41, 0]
    exact, near = all_logits(plain, ids), all_logits(quantized, ids)
    assert (exact - near).norm() <= {"float32": 1e-5, "bfloat16": 3e-2}[dtype] * exact.norm()
    if dtype == "bfloat16":
        kinds = {"int8": Int8PackLinear, "int4": Int4PackLinear}
        packed = has_packed_kernel(kinds[name], CPU)
        assert type(quantized.layers[0].mlp.down) is (kinds[name] if packed else UnpackedLinear)
    if not config.num_experts:
        beside = 0 if tied else quantized.embedding.nbytes
        assert quantized.num_bytes - quantized.bytes_read_per_step == beside
    if tied:
        assert quantized.head.num_bytes == quantize(weights["embed_tokens.weight"], SCHEMES["int8"]).nbytes


def config_and_weights(model, tiny):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_config(folder), tiny.canonical(model)


def stand_in(name: str, weight: torch.Tensor, scheme: Scheme, tied: bool) -> torch.Tensor:
    """What the codes of a weight stand for, if it is one that is quantized."""
    if weight.dim() == 1 or "router" in name or (name == "embed_tokens.weight" and not tied):
        return weight
    scheme = SCHEMES["int8"] if name in ("embed_tokens.weight", "lm_head.weight") else scheme
    if weight.dim() == 3:
        return torch.stack([quantize(expert, scheme).dequantize() for expert in weight])
    return quantize(weight, scheme).dequantize()


@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj", "embed_tokens"])
def test_a_weight_that_is_not_finite_is_refused_as_the_models_fault(name, tiny):
    config, weights = config_and_weights(tiny.make_model("llama", tie_word_embeddings=True), tiny)
    weights[f"{name}.weight"][0, 0] = torch.inf
    with pytest.raises(ModelError, match=f"{name}.*inf or nan"):
        Decoder.from_weights(config, weights, quantization="int8")


def test_a_scale_in_a_gguf_file_that_is_not_finite_is_refused(tmp_path, tiny):
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama", **WIDE),
                           kind=gguf.GGMLQuantizationType.Q4_1)
    file = read_gguf(path)
    with open(path, "r+b") as data:
        data.seek(file.data_start + file.tensors["blk.0.ffn_up.weight"].offset)
        data.write(b"\x00\x7e")  # NaN in float16
    with pytest.raises(ModelError, match="blk.0.ffn_up.weight.*inf or nan"):
        load_decoder(path, quantization="int4")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_4_bit_blocks_of_a_gguf_are_kept_as_they_are(kind, tmp_path, tiny):
    """Codes, order of rotary rows and sizes; only scales and middles are rounded, from float16 to bfloat16."""
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama", **WIDE),
                           kind=gguf.GGMLQuantizationType[kind])
    config = load_config(path)
    exact, kept = load_weights(path, config), load_weights(path, config, keep_blocks=True)
    blocks = [name for name, weight in kept.items() if isinstance(weight, QuantizedTensor)]
    assert len(blocks) == 7 * config.num_layers and all(name.startswith("layers.") for name in blocks)
    for name in blocks:
        assert kept[name].group_size == 32 and kept[name].nbytes == exact[name].numel() * 5 // 8
        scale = spread(kept[name], kept[name].scales).abs()
        allowed = 2**-8 * (8 * scale + spread(kept[name], kept[name].middles).abs())
        assert ((kept[name].dequantize() - exact[name]).abs() <= allowed).all(), name
    assert all(torch.equal(kept[name], exact[name]) for name in kept if name not in blocks)
    (mlp,) = {load_decoder(path, quantization="int4").layers[0].mlp.down.kernel}
    assert mlp == ("int4pack" if has_packed_kernel(Int4PackLinear, CPU) else "unpacked")


def test_weights_in_4_bit_are_refused_where_they_were_not_asked_for(tmp_path, tiny):
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama", **WIDE),
                           kind=gguf.GGMLQuantizationType.Q4_0)
    config = load_config(path)
    with pytest.raises(ModelError, match="layers.0.*need quantization='int4'"):
        Decoder.from_weights(config, load_weights(path, config, keep_blocks=True), quantization="int8")


def test_other_types_of_a_gguf_are_quantized_anew(tmp_path, tiny):
    path = tiny.write_gguf(tmp_path / "model.gguf", tiny.make_model("llama", **WIDE),
                           kind=gguf.GGMLQuantizationType.Q8_0)
    assert read_gguf(path).q4_blocks("blk.0.ffn_up.weight") is None
    kept = load_weights(path, load_config(path), keep_blocks=True)
    assert not any(isinstance(weight, QuantizedTensor) for weight in kept.values())


def test_a_model_already_loaded_cannot_be_quantized_by_an_option(tiny_model, byte_tok):
    with pytest.raises(ValueError, match="from_weights"):
        LLM(tiny_model, tokenizer=byte_tok, quantization="int8")
