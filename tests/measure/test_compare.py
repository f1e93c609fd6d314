"""``minillm bench``: order, pairing, report and files, first with fake samples, then one real one."""

from __future__ import annotations

import argparse
import json
import random
import shutil
from dataclasses import replace

import pytest

from minillm.measure.bench import compare, machine, peers
from minillm.measure.bench.compare import (
    SampleFailed,
    convert_in_fresh_process,
    format_comparison,
    parse_engine,
    run_comparison,
    sample_in_fresh_process,
)
from minillm.measure.bench.peers import SampleSpec
from minillm.measure.metrics import RequestMetrics
from minillm.measure.results import Recording

ENGINES = ["minillm-auto", "transformers-float32"]


def fake_sample(spec: SampleSpec, slowdown: float = 1.0) -> dict:
    speed = {"minillm-auto": 80.0, "transformers-float32": 20.0}[spec.engine] / slowdown
    return {"engine": spec.engine, "decode_tokens_per_s": speed, "ttft_s": 2 / speed, "prefill_s": 16 / speed,
            "read_bytes_per_s": 2.7e8 * speed, "peak_rss_bytes": 5e8, "tokens_sha256": "same", "device": "cpu",
            "num_threads": 2}


def spec(engine: str = "", model: str = "m", **more) -> SampleSpec:
    return SampleSpec(engine, model, **{"prompt_ids": [1, 2, 3, 4], "prefill_ids": [5, 6], "new_tokens": 4, **more})


def compared(take=fake_sample, engines=ENGINES, rounds=3) -> Recording:
    return run_comparison(spec(), engines, rounds, name="t", take=take, say=lambda line: None)


def test_every_other_round_runs_in_reverse_order():
    samples = compared().samples
    assert [(s["round"], s["engine"]) for s in samples] == [
        (0, ENGINES[0]), (0, ENGINES[1]), (1, ENGINES[1]), (1, ENGINES[0]), (2, ENGINES[0]), (2, ENGINES[1])]


def test_ratios_pair_the_samples_of_a_round():
    slowdowns = iter([1, 1, 4, 4, 2, 2])  # the machine is slow in the second round, for both
    text = format_comparison(compared(lambda s: fake_sample(s, next(slowdowns))))
    ratios = next(line for line in text.splitlines() if line.split()[:2] == ENGINES)
    assert ratios.split("transformers-float32")[1].split() == ["4.00", "(4.00-4.00)"] * 3


def test_the_report_names_what_differs_and_what_is_missing():
    def take(s: SampleSpec) -> dict:
        return fake_sample(s) | {"prefill_s": None, "tokens_sha256": s.engine}
    text = format_comparison(compared(take))
    assert "minillm-auto and transformers-float32 made different tokens" in text
    assert next(line for line in text.splitlines() if line.startswith("minillm-auto")).count("n/a") == 2


@pytest.mark.parametrize("engines, rounds", [([], 1), (ENGINES, 0), (["minillm-auto"] * 2, 1)])
def test_a_comparison_of_nothing_is_refused(engines, rounds):
    with pytest.raises(ValueError, match="at least one round"):
        compared(engines=engines, rounds=rounds)


@pytest.mark.parametrize("name", ["vllm-auto", "transformers-auto", "minillm", "minillm-int3", ""])
def test_an_unknown_engine_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="known: minillm-auto"):
        parse_engine(name)


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return parser.parse_args(list(arguments))


@pytest.mark.parametrize("error", [SampleFailed("no memory"), KeyboardInterrupt()])
def test_a_failed_sample_ends_the_run_and_keeps_what_was_taken(error, tmp_path, capsys, monkeypatch):
    """Three samples and then a failure: the file has three, the report pairs the round that is whole, the exit is 1."""
    taken = iter([None, None, None, error])

    def take(s: SampleSpec) -> dict:
        if (failure := next(taken)) is not None:
            raise failure
        return fake_sample(s)
    monkeypatch.setattr(machine, "current_card", lambda device: None)
    monkeypatch.setattr(compare, "convert_in_fresh_process", lambda model: None)
    monkeypatch.setattr(compare, "benchmark_ids", lambda *lengths: ([1, 2], [3]))
    monkeypatch.setattr(compare, "run_comparison", lambda *given, **more: run_comparison(*given, **more, take=take))
    monkeypatch.chdir(tmp_path)
    assert compare.main(options("--engines", ",".join(ENGINES), "--out", str(tmp_path / "kept.json"))) == 1
    out, err = capsys.readouterr()
    kept = Recording.load(tmp_path / "kept.json")
    assert len(kept.samples) == 3 and ENGINES[0] in kept.settings["failure"]
    assert (str(error) or "KeyboardInterrupt") in err and "ended early, with 3 samples" in out
    ratios = next(line for line in out.splitlines() if line.split()[:2] == ENGINES)
    assert ratios.split("transformers-float32")[1].split() == ["4.00", "(4.00-4.00)"] * 3
    assert out.splitlines()[-1] == "every sample: kept.json"


def test_engines_without_a_sample_are_compared_to_nobody():
    def take(s: SampleSpec) -> dict:
        if s.engine == ENGINES[1]:
            raise SampleFailed("no memory")
        return fake_sample(s)
    text = format_comparison(compared(take))
    assert "same tokens" not in text and "n/a" in text and "no memory" in text


def test_a_first_sample_that_fails_leaves_nothing_to_keep():
    def take(s: SampleSpec) -> dict:
        raise SampleFailed("no memory")
    with pytest.raises(SampleFailed, match="no memory"):
        compared(take)


