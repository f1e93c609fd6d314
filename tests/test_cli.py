"""The command line: what it prints, when it stops, and how it fails."""

from __future__ import annotations

import builtins
import io
import json
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from minillm import LLM, SamplingParams, cli, extras
from minillm.assemble import load_decoder
from minillm.cli import answer, doctor

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("generate", "Hi")``: exit code, standard output, standard error."""
    def command(*argv: str) -> tuple[int, str, str]:
        try:
            code = cli.main(list(argv))
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()
    return command


class Fake:
    """Stands in for loading: the LLM that answers, and what was asked of it."""

    def __init__(self) -> None:
        self.llm: LLM | None = None
        self.asked: list[object] = []
        self.params: list[SamplingParams] = []

    def load(self, args: object) -> LLM:
        """In place of :func:`minillm.cli.answer.load`."""
        stream = self.llm.stream

        def recorded(prompt: object, params: SamplingParams) -> object:
            self.asked.append(prompt)
            self.params.append(params)
            return stream(prompt, params)
        self.llm.stream = recorded
        return self.llm


@pytest.fixture
def fake(script_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    """``fake(text)``: every answer is ``text``; ``chat=True`` gives the model a chat template."""
    def make(text: str, *, chat: bool = False, **options: object) -> Fake:
        made = Fake()
        made.llm = script_llm([*text.encode(), 257], **options)
        made.llm.tokenizer.chat_template = TEMPLATE if chat else None
        monkeypatch.setattr(answer, "load", made.load)
        return made
    return make


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[object]], None]:
    """``typing([line, error class, ...])``: what the user does at each prompt, in turn; then Ctrl-D."""
    def make(lines: Sequence[object]) -> None:
        left = iter(lines)

        def type_in(prompt: str = "") -> str:
            line = next(left, EOFError)
            if isinstance(line, type):
                raise line
            return line
        monkeypatch.setattr(builtins, "input", type_in)
    return make


def interrupt_at(llm: LLM, *calls: int) -> None:
    """Ctrl-C arrives while the model computes its given calls (counted from 1)."""
    def edit(call: int, step: object, logits: object) -> None:
        if call in calls:
            signal.raise_signal(signal.SIGINT)
    llm.model.edit = edit


# --- the command itself

def test_help_is_quick_lists_every_command_and_loads_no_torch() -> None:
    code = "import sys, minillm.cli as cli\ntry: cli.main(['--help'])\nexcept SystemExit: print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"    {name} " in printed for name in cli.COMMANDS)
    assert printed.endswith("False\n")


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_explains_itself(name: str, run: Run) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0 and out.startswith(f"usage: minillm {name}")


@pytest.mark.parametrize("argv", [
    [], ["nonsense"], ["generate", "--dtype", "int3", "Hi"], ["generate", "--max-tokens", "x"],
    ["generate", "--raw", "--chat", "Hi"], ["course"],
])
def test_wrong_usage_exits_2(argv: list[str], run: Run) -> None:
    code, out, err = run(*argv)
    assert code == 2 and out == "" and "usage: minillm" in err


@pytest.mark.parametrize(("argv", "words"), [
    (["--temperature", "-1"], "temperature must be 0 (greedy) or more"),
    (["--top-p", "0"], "top_p must be above 0"),
    (["--max-tokens", "0"], "max_tokens must be at least 1"),
    (["--stop", ""], "stop must not hold an empty string"),
    (["--max-model-len", "-3"], "max_model_len must be a whole number"),
    (["--model", "no-such-model"], "no-such-model"),
    (["--model", "no/such/folder.gguf"], "no/such/folder.gguf"),
])
def test_a_users_mistake_is_one_line_and_exit_1(argv: list[str], words: str, run: Run) -> None:
    code, out, err = run("generate", *argv, "Hi")
    assert (code, out) == (1, "")
    assert err.startswith("minillm: ") and words in err and err.count("\n") == 1


def test_an_unset_course_notebook_is_one_line(run: Run) -> None:
    code, _, err = run("course", "work", "99")
    assert code == 1 and err.startswith("minillm: ") and "99" in err


def test_a_planned_notebook_is_said_to_be_planned_and_the_leading_zero_may_be_left_out(
        run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.course.commands import find_notebook

    assert run("course", "work", "25")[2].startswith("minillm: 25 is planned; ready: 00")
    monkeypatch.setattr("minillm.course.commands.all_notebooks", list)
    assert run("course", "work", "5")[2].startswith("minillm: 05 is planned; ready: none")
    monkeypatch.undo()
    assert find_notebook("0") == find_notebook("00")


@pytest.mark.parametrize(("missing", "argv", "extra"), [
    ("nbformat", ["course", "lint"], "notebooks"),
    ("nbformat", ["course", "work", "0"], "notebooks"),
    ("ipykernel", ["course", "execute", "0"], "notebooks"),
    ("accelerate", ["bench"], "bench"),
    ("transformers", ["bench"], "bench"),
])
def test_a_missing_optional_package_is_one_line_that_names_the_extra(
    missing: str, argv: list[str], extra: str,
) -> None:
    code = (f"import subprocess, sys; sys.modules[{missing!r}] = subprocess.run = None  # no process may be started\n"
            f"from minillm import cli; sys.exit(cli.main({argv}))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    err = done.stderr
    assert (done.returncode, done.stdout, err.count("\n")) == (1, "", 1)
    assert err.startswith("minillm: this needs the ") and f"({missing} is missing)" in err
    assert f"python -m pip install -c constraints.txt -e '.[{extra}]' (or make " in err


def test_every_optional_package_that_is_known_belongs_to_the_extra_it_names() -> None:
    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    known_as = {"IPython": "ipykernel", "PIL": "pillow", "llama_cpp": "llama-cpp-python"}  # or another name
    for extra, (_, _, packages) in extras.EXTRAS.items():
        names = {requirement.partition(">=")[0] for requirement in declared["optional-dependencies"][extra]}
        assert {known_as.get(package, package) for package in packages} <= names


def test_a_missing_package_of_no_extra_is_a_fault_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> None:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
    monkeypatch.setattr(answer, "load", broken)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["generate", "Hi"])


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> None:
        raise RuntimeError("a bug")
    monkeypatch.setattr(answer, "load", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["generate", "Hi"])


def test_minillm_debug_shows_the_traceback_of_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_DEBUG", "1")
    with pytest.raises(ValueError, match="temperature"):
        cli.main(["generate", "--temperature", "-1", "Hi"])


def test_ctrl_c_while_loading_exits_130_quietly(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> None:
        raise KeyboardInterrupt
    monkeypatch.setattr(answer, "load", interrupted)
    assert run("generate", "Hi") == (130, "", "\n")


# --- generate

def test_generate_streams_the_answer(run: Run, fake: Callable[..., Fake]) -> None:
    made = fake("Grüße, 🌍!")
    assert run("generate", "Hi") == (0, "Grüße, 🌍!\n", "")
    assert made.asked == ["Hi"]


@pytest.mark.parametrize("argv", [[], ["-"]])
def test_generate_reads_standard_input(argv: list[str], run: Run, fake: Callable[..., Fake],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake("ok")
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert run("generate", *argv)[0] == 0
    assert made.asked == ["from a pipe"]


def test_generate_without_a_prompt_at_a_terminal_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    code, _, err = run("generate")
    assert code == 1 and "no prompt" in err


@pytest.mark.parametrize(("argv", "piped"), [
    ([""], None), (["--raw", ""], None), (["  "], None), ([], ""), (["-"], "\n"), (["--raw"], ""),
])
def test_an_empty_prompt_is_refused_before_the_model_is_loaded(argv: list[str], piped: str | None, run: Run,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    monkeypatch.setattr(answer, "load", None)
    assert run("generate", *argv) == (1, "", "minillm: the prompt is empty\n")


def test_raw_text_may_be_blank(run: Run, fake: Callable[..., Fake]) -> None:
    made = fake("ok")
    assert run("generate", "--raw", " ")[0] == 0 and made.asked == [" "]


def test_options_reach_the_engine(run: Run, fake: Callable[..., Fake]) -> None:
    made = fake("a b c")
    run("generate", "--max-tokens", "7", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3", "--seed", "4",
        "--repetition-penalty", "1.1", "--stop", " b", "--stop", "x", "Hi")
    assert made.params == [SamplingParams(max_tokens=7, temperature=0.5, top_p=0.9, top_k=3, seed=4,
                                          repetition_penalty=1.1, stop=[" b", "x"])]


def test_generate_is_greedy_unless_told_otherwise(run: Run, fake: Callable[..., Fake]) -> None:
    made = fake("a")
    run("generate", "Hi")
    assert made.params[0].greedy


@pytest.mark.parametrize(("flag", "template", "expected"), [
    ([], False, "Hi"),
    ([], True, [{"role": "user", "content": "Hi"}]),
    (["--raw"], True, "Hi"),
    (["--chat"], True, [{"role": "user", "content": "Hi"}]),
])
def test_a_model_with_a_template_is_asked_as_a_chat(flag: list[str], template: bool, expected: object, run: Run,
                                                    fake: Callable[..., Fake]) -> None:
    made = fake("ok", chat=template)
    assert run("generate", *flag, "Hi")[:2] == (0, "ok\n")
    assert made.asked == [expected]


def test_chat_without_a_template_is_refused(run: Run, fake: Callable[..., Fake]) -> None:
    fake("ok")
    code, _, err = run("generate", "--chat", "Hi")
    assert code == 1 and "template" in err


def test_ctrl_c_ends_the_answer_between_two_steps_and_keeps_what_was_said(run: Run, fake: Callable[..., Fake]) -> None:
    made, before = fake("abcdefgh"), signal.getsignal(signal.SIGINT)
    interrupt_at(made.llm, 3)
    assert run("generate", "Hi") == (130, "abc\n", "")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait_for_the_step(run: Run, fake: Callable[..., Fake]) -> None:
    made = fake("abcdefgh")

    def edit(call: int, step: object, logits: object) -> None:
        if call == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    made.llm.model.edit = edit
    code, out, _ = run("generate", "Hi")
    assert (code, out) == (130, "ab")


def test_a_trace_is_written_for_the_viewers(run: Run, fake: Callable[..., Fake], tmp_path: Path) -> None:
    fake("abc")
    file = tmp_path / "trace.json"
    code, out, err = run("generate", "--trace", str(file), "Hi")
    assert (code, out) == (0, "abc\n") and err.startswith(f"trace written: {file}")
    names = {event["name"] for event in json.loads(file.read_text())["traceEvents"]}
    assert {"tokenize", "prefill", "decode", "detokenize", "deliver"} <= names


def test_stats_tell_the_four_numbers_and_the_stages(run: Run, tiny_llm: Callable[..., LLM], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.measure.bench import machine as bench
    from minillm.measure.card import MachineCard

    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    measured = []
    card = MachineCard(device="cpu", device_name="test", num_threads=1, read_bytes_per_s=1e10, flops_per_s={},
                       operator_overhead_s=1e-6, noise=0.0, buffer_bytes=1)
    monkeypatch.setattr(bench, "current_card",
                        lambda device, measure=True: measured.append(measure) or (card if measure else None))
    llm = tiny_llm()
    monkeypatch.setattr(answer, "load", lambda args: llm)
    code, out, err = run("generate", "--raw", "--stats", "--max-tokens", "5", "Hi")
    assert code == 0 and "about ten seconds" in err and measured == [False, True]
    for words in ("TTFT", "TPOT", "p50", "p95", "p99", "end to end", "tokens/s", "GB/s", "prefill", "decode"):
        assert words in out


# --- chat

def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_chat_remembers_and_clears(run: Run, fake: Callable[..., Fake], typing: Callable) -> None:
    made = fake("yes", chat=True)
    typing(["one?", "", "two?", "/clear", "three?", "/exit", "never"])
    code, out, _ = run("chat", "--system", "Be brief.")
    system = said("system", "Be brief.")
    assert code == 0 and out.count("yes\n") == 3
    assert made.asked == [
        [system, said("user", "one?")],
        [system, said("user", "one?"), said("assistant", "yes"), said("user", "two?")],
        [system, said("user", "three?")],
    ]


def test_ctrl_c_in_a_chat_stops_the_answer_and_keeps_what_was_said(run: Run, fake: Callable[..., Fake],
                                                                   typing: Callable) -> None:
    made = fake("abcdefgh", chat=True)
    interrupt_at(made.llm, 3)
    typing(["one?", "two?"])
    code, out, _ = run("chat")
    assert code == 0 and "abc\n" in out and "abcdefgh\n" in out
    assert made.asked[1] == [said("user", "one?"), said("assistant", "abc"), said("user", "two?")]


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, EOFError])
def test_ctrl_c_and_ctrl_d_at_the_prompt_leave(leaving: type, run: Run, fake: Callable[..., Fake],
                                               typing: Callable) -> None:
    fake("yes", chat=True)
    typing(["one?", leaving, "never"])
    code, out, err = run("chat")
    assert code == 0 and out.count("yes\n") == 1 and err == ""


def test_a_conversation_that_outgrew_the_context_is_told_so_and_goes_on(run: Run, fake: Callable[..., Fake],
                                                                        typing: Callable) -> None:
    made = fake("yes", chat=True, max_len=40)
    typing(["x" * 60, "short?"])
    code, out, _ = run("chat")
    assert code == 0 and "40" in out and "/clear" in out and "yes\n" in out
    assert made.asked[1] == [said("user", "short?")]


@pytest.mark.parametrize("line", ["/help", "/quit", "/clear all", "/"])
def test_a_command_that_is_none_shows_those_there_are_and_is_not_sent(line: str, run: Run, fake: Callable[..., Fake],
                                                                      typing: Callable) -> None:
    made = fake("yes", chat=True)
    typing([line])
    code, out, _ = run("chat")
    assert code == 0 and made.asked == [] and out.count("/clear starts anew, /exit or Ctrl-D leaves") == 2


def test_a_line_that_only_begins_with_a_slash_is_for_the_model(run: Run, fake: Callable[..., Fake],
                                                               typing: Callable) -> None:
    made = fake("yes", chat=True)
    typing(["/etc/hosts is what?"])
    run("chat")
    assert made.asked == [[said("user", "/etc/hosts is what?")]]


# --- pull, card, doctor

def test_pull_says_where_the_model_is(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.model import config, hub, weights

    prepared = []
    monkeypatch.setattr(hub, "resolve", lambda model: tmp_path / f"{model}.gguf")
    monkeypatch.setattr(config, "load_config", lambda path: f"config of {path.stem}")
    monkeypatch.setattr(weights, "load_weights", lambda path, read_config: prepared.append(read_config))
    assert run("pull", "some") == (0, f"some is ready: {tmp_path / 'some.gguf'}\n", "")
    assert "smollm2-135m.gguf" in run("pull")[1]
    assert prepared == ["config of some", "config of smollm2-135m"]


def test_pull_offline_says_what_forbids_it(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    monkeypatch.setenv("MINILLM_OFFLINE", "1")
    code, _, err = run("pull")
    assert code == 1 and "MINILLM_OFFLINE" in err and err.count("\n") == 1


def test_card_measures_saves_and_prints(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minillm.measure.bench import machine as bench
    from minillm.measure.card import MachineCard

    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    card = MachineCard(device="cpu", device_name="a test", num_threads=1, read_bytes_per_s=3e10,
                       flops_per_s={"float32": 1e11}, operator_overhead_s=1e-6, noise=0.01, buffer_bytes=1)
    monkeypatch.setattr(bench, "measure_card", lambda device: card)
    code, out, _ = run("card")
    assert code == 0 and "30.0 GB/s" in out
    assert MachineCard.load() == card


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without a model; nothing of this test's environment stays."""
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path))
    monkeypatch.setenv("MINILLM_OFFLINE", "0")
    return tmp_path


