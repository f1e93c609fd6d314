"""``minillm bench serving``: many requests at once beside other engines, and what each costs. No torch here.

Each part takes its sides in turn, every sample in a process of its own, every other round in reverse order (see
:mod:`~minillm.measure.bench.compare`), and reports medians with the middle half around them, achieved GB/s with their
share of what this machine reads at best, and ratios of paired samples beside the floors that they are held to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from minillm.measure.bench.compare import (
    SampleFailed,
    convert_in_fresh_process,
    run_in_fresh_process,
    say_now,
    spread_text,
)
from minillm.measure.distribution import Spread, ratio_of_medians
from minillm.measure.report import table
from minillm.measure.results import Recording, environment, shown_path

if TYPE_CHECKING:
    from minillm.measure.bench.serving_samples import ServingSpec

BATCH_SIZES = (8, 16, 32)
# (key of a sample, its heading, how many of its unit make one of the sample's)
COLUMNS = (("output_tokens_per_s", "output tokens/s", 1), ("batch_size", "batch size", 1), ("step_s", "step ms", 1e3),
           ("share", "% of step", 100), ("ttft_s", "TTFT ms", 1e3), ("num_cached_tokens", "cached", 1),
           ("worst_gap_s", "worst gap ms", 1e3), ("median_gap_s", "median gap ms", 1e3),
           ("resident_bytes", "resident MB", 1e-6), ("num_left", "left over", 1),
           ("read_bytes_per_s", "read GB/s", 1e-9))


@dataclass(frozen=True, slots=True)
class Goal:
    """``case`` over ``other`` in ``key``, at least or at most so much (``None``: reported alone)."""

    key: str
    case: str
    other: str
    at_least: float | None = None
    at_most: float | None = None

    def met_by(self, ratio: float) -> bool | None:
        """Whether ``ratio`` is on the right side; ``None`` without a bound."""
        if self.at_least is None and self.at_most is None:
            return None
        return ratio >= self.at_least if self.at_least is not None else ratio <= self.at_most

    @property
    def bound(self) -> str:
        """The bound in words."""
        if self.at_least is None and self.at_most is None:
            return "reported"
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark: what it is about, its sides, and what is asked of it."""

    title: str
    sides: tuple[str, ...]
    goals: tuple[Goal, ...] = ()


