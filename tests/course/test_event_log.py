"""The fixed event log of notebook 09 is what its script makes."""

import importlib.util
import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "data" / "workloads"


def test_the_log_is_made_by_its_script():
    spec = importlib.util.spec_from_file_location("make_event_log", FOLDER / "make_event_log.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.simulate() == json.loads((FOLDER / "event_log.json").read_text(encoding="utf-8"))


def test_times_never_go_back_and_chunks_hold_every_token():
    for request in json.loads((FOLDER / "event_log.json").read_text(encoding="utf-8")):
        times = request["token_times_s"]
        assert times == sorted(times)
        assert request["failure"] or times[0] > request["admitted_s"] >= request["arrival_s"]
        assert sum(count for _, count in request["chunks"]) == len(times)
