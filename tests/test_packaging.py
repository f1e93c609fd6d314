"""A newcomer's first minutes: what is declared, what is pinned, and what make, conda, Binder and CI do with it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
TARGETS = ("help", "demo", "test", "lab", "setup")


def lowered(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extra: str | None = None) -> dict[str, str]:
    """``{name: lower bound}`` of the runtime requirements, or of an extra; the project's own extras left out."""
    listed = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {lowered(name): bound for name, _, bound in (line.partition(">=") for line in listed) if "[" not in name}


def every_requirement() -> dict[str, str]:
    return {k: v for extra in (None, *PROJECT["optional-dependencies"]) for k, v in declared(extra).items()}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {lowered(name): version for name, _, version in (line.partition("==") for line in lines if line[0] != "#")}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def test_the_distribution_and_the_import_have_the_agreed_names() -> None:
    assert PROJECT["name"] == "minillm-course"
    assert PROJECT["scripts"] == {"minillm": "minillm.cli:main"}
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert set(PROJECT["optional-dependencies"]) == {"notebooks", "serve", "scale", "bench", "llamacpp", "dev"}


def test_requirements_are_lower_bounds_alone() -> None:
    """J06: an install never has a reason to replace what is preloaded."""
    listed = [line for lines in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()] for line in lines]
    assert [line for line in listed if re.search(r"[<=!~]", line.replace(">=", ""))] == []
    bounds = every_requirement()
    preloaded = {"torch": "2.11", "numpy": "2.1", "transformers": "5.15", "ipywidgets": "7.7.1"}  # Colab, August 2026
    assert all(numbers(bounds[name]) <= numbers(version) for name, version in preloaded.items())


IMPORTED_AS = {"pillow": "pil", "llama-cpp-python": "llama-cpp"}
GIVEN = {"minillm", "google", "ipython"}  # this package, Colab's own, and what comes with ipykernel


def imported_names() -> set[str]:
    """Top names that the package's modules import, at any place in them."""
    names = set()
    for path in (ROOT / "minillm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add((node.module or "").split(".")[0])
    return names - sys.stdlib_module_names


def test_what_is_imported_is_declared_and_what_is_declared_for_running_is_imported() -> None:
    imported = {lowered(name) for name in imported_names()}
    runtime, everything = ({IMPORTED_AS.get(name, name) for name in names}
                           for names in (declared(), every_requirement()))
    assert runtime - imported == set()
    assert imported - everything - GIVEN == set()


def test_constraints_pin_everything_that_is_declared() -> None:
    pinned = pins()
    missing = {name: bound for name, bound in every_requirement().items()
               if name not in pinned or (bound and numbers(pinned[name]) < numbers(bound))}
    assert missing == {}


def test_constraints_work_on_any_index() -> None:
    """No local build tag, no address, no editable line, nothing that only a CUDA build brings."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert [line for line in lines if line[0] != "#" and not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert [name for name in pins() if re.match(r"nvidia|cuda|triton|minillm", name)] == []


def test_what_runs_here_is_what_is_pinned() -> None:
    from importlib import metadata

    pinned = pins()
    for name in ("torch", "numpy", "transformers", "tokenizers", "gguf", "nbval"):
        assert metadata.version(name).partition("+")[0] == pinned[name], f"{name}: run make setup"


def test_a_wheel_holds_every_module_and_the_course_data(tmp_path: Path) -> None:
    """What Colab installs is not a checkout: data/ must come along."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "minillm", source / "minillm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "data", source / "data")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet",
             "-w", str(tmp_path), "."]
    run = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("minillm_course-*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = {path.relative_to(source).as_posix() for path in (source / "minillm").rglob("*") if path.is_file()}
    wanted |= {f"minillm/{path.relative_to(source).as_posix()}" for path in (source / "data").rglob("*")
               if path.suffix in (".json", ".npz") or path.match("draft/*.safetensors")}
    assert held == wanted


def test_the_makefile_offers_its_commands_and_says_so() -> None:
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"make {target} " in printed for target in TARGETS)


