"""``minillm bench``: one request, minillm beside transformers, in fresh processes and alternating order. No torch here.

A round takes one sample of every engine, each in a process of its own; every other round runs in reverse order, so
that a machine that slows down or warms up favours nobody. The report shows medians with the middle half around them,
and ratios of paired samples. Every raw sample is kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.extras import require
from minillm.measure.distribution import Spread, ratio_of_medians
from minillm.measure.report import table
from minillm.measure.results import Recording, environment, shown_path

if TYPE_CHECKING:
    from minillm.measure.bench.peers import SampleSpec
    from minillm.measure.card import MachineCard

DEFAULT_ENGINES = ("minillm-auto", "minillm-float32", "minillm-bfloat16", "transformers-float32",
                   "transformers-bfloat16")
# Each engine's ratio is to the other side in the type that its numbers compare to; "auto" promises float32's answers.
BASELINES = {"minillm-auto": "transformers-float32", "minillm-float32": "transformers-float32",
             "minillm-bfloat16": "transformers-bfloat16", "minillm-float16": "transformers-float16"}
ENGINES = (*BASELINES, "transformers-float32", "transformers-bfloat16", "transformers-float16")
SAMPLE_TIMEOUT_S = 900.0
TEXT = """The river rises in the hills above the town and runs north for two hundred miles before it meets the sea. In
spring the snow melts and the water is high and brown; by August a child can walk across at the old ford and hardly
wet her knees. Millers were the first to settle here. They built three wheels, a bakery and a small stone bridge, and
for a century nothing much was added. Then the railway came, and with it a sawmill, a bank, a school for girls, two
newspapers that never agreed, and a clock that was always four minutes late. People set their watches by it anyway, so
that the whole town arrived late together, and visitors who came on time found the shops shut, the streets empty and
the kettle cold. """


def parse_engine(name: str) -> tuple[str, str]:
    """``"minillm-auto"`` as ``("minillm", "auto")``; a name that is none of :data:`ENGINES` raises ``ValueError``."""
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; known: {', '.join(ENGINES)}")
    side, _, dtype = name.partition("-")
    return side, dtype


class SampleFailed(RuntimeError):
    """A sample's process failed; the message has the end of what it said."""


def sample_in_fresh_process(spec: SampleSpec) -> dict[str, Any]:
    """The sample that ``minillm.measure.bench.peers`` takes for ``spec``; :class:`SampleFailed` when it takes none."""
    said = run_in_fresh_process(spec.engine, "minillm.measure.bench.peers", json.dumps(asdict(spec)))
    try:
        return json.loads(said.strip().splitlines()[-1])
    except ValueError as error:
        raise SampleFailed(f"{spec.engine}: its process gave no sample: {error}") from error


def convert_in_fresh_process(model: str) -> None:
    """Have the model ready for transformers, see :func:`minillm.measure.bench.peers.hugging_face_folder`."""
    run_in_fresh_process(f"converting {model} for transformers", "minillm.measure.bench.peers", "--convert", model)


def run_in_fresh_process(what: str, module: str, *arguments: str) -> str:
    """What ``module`` says when run with ``arguments``; its failure is a :class:`SampleFailed` named ``what``."""
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLE_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise SampleFailed(f"{what}: its process was not done within {SAMPLE_TIMEOUT_S:.0f} s") from error
    if done.returncode or not done.stdout.strip() and "--convert" not in arguments:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise SampleFailed(f"{what}: its process ended with exit code {done.returncode}:\n{tail}")
    return done.stdout


