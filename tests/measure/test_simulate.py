"""Simulated runs: clocks, workloads, the cost of plans, predictions against the engine, and the command."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from weakref import ref

import pytest

from minillm.cache.blocks import BlockPool
from minillm.cli import main
from minillm.cli.simulate import _seconds, _serve
from minillm.measure.card import MachineCard
from minillm.measure.distribution import Distribution
from minillm.measure.hardware import Hardware
from minillm.measure.metrics import Slo
from minillm.measure.roofline import estimate, mixed_step_cost, step_cost
from minillm.measure.simulate import CostModel, compare, metrics_of, simulate
from minillm.measure.workload import (
    Arrival,
    Lognormal,
    Uniform,
    load_arrivals,
    random_arrivals,
    save_arrivals,
    shipped_workloads,
)
from minillm.model.shapes import find_config
from minillm.request import Request, SamplingParams
from minillm.schedule.history import History
from minillm.schedule.recording import RecordingScheduler
from minillm.schedule.replay import replay
from minillm.schedule.scheduler import Scheduler

WORKLOADS = Path(__file__).parents[2] / "data" / "workloads"


def arrival(arrival_s: float, prompt: int, output: int, **more) -> Arrival:
    return Arrival(arrival_s=arrival_s, num_prompt_tokens=prompt, num_output_tokens=output, **more)


def scheduler(blocks: int = 64, **options) -> Scheduler:
    return Scheduler(BlockPool(blocks, 4), **options)


def second(plan) -> float:
    return 1.0


def test_two_requests_by_hand():
    """Who comes during a step waits for its end; time in which nothing runs is skipped and not busy."""
    result = simulate([arrival(0.0, 3, 3), arrival(0.5, 3, 2), arrival(10.0, 3, 1)], scheduler(), second)
    first, then, late = result.requests
    assert (first.admitted_s, first.token_times_s, first.finished_s) == (0.0, [1.0, 2.0, 3.0], 3.0)
    assert (then.queue_s, then.ttft_s, then.tpot_s, then.e2e_s) == (0.5, 1.5, 1.0, 2.5)
    assert late.token_times_s == [11.0]
    assert (result.num_steps, result.busy_s, result.num_tokens) == (4, 4.0, 12)


def test_what_can_never_run_is_refused_and_counted_as_failed():
    result = simulate([arrival(0.0, 300, 3), arrival(0.0, 3, 3)], scheduler(), second)
    summary = result.summary(Slo(ttft_s=1.0))
    assert (summary.num_failed, summary.failures, summary.goodput) == (1, {"refused": 1}, 0.5)


def test_groups_are_summed_up_apart():
    result = simulate([arrival(0.0, 3, 2, group="a"), arrival(0.0, 3, 5, group="b")], scheduler(), second)
    assert [result.summary(group=group).num_output_tokens for group in (None, "a", "b")] == [7, 2, 5]


def test_a_shared_prefix_is_computed_once_and_a_tight_pool_preempts():
    arrivals = [arrival(3.0 * number, 21, 4, prefix=("tools", 16)) for number in range(5)]
    hits = simulate(arrivals, scheduler(), second)
    assert hits.num_hit_tokens == 4 * 16 and hits.requests[-1].num_cached_tokens == 16
    assert hits.num_tokens == 5 * 24 - 4 * 16
    alone = simulate([replace(own, prefix=None) for own in arrivals], scheduler(), second)
    assert alone.num_hit_tokens == 0 and alone.num_tokens == 5 * 24
    tight = simulate([arrival(0.0, 9, 20) for _ in range(3)], scheduler(blocks=10), second)
    assert tight.num_preemptions > 0 and all(own.num_output_tokens == 20 for own in tight.requests)


def test_priorities_count_where_the_policy_heeds_them():
    arrivals = [arrival(0.0, 4, 9), arrival(0.1, 4, 9, priority=1), arrival(0.2, 4, 9, priority=-1)]
    for policy, order in (("fcfs", [0, 1, 2]), ("priority", [0, 2, 1])):
        result = simulate(arrivals, scheduler(max_num_seqs=1, policy=policy), second)
        starts = [own.token_times_s[0] for own in result.requests]
        assert sorted(range(3), key=starts.__getitem__) == order


def test_a_simulation_can_be_recorded_replayed_and_says_the_same_of_each_request():
    recorder = RecordingScheduler(scheduler(blocks=40, max_num_batched_tokens=24, max_prefill_chunk=8))
    result = simulate(random_arrivals(40, rate=0.2, prompt=Uniform(3, 30), output=Uniform(1, 20)), recorder, second)
    told = metrics_of(recorder.history)
    assert [(own.arrival_s, own.admitted_s, own.token_times_s, own.finished_s, own.num_preemptions)
            for own in told.values()] == [
        (own.arrival_s, own.admitted_s, own.token_times_s, own.finished_s, own.num_preemptions)
        for own in result.requests]
    assert list(replay(recorder.history))[-1].num_computed_tokens == result.num_tokens
    assert all(row["ratio"] == 1.0 and row["median_error"] == 0.0 for row in compare(recorder.history, second).values())
    slow = compare(recorder.history, lambda plan: 2.0)
    assert slow["step_s"]["ratio"] == 2.0 and slow["step_s"]["median_error"] == 1.0
    assert slow["e2e_s"]["predicted"] > slow["e2e_s"]["measured"]


def test_a_record_without_steps_or_tokens_compares_to_nothing():
    recorder = RecordingScheduler(scheduler())
    simulate([arrival(0.0, 3, 1)], recorder, second)
    assert compare(recorder.history, second)["tpot_s"]["ratio"] is None


def plan_of(*chunks: tuple[int, int]):
    """A plan of requests that have ``start`` tokens computed and ``num_tokens`` to go, all of them planned."""
    owner = scheduler(blocks=4000, max_num_seqs=32, max_prefill_chunk=2000)
    for number, (start, num_tokens) in enumerate(chunks):
        request = Request(request_id=f"r{number}", prompt_token_ids=tuple(range(5000 * number, 5000 * number + start
                          + num_tokens)), params=SamplingParams(), seed=0, max_total_tokens=9999)
        request.num_computed_tokens = start
        owner.pool.allocate(request.table, start)
        owner.running.append(request)
    plan = owner.schedule()
    assert [(item.start, item.num_tokens) for item in plan.scheduled] == list(chunks)
    return plan


def test_the_seconds_of_a_plan_are_those_of_its_cost():
    config, h100 = find_config("llama-3-8b"), Hardware.named("h100")
    model = CostModel(config, h100)
    alike = plan_of(*[(101, 1)] * 4)
    assert model(alike) == estimate(step_cost(config, batch=4, context=101), h100).time_s
    mixed = mixed_step_cost(config, Counter([(1, 101), (1, 40), (300, 0)]), logit_rows=3, paged=True)
    assert model(plan_of((101, 1), (40, 1), (0, 300))) == estimate(mixed, h100).time_s
    assert CostModel(config, h100, overhead_s=1.0)(alike) == 1.0 + model(alike)


def test_one_request_alone_takes_what_estimate_says():
    config, machine = find_config("llama-3-8b"), Hardware.named("a100-80gb")
    own, = simulate([arrival(0.0, 512, 100)], scheduler(blocks=999), CostModel(config, machine)).requests
    assert own.ttft_s == pytest.approx(estimate(step_cost(config, num_new=512), machine).time_s)
    assert own.tpot_s == pytest.approx(estimate(step_cost(config, context=562), machine).time_s, rel=1e-3)


def test_more_load_costs_goodput():
    model, slo, goodput = CostModel(find_config("llama-3-8b"), Hardware.named("l4")), Slo(ttft_s=1.0, tpot_s=0.1), []
    for rate in (0.5, 3.0):
        arrivals = random_arrivals(300, rate=rate, seed=5, prompt=Lognormal(200, high=2000), output=Lognormal(40))
        summary = simulate(arrivals, Scheduler(BlockPool(4000)), model).summary(slo)
        goodput.append(summary.goodput)
        assert summary.num_failed == 0 and summary.clock == "engine"
    assert goodput[0] > 0.95 > 0.5 > goodput[1]


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(cv):
    arrivals = random_arrivals(20_000, rate=5.0, cv=cv, seed=3, prompt=Uniform(1, 9), output=Uniform(2, 2))
    gaps = [b.arrival_s - a.arrival_s for a, b in zip(arrivals, arrivals[1:])]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.2, rel=0.06) and deviation / mean == pytest.approx(cv, rel=0.06)
    assert {own.num_prompt_tokens for own in arrivals} == set(range(1, 10))
    assert arrivals[:50] == random_arrivals(50, rate=5.0, cv=cv, seed=3, prompt=Uniform(1, 9), output=Uniform(2, 2))


def test_lengths_are_drawn_around_their_median_and_cut():
    arrivals = random_arrivals(5000, rate=1.0, prompt=Lognormal(100, 0.7, low=20, high=900), output=Lognormal(50, 0.0))
    lengths = Distribution.of(own.num_prompt_tokens for own in arrivals)
    assert lengths.p50 == pytest.approx(100, rel=0.05) and (lengths.min, lengths.max) == (20, 900)
    assert {own.num_output_tokens for own in arrivals} == {50}


def test_prompts_share_their_named_prefix_and_nothing_else():
    one, two = arrival(0, 40, 1, prefix=("a", 24)), arrival(0, 40, 1, prefix=("b", 24))
    prompts = [one.prompt_token_ids(0), one.prompt_token_ids(1), two.prompt_token_ids(2)]
    assert prompts[0][:24] == prompts[1][:24]
    assert not set(prompts[0][24:]) & set(prompts[1]) and not set(prompts[2]) & {*prompts[0], *prompts[1]}
    assert all(0 <= token_id < 99 for token_id in one.prompt_token_ids(5, vocab_size=99))


def test_a_workload_comes_back_from_its_file(tmp_path):
    arrivals = [arrival(0.0, 3, 4), arrival(1.5, 30, 4, prefix=("x", 8), priority=-1, group="chat")]
    assert load_arrivals(save_arrivals(arrivals, tmp_path / "load.jsonl")) == arrivals


def test_the_shipped_workloads_are_those_their_seeds_draw():
    made = shipped_workloads()
    assert {name: load_arrivals(WORKLOADS / f"{name}.jsonl") for name in made} == made


@pytest.mark.parametrize(("line", "words"), [
    ("{", r"no JSON \(Expecting .*, column 2 .*: give a request a line"), ("[" * 100_000, "no JSON"),
    ("[1]", "no request: give a request a line, such as"), ('{"arrival_s": 1}', "no request: .*num_prompt_tokens"),
    ('{"arrival_s": 1, "num_prompt_tokens": 3, "num_output_tokens": 0}', "num_output_tokens must be .* at least 1"),
    ('{"arrival_s": "x", "num_prompt_tokens": 3, "num_output_tokens": 1}', "arrival_s must be seconds"),
    ('{"arrival_s": NaN, "num_prompt_tokens": 3, "num_output_tokens": 1}', "arrival_s must be seconds"),
    ('{"arrival_s": 1, "num_prompt_tokens": 3, "num_output_tokens": 1, "size": 2}', "nothing else"),
    ('{"arrival_s": 1, "num_prompt_tokens": 3, "num_output_tokens": 1, "prefix": ["a", 3]}',
     r'prefix must be \["name", tokens\] .* got \["a", 3\]'),
    ('{"arrival_s": 1, "num_prompt_tokens": 3, "num_output_tokens": 1, "prefix": "sys"}', 'prefix must .* got "sys"'),
    ('{"arrival_s": 1, "num_prompt_tokens": 3, "num_output_tokens": 1, "prefix": 5}', "prefix must be .* got 5"),
    ('{"arrival_s": 1, "num_prompt_tokens": 3, "num_output_tokens": 1, "priority": 0.5}', "priority must be a whole"),
    ('{"arrival_s": 1, "num_prompt_tokens": 3, "num_output_tokens": 1, "group": 1}', "group must be text"),
    ('{"arrival_s": 1, "num_prompt_tokens": 3, "num_output_tokens": 1, "group": "all"}', "every request is in"),
    ('{"arrival_s": 1' + "0" * 400 + ', "num_prompt_tokens": 3, "num_output_tokens": 1}', "arrival_s must be seconds"),
    ('{"arrival_s": 1, "num_prompt_tokens": 1000000000, "num_output_tokens": 1}', "1,000,000,001 tokens in all; the"),
    ("\udcff\udcfe", "no JSON"), ("{\udcff}", "no JSON .*utf-8"),
])
def test_a_bad_line_of_a_workload_is_named(tmp_path, line, words):
    path = tmp_path / "load.jsonl"
    path.write_text('{"arrival_s": 0, "num_prompt_tokens": 3, "num_output_tokens": 1}\n' + line, encoding="utf-8",
                    errors="surrogateescape")
    with pytest.raises(ValueError, match=f"load.jsonl, line 2: .*{words}"):
        load_arrivals(path, 8192)


def test_an_empty_workload_and_absurd_rates_are_refused(tmp_path):
    (tmp_path / "load.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no request: give a request a line"):
        load_arrivals(tmp_path / "load.jsonl")
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory|Permission denied")):
        with pytest.raises(OSError, match=rf"cannot read .*({why}).*: give one like"):
            load_arrivals(path)
    for keys in ({"rate": 0.0}, {"rate": math.inf}, {"rate": 1.0, "cv": 0.0}):
        with pytest.raises(ValueError, match="above 0"):
            random_arrivals(3, prompt=Uniform(1, 2), output=Uniform(1, 2), **keys)


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["simulate", *argv]) == 0
    return capsys.readouterr().out


def test_the_command_simulates_a_file_by_group(capsys):
    text = said(capsys, str(WORKLOADS / "long_prompts.jsonl"), "--hardware", "h100", "--max-num-seqs", "32",
                "--model", "llama-3-8b", "--ttft-ms", "200", "--tpot-ms", "20")
    assert "llama-3-8b in bfloat16 on NVIDIA H100" in text and "162 requests, 0 refused" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line}
    assert rows["chat"][1] == "150" and rows["document"][1] == "12" and rows["all"][-1].endswith("%")
    assert "Goodput needs" not in text and "first refused" not in text


def test_the_command_says_why_a_request_was_refused_and_of_how_many_its_times_are(capsys, tmp_path):
    path = save_arrivals([arrival(0.0, 300, 2), arrival(1.0, 30, 2), arrival(2.0, 30, 2)], tmp_path / "load.jsonl")
    options = str(path), "--hardware", "l4", "--num-kv-blocks", "10"
    text, reason = said(capsys, *options), "a prompt of 300 tokens: the KV cache holds 10 blocks of 16."
    assert "3 requests, 1 refused; 4 output tokens" in text and "smollm2-135m in bfloat16 on NVIDIA L4" in text
    assert f"first refused: {reason} Shorten it or raise --num-kv-blocks\n" in text
    assert next(line.split()[:3] for line in text.splitlines() if line.startswith("all")) == ["all", "3", "2"]
    assert "Goodput needs limits for a good request: give --ttft-ms" in text
    assert json.loads(said(capsys, *options, "--json"))["first_refused"].startswith(reason)


def test_long_times_are_plain_seconds():
    assert [_seconds(value) for value in (None, 2167.3, 999.6, 0.9996, 99.96, 0.0172)] == [
        "n/a", "2,170 s", "1,000 s", "1 s", "100 s", "17.2 ms"]


def test_auto_is_said_in_words_where_it_stays_auto(capsys, monkeypatch):
    card = MachineCard(device="cpu", device_name="chip", num_threads=2, read_bytes_per_s=3e10,
                       flops_per_s={"float32": 1e11}, operator_overhead_s=1e-6, noise=0.1, buffer_bytes=1)
    monkeypatch.setattr(MachineCard, "load", lambda: card)
    text = said(capsys, "--requests", "3")
    assert text.startswith("smollm2-135m in auto (16-bit weights, float32 activations) on chip")


def test_help_names_every_field_of_a_line(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    text = capsys.readouterr().out
    assert all(f"  {each.name} " in text for each in fields(Arrival))
    example = next(line for line in text.splitlines() if line.startswith("  {"))
    assert Arrival(**json.loads(example) | {"prefix": ("rules", 64)}).group == "chat"


def test_the_command_draws_a_load_and_keeps_plans_and_a_trace(capsys, tmp_path):
    plans, trace = tmp_path / "plans.jsonl", tmp_path / "trace.json"
    answer = json.loads(said(capsys, "--requests", "20", "--hardware", "l4", "--num-kv-blocks", "200", "--json",
                             "--plans", str(plans), "--perfetto", str(trace)))
    history = History.load(plans)
    assert history.num_steps == answer["num_steps"] and history.settings["num_blocks"] == 200
    assert any(event["ph"] == "C" for event in json.loads(trace.read_text())["traceEvents"])
    assert f"step {history.num_steps - 1}: " in said(
        capsys, "--requests", "20", "--hardware", "l4", "--num-kv-blocks", "200", "--plans", "-")


@pytest.mark.parametrize(("argv", "words"), [
    (["--model", "llama-3-70b", "--hardware", "l4"], "does not fit NVIDIA L4.*: give --num-kv-blocks"),
    (["--hardware", "abacus"], "unknown hardware"), (["--hardware", "l4", "--tpot-ms", "0"], "above 0"),
    (["--hardware", "l4", "--rate", "0"], "above 0"),
    (["nowhere.jsonl", "--hardware", "l4"], "cannot read nowhere.jsonl .*: give one like"),
    ([], "has not been measured")])
def test_the_command_says_what_is_wrong(capsys, tmp_path, monkeypatch, argv, words):
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    assert main(["simulate", *argv]) == 1
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(("argv", "words"), [
    (["--check-engine", "--hardware", "l4"], "use for --hardware"), (["--check-engine", "--json"], "no use for --json"),
    (["--check-engine", "--plans", "x"], "no use for --plans"), (["--check-engine", "--tpot-ms", "0"], "for --tpot-ms"),
    (["x.jsonl", "--rate", "0"], "no use for --rate"), (["x.jsonl", "--requests", "9"], "no use for --requests"),
    (["x.jsonl", "--check-engine", "--seed", "0"], "no use for --seed: leave it out"),
    (["--hardware", "l4", "--save", "x"], "--save keeps what --check-engine finds"),
    (["--hardware", "l4", "--json", "--plans", "-"], "would print to one place"),
    (["x.jsonl", "--plans", "./x.jsonl"], "must be different files"),
    (["--hardware", "l4", "--plans", "x", "--perfetto", "x"], "must be different files")])
def test_an_option_that_would_be_ignored_or_spoil_the_output_is_wrong_usage(capsys, argv, words):
    with pytest.raises(SystemExit) as left:
        main(["simulate", *argv])
    assert left.value.code == 2 and words in capsys.readouterr().err


@pytest.fixture
def shape(tmp_path: Path) -> str:
    """The folder of a model of 64 positions, without weights."""
    (tmp_path / "config.json").write_text(json.dumps({
        "model_type": "llama", "vocab_size": 99, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64}))
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


@pytest.mark.parametrize("where", [["--hardware", "h100"], ["--check-engine"]])
def test_a_load_longer_than_the_models_context_is_refused_by_its_line_before_anything_runs(capsys, shape, where):
    path = save_arrivals([arrival(0.0, 9, 1), arrival(1.0, 10**9, 1)], Path(shape) / "load.jsonl")
    assert main(["simulate", str(path), "--model", shape, *where]) == 1
    assert "load.jsonl, line 2: 1,000,000,001 tokens in all; the model has positions for 64" in capsys.readouterr().err


def test_a_drawn_load_fits_the_model(capsys, shape):
    assert "300 requests, 0 refused" in said(capsys, "--model", shape, "--hardware", "l4", "--requests", "300")


def test_the_engine_serves_a_load_open_loop_and_is_compared(tiny_llm):
    recorder = RecordingScheduler(scheduler(max_num_seqs=2, max_num_batched_tokens=8))
    llm = tiny_llm(scheduler=recorder)
    _serve(llm, [arrival(0.0, 9, 4), arrival(0.0, 6, 3, priority=1), arrival(0.05, 5, 1)])
    measured = metrics_of(recorder.history)
    assert [own.num_output_tokens for own in measured.values()] == [4, 3, 1]
    assert all(own.ttft_s > 0 and own.failure is None for own in measured.values())
    card = MachineCard(device="cpu", device_name="chip", num_threads=2, read_bytes_per_s=3e10,
                       flops_per_s={"float64": 1e11}, operator_overhead_s=1e-6, noise=0.1, buffer_bytes=1)
    config, attention = llm.model.config, ref(llm.attention)
    del llm
    assert attention() is None, "its KV cache would stand beside the next one's"
    rows = compare(recorder.history, CostModel(config, Hardware.of_card(card), "float64"))
    assert rows.keys() == {"step_s", "ttft_s", "tpot_s", "e2e_s"}
    assert all(row["predicted"] > 0 and row["ratio"] == row["predicted"] / row["measured"] for row in rows.values())


def test_the_engine_serves_a_load_by_its_priorities_where_they_count(tiny_llm):
    recorder = RecordingScheduler(scheduler(max_num_seqs=1, policy="priority"))
    _serve(tiny_llm(scheduler=recorder), [arrival(0.0, 4, 2), arrival(0.0, 4, 2, priority=1),
                                          arrival(0.0, 4, 2, priority=-1)])
    first_s = [own.first_token_s for own in metrics_of(recorder.history).values()]
    assert sorted(range(3), key=first_s.__getitem__) == [2, 0, 1]