def dry_run(target: str, venv: Path, *settings: str) -> str:
    run = subprocess.run(["make", "-n", target, f"VENV={venv}", *settings], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_second_demo_installs_nothing(tmp_path: Path) -> None:
    assert "pip install" in dry_run("demo", tmp_path)
    (tmp_path / ".installed-demo").touch()
    assert "pip install" not in dry_run("demo", tmp_path)
    assert "minillm generate" in dry_run("demo", tmp_path)


def test_installs_go_through_the_constraints_and_the_index_of_choice(tmp_path: Path) -> None:
    for target in ("demo", "lab", "test", "setup"):
        commands = [line for line in dry_run(target, tmp_path, "TORCH_INDEX=https://i.test/cpu").splitlines()
                    if "pip install" in line and " -e " in line]
        assert len(commands) == 1
        assert "--extra-index-url https://i.test/cpu" in commands[0]
    install = dry_run("setup", tmp_path)
    assert "-c constraints.txt" in install and "extra-index-url" not in install


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_python_too_old_is_refused_in_plain_words(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    run = subprocess.run(["make", "-s", "setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={old}"], cwd=ROOT,
                         capture_output=True, text=True)
    assert run.returncode != 0
    assert "minillm needs Python 3.11, 3.12 or 3.13" in run.stdout
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_python_without_venv_is_told_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "python3"
    bare.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexit 0\n')
    bare.chmod(0o755)
    run = subprocess.run(["make", "-s", "setup", f"VENV={tmp_path / 'venv'}", f"PYTHON={bare}"], cwd=ROOT,
                         capture_output=True, text=True)
    assert run.returncode != 0
    assert "apt-get install python3-venv" in run.stdout


def test_a_prompt_reaches_the_command_as_it_was_written(tmp_path: Path) -> None:
    """Quotes, backticks and dollar signs of PROMPT are text, never shell."""
    (tmp_path / ".installed-demo").touch()
    fake = tmp_path / "bin" / "python"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nfor last; do :; done\nprintf "%s" "$last"\n')
    fake.chmod(0o755)
    prompt = "say \"hi\"; it's `date` & more"
    run = subprocess.run(["make", "-s", "demo", f"VENV={tmp_path}", f"PROMPT={prompt}"],
                         cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == prompt


def test_the_readme_gives_the_test_command_without_make_too() -> None:
    (options,) = re.findall(r"^NBVAL := (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert f"python -m pytest {options} tests notebooks" in (ROOT / "README.md").read_text("utf-8")


def test_ci_runs_the_readme_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert script.rstrip().splitlines()[-1] == "exec make test"
    assert "MINILLM_REQUIRE_BROWSER=1" in script
    assert "\nmake test\n" in (ROOT / "README.md").read_text("utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def environment(path: str) -> dict[str, list[str]]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def test_conda_and_binder_list_the_same_packages_with_the_declared_bounds() -> None:
    ours, binder = environment("environment.yml"), environment("binder/environment.yml")
    assert ours == binder
    specs = {lowered(name): bound for name, _, bound in (spec.partition(">=") for spec in ours["dependencies"])}
    conda_names = {"torch": "pytorch-cpu", "matplotlib": "matplotlib-base"}
    wanted = declared() | declared("notebooks")
    assert {name: specs.get(lowered(conda_names.get(name, name))) for name in wanted} == wanted


def test_conda_specs_parse_strictly_and_name_the_cpu_build() -> None:
    """J08: Python pinned where repo2docker reads it, no GPU packages."""
    rattler = pytest.importorskip("rattler")
    specs = [rattler.MatchSpec(spec, strict=True) for spec in environment("binder/environment.yml")["dependencies"]]
    names = {spec.name.normalized for spec in specs}
    assert "pytorch-cpu" in names and not names & {"pytorch", "pytorch-gpu", "torch"}
    assert re.search(r"^  - python=3\.1[123]$", (ROOT / "binder/environment.yml").read_text("utf-8"), re.M)


def test_binder_renders_without_an_engine(tmp_path: Path) -> None:
    """J08: repo2docker finds the environment, the Python version and postBuild."""
    pytest.importorskip("repo2docker")
    shutil.copytree(ROOT / "binder", tmp_path / "repo" / "binder")
    run = subprocess.run([sys.executable, "-m", "repo2docker", "--no-build", "--debug", str(tmp_path / "repo")],
                         capture_output=True, text=True, cwd=tmp_path)
    rendered = run.stdout + run.stderr
    assert run.returncode == 0, rendered[-2000:]
    assert 'env update -p ${NB_PYTHON_PREFIX} --file "binder/environment.yml"' in rendered
    assert "RUN ./binder/postBuild" in rendered
    assert "environment.py-3.12-" in rendered.replace("-2d", "-").replace("-2e", "."), "the base has another Python"


def test_binder_installs_without_dependencies_and_fetches_the_model() -> None:
    script = (ROOT / "binder" / "postBuild").read_text("utf-8")
    assert "pip install --no-deps" in script and "minillm pull" in script and script.startswith("#!")
    assert os.access(ROOT / "binder" / "postBuild", os.X_OK)


def test_the_licence_is_apache_2_and_the_model_has_its_notice() -> None:
    licence = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License\n" in licence and "END OF TERMS AND CONDITIONS" in licence
    notice = (ROOT / "NOTICE").read_text("utf-8")
    assert "SmolLM2-135M-Instruct" in notice and "Apache License" in notice


def test_the_address_stands_in_one_place_and_everything_repeats_it() -> None:
    from minillm.course.address import badges, carriers, clone_url, repository

    assert PROJECT["urls"]["Repository"] == clone_url()
    first = "notebooks/00_one_token_end_to_end.ipynb"
    assert badges(first) in (ROOT / "README.md").read_text("utf-8")
    for path in carriers(ROOT):
        text = path.read_text("utf-8")
        badge_targets = re.findall(
            r"(?:mybinder\.org/v2/gh|colab\.research\.google\.com/github)/([\w.-]+/[\w.-]+)", text)
        assert set(badge_targets) <= {repository()}, path.name
        installs = re.findall(r"(?:git\+|git clone )https://github\.com/([\w.-]+/[\w-]+)", text)
        assert set(installs) <= {repository()}, path.name


def test_one_command_moves_the_address_everywhere(tmp_path: Path) -> None:
    from minillm.course import address

    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("mine", "solutions"))
    for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    old = address.repository()
    changed = address.move("someone/elsewhere.2", root=tmp_path)
    assert {"README.md", "pyproject.toml"} <= {path.name for path in changed}
    for path in address.carriers(tmp_path):
        assert not re.search(rf"(github\.com|gh|github)/{re.escape(old)}\b", path.read_text("utf-8")), path.name
    assert (tmp_path / "minillm/course/address.txt").read_text("utf-8") == "someone/elsewhere.2\n"
    assert address.repository() == old
    with pytest.raises(ValueError, match="owner/name"):
        address.move("https://github.com/a/b", root=tmp_path)


def test_the_project_names_no_machine_of_its_makers() -> None:
    """Nothing that is committed holds a local path of a build machine or the host name of a package index."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    foreign = re.compile("py" r"pi\.org|python" r"hosted|/(?:work|root|home)/[a-z]|/t" r"mp/[a-z]", re.I)
    found = []
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yml", ".txt", ".cfg", ".ipynb", ".json", ""} and path.is_file():
            text = path.read_text("utf-8", errors="replace")
            found += [f"{name}: {match.group()}" for match in foreign.finditer(text)]
    assert found == []
