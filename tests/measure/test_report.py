"""The report of one request: its numbers are those of the metrics, and it fits a terminal."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from minillm.measure.card import MachineCard
from minillm.measure.metrics import RequestMetrics
from minillm.measure.report import bar, decode_bytes_per_token, format_report, kv_bytes_read, table
from minillm.measure.trace import Trace
from minillm.model.config import ModelConfig
from minillm.request import CompletionOutput, RequestOutput


def config(**more) -> ModelConfig:
    return ModelConfig(model_type="llama", vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=2,
                       num_heads=2, num_kv_heads=1, head_dim=4, max_position_embeddings=64, **more)


def card() -> MachineCard:
    return MachineCard(device="cpu", device_name="test", num_threads=2, read_bytes_per_s=20e9, flops_per_s={},
                       operator_overhead_s=1e-6, noise=0.01, buffer_bytes=1)


def output(times: list[float]) -> RequestOutput:
    metrics = RequestMetrics(0.0, finished_s=1.0, token_times_s=times, num_prompt_tokens=7)
    return RequestOutput("r", "hi", [1] * 7, [CompletionOutput(0)], [metrics])


def test_the_report_shows_the_metrics_the_bandwidth_and_the_stages():
    trace = Trace()
    trace.add("prefill", 0.0, 0.4, request_id="r")
    trace.add("decode", 0.4, 0.6, request_id="r")
    trace.add("decode", 0.6, 0.9, request_id="r")
    trace.add("deliver", 0.95, 1.0, request_id="r")
    trace.add("decode", 0.0, 50.0, request_id="another")
    text = format_report(output([0.4, 0.6, 1.0]), trace, bytes_per_token=3e9, card=card())
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ")}
    assert "400.0 ms" in lines["TTFT"] and "300.0 ms" in lines["TPOT"] and "1,000.0 ms" in lines["end"]
    assert "p50    300.0 ms" in lines["ITL"] and "p95    390.0 ms" in lines["ITL"] and "p99    398.0 ms" in lines["ITL"]
    assert "3.3 tokens/s" in text
    assert "10.0 GB/s (50% of the 20.0 GB/s" in lines["memory"]
    assert "40.0%" in lines["prefill"] and "50.0%" in lines["decode"] and "2 ×" in lines["decode"]
    assert "5.0%" in lines["other"] and "linear interpolation" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("times", [[], [0.4]])
def test_what_has_no_value_is_not_applicable_instead_of_zero(times):
    text = format_report(output(times), None, bytes_per_token=3e9, card=card())
    assert text.count("n/a") == (7 if not times else 6)
    assert "where the time went: nothing was traced" in format_report(output(times), Trace())


def test_a_missing_card_and_a_doubtful_one_are_said_to_be_so():
    assert "measures again" not in format_report(output([0.4, 0.5]), None, bytes_per_token=1e9, card=card())
    busy = replace(card(), cpu_share=0.4)
    assert "measures again" in format_report(output([0.4, 0.5]), None, bytes_per_token=1e9, card=busy)
    assert "no card yet" in format_report(output([0.4, 0.5]), None, bytes_per_token=1e9)


def test_a_share_above_the_best_says_that_the_card_is_too_low_or_the_cache_helped():
    def text(gigabytes: float, **more) -> str:
        return format_report(output([0.4, 1.4]), None, bytes_per_token=gigabytes * 1e9, card=replace(card(), **more))
    assert "too low" not in text(19.9)
    assert "above 100 %: the card is too low (measure it again: minillm card)" in text(24)
    assert "cache" not in text(24) and "or weights stayed in the 20,000 MB cache" in text(24, cache_bytes=20e9)


def test_times_with_other_work_in_them_say_so():
    """The process waited for a core, or (where that is not told) a few tokens took far longer than the others."""
    def text(times: list[float], waited: float | None = None) -> str:
        return format_report(output(times), None, waited=waited)
    even = [0.01 * i for i in range(1, 40)]
    assert "other work" not in text(even, 0.03) and "other work" not in text(even)
    assert "other work ran on this machine meanwhile (waited for a core 44% of the time)" in text(even, 0.44)
    uneven = [*even, even[-1] + 0.3, even[-1] + 0.31]
    assert "not the engine's alone" in text(uneven)
    assert "other work" not in text([0.01, 0.02, 0.5]), "too few to tell"


def test_bytes_of_a_decode_step_are_the_weights_and_the_cache_before_it():
    model = SimpleNamespace(bytes_read_per_step=1000, config=config(), dtype=SimpleNamespace(itemsize=4))
    assert decode_bytes_per_token(model, 10, 4) == 1000 + 2 * 1 * 4 * 4 * 2 * 12
    assert kv_bytes_read(config(sliding_window=(None, 5)), 12, 2) == 2 * 1 * 4 * 2 * (12 + 5)


def test_bars_are_as_long_as_their_share():
    assert [len(bar(share, 8)) for share in (0.0, 0.5, 1.0, 2.0)] == [0, 4, 8, 8]
    assert bar(1 / 16, 8) == "▌"


def test_tables_are_aligned():
    assert table([["a", "bb"], ["long", "1"]]).splitlines() == ["a     bb", "--------", "long   1"]
