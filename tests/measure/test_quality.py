"""The quality benchmark: sums against direct formulas, intervals that cover, sides that differ where they should."""

from __future__ import annotations

import json
import math

import pytest
import torch

from minillm.measure.bench import quality
from minillm.measure.bench.quality import SIDES, STATISTICS, compared, format_quality, interval, num_matching
from minillm.measure.results import Recording


def test_sums_are_those_of_the_definitions():
    generator = torch.Generator().manual_seed(0)
    exact, near = (torch.randn(4, 5, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    ids = [0, 3, 1, 4]
    sums = compared(exact, near, ids)
    assert sums["num_tokens"] == 3
    assert sums["nll"] == pytest.approx(-sum(near[i, ids[i + 1]].item() for i in range(3)))
    divergence = torch.nn.functional.kl_div(near[:3], exact[:3], reduction="sum", log_target=True)
    assert sums["kl"] == pytest.approx(divergence.item())
    assert sums["top1"] == sum(int(exact[i].argmax() == near[i].argmax()) for i in range(3))
    same = compared(exact, exact, ids)
    assert (same["kl"], same["top1"], same["nll"]) == (0, 3, same["reference_nll"])


def test_answers_match_until_the_first_difference():
    assert [num_matching(ours, [1, 2, 3]) for ours in ([1, 2, 3], [1, 9, 3], [9], [1, 2], [])] == [3, 1, 0, 2, 0]


def sample(kl: float, **other: object) -> dict:
    return {"num_tokens": 100, "nll": 250.0, "reference_nll": 240.0, "kl": kl, "top1": 90, "match": 10} | other


def test_an_interval_is_of_whole_passages_and_covers_the_value():
    samples = [sample(kl) for kl in (1.0, 2.0, 3.0, 4.0)]
    value, low, high = interval(samples, STATISTICS["KL"])
    assert value == pytest.approx(0.025) and 0.01 <= low < value < high <= 0.04
    assert interval(samples[:1], STATISTICS["KL"]) == (0.01, 0.01, 0.01)
    assert interval(samples, STATISTICS["perplexity ratio"])[0] == pytest.approx(math.exp(0.1))
    assert interval(samples, STATISTICS["match"])[0] == 10 and interval(samples, STATISTICS["top-1"])[0] == 0.9


def test_a_run_compares_sides_with_float32_and_keeps_every_passage(tiny_llama, tmp_path):
    """On a tiny model: the reference in other chunks is the noise floor; fewer bits are above it."""
    names = ["float32, other chunks", "auto, int8 KV", "int8", "int4 g32 absmax"]
    recording = quality.run(tiny_llama, "cpu", {name: SIDES[name] for name in names}, most=3, say=lambda line: None)
    assert len(recording.samples) == 3 * len(names)
    kl = {name: interval([s for s in recording.samples if s["side"] == name], STATISTICS["KL"])[0] for name in names}
    assert kl["float32, other chunks"] < 1e-9 < kl["auto, int8 KV"] < kl["int4 g32 absmax"]
    assert kl["int8"] < kl["int4 g32 absmax"]
    table = format_quality(Recording.load(recording.save(tmp_path / "quality.json")))
    assert all(name in table for name in (*names, "bits a weight", "perplexity"))


def test_the_passages_are_at_least_twenty_of_prose_code_dialogue_and_lists_in_several_languages():
    passages = quality.passages()
    assert len(passages) >= 20 and len({passage["name"] for passage in passages}) == len(passages)
    assert {passage["kind"] for passage in passages} == {"prose", "code", "dialogue", "list"}
    assert len({passage["language"] for passage in passages}) >= 3
    assert all(len(passage["text"]) > 800 for passage in passages)
    assert json.dumps(passages)