_SPEED, _STEP = "output_tokens_per_s", "step_s"
_ENGINES = ("minillm", "llamacpp")
_FORMATS, _PEERS = ("auto", "bfloat16", "int8", "int4"), ("float32", "bfloat16", "int8", "int4")
_FLOORS = {"one request": (1, 0.5, 0.55, 0.75), "prompt": (None, 1, None, 1.4), "32 at once": (None, 0.95, None, 1.5)}
_SPECULATING, _DRAFTS = ("auto", "bfloat16", "int4"), ("ngram", "table", "mlp")
CHUNKS = ("512 of 2048", "256 of 2048", "128 of 2048", "64 of 2048", "2048 of 128")
PARTS = {
    "batch": Part(
        "32 requests at once, prompts of 16-256 and outputs of 16-128 tokens, greedy",
        ("minillm-auto", "minillm-float32", "minillm-bfloat16", "transformers-static-float32",
         "transformers-static-bfloat16", "transformers-continuous-float32", "llamacpp-float16", "llamacpp-bfloat16"),
        (Goal(_SPEED, "minillm-auto", "transformers-static-float32", at_least=2.5),
         Goal(_SPEED, "minillm-float32", "transformers-static-float32"),
         Goal(_SPEED, "minillm-bfloat16", "transformers-static-bfloat16", at_least=2.2),
         Goal(_SPEED, "minillm-auto", "transformers-continuous-float32", at_least=1.3),
         Goal(_SPEED, "minillm-auto", "llamacpp-float16"),
         Goal(_SPEED, "minillm-bfloat16", "llamacpp-bfloat16", at_least=1))),
    "formats": Part(
        "number formats beside llama.cpp's: decoding one request and 32 at once, and reading a prompt of 256 tokens",
        tuple(f"{engine}-{kind}" for kinds in zip(_FORMATS, _PEERS) for engine, kind in zip(_ENGINES, kinds)),
        tuple(Goal(_SPEED, f"{case}, minillm-{ours}", f"{case}, llamacpp-{theirs}", at_least=floor)
              for case, floors in _FLOORS.items() for ours, theirs, floor in zip(_FORMATS, _PEERS, floors))),
    "paged": Part(
        "one request, 128 tokens after a prompt of 128: over blocks, and over one buffer", ("paged", "contiguous"),
        (Goal(_SPEED, "paged", "contiguous", at_least=0.9),)),
    "overhead": Part(
        "a greedy decode step of 32 requests by its parts, and the sampler alone on 32 rows", ("step", "sampler"),
        (Goal(_STEP, "all but the model", "whole step", at_most=0.1),
         Goal(_STEP, "sampler, top_p 0.9, vocabulary 131072", "sampler, top_p 0.9, vocabulary 1024"))),
    "prefix": Part(
        "a prompt of 1,020 tokens that shares 1,000 with an earlier one (warm), or none (cold)", ("warm", "cold"),
        (Goal("ttft_s", "warm", "cold", at_most=0.1),)),
    "chunked": Part(
        "a prompt of 2,000 tokens arrives among 8 decoding streams: most tokens of a prompt in a step, of a whole step",
        ("unchunked", *CHUNKS),
        tuple(goal for side in CHUNKS for goal in (
            Goal("worst_gap_s", "unchunked", side, at_least=5), Goal(_SPEED, side, "unchunked", at_least=0.9)))),
    "speculation": Part(
        "drafts beside none (n-grams of the context; and a table where they find nothing; a trained network): answers "
        "that copy their prompt, answers that do not, 32 at once",
        tuple(f"{kind} {how}" for kind in _SPECULATING for how in ("plain", *_DRAFTS)),
        tuple(Goal(_SPEED, f"{case}, {kind} {how}", f"{case}, {kind} plain",
                   at_least={"copies": None if kind == "int4" else 1.5, "32 at once": 0.98,
                             "stories": 1.3 if how == "mlp" and kind != "int4" else None}.get(case))
              for kind in _SPECULATING for how in _DRAFTS for case in ("copies", "stories", "32 at once"))),
    "growth": Part(
        "a decode step by batch and context, and the scheduler alone by queue", ("step", "scheduler"),
        (Goal(_STEP, "step, batch 64, context 128", "step, batch 1, context 128", at_most=64),
         Goal(_STEP, "step, batch 32, context 2048", "step, batch 32, context 128", at_most=16),
         Goal(_STEP, "scheduler, 8 running, 10000 waiting", "scheduler, 8 running, 10 waiting", at_most=2),
         Goal(_STEP, "scheduler, 256 running, 0 waiting", "scheduler, 4 running, 0 waiting", at_most=64))),
    "endurance": Part(
        "10,000 requests in a row through a tiny model", ("tiny",),
        (Goal(_STEP, "requests, stage 10 of 10", "requests, stage 2 of 10", at_most=1.1),
         Goal("resident_bytes", "requests, stage 10 of 10", "requests, stage 2 of 10", at_most=1.02))),
}

Take = Callable[["ServingSpec"], list[dict[str, Any]]]


def cases_in_fresh_process(spec: ServingSpec) -> list[dict[str, Any]]:
    """What :mod:`~minillm.measure.bench.serving_samples` measures for ``spec``; :class:`SampleFailed` when it can't."""
    name = f"{spec.part} {spec.side}"
    said = run_in_fresh_process(name, "minillm.measure.bench.serving_samples", json.dumps(asdict(spec)))
    try:
        return json.loads(said.strip().splitlines()[-1])
    except ValueError as error:
        raise SampleFailed(f"{name}: its process gave no sample: {error}") from error