def test_a_bad_engine_ends_with_a_message_and_no_file(tmp_path, capsys):
    assert compare.main(options("--engines", "nonsense", "--out", str(tmp_path / "x.json"))) == 2
    assert "unknown engine 'nonsense'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_fails_is_reported_with_what_it_said():
    with pytest.raises(SampleFailed, match=r"^minillm-float32: its process ended with exit code 1:\n(?s:.)*no-such"):
        sample_in_fresh_process(spec("minillm-float32", "./no-such-model"))


def test_a_conversion_that_fails_says_that_it_is_one(monkeypatch):
    monkeypatch.setattr(compare.sys, "executable", shutil.which("false"))
    with pytest.raises(SampleFailed, match="^converting some for transformers: its process ended with exit code 1"):
        convert_in_fresh_process("some")


def test_the_help_names_every_engine_and_the_defaults_leave_out_float16():
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    words = " ".join(parser.format_help().split()).replace("- ", "-")  # it wraps at hyphens
    assert all(engine in words for engine in compare.ENGINES) and words.count("(default: 128)") == 2
    assert {*compare.DEFAULT_ENGINES} == {engine for engine in compare.ENGINES if "float16" not in engine.split("-")}


class FakeEngine:
    """Makes tokens 1, 2, 3 ..., one every 10 ms of its own clock."""

    context_tokens = 100

    def __init__(self, make: int = 0):
        self.calls, self.make = [], make

    def generate(self, ids: list[int], n: int):
        self.calls.append((ids, n))
        n += self.make
        times = [1.0 + 0.01 * (i + 5) for i in range(n)]
        return RequestMetrics(1.0, token_times_s=times, finished_s=2.0), list(range(n))

    def bytes_per_token(self, prompt: int, new: int) -> float:
        return 1000.0


def sampled(monkeypatch, engine: FakeEngine, **more) -> dict:
    monkeypatch.setattr(peers, "load_engine", lambda *_: engine)
    return peers.take_sample(spec("minillm-auto", device="cpu", **more))


def test_a_sample_is_of_the_timed_run_after_a_warm_up_on_other_ids(monkeypatch):
    engine = FakeEngine()
    sample = sampled(monkeypatch, engine)
    assert engine.calls == [([4, 3, 2, 1], 4), ([1, 2, 3, 4], 4), ([6, 5], 1), ([5, 6], 1)]
    assert sample["decode_tokens_per_s"] == pytest.approx(100.0)
    assert sample["ttft_s"] == pytest.approx(0.05) and sample["prefill_s"] == pytest.approx(0.05)
    assert sample["read_bytes_per_s"] == pytest.approx(1e5)
    assert sample["token_times_s"] == pytest.approx([0.05, 0.06, 0.07, 0.08])
    assert sample["peak_rss_bytes"] > 50e6


def test_a_sample_with_the_wrong_number_of_tokens_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match="4 tokens asked, 5 made"):
        sampled(monkeypatch, FakeEngine(make=1))


def test_a_prefill_that_does_not_fit_the_context_is_left_out(monkeypatch):
    assert sampled(monkeypatch, FakeEngine(), prefill_ids=list(range(100)))["prefill_s"] is None


def test_transformers_is_timed_a_token_at_a_time(tiny_llama):
    engine = peers.TransformersEngine(tiny_llama, "float32", "cpu")
    metrics, ids = engine.generate([random.Random(0).randrange(256) for _ in range(8)], 6)
    assert len(ids) == len(metrics.token_times_s) == 6
    assert metrics.arrival_s < metrics.token_times_s[0] < metrics.token_times_s[-1] <= metrics.finished_s
    weights = sum(p.nbytes for p in engine.model.parameters())
    assert engine.bytes_per_token(8, 6) == weights + 2 * 2 * 8 * 4 * 2 * 11  # the head shares the embedding: read once


def test_a_card_measures_every_ceiling(monkeypatch):
    monkeypatch.setattr(machine, "_buffer_bytes", lambda *_: 2**22)
    card = machine.measure_card("cpu", seconds=0.1)
    assert card.read_bytes_per_s > 1e8 and card.buffer_bytes == 2**22
    assert set(card.flops_per_s) == {"float32", "bfloat16", "float16"} and min(card.flops_per_s.values()) > 1e6
    assert 1e-8 < card.operator_overhead_s < 1e-3 and card.noise >= 0
    assert card.device_name and card.versions["torch"]


def test_the_read_buffer_is_far_larger_than_the_cache_but_leaves_memory_free(monkeypatch):
    monkeypatch.setattr(machine, "free_bytes", lambda _: 8 * 2**30)
    assert machine._buffer_bytes("cpu", 260 * 2**20) == 1040 * 2**20
    assert machine._buffer_bytes("cpu", 0) >= 256 * 2**20
    monkeypatch.setattr(machine, "free_bytes", lambda _: 2**30)
    assert machine._buffer_bytes("cpu", 260 * 2**20) == 2**28


def test_a_saved_card_is_used_until_it_is_stale(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "_buffer_bytes", lambda *_: 2**20)
    quiet, measured = replace(machine.measure_card("cpu", seconds=0.05), noise=0.0, cpu_share=1.0), []
    monkeypatch.setattr(machine, "measure_card", lambda device: measured.append(device) or quiet)
    assert machine.current_card("cpu", measure=False) is None
    assert machine.current_card("cpu") == machine.current_card("cpu") and measured == ["cpu"]
    content = json.loads((tmp_path / "card.json").read_text()) | {"num_threads": 999}
    (tmp_path / "card.json").write_text(json.dumps(content))
    assert machine.current_card("cpu").num_threads != 999 and len(measured) == 2


def test_repeated_timing_warms_up_and_takes_at_least_the_rounds_asked_for():
    calls = []
    samples = machine.time_repeated(lambda: calls.append(1), seconds=0.0, min_rounds=7, warmup=3)
    assert len(samples) == 7 and len(calls) == 10 and min(samples) >= 0