def benchmark_ids(model: str, prompt_tokens: int, prefill_tokens: int) -> tuple[list[int], list[int]]:
    """Ids of :data:`TEXT` (repeated as needed) in the model's own tokenizer: a prompt, and what follows it for the long
    prefill, so that neither is the start of the other."""
    from minillm.model.hub import resolve
    from minillm.text.tokenizer import load_tokenizer

    ids = load_tokenizer(resolve(model)).encode(TEXT, add_special_tokens=False)
    total = prompt_tokens + prefill_tokens
    ids = (ids * (total // len(ids) + 1))[:total]
    return ids[:prompt_tokens], ids[prompt_tokens:]


def say_now(line: str) -> None:
    """Print a line that is seen at once."""
    print(line, flush=True)


def run_comparison(
    spec: SampleSpec, engines: Sequence[str], rounds: int, *, name: str, card: MachineCard | None = None,
    take: Callable[[SampleSpec], dict[str, Any]] = sample_in_fresh_process,
    say: Callable[[str], None] = say_now,
) -> Recording:
    """``rounds`` samples of each engine. ``spec.engine`` is replaced by each; ``take`` takes one sample.

    Raises:
        ValueError: no round or engine, or the same engine twice.
        SampleFailed: from ``take``, before any sample was taken. One after that (or Ctrl-C) ends the run, and what was
            taken is kept: ``settings["failure"]`` then says which sample failed and why, and is ``None`` otherwise.
    """
    if rounds < 1 or not engines or len(set(engines)) != len(engines):
        raise ValueError(f"at least one round of one or more different engines, got {rounds} of {list(engines)}")
    samples, failure = [], None
    where = environment(card=asdict(card) if card else None)  # before our own load counts as the machine's
    turns = [(number, engine) for number in range(rounds) for engine in (engines if number % 2 == 0 else engines[::-1])]
    for number, engine in turns:
        try:
            sample = take(replace(spec, engine=engine))
        except (SampleFailed, KeyboardInterrupt) as error:
            if not samples:
                raise
            failure = f"{engine} in round {number + 1}: {str(error) or type(error).__name__}"
            break
        samples.append({"round": number, **sample})
        say(f"round {number + 1} of {rounds}  {engine:<22} {sample['decode_tokens_per_s'] or 0.0:7.1f} tokens/s")
    settings = {
        "model": spec.model, "prompt_tokens": len(spec.prompt_ids), "new_tokens": spec.new_tokens,
        "prefill_tokens": len(spec.prefill_ids), "engines": list(engines), "rounds": rounds,
        "failure": failure,
    }
    where |= {key: samples[0].get(key) for key in ("device", "num_threads")}
    return Recording(name=name, samples=samples, settings=settings, environment=where)


def format_comparison(recording: Recording) -> str:
    """Medians (middle half), then ratios to the other side's median, then who made the same tokens."""
    settings, card = recording.settings, recording.environment.get("card")
    engines, best = settings["engines"], card["read_bytes_per_s"] if card else None
    rows = [["engine", "decode tokens/s", "TTFT ms", f"prefill {settings['prefill_tokens']} ms", "read GB/s",
             "of best", "peak MB"]]
    for engine in engines:
        def column(key: str, scale: float, engine: str = engine) -> str:
            return spread_text(recording.values(key, engine=engine), scale)
        rates = recording.values("read_bytes_per_s", engine=engine)
        share = f"{Spread.of(rates).median / best:.0%}" if best and rates else "n/a"
        peaks = recording.values("peak_rss_bytes", engine=engine)
        rows.append([engine, column("decode_tokens_per_s", 1), column("ttft_s", 1e3), column("prefill_s", 1e3),
                     f"{Spread.of(rates).median / 1e9:.1f}" if rates else "n/a", share,
                     f"{Spread.of(peaks).median / 1e6:,.0f}" if peaks else "n/a"])
    lines = [
        f"{settings['model']}, one request, {settings['prompt_tokens']} prompt and {settings['new_tokens']} new "
        f"tokens, {settings['rounds']} rounds in fresh processes; median (middle half)",
        table(rows), *_ratio_lines(recording, engines), *_same_token_lines(recording, engines),
    ]
    if failure := settings.get("failure"):
        lines.append(f"the run ended early, with {len(recording.samples)} samples: {failure}")
    if best:
        lines.append(f"best memory read of this machine: {best / 1e9:.1f} GB/s; a model that partly stays in the "
                     f"{card['cache_bytes'] / 1e6:,.0f} MB cache can pass it")
    return "\n".join(lines)


def spread_text(values: Sequence[float], scale: float) -> str:
    """``"median (25th-75th percentile)"`` of ``values`` times ``scale``; ``"n/a"`` of none."""
    if not values:
        return "n/a"
    spread = Spread.of(value * scale for value in values)
    digits = ",.1f" if spread.median >= 1 else ".3g"
    return f"{spread.median:{digits}} ({spread.low:{digits}}-{spread.high:{digits}})"


def _ratio_lines(recording: Recording, engines: Sequence[str]) -> list[str]:
    rows = [["times as fast as", "", "decode", "TTFT", "prefill"]]
    for engine in engines:
        baseline = BASELINES.get(engine)
        if baseline in engines:
            rows.append([engine, baseline, *(_speedup(recording, key, engine, baseline)
                                             for key in ("decode_tokens_per_s", "ttft_s", "prefill_s"))])
    return ["", table(rows)] if len(rows) > 1 else []


def _speedup(recording: Recording, key: str, engine: str, baseline: str) -> str:
    """How many times as fast, whether the key is a speed or a time; the rounds are the pairs."""
    rounds = [[recording.values(key, engine=name, round=number) for name in (engine, baseline)]
              for number in range(recording.settings["rounds"])]
    pairs = [(ours[0], theirs[0]) for ours, theirs in rounds if ours and theirs]
    if not pairs:
        return "n/a"
    ours, theirs = zip(*pairs, strict=True)
    ratio = ratio_of_medians(ours, theirs) if key.endswith("_per_s") else ratio_of_medians(theirs, ours)
    return f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _same_token_lines(recording: Recording, engines: Sequence[str]) -> list[str]:
    made = {engine: {sample["tokens_sha256"] for sample in recording.samples if sample["engine"] == engine}
            for engine in engines}
    unsteady = [engine for engine in engines if len(made[engine]) > 1]
    pairs = [(engine, BASELINES[engine]) for engine in engines if BASELINES.get(engine) in engines]
    lines = [f"{ours} and {theirs} made {'the same' if made[ours] == made[theirs] else 'different'} tokens"
             for ours, theirs in pairs if made[ours] and made[theirs]]
    return ["", *lines, *(f"{engine} made different tokens in different rounds" for engine in unsteady)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``minillm bench``."""
    from minillm.measure.bench import serving

    parser.add_argument("what", nargs="?", choices=("compare", "serving", "quality", "record"),
                        default="compare",
                        help="compare one request with transformers (default), serving: many requests beside other "
                             "engines, quality: what fewer bits change, record: the course's measurements")
    parser.add_argument("--model", default="smollm2-135m", help="name, Hugging Face id or folder, or .gguf file")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each engine (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N",
                        help="length of the prompt before the decoding (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N",
                        help="tokens decoded in a sample (default: %(default)s)")
    parser.add_argument("--prefill-tokens", type=int, default=1024, metavar="N",
                        help="length of the prefill alone; 0 leaves it out (default: %(default)s)")
    parser.add_argument("--engines", default=",".join(DEFAULT_ENGINES), metavar="A,B",
                        help=f"with commas between them, of: {', '.join(ENGINES)} (default: all but float16)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, mps")
    serving.add_arguments(parser)
    recording = parser.add_argument_group("record")
    recording.add_argument("--notebooks", default="", metavar="NN,NN", help="of these notebooks alone (default: all)")
    recording.add_argument("--force", action="store_true", help="on a busy machine too")
    recording.add_argument("--budget-s", type=float, default=480, metavar="S",
                           help="begin no notebook after so many seconds (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="file of the samples (default: data/measurements/compare-DATE.json or "
                                                      "serving-DATE.json)")


def main(args: argparse.Namespace) -> int:
    """Run ``minillm bench`` with parsed options; 0 when every sample was taken, 1 when one failed, 2 on bad options."""
    if args.what == "record":
        from minillm.course.commands import record_all

        return record_all(args)
    if args.what in ("serving", "quality"):
        return import_module(f"minillm.measure.bench.{args.what}").main(args)
    engines = [name.strip() for name in args.engines.split(",") if name.strip()]
    name = args.out.stem if args.out else f"compare-{datetime.now(UTC):%Y-%m-%d-%H%M%S}"
    try:
        sides = {parse_engine(engine)[0] for engine in engines}
        if "transformers" in sides:
            require("transformers", "accelerate")
            convert_in_fresh_process(args.model)
        from minillm.measure.bench.machine import current_card
        from minillm.measure.bench.peers import SampleSpec

        prompt_ids, prefill_ids = benchmark_ids(args.model, args.prompt_tokens, args.prefill_tokens)
        spec = SampleSpec("", args.model, prompt_ids, prefill_ids, args.new_tokens, args.device)
        recording = run_comparison(spec, engines, args.rounds, name=name, card=current_card(args.device))
    except (SampleFailed, ValueError) as error:
        print(f"minillm bench: {error}", file=sys.stderr)
        return 1 if isinstance(error, SampleFailed) else 2
    path = recording.save(args.out)
    print("", format_comparison(recording), "", f"every sample: {shown_path(path)}", sep="\n")
    if failure := recording.settings["failure"]:
        print(f"minillm bench: {failure}", file=sys.stderr)
    return 1 if failure else 0