class Run:
    """Takes samples and keeps them: ``samples`` in order, ``failures`` with the reason by ``(part, side)``.

    A side that fails is left out from then on; the others go on.
    """

    def __init__(self, spec: ServingSpec, take: Take = cases_in_fresh_process,
                 say: Callable[[str], None] = say_now):
        self.spec, self.take, self.say = spec, take, say
        self.samples: list[dict[str, Any]] = []
        self.failures: dict[tuple[str, str], str] = {}

    def part(self, name: str, rounds: int, batch_sizes: Sequence[int] = (32,)) -> None:
        """``rounds`` samples of each side of a part; in ``batch``, of each at the best of ``batch_sizes`` for it.

        Raises:
            ValueError: an unknown part, or no round.
        """
        if name not in PARTS or rounds < 1:
            raise ValueError(f"at least one round of {', '.join(PARTS)}, got {rounds} of {name!r}")
        specs = [replace(self.spec, part=name, side=side, batch_size=batch_sizes[0]) for side in PARTS[name].sides]
        if name == "batch" and len(batch_sizes) > 1:
            specs = [self._best(spec, batch_sizes) for spec in specs]
        for number in range(rounds):
            for spec in specs if number % 2 == 0 else specs[::-1]:
                self._sample(spec, name, number)

    def _best(self, spec: ServingSpec, batch_sizes: Sequence[int]) -> ServingSpec:
        """``spec`` with the batch size that gives most tokens a second in one try of each."""
        tries = [replace(spec, batch_size=size) for size in batch_sizes]
        speeds = [cases[0]["output_tokens_per_s"] if (cases := self._sample(one, f"{spec.part} trial", 0)) else 0.0
                  for one in tries]
        return tries[speeds.index(max(speeds))]

    def _sample(self, spec: ServingSpec, part: str, number: int) -> list[dict[str, Any]]:
        """The cases taken and kept under ``part``; none from a side that has failed."""
        if (spec.part, spec.side) in self.failures:
            return []
        try:
            cases = self.take(spec)
        except SampleFailed as error:
            self.failures[spec.part, spec.side] = str(error)
            self.say(f"left out from now on: {error}")
            return []
        self.samples += ({"part": part, "round": number, **case} for case in cases)
        speed = cases[0].get("output_tokens_per_s")
        said = f"{speed:8.1f} tokens/s" if speed and len(cases) == 1 else "taken"
        size = f", batch size {spec.batch_size}" if spec.part == "batch" else ""
        self.say(f"{part}, round {number + 1}: {spec.side}{size}: {said.strip()}")
        return cases


def format_serving(recording: Recording) -> str:
    """Every part that was run: a table of its cases, then its goals, met or not."""
    return "\n\n".join("\n".join(_part_lines(recording, name)) for name in PARTS
                       if name in recording.settings["parts"])


def _part_lines(recording: Recording, name: str) -> Iterator[str]:
    card, samples = recording.environment.get("card"), [s for s in recording.samples if s["part"] == name]
    cases = list(dict.fromkeys(sample["case"] for sample in samples))
    columns = [column for column in COLUMNS if any(sample.get(column[0]) is not None for sample in samples)]
    best = card["read_bytes_per_s"] if card else None
    shown = ["of best"] if best and any(column[0] == "read_bytes_per_s" for column in columns) else []
    rows = [["", *(heading for _, heading, _ in columns), *shown]]
    for case in cases:
        values = {key: recording.values(key, part=name, case=case) for key, _, _ in columns}
        cells = [spread_text(values[key], scale) for key, _, scale in columns]
        rate = values.get("read_bytes_per_s")
        rows.append([case, *cells, *([f"{Spread.of(rate).median / best:.0%}" if rate else "n/a"] if shown else [])])
    yield f"{name}: {PARTS[name].title}"
    if cases:
        yield table(rows)
    for goal in PARTS[name].goals:
        yield from _goal_lines(recording, name, goal)
    yield from _answer_lines(samples)
    yield from (f"left out: {why}" for where, why in recording.settings["failures"].items()
                if where.partition(" ")[0] == name)


