"""Linear layers: every kernel computes the same product, the choice follows the device, memory is counted right."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from minillm.model import linear as module
from minillm.model.linear import (
    DenseLinear,
    Fp16WeightLinear,
    OneDnnLinear,
    activation_dtype,
    choose_kernel,
    fits_float16,
    has_kernel,
    make_linear,
)
from minillm.model.quantized import describe_kernels

CPU = torch.device("cpu")
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2, "float16": 3e-3, "auto": 2e-3}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch):
    """Makes the process believe that some kernels are missing, so that each fallback runs on any machine."""
    def remove(*missing: str) -> None:
        real = has_kernel
        monkeypatch.setattr(module, "has_kernel", lambda kernel, dtype: kernel not in missing and real(kernel, dtype))
    return remove


@pytest.mark.parametrize(
    "missing", [(), ("fbgemm-fp16",), ("fbgemm-fp16", "onednn")], ids=["all", "no-fp16", "dense"]
)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_kernel_equals_the_float64_product_at_any_row_count(without_kernels, dtype, with_bias, missing):
    without_kernels(*missing)
    weight, bias = random(70, 600) / 25, random(70, seed=1) if with_bias else None
    layer = make_linear(weight, bias, dtype=dtype, device=CPU)
    assert layer.kernel not in missing
    for rows in (0, 1, 2, 5, 33, 130):
        x = random(rows, 600, seed=rows).to(activation_dtype(dtype, CPU))
        result = layer(x)
        assert result.shape == (rows, 70) and result.dtype == x.dtype
        expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepacked_weights_equal_the_float64_product_at_any_row_count(dtype):
    if not has_kernel("onednn", dtype):
        pytest.skip("this machine has no onednn kernel")
    weight, bias = (random(70, 600) / 25).to(dtype), random(70, seed=1).to(dtype)
    layer = OneDnnLinear(weight, bias)
    for rows in (0, 1, 2, 5, 33, 130):
        x = random(rows, 600, seed=rows).to(dtype)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        expected = linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(layer(x).double(), expected, rtol=tolerance, atol=tolerance)


def test_float32_is_never_narrowed():
    """``dtype="float32"`` is real float32: a weight that float16 and bfloat16 would round comes back exact."""
    weight = torch.full((16, 32), 1.0 + 2.0**-23)
    layer = make_linear(weight, dtype="float32", device=CPU)
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer(torch.eye(32)), weight.T)


def test_inputs_may_be_strided():
    weight, x = random(24, 40), random(6, 80)[:, ::2]
    for dtype in ("auto", "float32"):
        result = make_linear(weight, dtype=dtype, device=CPU)(x)
        torch.testing.assert_close(result, x @ weight.T, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("kind", [DenseLinear, OneDnnLinear, Fp16WeightLinear])
def test_the_weight_comes_back_and_memory_is_counted(kind):
    if not has_kernel(kind.kernel, torch.float32):
        pytest.skip(f"this machine has no {kind.kernel} kernel")
    weight, bias = random(48, 576).half().float(), random(48)
    layer = kind(weight, bias)
    assert torch.equal(layer.weight.float(), weight)
    width = 2 if kind is Fp16WeightLinear else 4
    held_inputs = 1024 if kind is Fp16WeightLinear else 576
    assert layer.bytes_read == width * 48 * 576 + 4 * 48
    assert layer.num_bytes == width * 48 * held_inputs + 4 * 48


def test_a_packed_layer_keeps_no_plain_copy():
    for kind in (OneDnnLinear, Fp16WeightLinear):
        if has_kernel(kind.kernel, torch.float32):
            layer = kind(random(32, 64), None)
            plain = [value for value in vars(layer).values() if isinstance(value, torch.Tensor) and not value.is_mkldnn]
            assert plain == []


@pytest.mark.parametrize("bad", [65_536.0, 1e30, float("inf"), float("nan"), 1e-9])
def test_auto_falls_back_to_float32_where_float16_cannot_hold_the_weight(bad):
    weight = random(32, 64)
    assert fits_float16(weight)
    if bad == 1e-9:
        weight = weight * bad
    else:
        weight[3, 5] = bad
    assert not fits_float16(weight)
    layer = make_linear(weight, dtype="auto", device=CPU)
    assert layer.kernel != "fbgemm-fp16"
    assert torch.equal(layer.weight.nan_to_num(), weight.nan_to_num())


def test_the_probe_says_no_when_an_operator_is_gone_wrong_or_refuses(monkeypatch: pytest.MonkeyPatch):
    class Gone(DenseLinear):
        def __init__(self, weight, bias):
            raise AttributeError("no such operator")

    class Wrong(DenseLinear):
        def __call__(self, x):
            return super().__call__(x) + 1

    for kind in (Gone, Wrong):
        monkeypatch.setitem(module._KERNELS, "onednn", kind)
        has_kernel.cache_clear()
        assert not has_kernel("onednn", torch.float32)
        assert choose_kernel("float32", CPU) == "dense"
    monkeypatch.undo()
    has_kernel.cache_clear()


def test_of_two_kernels_that_read_the_same_bytes_the_quicker_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "has_kernel", lambda kernel, dtype: True)
    for quick, slow in (("onednn", "dense"), ("dense", "onednn")):
        monkeypatch.setattr(module, "seconds_per_row", lambda kernel, dtype, slow=slow: 1.0 + (kernel == slow))
        assert choose_kernel("float32", CPU) == choose_kernel("bfloat16", CPU) == quick
        assert choose_kernel("auto", CPU) == "fbgemm-fp16"


def test_the_choice_and_its_description_name_dtype_and_kernel(without_kernels):
    without_kernels("fbgemm-fp16", "onednn")
    assert [choose_kernel(dtype, CPU) for dtype in TOLERANCES] == ["dense"] * len(TOLERANCES)
    assert describe_kernels("auto", CPU) == "dense kernel, float32 activations"
    assert describe_kernels("bfloat16", CPU) == "dense kernel, bfloat16 activations"


@pytest.mark.parametrize(("native", "expected"), [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_on_cuda_is_bfloat16_only_where_the_hardware_has_it(monkeypatch, native, expected):
    def is_bf16_supported(including_emulation=True):
        return native or including_emulation
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    device = torch.device("cuda")
    assert activation_dtype("auto", device) == expected
    assert activation_dtype("float32", device) == torch.float32
    assert choose_kernel("auto", device) == "dense"