def test_doctor_finds_nothing_wrong_before_the_first_download(run: Run, empty_cache: Path) -> None:
    code, out, _ = run("doctor")
    assert code == 0 and "nothing is wrong" in out and "minillm pull" in out
    for name in ("python", "package", "versions", "device", "cache", "disk", "model"):
        assert f"ok       {name}" in out
    assert list(empty_cache.iterdir()) == [], "it fetches nothing"


def test_doctor_says_what_to_do_about_each_problem(run: Run, empty_cache: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_OFFLINE", "1")
    monkeypatch.setattr(doctor, "_requirements", lambda: ["numpy>=99.0", "no-such-package>=1"])
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(doctor.metadata, "packages_distributions", lambda: {"minillm": ["minillm"]})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    code, out, _ = run("doctor")
    assert code == 1 and "6 problems to mend" in out
    for words in ("use Python 3.11", "pip uninstall minillm", "older than 99.0; no-such-package is missing",
                  "pip install -c constraints.txt", "set MINILLM_HOME", "free 0.9 GB", "unset MINILLM_OFFLINE"):
        assert words in out


def test_doctor_reports_a_device_that_cannot_be_used(run: Run, empty_cache: Path) -> None:
    code, out, _ = run("doctor", "--device", "cuda:99")
    assert code == 1 and "PROBLEM  device" in out


@pytest.mark.parametrize("command", [("card",), ("generate", "Hi")])
def test_a_device_that_cannot_be_used_is_said_in_one_line(run: Run, command: tuple[str, ...], tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "load", lambda args: load_decoder(tmp_path, device=args.device))
    code, out, err = run(*command, "--device", "foo")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("minillm: device 'foo' cannot be used here")


# --- the real thing

def minillm(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "minillm", *argv], capture_output=True, text=True, **options)


def test_the_default_model_answers_a_question_end_to_end() -> None:
    run = minillm("generate", "--max-tokens", "12", "What is the capital of France?")
    assert run.returncode == 0, run.stderr
    assert "Paris" in run.stdout


def test_a_pipe_that_closes_early_leaves_no_traceback() -> None:
    command = f"{shlex.quote(sys.executable)} -m minillm generate --max-tokens 30 'Tell a story' | head -c 1"
    run = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "Traceback" not in run.stderr and "Exception" not in run.stderr
