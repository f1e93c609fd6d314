"""Speculative decoding on a page: prompts that copy and that do not, an engine that always asks for as many drafts,
drafts marked in the text, a figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any

from minillm.course.display import MARKERS, PALETTE, Shown, canvas, show
from minillm.course.files import data_file
from minillm.course.html import escape
from minillm.speculate.propose import Controller

if TYPE_CHECKING:
    from minillm.llm import LLM

Calls = Sequence[tuple[Sequence[int], Sequence[int]]]
"""What each call of the target was asked to check, and what it gave: ``(drafts, tokens kept)``."""


def as_chat(llm: LLM, text: str) -> list[int]:
    """The ids of a conversation that begins with ``text``, up to where the answer begins."""
    from minillm.text.chat import encode_chat

    return encode_chat(llm.tokenizer, [{"role": "user", "content": text}])


def sample_prompts() -> dict[str, str]:
    """By kind of answer: from one that is all new to one that is all in its prompt."""
    texts = {own["name"]: own["text"] for own in json.loads(data_file("eval/passages.json").read_text("utf-8"))}
    words = {name: text.split(" ") for name, text in texts.items()}
    return {
        "story": "Write a short story about a lighthouse keeper.",
        "list": "Name ten fruits, one on each line.",
        "summary": "Summarize this text in two sentences:\n\n" + " ".join(words["how-bread-rises"][:80]),
        "code edit": "Rewrite this program with the name total in place of sum:\n\n"
                     + "\n".join(texts["csv-totals"].split("\n")[:14]),
        "quotation": "Quote the three most important sentences of this text, each on a line of its own:\n\n"
                     + " ".join(words["mill-pond"][:70]),
    }


class _Always(Controller):
    """As many drafts as it may ask for, whatever the clock says: for counting, and for sweeps over their number."""

    def num_drafts(self, *_: Any, **__: Any) -> int:
        return self.most


def always(llm: LLM, num_drafts: int) -> LLM:
    """``llm``, whose proposer is from now on asked for ``num_drafts`` in each step: minillm's own controller decides by
    what it has measured, so that its counts differ from run to run.

    Raises:
        ValueError: it has no proposer.
    """
    if llm.engine.speculation is None:
        raise ValueError("this engine does not speculate: give it a proposer, or a speculative_config")
    llm.engine.speculation.controller = _Always(num_drafts)
    return llm


def calls_with(llm: LLM, drafts: Mapping[str, Any], prompt: Sequence[int], answer: Sequence[int],
               num_drafts: int) -> int:
    """Decode calls in which an engine over ``llm``'s model gives ``answer``, with ``drafts`` as its
    ``speculative_config`` and ``num_drafts`` of them in each call.

    Raises:
        ValueError: it gives another answer, as it may in 16 bit.
    """
    from minillm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=len(answer))
    with LLM(llm.model, tokenizer=llm.tokenizer, num_kv_blocks=64, speculative_config=drafts) as other:
        (output,) = always(other, num_drafts).generate([list(prompt)], params)
        if output.outputs[0].token_ids != list(answer):
            raise ValueError("with drafts the answer is another one: compare in float32")
        return other.stats().num_steps - 1  # the first reads the prompt


@dataclass(frozen=True, slots=True)
class Marked:
    """An answer in which every draft shows what became of it, by brackets and tildes and not by colour."""

    text: str
    body: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.text, "text/html": f'<pre style="white-space: pre-wrap">{self.body}</pre>'}


def marked(answers: Mapping[str, Calls], decode: Callable[[Sequence[int]], str]) -> Marked:
    """``[accepted drafts]``, ``~rejected ones~`` and the target's own tokens, by name of the answer. ``decode`` makes
    text of ids; a line break in it is shown as an arrow.

        [ the]~ cat~ dog       the draft " the" was right, " cat" was not: the target says " dog"
    """
    texts, bodies = [], []
    for name, calls in answers.items():
        plain, rich = [], []
        for drafts, kept in calls:
            right = next((i for i, pair in enumerate(zip(drafts, kept)) if pair[0] != pair[1]),
                         min(len(drafts), len(kept)))
            for ids, ends, tag in ((drafts[:right], "[]", "u"), (drafts[right:], "~~", "del"), (kept[right:], "", "")):
                if ids:
                    own = decode(list(ids)).replace("\n", "↵")
                    plain.append(f"{ends[:1]}{own}{ends[1:]}")
                    rich.append(f"{ends[:1]}<{tag}>{escape(own)}</{tag}>{ends[1:]}" if tag else escape(own))
        texts.append(fill(f"{name}: {''.join(plain)}", 96, break_on_hyphens=False))
        bodies.append(f"<b>{escape(name)}</b>: {''.join(rich)}")
    return Marked("\n".join(texts), "\n\n".join(bodies))


Lines = Mapping[str, Sequence[float]]
"""Lines by name; the same name has the same colour and marker wherever it stands."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: by ``"recorded"`` and perhaps ``"yours"`` the lines over ``x``, and what a card expects of some."""

    title: str
    x_label: str
    x: Sequence[float]
    runs: Mapping[str, Lines]
    laws: Lines = field(default_factory=dict)


def panels(parts: Sequence[Panel], *, finding: str, recorded_label: str) -> Shown:
    """Panels side by side, each over an x axis of its own and with a line across at 1; recorded runs are hollow and
    dashed, the reader's filled and solid, what the recorded run's card expects dotted."""
    figure, axes = canvas(9.0, 3.5, ncols=len(parts), squeeze=False)
    rows: list[tuple[str, str, float, float]] = []
    for ax, part in zip(axes[0], parts, strict=True):
        names = list(part.runs["recorded"])
        for who, lines in (*part.runs.items(), ("by the card", part.laws)):
            for name, values in lines.items():
                i = names.index(name)
                style = {"recorded": MARKERS[i] + "--", "yours": MARKERS[i] + "-", "by the card": ":"}[who]
                ax.plot(part.x, values, style, color=PALETTE[i], label=name if who == "recorded" else None,
                        markerfacecolor="white" if who == "recorded" else PALETTE[i])
                rows += [(part.title, f"{who}: {name}", x, y) for x, y in zip(part.x, values, strict=True)]
        ax.axhline(1, color="#555555", linewidth=1)
        ax.set_title(part.title, fontsize=9.5)
        ax.set(xlabel=part.x_label, ylim=(0, None), xticks=_ticks(part.x))
        ax.legend(fontsize=8, loc="best")
    figure.suptitle("\n".join(wrap(finding, 118)), x=0.01, ha="left", fontsize=9.5)
    keys = [("o--", "white", f"recorded: {recorded_label}"), (":", "white", "by the recorded run's card")]
    keys += [("o-", "#555555", "yours")] * any("yours" in part.runs for part in parts)
    handles = [axes[0, 0].plot([], [], style, color="#555555", markerfacecolor=face, label=label)[0]
               for style, face, label in keys]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, fontsize=8.5, frameon=False)
    return show(figure, alt=finding, table=dict(zip(("panel", "line", "x", "y"), map(list, zip(*rows)))))


def _ticks(values: Sequence[float]) -> list[float]:
    """The values at which labels do not touch."""
    kept = list(values[:1])
    for value in values[1:]:
        if value - kept[-1] >= (max(values) - min(values)) / 10:
            kept.append(value)
    return kept
