"""README's measured numbers are those of the recorded run that it links."""

from __future__ import annotations

import re
from pathlib import Path

from minillm.measure.bench.compare import BASELINES
from minillm.measure.bench.quality import STATISTICS, interval
from minillm.measure.bench.serving import PARTS
from minillm.measure.distribution import ratio_of_medians
from minillm.measure.results import Recording

ROOT = Path(__file__).parents[1]


def test_speed_in_readme_is_that_of_the_recorded_comparison() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    (cell,) = re.findall(r"\| one request on a CPU \| ([^|]*)", readme)
    runs = re.findall(r"(.*?)\[recorded\]\(([^)]+)\)", cell)
    assert runs
    for claim, link in runs:
        check_claim(claim, Recording.load(ROOT / link))


def test_many_requests_in_readme_are_those_of_the_recorded_benchmark() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    (cell,) = re.findall(r"\| many requests \| ([^|]*)", readme)
    (link,) = re.findall(r"\[recorded\]\(([^)]+)\)", cell)
    recording = Recording.load(ROOT / link)
    assert recording.settings["rounds"] >= 5 and not recording.settings["failures"]
    claimed = re.findall(r"`(\w+)` ([\d.]+) times (?:the output tokens/s of )?`([\w-]+)`", cell)
    others = {name for name in PARTS["batch"].sides if not name.startswith("minillm")}
    assert {other for _, _, other in claimed} == others, "a peer that was measured is left out"
    for dtype, times, other in claimed:
        speeds = [recording.values("output_tokens_per_s", part="batch", case=case)
                  for case in (f"minillm-{dtype}", other)]
        assert times == f"{ratio_of_medians(*speeds).median:.1f}", (dtype, other)


def test_costs_in_readme_are_the_goals_of_the_recorded_benchmarks_and_none_that_is_missed_is_left_out() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    linked = {*re.findall(r"data/measurements/serving-[\w-]+\.json", readme)} - {"data/measurements/serving-batch.json"}
    recordings = [Recording.load(ROOT / link) for link in sorted(linked)]
    assert all(own.settings["rounds"] >= 5 and not own.settings["failures"] for own in recordings)
    told = {(of, over): (ratio, asked)
            for of, over, ratio, asked in re.findall(r"\| `([^`]+)` \| `([^`]+)` \| ([\d.]+) \| ([^|]+) \|", readme)}
    goals = [(own, part, goal) for own in recordings for part in own.settings["parts"] for goal in PARTS[part].goals]
    for recording, part, goal in goals:
        sides = [recording.values(goal.key, part=part, case=case) for case in (goal.case, goal.other)]
        ratio = ratio_of_medians(*sides).median
        if goal.met_by(ratio) is False or (goal.case, goal.other) in told:
            claimed, asked = told.pop((goal.case, goal.other))
            assert claimed == f"{ratio:.2f}", goal
            assert asked == goal.bound + (", **not met**" if goal.met_by(ratio) is False else ""), goal
    assert not told


def test_quality_in_readme_is_that_of_the_recorded_passages() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    recordings = [Recording.load(ROOT / link) for link in re.findall(r"data/measurements/quality-[\w-]+\.json", readme)]
    assert len(recordings) == 2
    rows = re.findall(r"^\| `([^`]+)` ((?:\| [\d.e-]+ ){6})\|$", readme, re.M)
    assert {"auto", "auto, int8 KV", "bfloat16", "int8", "int4"} <= {side for side, _ in rows}
    for side, told in rows:
        cells = []
        for recording in recordings:
            own = [sample for sample in recording.samples if sample["side"] == side]
            sums = {key: sum(sample[key] for sample in own)
                    for key in ("num_tokens", "nll", "reference_nll", "kl", "top1")}
            cells += [f"{STATISTICS['KL'](sums):.2g}", f"{STATISTICS['perplexity ratio'](sums):.3f}",
                      f"{STATISTICS['top-1'](sums):.3f}"]
        assert re.findall(r"[\d.e-]+", told) == cells, side


def test_quality_keeps_the_bounds_that_were_asked_for() -> None:
    """int8 weights: a divergence of at most 0.01; keys and values in int8: perplexity within 0.7 %."""
    for model in ("smollm2-135m", "bytes-1m"):
        recording = Recording.load(ROOT / "data" / "measurements" / f"quality-{model}.json")
        by_side = {side: [sample for sample in recording.samples if sample["side"] == side]
                   for side in recording.settings["sides"]}
        divergence, _, _ = interval(by_side["int8"], STATISTICS["KL"])
        _, low, high = interval(by_side["auto, int8 KV"], STATISTICS["perplexity ratio"])
        assert divergence <= 0.01 and 0.993 <= low <= high <= 1.007, model


def check_claim(claim: str, recording: Recording) -> None:
    """Each decode ratio in ``claim`` is that of ``recording``, a whole run of at least five rounds."""
    assert recording.settings["rounds"] >= 5 and not recording.settings.get("failure")
    claimed = dict(re.findall(r"`(\w+)` ([\d.]+)", claim))
    assert set(claimed) == {"auto", "float32", "bfloat16"}
    for dtype, times in claimed.items():
        engine = f"minillm-{dtype}"
        decode = [recording.values("decode_tokens_per_s", engine=name) for name in (engine, BASELINES[engine])]
        assert times == f"{ratio_of_medians(*decode).median:.1f}"
