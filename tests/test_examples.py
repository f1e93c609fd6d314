"""Every example runs as it stands and prints what it promises; the README's snippets are real code."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRINTED = {
    "generate.py": r"The sky is blue because.+\n +\[\d+ tokens, (length|stop); "
                   r"first after \d+ ms, then one each \d+ ms\]",
    "stream.py": r"^Once upon a time.{40,}\n\[cancelled after \d+ tokens\]",
    "chat.py": r"assistant: .*Paris.*\nuser: What is it famous for\?\nassistant: .*(Paris|Eiffel).*[.!]\n$",
    "score.py": r"perplexity +[\d.]+  The capital of France is Paris\.",
    "own_sampler.py": r"The capital of France is\S*.+",
    "own_scheduler.py": r"scheduler: \d+ cases hold\n\d+ ms: Two and two.+\n\d+ ms: The capital of France.+",
    "speculation.py": r"page 12\n2\. Chapter 2: page 24[\s\S]+96 steps without drafts, [1-8]\d with; .* equal: True",
    "many.py": r"(?s)The sky is.+The capital of France is.+\n64 tokens in 1\d steps; (\d+) of \1 blocks free",
    "trace.py": r"prefill +[\d.]+ ms\ndecode +[\d.]+ ms",
}


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_example_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert re.search(PRINTED[name], capsys.readouterr().out)


def test_scoring_prefers_the_true_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "score.py"), run_name="__main__")
    true, false = map(float, re.findall(r"perplexity +([\d.]+)", capsys.readouterr().out))
    assert true < false


def test_the_readme_shows_the_public_face_as_it_is() -> None:
    """Its Python blocks run as they stand."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})  # noqa: S102


def test_the_readme_links_files_that_exist() -> None:
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / document).read_text("utf-8"))
        assert [target for target in targets if not (ROOT / target).exists()] == [], document
