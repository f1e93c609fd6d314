"""The setup cell: the right package, versions that fit, seeds, threads, and where it runs."""

import dataclasses
import json
import platform
import random
import sys
import types

import numpy
import pytest
import torch

from minillm.course import session as session_module
from minillm.course import start
from minillm.course.files import CourseError, Store, data_file
from minillm.course.recording import FOLDER_VARIABLE, RECORD_VARIABLE
from minillm.course.session import available_cores, version_problem, where


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MINILLM_LIVE", "1")
    threads = torch.get_num_threads()
    yield tmp_path / "home"
    torch.set_num_threads(threads)


def test_seeds_make_runs_repeat_and_threads_are_set(capsys):
    draws = []
    for _ in range(2):
        start(threads=1)
        draws.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1]
    assert torch.get_num_threads() == 1
    assert "minillm" in capsys.readouterr().out


def test_another_projects_minillm_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "minillm", types.SimpleNamespace(__file__="/elsewhere/minillm/__init__.py"))
    with pytest.raises(CourseError, match="another project's package.*pip uninstall minillm"):
        session_module.check_package()


def test_j06_a_library_replaced_after_loading_asks_for_a_restart():
    """J06: before any heavy work, and not as a crash deep inside numpy."""
    assert "restart the kernel" in version_problem("numpy", "2.1.0", "2.3.0")
    assert version_problem("torch", "2.13.0+cpu", "2.13.0") == ""
    assert version_problem("numpy", None, "2.3.0") == ""


def test_j06_bounds_are_lower_bounds_and_too_old_is_named(monkeypatch):
    """J06: nothing that is preloaded is ever replaced for being too new."""
    from packaging.requirements import Requirement
    monkeypatch.setattr(session_module, "requirements", lambda: [Requirement("numpy>=2.1")])
    assert "numpy 1.26.4 is installed, >=2.1 is needed" in version_problem("numpy", None, "1.26.4")
    assert version_problem("numpy", None, "9.0") == ""


def test_j06_own_requirements_have_no_upper_pins():
    """J06: an install in an environment with newer libraries swaps none of them."""
    import tomllib
    from pathlib import Path

    from packaging.requirements import Requirement
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["notebooks"]
    operators = {spec.operator for line in lines for spec in Requirement(line).specifier}
    assert operators == {">="}


def test_j06_the_setup_cell_installs_without_dependencies():
    """J06: the package alone; only small packages that Colab lacks are named beside it."""
    from minillm.course.lint import setup_cell
    lines = [line.strip() for line in setup_cell().splitlines() if "%pip" in line]
    assert "--no-deps" in lines[0]
    assert not any(name in line for line in lines for name in ("torch", "numpy", "transformers"))
    assert len(setup_cell().splitlines()) <= 10


