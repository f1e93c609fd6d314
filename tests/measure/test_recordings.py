"""Recorded runs and the machine card as files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from minillm.measure import results
from minillm.measure.card import MachineCard
from minillm.measure.results import Recording, environment, git_commit


def recording(**more) -> Recording:
    samples = [{"engine": engine, "s": value} for engine, value in (("a", 1.0), ("b", 2.0), ("a", None), ("a", 3.0))]
    return Recording(name="run-1", samples=samples, settings={"rounds": 2}, environment=environment(), **more)


def test_a_recording_comes_back_as_it_was_saved(tmp_path):
    path = recording().save(tmp_path / "deep" / "run.json")
    again = Recording.load(path)
    assert again.samples == recording().samples
    assert again.values("s", engine="a") == [1.0, 3.0]
    assert {"cpu", "versions", "commit", "system"} <= set(again.environment)
    assert again.recorded_at.endswith("+00:00")
    assert [file.name for file in path.parent.iterdir()] == ["run.json"], "no partial file is left"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_are_neither_written_nor_read(value, tmp_path):
    path = tmp_path / "run.json"
    with pytest.raises(ValueError):
        replace(recording(), samples=[{"s": value}]).save(path)
    assert not path.exists()
    path.write_text(json.dumps({"samples": [value]}))
    with pytest.raises(ValueError, match="not valid JSON"):
        Recording.load(path)


def test_by_default_a_recording_goes_to_the_measurements_under_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "measurements_dir", lambda: tmp_path)
    assert recording().save() == tmp_path / "run-1.json"
    with pytest.raises(ValueError, match="plain|letters"):
        replace(recording(), name="../run").save()


def test_the_commit_is_that_of_the_checkout_or_none(tmp_path, monkeypatch):
    commit = git_commit()
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    installed = tmp_path / "site-packages" / "minillm" / "measure" / "results.py"
    installed.parent.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(results, "__file__", str(installed))
    assert git_commit() is None, "another project's repository says nothing about this package"


def card() -> MachineCard:
    return MachineCard(device="cpu", device_name="Test CPU", num_threads=2, read_bytes_per_s=20e9,
                       operator_overhead_s=1e-6, flops_per_s={"float32": 1e11}, noise=0.05, buffer_bytes=10**9,
                       versions={"torch": "2.13.0"})


def test_a_card_is_kept_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    assert MachineCard.load() is None
    path = card().save()
    assert path.name == "card.json" and tmp_path in path.parents
    assert MachineCard.load().flops_per_s == {"float32": 1e11}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"device": "cpu"}', '{"noise": NaN}'])
def test_a_broken_card_is_no_card(content, tmp_path):
    path = tmp_path / "card.json"
    path.write_text(content)
    assert MachineCard.load(path) is None


def test_a_card_is_stale_when_device_threads_or_torch_changed():
    now = {"device": "cpu", "num_threads": 2, "torch_version": "2.13.0"}
    assert card().stale(**now) is None
    for change in ({"device": "cuda"}, {"num_threads": 4}, {"torch_version": "2.14.0"}):
        reason = card().stale(**now | change)
        assert str(*change.values()) in reason and "was" in reason


def test_a_card_describes_itself_with_units():
    text = card().describe()
    assert "idle" not in text and "idle" in replace(card(), noise=0.4).describe()
    assert "idle" in replace(card(), cpu_share=0.5).describe()
    assert "20.0 GB/s" in text and "float32 100 GFLOP/s" in text and "1.00 µs" in text and "5%" in text


def test_the_room_needs_no_torch():
    modules = ["distribution", "metrics", "trace", "card", "results", "report", "bench.compare"]
    imports = "; ".join(f"import minillm.measure.{name}" for name in modules)
    code = f"import sys; {imports}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
