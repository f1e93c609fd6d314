"""``minillm bench serving``: sides, rounds, goals and files with fake samples; the measuring code on tiny models."""

from __future__ import annotations

import argparse

import pytest

from minillm.measure.bench import batch_peers, compare, machine, serving, serving_samples, step_costs
from minillm.measure.bench.batch_peers import BatchJob, batch_workload, load_batch_engine, stretch
from minillm.measure.bench.compare import SampleFailed
from minillm.measure.bench.serving import PARTS, Goal, Run, format_serving
from minillm.measure.bench.serving_samples import ServingSpec, gaps_after
from minillm.measure.results import Recording

SPEC = ServingSpec("", "", "m", "cpu")
SPEEDS = {"paged": 90.0, "contiguous": 100.0}


def fake(spec: ServingSpec) -> list[dict]:
    """Batches of 16 are the best of ``minillm-*``, 8 of the others."""
    if spec.part == "batch":
        best = 16 if spec.side.startswith("minillm") else 8
        answers = ["a", "b" if spec.side == "minillm-auto" else spec.side]
        return [{"case": spec.side, "batch_size": spec.batch_size, "answers": answers,
                 "output_tokens_per_s": 100 - abs(spec.batch_size - best)}]
    return [{"case": spec.side, "output_tokens_per_s": SPEEDS.get(spec.side, 1.0), "read_bytes_per_s": 5e9,
             "device": "cpu", "num_threads": 2}]


def taken(part: str, take=fake, rounds: int = 3, **more) -> Run:
    run = Run(SPEC, take, say=lambda line: None)
    run.part(part, rounds, **more)
    return run


def recorded(run: Run, part: str, rounds: int = 3, card: dict | None = None) -> str:
    failures = {" ".join(key): why for key, why in run.failures.items()}
    settings = {"parts": [part], "rounds": rounds, "failures": failures}
    return format_serving(Recording(name="t", samples=run.samples, settings=settings, environment={"card": card}))


def test_every_other_round_of_a_part_runs_in_reverse_order():
    assert [(s["round"], s["case"]) for s in taken("paged").samples] == [
        (0, "paged"), (0, "contiguous"), (1, "contiguous"), (1, "paged"), (2, "paged"), (2, "contiguous")]


def test_each_side_of_a_batch_is_measured_at_its_own_best_size_and_trials_are_in_no_median():
    run = taken("batch", rounds=2, batch_sizes=(8, 16, 32))
    trials = [s for s in run.samples if s["part"] == "batch trial"]
    assert len(trials) == 3 * len(PARTS["batch"].sides)
    measured = {s["case"]: s["batch_size"] for s in run.samples if s["part"] == "batch"}
    assert measured["minillm-auto"] == 16 and measured["transformers-static-float32"] == 8
    assert len(run.samples) == len(trials) + 2 * len(measured)


def test_one_batch_size_needs_no_trial():
    assert {(s["part"], s["batch_size"]) for s in taken("batch", batch_sizes=(8,)).samples} == {("batch", 8)}


@pytest.mark.parametrize("part, rounds", [("nonsense", 1), ("paged", 0)])
def test_an_unknown_part_or_no_round_is_refused(part, rounds):
    with pytest.raises(ValueError, match="at least one round of batch, formats, paged"):
        taken(part, rounds=rounds)


def test_a_side_that_fails_is_left_out_and_said_and_the_others_go_on():
    asked = []

    def take(spec: ServingSpec) -> list[dict]:
        asked.append(spec.side)
        if spec.side.startswith("llamacpp"):
            raise SampleFailed(f"batch {spec.side}: No module named 'llama_cpp'")
        return fake(spec)
    run = taken("batch", take, batch_sizes=(8, 16))
    assert asked.count("llamacpp-float16") == 1 and asked.count("minillm-auto") == 2 + 3
    text = recorded(run, "batch")
    assert "left out: batch llamacpp-float16: No module named 'llama_cpp'" in text
    assert "minillm-auto over llamacpp-float16" not in text


