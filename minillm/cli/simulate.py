"""``minillm simulate``: what many requests would see of a model on a machine. The real scheduler, without the model.

A line of FILE (data/workloads has some) is one request: a JSON object of these fields, the first three always.
  arrival_s          seconds from the beginning, from 0 on
  num_prompt_tokens  at least 1
  num_output_tokens  at least 1; exactly so many are generated
  prefix             ["name", tokens]: of prompts with one name, so many tokens at the beginning are the same
  priority           a whole number; lower ones go first under --policy priority (default: 0)
  group              "name": whose request it is; each group has a row of its own in the table
For example:
  {"arrival_s": 0.5, "num_prompt_tokens": 120, "num_output_tokens": 40, "prefix": ["rules", 64], "group": "chat"}
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from minillm.cache.blocks import BlockPool
from minillm.cli.estimate import add_formats, count, in_words, machine_of
from minillm.config import EngineConfig
from minillm.measure.hardware import Hardware
from minillm.measure.metrics import Slo, Summary
from minillm.measure.report import MAX_WAITED, format_seconds, table
from minillm.measure.roofline import engine_options, kv_bytes_per_token, weight_bytes_held
from minillm.measure.simulate import CostModel, Simulation, compare, simulate
from minillm.measure.waiting import scheduler_seconds, waited_share
from minillm.measure.workload import Arrival, Lognormal, load_arrivals, random_arrivals
from minillm.model.config import ModelConfig, load_config
from minillm.model.hub import DEFAULT_MODEL, resolve
from minillm.model.shapes import find_config
from minillm.schedule.fork import mean_step_seconds
from minillm.schedule.recording import RecordingScheduler
from minillm.schedule.replay import describe, replay, trace_of
from minillm.schedule.scheduler import Scheduler

SIZES = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "block_size")
MEMORY_SHARE = 0.9  # of what the weights leave; activations need the rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The load, the model, the machine, the scheduler and what to print."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (__doc__ or "").partition("\n\n")[2]  # python -OO leaves none
    load = parser.add_argument_group("load")
    load.add_argument("workload", metavar="FILE", nargs="?", help="JSON lines, see below (default: a drawn load)")
    # No defaults here: what is given beside a FILE is wrong usage.
    load.add_argument("--rate", type=float, help="requests a second of a drawn load (default: 4)")
    load.add_argument("--requests", type=count, help="requests of a drawn load (default: 1000)")
    load.add_argument("--seed", type=int, help="of a drawn load (default: 0)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as for estimate (default: %(default)s)")
    parser.add_argument("--hardware", "--on", metavar="MACHINE", help="h100, l4, m4-max ... (default: this machine)")
    add_formats(parser)
    options, default = parser.add_argument_group("scheduler"), EngineConfig()
    for name in SIZES:
        options.add_argument(f"--{name.replace('_', '-')}", type=count, default=getattr(default, name),
                             help="as LLM's option of this name (default: %(default)s)")
    options.add_argument("--num-kv-blocks", type=count, help="blocks of KV cache (default: what max_num_seqs requests "
                         "of full length use, as far as memory goes)")
    options.add_argument("--policy", choices=("fcfs", "priority"), default="fcfs", help="(default: fcfs)")
    options.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt whole")
    parser.add_argument("--ttft-ms", type=float, help="objective: first token within so many milliseconds")
    parser.add_argument("--tpot-ms", type=float, help="objective: milliseconds a token after the first")
    parser.add_argument("--plans", metavar="FILE", help="save every step's plan as a history; - prints a line a step")
    parser.add_argument("--perfetto", metavar="FILE", help="save a trace for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON, in base units")
    parser.add_argument("--check-engine", action="store_true", help="run the load through the real engine on this "
                        "machine too (--model's weights are needed), and print how far the prediction is off")
    parser.add_argument("--save", metavar="NAME", help="keep the check as data/measurements/NAME.json")
    parser.set_defaults(refuse=parser.error)


def run(args: argparse.Namespace) -> int:
    """Print what came of the load."""
    given = [name for name, value in vars(args).items() if value is not None and value is not False]
    for chosen, what, unused in (
            ("workload", "a load from a FILE", ("rate", "requests", "seed")),
            ("check_engine", "--check-engine", ("hardware", "json", "plans", "perfetto", "ttft_ms", "tpot_ms"))):
        if chosen in given and (ignored := [name for name in unused if name in given]):
            args.refuse(f"{what} has no use for --{ignored[0].replace('_', '-')}: leave it out")
    if args.save and not args.check_engine:
        args.refuse("--save keeps what --check-engine finds: give both")
    if args.json and args.plans == "-":
        args.refuse("--json and --plans - would print to one place: give --plans a file")
    files = [Path(name).resolve() for name in (args.workload, args.plans, args.perfetto) if name]
    if len(set(files)) < len(files):
        args.refuse("FILE, --plans and --perfetto must be different files: one would overwrite another")
    config = load_config(resolve(args.model)) if args.check_engine else find_config(args.model)
    most = config.max_position_embeddings
    arrivals = load_arrivals(args.workload, most) if args.workload else random_arrivals(
        args.requests or 1000, rate=4.0 if args.rate is None else args.rate, seed=args.seed or 0,
        prompt=Lognormal(200, high=min(2000, most // 2)), output=Lognormal(100, high=min(800, most // 2)))
    if args.check_engine:
        return _check_engine(args, config, arrivals)
    model = CostModel(config, *machine_of(args.hardware, args.dtype), args.kv_cache_dtype)
    limits = [value and value / 1e3 for value in (args.ttft_ms, args.tpot_ms)]
    slo, scheduler = Slo(*limits) if limits != [None, None] else None, _scheduler(args, model)
    if args.plans or args.perfetto:
        scheduler = RecordingScheduler(scheduler)
    result = simulate(arrivals, scheduler, model)
    what = f"{args.model} in {in_words(model.dtype, model.kv_cache_dtype)} on {model.hardware.name}"
    _print(args, result, slo, what, scheduler)
    if args.plans == "-":
        print("\n".join(map(describe, replay(scheduler.history))))
    elif args.plans:
        print(f"plans kept in {scheduler.history.save(args.plans)}", file=sys.stderr)
    if args.perfetto:
        print(f"trace kept in {trace_of(scheduler.history).save(args.perfetto)}", file=sys.stderr)
    return 0


def _scheduler(args: argparse.Namespace, model: CostModel) -> Scheduler:
    config, memory, num_blocks = model.config, model.hardware.memory_bytes, args.num_kv_blocks
    block_bytes = args.block_size * kv_bytes_per_token(config, model.dtype, model.kv_cache_dtype)
    if num_blocks is None:
        useful = args.max_num_seqs * -(-config.max_position_embeddings // args.block_size)
        free = MEMORY_SHARE * (memory - weight_bytes_held(config, model.dtype))
        if memory and free < block_bytes:
            raise ValueError(f"{args.model} in {model.dtype} does not fit {model.hardware.name}: give --num-kv-blocks")
        num_blocks = min(useful, int(free / block_bytes)) if memory else useful
    options = {name: getattr(args, name) for name in (*SIZES[:3], "policy")}
    return Scheduler(BlockPool(num_blocks, args.block_size, caching=not args.no_prefix_caching), **options)


def _print(args: argparse.Namespace, result: Simulation, slo: Slo | None, what: str, scheduler: Scheduler) -> None:
    groups = sorted({arrival.group for arrival in result.arrivals})
    summaries = {"all": result.summary(slo)} | {
        group or "(no group)": result.summary(slo, group=group) for group in groups if len(groups) > 1}
    refused = next((own.num_prompt_tokens for own in result.requests if own.failure is not None), None)
    why = refused and f"a prompt of {refused:,} tokens: {scheduler.why_never(refused)}".replace("num_kv_", "--num-kv-")
    counts = {name: getattr(result, name) for name in ("num_steps", "busy_s", "num_tokens", "num_hit_tokens",
                                                       "num_preemptions")}
    if args.json:
        print(json.dumps({"of": what, **counts, "first_refused": why, "groups": {
            name: own.to_dict() for name, own in summaries.items()}}, indent=1, allow_nan=False))
        return
    whole, prompts = summaries["all"], sum(own.num_prompt_tokens for own in result.requests)
    print(f"{what}\n{whole.num_requests:,} requests, {whole.num_failed:,} refused; {whole.num_output_tokens:,} output "
          f"tokens in {_seconds(whole.duration_s or 0)}: {whole.output_tokens_per_s or 0:,.1f} tokens/s\n"
          f"{result.num_steps:,} steps, busy {_seconds(result.busy_s)}; {result.num_hit_tokens:,} of {prompts:,} "
          f"prompt tokens found in the cache; {result.num_preemptions:,} preemptions"
          + f"\nfirst refused: {why}" * (why is not None) + "\n")
    print(table(["|requests|served|TTFT p50|p95|TPOT p50|p95|ITL p99|e2e p50|p95|goodput".split("|"),
                 *(_row(name, own) for name, own in summaries.items())]))
    print("Times are of those served. The cost model gives least times: the scheduling is real, the speed a floor."
          + "\nGoodput needs limits for a good request: give --ttft-ms, --tpot-ms or both." * (slo is None))


def _row(name: str, own: Summary) -> list[str]:
    took = (own.ttft_s.p50, own.ttft_s.p95, own.tpot_s.p50, own.tpot_s.p95, own.itl_s.p99, own.e2e_s.p50, own.e2e_s.p95)
    return [name, f"{own.num_requests:,}", f"{own.num_requests - own.num_failed:,}", *map(_seconds, took),
            "n/a" if own.goodput is None else f"{own.goodput:.0%}"]


def _seconds(value: float | None) -> str:
    """Three digits, large ones without an exponent."""
    rounded = None if value is None else float(f"{value:.3g}")
    return "n/a" if rounded is None else f"{rounded:,.0f} s" if rounded >= 1000 else format_seconds(rounded)


def _check_engine(args: argparse.Namespace, config: ModelConfig, arrivals: Sequence[Arrival]) -> int:
    """Serve ``arrivals`` with the real engine, and compare with what the cost model says of the same run."""
    from minillm.assemble import load_decoder
    from minillm.llm import LLM
    from minillm.measure.bench.kernels import with_kernels
    from minillm.measure.bench.machine import current_card
    from minillm.measure.results import Recording, environment
    from minillm.text.tokenizer import load_tokenizer

    path = resolve(args.model)
    model, tokenizer = load_decoder(path, **engine_options(args.dtype)), load_tokenizer(path)
    device = str(model.device)
    dtype = str(model.dtype).removeprefix("torch.") if args.dtype == "auto" and device != "cpu" else args.dtype
    hardware = Hardware.of_card(card := with_kernels(current_card(device), [dtype]))
    cost = CostModel(config, hardware, dtype, args.kv_cache_dtype)
    for _ in range(2):  # the first warms up
        recorder = RecordingScheduler(_scheduler(args, cost))
        before = scheduler_seconds()
        # An LLM without a name is gone before the next one's KV cache.
        _serve(LLM(model, tokenizer=tokenizer, scheduler=recorder, kv_cache_dtype=args.kv_cache_dtype), arrivals)
        waited = waited_share(before, scheduler_seconds())
    print("Each table predicts with what its title says; values are medians of all steps and of all requests.\n"
          "error of one: how far off the prediction of a single step or request is, the median of these.\n")
    samples = []
    for name, step_seconds in (
            ("measured kernels", cost), ("straight roofline", replace(cost, hardware=replace(hardware, kernels={}))),
            ("a line through the run's own steps", mean_step_seconds(recorder.history))):
        rows = compare(recorder.history, step_seconds)
        samples.append({"step_seconds": name, "waited_share": waited, **rows})
        print(name + ":", table([("median", "measured", "predicted", "ratio", "error of one"), *(
            (what.removesuffix("_s"), _seconds(row["measured"]), _seconds(row["predicted"]), f"{row['ratio']:.2f}",
             f"{row['median_error']:.0%}") for what, row in rows.items() if row["ratio"] is not None)]), "", sep="\n")
    if waited is not None and waited > MAX_WAITED:
        print(f"Other work ran meanwhile (the process waited for a core {waited:.0%} of the time): run it again.")
    if args.save:
        recording = Recording(
            name=args.save, samples=samples, environment=environment(card=asdict(card), device=device),
            settings={"model": args.model, "dtype": dtype, "workload": Path(args.workload or "drawn").name,
                      "requests": len(arrivals), **recorder.history.settings})
        print(f"kept in {recording.save()}")
    return 0


def _serve(llm: Any, arrivals: Sequence[Arrival]) -> None:  # an LLM, whose module imports torch
    """Every request at its time, whatever waits, and then steps until all are done."""
    from minillm.request import SamplingParams

    limits, coming, submitted, start_s = llm.engine.limits, deque(enumerate(arrivals)), [], time.perf_counter()
    while True:
        while coming and coming[0][1].arrival_s <= time.perf_counter() - start_s:
            number, arrival = coming.popleft()
            params = SamplingParams(temperature=0.0, max_tokens=arrival.num_output_tokens, ignore_eos=True)
            job = llm.prompts.one(arrival.prompt_token_ids(number, limits.vocab_size), params,
                                  arrival.priority * limits.heeds_priority, arrival_s=start_s + arrival.arrival_s)
            submitted.append(llm.engine.submit(job))  # held: who drops a submission cancels it
        if not llm.step():
            if not coming:
                return
            time.sleep(max(0.0, coming[0][1].arrival_s - (time.perf_counter() - start_s)))