def _goal_lines(recording: Recording, part: str, goal: Goal) -> Iterator[str]:
    """The ratio of medians; the rounds that both have are its pairs."""
    pairs = [(ours[0], theirs[0]) for number in range(recording.settings["rounds"])
             if (ours := recording.values(goal.key, part=part, case=goal.case, round=number))
             and (theirs := recording.values(goal.key, part=part, case=goal.other, round=number))]
    if pairs:
        ratio = ratio_of_medians(*zip(*pairs, strict=True))
        verdict = {True: "met", False: "NOT MET", None: ""}[goal.met_by(ratio.median)]
        yield (f"  {goal.key} of {goal.case} over {goal.other}: {ratio.median:.3g} ({ratio.low:.3g}-{ratio.high:.3g})"
               f", {goal.bound} {verdict}".rstrip())


def _answer_lines(samples: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How many answers are those of the first side, token for token."""
    with_answers = {sample["case"]: sample["answers"] for sample in samples if "answers" in sample}
    first = next(iter(with_answers), None)
    for case, answers in with_answers.items():
        if case != first:
            same = sum(ours == theirs for ours, theirs in zip(answers, with_answers[first], strict=True))
            yield f"  {case}: {same} of {len(answers)} answers are those of {first}, token for token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``minillm bench serving`` that no other benchmark has."""
    serving = parser.add_argument_group("serving")
    serving.add_argument("--only", default=",".join(PARTS), metavar="A,B",
                         help=f"of these parts alone: {', '.join(PARTS)} (default: all)")
    serving.add_argument("--batch-sizes", default=",".join(map(str, BATCH_SIZES)), metavar="N,N",
                         help="tried once for each side of the batch part; its best is measured (default: %(default)s)")


def main(args: argparse.Namespace) -> int:
    """Run ``minillm bench serving``; 0 when every side was measured, 1 when one was left out or Ctrl-C ended the run.

    Raises:
        ValueError: an unknown part or batch size, or no round.
    """
    names = [name.strip() for name in args.only.split(",") if name.strip()]
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    if not names or {*names} - {*PARTS} or args.rounds < 1 or min(sizes) < 1:
        raise ValueError(f"--only takes parts of {', '.join(PARTS)}; --rounds and --batch-sizes numbers from 1")
    from minillm.measure.bench.machine import current_card
    from minillm.measure.bench.serving_samples import ServingSpec

    card = current_card(args.device)
    where = environment(card=asdict(card) if card else None)  # before our own load counts as the machine's
    run, interrupted = Run(ServingSpec("", "", args.model, args.device)), False
    try:
        if "batch" in names:
            convert_in_fresh_process(args.model)
        for name in names:
            run.part(name, args.rounds, sizes)
    except KeyboardInterrupt:
        interrupted = True
    if not run.samples:
        print(f"minillm bench: no sample was taken {[*run.failures.values()]}", file=sys.stderr)
        return 1
    settings = {"model": args.model, "parts": names, "rounds": args.rounds, "batch_sizes": sizes,
                "interrupted": interrupted, "failures": {" ".join(key): why for key, why in run.failures.items()}}
    where |= {key: run.samples[0].get(key) for key in ("device", "num_threads")}
    name = args.out.stem if args.out else f"serving-{datetime.now(UTC):%Y-%m-%d-%H%M%S}"
    recording = Recording(name=name, samples=run.samples, settings=settings, environment=where)
    path = recording.save(args.out)
    print("", format_serving(recording), "", f"every sample: {shown_path(path)}", sep="\n")
    return 1 if run.failures or interrupted else 0