def test_a_goal_is_a_ratio_of_paired_medians_with_its_verdict():
    text = recorded(taken("paged"), "paged", card={"read_bytes_per_s": 10e9})
    assert "output_tokens_per_s of paged over contiguous: 0.9 (0.9-0.9), at least 0.9 met" in text
    assert "read GB/s" in text and "50%" in text

    def slow(spec: ServingSpec) -> list[dict]:
        return [case | {"output_tokens_per_s": 80.0} if spec.side == "paged" else case for case in fake(spec)]
    assert "0.8 (0.8-0.8), at least 0.9 NOT MET" in recorded(taken("paged", slow), "paged")


def test_what_takes_microseconds_is_not_shown_as_nothing():
    assert compare.spread_text([2.2e-5, 2.3e-5, 2.4e-5], 1e3) == "0.023 (0.0225-0.0235)"
    assert compare.spread_text([1.0, 2.0, 3.0], 1e3) == "2,000.0 (1,500.0-2,500.0)"


@pytest.mark.parametrize("goal, ratio, met", [
    (Goal("k", "a", "b", at_least=2), 2.0, True), (Goal("k", "a", "b", at_least=2), 1.9, False),
    (Goal("k", "a", "b", at_most=2), 2.0, True), (Goal("k", "a", "b", at_most=2), 2.1, False),
    (Goal("k", "a", "b"), 9.0, None)])
def test_a_bound_is_met_on_its_right_side(goal, ratio, met):
    assert goal.met_by(ratio) is met


def test_answers_are_counted_against_the_first_side():
    text = recorded(taken("batch"), "batch")
    assert "transformers-static-float32: 1 of 2 answers are those of minillm-auto, token for token" in text


def test_each_goal_names_cases_of_one_part_and_every_part_can_be_taken():
    assert {*PARTS} == {*serving_samples.TAKERS}
    for name in ("batch", "paged", "prefix", "chunked"):  # whose cases are their sides
        assert {side for goal in PARTS[name].goals for side in (goal.case, goal.other)} <= {*PARTS[name].sides}


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return parser.parse_args(["serving", *arguments])


@pytest.mark.parametrize("error, code", [(None, 0), (SampleFailed("no memory"), 1), (KeyboardInterrupt(), 1)])
def test_the_command_keeps_what_was_taken_whatever_ends_it(error, code, tmp_path, monkeypatch, capsys):
    def take(spec: ServingSpec) -> list[dict]:
        if error and spec.side == "contiguous":
            raise error
        return fake(spec)
    monkeypatch.setattr(machine, "current_card", lambda device: None)
    monkeypatch.setattr(serving, "Run", lambda spec: Run(spec, take))
    monkeypatch.chdir(tmp_path)
    assert compare.main(options("--only", "paged", "--rounds", "2", "--out", str(tmp_path / "kept.json"))) == code
    kept = Recording.load(tmp_path / "kept.json")
    assert len(kept.samples) == {0: 4, 1: 1 if isinstance(error, KeyboardInterrupt) else 2}[code]
    assert capsys.readouterr().out.splitlines()[-1] == "every sample: kept.json"


@pytest.mark.parametrize("arguments", [
    ("--only", "nonsense"), ("--only", ""), ("--rounds", "0"), ("--batch-sizes", "0")])
def test_bad_options_are_refused_before_anything_runs(arguments):
    with pytest.raises(ValueError, match="--only takes parts of batch, formats, paged"):
        compare.main(options(*arguments))


def test_a_process_that_fails_is_reported_under_its_part_and_side():
    with pytest.raises(SampleFailed, match=r"^paged paged: its process ended with exit code 1:\n(?s:.)*no-such"):
        serving.cases_in_fresh_process(ServingSpec("paged", "paged", "./no-such-model", "cpu"))


