"""Run ``minillm generate --stats`` for real and draw what it printed as docs/images/demo.svg, README's picture."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path

PROMPT = "What is a transformer in machine learning? Answer in two sentences."
TYPED = f'$ make demo PROMPT="{PROMPT}"'
COLUMNS, SIZE, LINE, PAD = 88, 14, 19, 18
LEAST_SHARE = 30  # percent of the card's read bandwidth: below it the machine was busy, or the card is wrong
CHAR = SIZE * 0.6015  # width of a monospaced character


def draw(lines: list[str]) -> str:
    """The lines as a terminal, in SVG: opaque, so that it reads on a light and on a dark page."""
    width, height = COLUMNS * CHAR + 2 * PAD, len(lines) * LINE + 2 * PAD + 22
    rows = [f'<text x="{PAD}" y="{PAD + 30 + LINE * i}" fill="{colour(line)}" '
            f'xml:space="preserve">{escape(line)}</text>'
            for i, line in enumerate(lines) if line]
    dots = [f'<circle cx="{PAD + 18 * i}" cy="16" r="5.5" fill="{fill}"/>'
            for i, fill in enumerate(("#f47067", "#e3b341", "#57ab5a"))]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}"',
        '     font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace" '
        f'font-size="{SIZE}">',
        '<rect width="100%" height="100%" rx="8" fill="#22272e"/>', *dots, *rows, "</svg>", "",
    ])


def colour(line: str) -> str:
    """What was typed stands out, and so do the bars."""
    return "#8ddb8c" if line.startswith("$") else "#6cb6ff" if "▏" in line or "█" in line else "#d1d7e0"


def check(printed: str) -> None:
    """Refuse a run that says nothing about the engine: ``SystemExit`` with the reason, and no picture is written."""
    share = re.search(r"\((\d+)% of the", printed)
    if "other work ran" in printed:
        reason = "other work ran on this machine"
    elif share is None:
        reason = "it tells no share of the memory bandwidth"
    elif int(share[1]) < LEAST_SHARE:
        reason = f"it read {share[1]} % of the card's bandwidth, and {LEAST_SHARE} % is the least expected"
    else:
        return
    sys.exit(f"{printed}\nno picture of this run: {reason}. Run again on an idle machine.")


def main() -> None:
    """Run, check, wrap, draw, write."""
    command = [sys.executable, "-m", "minillm", "generate", "--stats", "--max-tokens", "128", PROMPT]
    subprocess.run(command, capture_output=True, check=True)  # the machine card, and files into the page cache
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    check(printed)
    lines = [part for line in printed.splitlines()
             for part in (textwrap.wrap(line, COLUMNS) if len(line) > COLUMNS else [line])]
    target = Path(__file__).with_name("demo.svg")
    target.write_text(draw([TYPED, "", *lines]), encoding="utf-8")
    print(f"{printed}\nwritten: {target}")


if __name__ == "__main__":
    main()
