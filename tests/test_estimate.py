"""``minillm estimate``: answers without weights, and says what it needs when it cannot answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minillm.cli import main
from minillm.measure.card import MachineCard


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MINILLM_OFFLINE", "1")
    return tmp_path / "home"


def save_card(**keys) -> None:
    MachineCard(**{**dict(device="cpu", device_name="chip", num_threads=2, read_bytes_per_s=3e10,
                          flops_per_s={"float32": 1e11}, operator_overhead_s=1e-6, noise=0.1, buffer_bytes=1,
                          memory_bytes=8 * 10**9), **keys}).save()


def asked(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main(["estimate", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["estimate", *argv]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["estimate", *argv]) == 1
    return capsys.readouterr().err


def test_an_8b_model_on_an_h200(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "llama-3-8b", "--on", "h200", "--context", "8192", "--batch", "16")
    assert "llama-3-8b in bfloat16 on NVIDIA H200" in text
    assert "weights 16.1 GB + cache 17.2 GB (16 x 8,192 tokens x 128 KiB)" in text
    assert "fits: 108 GB left of 141 GB; at most 116 such requests fit" in text
    assert "at least 6.71 ms (in all reading memory 6.71 ms" in text and "2,385." in text
    assert "https://www.nvidia.com" in text


def test_json_holds_the_same_numbers_in_base_units(capsys: pytest.CaptureFixture[str]) -> None:
    answer = asked(capsys, "llama-3-8b", "--on", "H200", "--context", "8192", "--batch", "16", "--prompt", "1000")
    assert answer["kv_bytes"] == 16 * 8192 * 128 * 1024 and answer["fits"] and answer["max_requests"] == 116
    assert answer["step"]["limit"] == "bytes" and answer["ttft"]["limit"] == "flops"
    assert answer["tokens_per_s"] == pytest.approx(16 / answer["step"]["time_s"])
    assert answer["ttft"]["time_s"] == pytest.approx(0.0143, rel=0.05), "2 x 7e9 x 1000 FLOPs at 989 TFLOP/s"
    assert answer["crossover_batch"] is None and answer["crossover_batch_of_weights"] == pytest.approx(206, abs=3)


def test_what_does_not_fit_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not fit: 61.8 GB too much of 80 GB; not even one such request fits" in said(
        capsys, "llama-3-70b", "--on", "h100")
    assert not asked(capsys, "llama-3-70b", "--on", "h100")["fits"]


def test_a_machine_without_a_published_flop_rate_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "qwen3-8b", "--on", "m4-max")
    assert text.count("no FLOP rate is known") == 2 and "tokens/s" in text


def test_auto_is_float16_where_the_hardware_lacks_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(capsys, "smollm2-135m", "--on", "t4")["dtype"] == "float16"
    assert asked(capsys, "smollm2-135m", "--on", "l4")["dtype"] == "bfloat16"


def test_this_machine_answers_by_its_card(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, "smollm2-135m")
    assert "run `minillm card` first" in message and "h200" in message
    save_card()
    answer = asked(capsys, "smollm2-135m", "--context", "1024")
    assert answer["dtype"] == "auto" and answer["machine"] == "chip (cpu, 2 threads)" and answer["fits"]
    assert answer["step"]["operators_s"] > 1e-3
    assert "operators" in said(capsys, "smollm2-135m")
    save_card(memory_bytes=0)
    assert asked(capsys, "smollm2-135m")["fits"] is None
    assert "memory is unknown: run `minillm card` again" in said(capsys, "smollm2-135m")


def test_a_folder_needs_its_config_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}))
    answer = asked(capsys, str(tmp_path), "--on", "t4", "--context", "64")
    assert answer["kv_bytes_per_token"] == 2 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(("argv", "words"), [
    (("llama-9", "--on", "h200"), "llama-3-8b, "),
    (("", "--on", "h200"), "there is no model ''"),
    (("x" * 5000, "--on", "h200"), "there is no model"),
    (("llama-3-8b", "--on", "h300"), "known: a100-40gb"),
    (("llama-3-8b", "--on", ""), "unknown hardware ''; known: a100-40gb"),
    (("llama-3-8b", "--on", "h200", "--dtype", "int3"), "known: auto, float32"),
    (("llama-3-8b", "--on", "h200", "--context", "9000"), "positions for 8,192 tokens"),
    (("llama-3-8b", "--on", "h200", "--prompt", "9000"), "positions for 8,192 tokens"),
])
def test_what_does_not_exist_is_refused_by_what_does(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...],
                                                     words: str) -> None:
    assert words in refused(capsys, *argv)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "many", "1000000000000"])
@pytest.mark.parametrize("option", ["--context", "--batch", "--prompt"])
def test_absurd_counts_are_wrong_usage(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["estimate", "llama-3-8b", "--on", "h200", f"{option}={value}"])
    assert stop.value.code == 2 and "is not a whole number from 1 to" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [
    {"read_bytes_per_s": 0}, {"read_bytes_per_s": -1.0}, {"read_bytes_per_s": "fast"}, {"flops_per_s": {"float32": 0}},
    {"flops_per_s": []}, {"operator_overhead_s": None}, {"memory_bytes": -5}, {"kernels": {"auto": {}}},
    {"kernels": [1]}], ids=str)
def test_a_card_that_cannot_be_used_counts_as_none(capsys: pytest.CaptureFixture[str], damage: dict) -> None:
    save_card(**damage)
    assert MachineCard.load() is None and "run `minillm card` first" in refused(capsys, "smollm2-135m")


@pytest.mark.parametrize("layers", [10_001, 2**31 - 1])
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(
        capsys: pytest.CaptureFixture[str], tmp_path: Path, layers: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6,
        "num_hidden_layers": layers, "head_dim": 8}))
    assert f"num_hidden_layers = {layers}; it must be a whole number from 1 to 10000" in refused(
        capsys, str(tmp_path), "--on", "t4")


def test_an_answer_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys; from minillm.cli import main; main(['estimate', 'llama-3-8b', '--on', 'h200']); " \
           "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