# ---- the workload and the sides ----------------------------------------------------------------------------------

def test_the_workload_repeats_and_is_spread_over_its_ranges():
    text = list(range(1000, 1240))
    jobs = batch_workload(text)
    assert jobs == batch_workload(text) != batch_workload(text, seed=1) and len(jobs) == 32
    assert len({job.prompt_ids[0] for job in jobs}) == 32
    for lengths, (low, high) in (([len(job.prompt_ids) for job in jobs], batch_peers.PROMPT_TOKENS),
                                 ([job.num_new_tokens for job in jobs], batch_peers.OUTPUT_TOKENS)):
        assert low <= min(lengths) < low + (high - low) / 4 and high - (high - low) / 4 < max(lengths) <= high


def test_a_stretch_of_text_goes_round():
    assert stretch([1, 2, 3], 5, 1) == [2, 3, 1, 2, 3] and stretch([1, 2, 3], 2, 0) == [1, 2]


def test_an_unknown_side_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="known: minillm, transformers-static"):
        load_batch_engine("vllm-auto", "m", "cpu", 8)


JOBS = [BatchJob(list(range(length)), new) for length, new in ((5, 4), (17, 6), (33, 3), (9, 5))]


def test_both_ways_of_batching_in_transformers_give_the_answers_of_minillm(tiny_llama):
    """Greedy answers of different lengths, in float32, in batches of two: left padding and pages change no token."""
    ours = load_batch_engine("minillm-float32", tiny_llama, "cpu", 2)
    answers = ours.run(JOBS)
    assert [len(answer) for answer in answers] == [job.num_new_tokens for job in JOBS] and ours.weight_bytes > 0
    static = load_batch_engine("transformers-static-float32", tiny_llama, "cpu", 2)
    assert static.run(JOBS) == answers
    assert static.weight_bytes == (6 + 5) * sum(p.nbytes for p in static.model.parameters())
    continuous = load_batch_engine("transformers-continuous-float32", tiny_llama, "cpu", 2)
    try:
        assert continuous.run(JOBS) == answers
    finally:
        continuous.close()


def test_llama_cpp_is_compared_on_gguf_files_alone(tiny_llama):
    pytest.importorskip("llama_cpp")
    with pytest.raises(ValueError, match="on a .gguf file in float32 or float16 or .*, not on"):
        load_batch_engine("llamacpp-float16", tiny_llama, "cpu", 2)


def test_the_parts_of_a_step_add_up_to_the_whole(tiny_llama):
    cases = {case["case"]: case for case in step_costs.step_parts(tiny_llama, "cpu", batch=4, num_steps=3)}
    whole = cases.pop("whole step")["step_s"]
    assert set(cases) == {"schedule", "build tensors", "model", "sample", "commit", "detokenize and deliver",
                          "the rest", "all but the model"}
    assert sum(case["step_s"] for name, case in cases.items() if name != "all but the model") == pytest.approx(whole)
    assert cases["all but the model"]["step_s"] == pytest.approx(whole - cases["model"]["step_s"])
    assert all(case["step_s"] > 0 for case in cases.values()) and cases["model"]["read_bytes_per_s"] > 0


def test_the_grids_cover_what_they_name(tiny_llama):
    cases = step_costs.decode_by_load(tiny_llama, "cpu", batches=(1, 4), contexts=(16, 64), most_tokens=128, seconds=0)
    assert [case["case"] for case in cases] == ["step, batch 1, context 16", "step, batch 4, context 16",
                                                "step, batch 1, context 64"]
    cases = step_costs.scheduler_by_queue([(2, 50), (4, 0)])
    assert [case["case"] for case in cases] == ["scheduler, 2 running, 50 waiting", "scheduler, 4 running, 0 waiting"]
    cases = step_costs.sampler_by_vocabulary("cpu", sizes=(64, 128), seconds=0)
    assert len(cases) == 4 and all(case["step_s"] > 0 for case in cases)


