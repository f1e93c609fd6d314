"""The share of its time that a process waited for a core."""

from __future__ import annotations

import time

import pytest

from minillm.measure import waiting
from minillm.measure.waiting import scheduler_seconds, waited_share


def test_the_seconds_of_all_threads_are_added_up(tmp_path, monkeypatch):
    for name, text in {"1": "2000000000 500000000 9", "2": "1000000000 1500000000 3", "3": "torn"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    monkeypatch.setattr(waiting, "TASKS", tmp_path)
    assert scheduler_seconds() == (3.0, 2.0)


def test_a_system_that_does_not_tell_is_not_taken_for_an_idle_one(tmp_path, monkeypatch):
    monkeypatch.setattr(waiting, "TASKS", tmp_path / "none")
    assert scheduler_seconds() is None and waited_share(None, (1.0, 1.0)) is None
    assert waited_share((1.0, 1.0), (1.0, 1.0)) is None, "nothing ran in between"


def test_the_share_is_of_the_time_between_the_readings():
    assert waited_share((10.0, 5.0), (13.0, 6.0)) == 0.25
    assert waited_share((10.0, 5.0), (13.0, 4.0)) == 0.0, "a thread that ended takes its seconds with it"


def test_time_that_this_process_runs_is_counted():
    before = scheduler_seconds()
    if before is None:
        pytest.skip("this system does not tell")
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    assert scheduler_seconds()[0] - before[0] > 0.03