def test_where_is_colab_without_the_parent_package(monkeypatch):
    monkeypatch.delenv("BINDER_SERVICE_HOST", raising=False)
    for name in [name for name in sys.modules if name == "google" or name.startswith("google.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(session_module, "find_spec", lambda name: (_ for _ in ()).throw(ModuleNotFoundError("google")))
    assert where() == "local"
    monkeypatch.setenv("BINDER_SERVICE_HOST", "x")
    assert where() == "binder"
    monkeypatch.setattr(session_module, "find_spec", lambda name: object())
    assert where() == "colab"


def test_cores_follow_what_was_asked(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert available_cores() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "nonsense")
    assert available_cores() >= 1


def test_guesses_and_rungs_are_kept_between_notebooks(home):
    first = start(threads=1)
    first.ledger.predict("ceiling", 119, "tokens/s")
    first.ladder.add("cache", notebook="06", predicted=40)
    second = start(threads=1)
    assert second.ledger["ceiling"].measured is None
    assert second.ledger.measured("ceiling", 60).ratio == pytest.approx(119 / 60)
    second.ladder.add("cache", notebook="06", predicted=40, measured=35)
    assert [rung.measured for rung in second.ladder.rungs()] == [35]
    assert "119 tokens/s" in second.ledger._repr_mimebundle_()["text/html"]
    assert len(second.ledger.figure().rows) == len(second.ladder.figure().rows) == 1
    assert sorted(path.name for path in (home / "course").iterdir()) == ["guesses.json", "ladder.json"]


def test_a_kept_run_writes_nothing_and_measures_nothing(home, monkeypatch, capsys):
    monkeypatch.setenv("MINILLM_LIVE", "0")
    session = start(threads=1)
    session.ledger.predict("x", 1, "s")
    session.ladder.add("x", notebook="00", predicted=1)
    assert session.measure("x", lambda: pytest.fail("measured")) is None
    assert "run this cell to add your machine" in capsys.readouterr().out
    assert not home.exists()


def test_measuring_returns_the_values_and_records_only_when_asked(monkeypatch, tmp_path):
    """Several names a notebook, each with the card that the recording measured once."""
    session = start(threads=1)
    assert session.measure("x", lambda: {"a": 1}) == {"a": 1} and list(tmp_path.glob("*.json")) == []
    monkeypatch.setenv(RECORD_VARIABLE, "00_x")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    a_card().save(tmp_path / "course_card.json")
    monkeypatch.setattr("minillm.course.session.measure_card_once", lambda *_: pytest.fail("measured again"))
    assert session.card() == a_card(measured_at=session.card().measured_at)
    for name in ("x", "y"):
        session.measure(name, lambda: {"a": 1})
        kept = json.loads((tmp_path / f"course_{name}.json").read_text())
        assert kept["samples"] == [{"a": 1}] and kept["environment"]["device_name"] == "test"
        assert kept["settings"]["notebook"] == "00_x" and kept["settings"]["card"]["read_bytes_per_s"] == 1e9
        assert kept["environment"]["versions"] and "waited_share" in kept["environment"]


def test_measuring_cells_move_to_cuda_alone(monkeypatch):
    session = start(threads=1)
    devices = [dataclasses.replace(session, device=device).measure_device for device in ("cpu", "cuda:0", "mps")]
    assert devices == ["cpu", "cuda", "cpu"]


def test_on_a_cpu_the_model_that_is_measured_is_the_default_one():
    from minillm.course.batteries.cache import tiny_config
    from minillm.course.measuring import random_decoder

    model = random_decoder(tiny_config(), dtype="float32")
    session = dataclasses.replace(start(threads=1), device="cpu")
    assert session.measure_model(model) is model and session.measure_shape == "smollm2-135m"


def test_on_cuda_it_has_the_shape_for_the_card_random_weights_and_the_same_dtype(monkeypatch, capsys):
    """Where outputs are kept, a GPU changes nothing."""
    from minillm.course import measuring
    from minillm.course.batteries.cache import tiny_config

    model, asked = measuring.random_decoder(tiny_config(), dtype="float32"), []
    monkeypatch.setattr("minillm.measure.bench.machine.current_card", lambda **_: a_card(
        read_bytes_per_s=320e9, operator_overhead_s=1e-6, memory_bytes=15e9))
    monkeypatch.setattr(measuring, "random_decoder", lambda config, **options: asked.append((config, options)) or model)
    session = dataclasses.replace(start(threads=1), device="cuda:0", live=True)
    assert session.measure_shape == "llama-3.2-1b" and session.measure_model(model) is model
    [(config, options)] = asked
    assert config.hidden_size == 2048 and options == {"device": "cuda", "dtype": "float32"}
    assert "shape of llama-3.2-1b" in capsys.readouterr().out
    assert dataclasses.replace(session, live=False).measure_shape == "smollm2-135m"


@pytest.mark.parametrize(("read_bytes_per_s", "overhead_s", "memory_bytes", "expected"), [
    (30e9, 1e-6, 140e9, "smollm2-135m"), (320e9, 1e-6, 140e9, "llama-3.2-1b"), (4.8e12, 4e-6, 140e9, "llama-3-8b"),
    (320e9, 4e-6, 15e9, "llama-3.2-1b"), (4.8e12, 4e-6, 1e8, "smollm2-135m")])
def test_a_gpu_measures_the_smallest_model_whose_bytes_outweigh_its_calls(
        read_bytes_per_s, overhead_s, memory_bytes, expected):
    from minillm.course.measuring import shape_for

    card = a_card(read_bytes_per_s=read_bytes_per_s, operator_overhead_s=overhead_s, memory_bytes=memory_bytes)
    assert shape_for(card) == expected


def a_card(**changes):
    return session_module.MachineCard(**{
        "device": "cpu", "device_name": "test", "num_threads": 1, "read_bytes_per_s": 1e9, "noise": 0.1,
        "flops_per_s": {"float32": 1e9}, "operator_overhead_s": 1e-6, "buffer_bytes": 1,
        "versions": {"torch": torch.__version__}} | changes)


def test_a_busy_card_serves_its_session_alone_and_a_quiet_one_is_kept(monkeypatch, capsys):
    cards = [a_card(cpu_share=0.4), a_card(noise=0.9), a_card(), a_card(read_bytes_per_s=2e9)]
    measured = []
    monkeypatch.setattr("minillm.course.session.measure_card_once",
                        lambda folder, threads: measured.append(threads) or cards[len(measured) - 1])
    session = start(threads=1)
    assert session.card() is session.card() is cards[0]
    out = capsys.readouterr().out
    assert "not kept" in out and "`minillm card`" in cards[0].describe() and "card(again=True)" in cards[0].describe()
    assert session.card(again=True) is session.card() is cards[1]
    assert start(threads=1).card() is cards[2]
    assert start(threads=1).card() == cards[2] and len(measured) == 3
    assert start(threads=1).card(again=True) is cards[3] and start(threads=1).card() == cards[3]


def test_a_measured_guess_stands_for_the_session():
    ledger = start(threads=1).ledger
    ledger.predict("x", 1, "s")
    ledger.predict("x", 2, "s")
    ledger.measured("x", 4)
    assert ledger.predict("x", 4, "s") == ledger["x"] and ledger["x"].predicted == 2
    assert start(threads=1).ledger.predict("x", 3, "s").measured is None


def test_slow_cold_steps_are_told_from_the_record():
    from minillm.course.timing import slow_steps
    warm = {"itl_s": [0.02, 0.02, 0.03]}
    assert "no cold decode step" in slow_steps("recorded", {"itl_s": [0.02, 0.05]}, warm)
    told = slow_steps("recorded", {"itl_s": [0.02, 1.25, 0.1]}, warm)
    assert "2 of 3" in told and "the slowest 1,250 ms" in told and told.startswith("recorded:")


def test_a_broken_file_is_set_aside(tmp_path):
    path = tmp_path / "guesses.json"
    path.write_text("{not json")
    store = Store(path)
    assert store.values == {} and (tmp_path / "guesses.json.broken").exists()
    store.put("a", 1)
    assert Store(path).values == {"a": 1}


def test_missing_data_says_what_to_do():
    with pytest.raises(CourseError, match="Install the package again"):
        data_file("quizzes/none.json")


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_a_guess_is_above_zero(value):
    with pytest.raises(CourseError, match="above 0"):
        start(threads=1).ledger.predict("x", value, "s")


def test_a_reader_measures_as_often_as_asked_and_a_test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.course.timing import median_seconds, repeats

    def calls() -> int:
        made: list[None] = []
        median_seconds(lambda: made.append(None), seconds=0.0, rounds=4)
        return len(made)

    monkeypatch.delenv("MINILLM_BRIEF", raising=False)
    assert (repeats(3), calls()) == (3, 1 + 4)  # once to warm up
    monkeypatch.setenv("MINILLM_BRIEF", "1")
    assert (repeats(3), calls()) == (1, 1 + 1)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps what was let go of")
def test_memory_that_was_let_go_of_goes_back_to_the_system() -> None:
    import psutil

    from minillm.course.measuring import give_memory_back

    def resident() -> int:
        return psutil.Process().memory_info().rss

    pieces = [bytes(60_000) + bytes([i % 256]) for i in range(2000)]  # 120 MB below the size that is mapped apart
    last = bytes(60_000) + b"x"  # behind them all, so that the heap cannot shrink by itself
    full = resident()
    del pieces
    give_memory_back()
    assert full - resident() > 80e6 and last