def test_endurance_leaves_nothing_behind():
    cases = step_costs.endurance(num_requests=48, num_stages=3)
    assert len(cases) == 3 and [case["num_left"] for case in cases] == [0, 0, 0]
    assert all(case["step_s"] > 0 for case in cases)


class FakeEngine(batch_peers.BatchEngine):
    """Gives each job as many tokens as it asks for, and ``more``."""

    def __init__(self, more: int = 0):
        self.more, self.runs, self.weight_bytes, self.closed = more, [], 0, False

    def run(self, jobs: list[BatchJob]) -> list[list[int]]:
        self.runs.append(jobs)
        self.weight_bytes += 1000
        return [[7] * (job.num_new_tokens + self.more) for job in jobs]

    def close(self) -> None:
        self.closed = True


def batch_sample(engine: FakeEngine, monkeypatch) -> dict:
    monkeypatch.setattr(serving_samples, "load_batch_engine", lambda *_: engine)
    monkeypatch.setattr(serving_samples, "text_ids", lambda model: list(range(240)))
    case, = serving_samples.take(ServingSpec("batch", "minillm-auto", "m", "cpu", 8))
    return case


def test_a_batch_sample_counts_the_tokens_asked_for_after_a_warm_up_on_other_prompts(monkeypatch):
    engine = FakeEngine()
    case = batch_sample(engine, monkeypatch)
    warmup, jobs = engine.runs
    assert engine.closed and jobs == batch_workload(list(range(240)))
    assert not {tuple(job.prompt_ids[:16]) for job in warmup} & {tuple(job.prompt_ids[:16]) for job in jobs}
    asked = sum(job.num_new_tokens for job in jobs)
    assert case["output_tokens_per_s"] == pytest.approx(asked / case["seconds"])
    assert case["read_bytes_per_s"] == pytest.approx(1000 / case["seconds"])  # of the timed run alone
    assert case["batch_size"] == 8 and case["device"] == "cpu" and case["num_threads"] >= 1


def test_a_batch_with_the_wrong_number_of_tokens_is_refused(monkeypatch):
    with pytest.raises(RuntimeError, match="minillm-auto did not make the numbers of tokens"):
        batch_sample(FakeEngine(more=1), monkeypatch)


@pytest.mark.parametrize("side", PARTS["paged"].sides)
def test_one_request_runs_over_blocks_or_over_one_buffer(side, tiny_llama, monkeypatch):
    monkeypatch.setattr(serving_samples, "greedy", lambda max_tokens: batch_peers.greedy(4))
    case, = serving_samples.take(ServingSpec("paged", side, tiny_llama, "cpu"))
    assert case["case"] == side and case["output_tokens_per_s"] > 0 and case["read_bytes_per_s"] > 0


def test_drafts_are_measured_on_copies_stories_and_a_batch(tiny_llama, monkeypatch):
    """On a model without a chat template, whose answers are cut short."""
    def chat(llm, conversations, params):
        return llm.generate([conversation[0]["content"][:40] for conversation in conversations],
                            batch_peers.greedy(3))

    monkeypatch.setattr(serving_samples.LLM, "chat", chat)
    names = []
    for side in ("auto plain", "int8 ngram"):
        cases = serving_samples.take(ServingSpec("speculation", side, tiny_llama, "cpu"))
        assert all(case["output_tokens_per_s"] > 0 for case in cases)
        names += [case["case"] for case in cases]
    assert names == [f"{what}, {side}" for side in ("auto plain", "int8 ngram")
                     for what in ("copies", "stories", "32 at once")]


def test_gaps_after_a_moment_include_the_one_it_falls_in():
    assert gaps_after([1.0, 2.0, 5.0, 6.0], 3.0) == [3.0, 1.0] and gaps_after([1.0], 0.0) == []
