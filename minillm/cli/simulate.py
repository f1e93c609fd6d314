"""``minillm simulate``: what many requests would see of a model on a machine. The real scheduler, without the model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minillm.cache.blocks import BlockPool
from minillm.cli.estimate import count, machine_of
from minillm.config import EngineConfig
from minillm.measure.hardware import Hardware
from minillm.measure.metrics import Slo, Summary
from minillm.measure.report import MAX_WAITED, format_seconds, table
from minillm.measure.roofline import kv_bytes_per_token, weight_bytes_held
from minillm.measure.simulate import CostModel, Simulation, compare, simulate
from minillm.measure.waiting import scheduler_seconds, waited_share
from minillm.measure.workload import Arrival, Lognormal, load_arrivals, random_arrivals
from minillm.model.config import ModelConfig, load_config
from minillm.model.hub import resolve
from minillm.model.shapes import find_config
from minillm.schedule.fork import mean_step_seconds
from minillm.schedule.history import History
from minillm.schedule.recording import RecordingScheduler
from minillm.schedule.replay import describe, replay, trace_of
from minillm.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from minillm.llm import LLM

MEMORY_SHARE = 0.9  # of what the weights leave; activations need the rest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The load, the model, the machine, the scheduler and what to print."""
    load = parser.add_argument_group("load")
    load.add_argument("workload", nargs="?", help="JSON lines with arrival_s, num_prompt_tokens and num_output_tokens "
                      "(data/workloads has some; default: drawn, see --rate and --requests)")
    load.add_argument("--rate", type=float, default=4.0, help="requests a second of a drawn load (default: 4)")
    load.add_argument("--requests", type=count, default=1000, help="requests of a drawn load (default: 1000)")
    load.add_argument("--seed", type=int, default=0, help="of a drawn load (default: 0)")
    parser.add_argument("--model", default="llama-3-8b", help="as for estimate (default: llama-3-8b)")
    parser.add_argument("--hardware", "--on", dest="on", metavar="MACHINE", help="h100, l4, m4-max ... (default: this "
                        "machine, by its card)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 (default: auto)")
    options, default = parser.add_argument_group("scheduler"), EngineConfig()
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "block_size"):
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
    ignored = [name for name in ("on", "json", "plans", "perfetto", "ttft_ms", "tpot_ms")
               if (given := getattr(args, name)) is not None and given is not False]
    if args.check_engine and ignored:
        args.refuse(f"--check-engine has no use for --{ignored[0].replace('_', '-')}: leave it out")
    if args.save and not args.check_engine:
        args.refuse("--save keeps what --check-engine finds: give both")
    if args.json and args.plans == "-":
        args.refuse("--json and --plans - would print to one place: give --plans a file")
    config = load_config(resolve(args.model)) if args.check_engine else find_config(args.model)
    most = config.max_position_embeddings
    arrivals = load_arrivals(args.workload, most) if args.workload else random_arrivals(
        args.requests, rate=args.rate, seed=args.seed, prompt=Lognormal(200, high=min(2000, most // 2)),
        output=Lognormal(100, high=min(800, most // 2)))
    if args.check_engine:
        return _check_engine(args, config, arrivals)
    hardware, dtype = machine_of(args.on, args.dtype)
    limits = {name: value / 1e3 for name, value in (("ttft_s", args.ttft_ms), ("tpot_s", args.tpot_ms))
              if value is not None}
    slo, scheduler = Slo(**limits) if limits else None, _scheduler(args, config, hardware, dtype)
    if recorded := args.plans or args.perfetto:
        scheduler = RecordingScheduler(scheduler)
    result = simulate(arrivals, scheduler, CostModel(config, hardware, dtype))
    _print(args, result, slo, f"{args.model} in {dtype} on {hardware.name}")
    if recorded:
        _keep(args, scheduler.history)
    return 0


def _scheduler(args: argparse.Namespace, config: ModelConfig, hardware: Hardware, dtype: str) -> Scheduler:
    size, num_blocks = args.block_size, args.num_kv_blocks
    if num_blocks is None:
        useful = args.max_num_seqs * -(-config.max_position_embeddings // size)
        free = MEMORY_SHARE * (hardware.memory_bytes - weight_bytes_held(config, dtype))
        if hardware.memory_bytes and free < size * kv_bytes_per_token(config, dtype):
            raise ValueError(f"{args.model} in {dtype} does not fit {hardware.name}: give --num-kv-blocks to go on as "
                             "if it did")
        held = int(free / (size * kv_bytes_per_token(config, dtype))) if hardware.memory_bytes else useful
        num_blocks = min(useful, held)
    return Scheduler(
        BlockPool(num_blocks, size, caching=not args.no_prefix_caching), max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens, max_prefill_chunk=args.max_prefill_chunk,
        policy=args.policy)


def _print(args: argparse.Namespace, result: Simulation, slo: Slo | None, what: str) -> None:
    groups = sorted({arrival.group for arrival in result.arrivals})
    summaries = {"all": result.summary(slo)}
    if len(groups) > 1:
        summaries |= {group or "(no group)": result.summary(slo, group=group) for group in groups}
    counts = {name: getattr(result, name) for name in ("num_steps", "busy_s", "num_tokens", "num_hit_tokens",
                                                       "num_preemptions")}
    if args.json:
        print(json.dumps({"of": what, **counts, "groups": {name: own.to_dict() for name, own in summaries.items()}},
                         indent=1, allow_nan=False))
        return
    whole, prompts = summaries["all"], sum(own.num_prompt_tokens for own in result.requests)
    print(f"{what}\n{whole.num_requests:,} requests, {whole.num_failed:,} refused; {whole.num_output_tokens:,} output "
          f"tokens in {format_seconds(whole.duration_s or 0)}: {whole.output_tokens_per_s or 0:,.1f} tokens/s\n"
          f"{result.num_steps:,} steps, busy {format_seconds(result.busy_s)}; {result.num_hit_tokens:,} of {prompts:,} "
          f"prompt tokens found in the cache; {result.num_preemptions:,} preemptions\n")
    print(table([("", "requests", "TTFT p50", "p95", "TPOT p50", "p95", "ITL p99", "e2e p50", "p95", "goodput"),
                 *(_row(name, own) for name, own in summaries.items())]))
    print("Seconds by the cost model, which gives least times: the scheduling is real, the speed a floor.")


def _row(name: str, summary: Summary) -> list[str]:
    times = (summary.ttft_s.p50, summary.ttft_s.p95, summary.tpot_s.p50, summary.tpot_s.p95, summary.itl_s.p99,
             summary.e2e_s.p50, summary.e2e_s.p95)
    return [name, f"{summary.num_requests:,}", *("n/a" if value is None else format_seconds(value) for value in times),
            "n/a" if summary.goodput is None else f"{summary.goodput:.0%}"]


def _keep(args: argparse.Namespace, history: History) -> None:
    if args.plans == "-":
        print("\n".join(map(describe, replay(history))))
    elif args.plans:
        print(f"plans kept in {history.save(args.plans)}", file=sys.stderr)
    if args.perfetto:
        print(f"trace kept in {trace_of(history).save(args.perfetto)}", file=sys.stderr)


def _check_engine(args: argparse.Namespace, config: ModelConfig, arrivals: Sequence[Arrival]) -> int:
    """Serve ``arrivals`` with the real engine, and compare with what the cost model says of the same run."""
    from minillm.assemble import load_decoder
    from minillm.llm import LLM
    from minillm.measure.bench.kernels import with_kernels
    from minillm.measure.bench.machine import current_card
    from minillm.measure.results import Recording, environment
    from minillm.text.tokenizer import load_tokenizer

    path = resolve(args.model)
    model, tokenizer = load_decoder(path, dtype=args.dtype), load_tokenizer(path)
    device = str(model.device)
    dtype = args.dtype if device == "cpu" else str(model.dtype).removeprefix("torch.")
    card = with_kernels(current_card(device), [dtype])
    hardware = Hardware.of_card(card)
    for _ in range(2):  # the first warms up
        recorder = RecordingScheduler(_scheduler(args, config, hardware, dtype))
        before = scheduler_seconds()
        _serve(LLM(model, tokenizer=tokenizer, scheduler=recorder), arrivals)  # gone before the next one's KV cache
        waited = waited_share(before, scheduler_seconds())
    samples = []
    for name, step_seconds in (
            ("measured kernels", CostModel(config, hardware, dtype)),
            ("straight roofline", CostModel(config, replace(hardware, kernels={}), dtype)),
            ("a line through the run's own steps", mean_step_seconds(recorder.history))):
        rows = compare(recorder.history, step_seconds)
        samples.append({"step_seconds": name, "waited_share": waited, **rows})
        print(f"{name}:\n{_comparison(rows)}\n")
    if waited is not None and waited > MAX_WAITED:
        print(f"Other work ran meanwhile (the process waited for a core {waited:.0%} of the time): run it again.")
    if args.save:
        recording = Recording(
            name=args.save, samples=samples, environment=environment(card=asdict(card), device=device),
            settings={"model": args.model, "dtype": dtype, "workload": Path(args.workload or "drawn").name,
                      "requests": len(arrivals), **recorder.history.settings})
        print(f"kept in {recording.save()}")
    return 0


def _serve(llm: LLM, arrivals: Sequence[Arrival]) -> None:
    """Every request at its time, whatever waits, and then steps until all are done."""
    from minillm.request import SamplingParams

    start_s, coming, submitted = time.perf_counter(), deque(enumerate(arrivals)), []
    while True:
        while coming and coming[0][1].arrival_s <= time.perf_counter() - start_s:
            number, arrival = coming.popleft()
            submitted.append(llm.engine.submit(  # held: who drops a submission cancels it
                arrival.prompt_token_ids(number, llm.engine.limits.vocab_size), arrival_s=start_s + arrival.arrival_s,
                priority=arrival.priority if llm.engine.limits.heeds_priority else 0,
                params=SamplingParams(temperature=0.0, max_tokens=arrival.num_output_tokens, ignore_eos=True)))
        if not llm.step():
            if not coming:
                return
            time.sleep(max(0.0, coming[0][1].arrival_s - (time.perf_counter() - start_s)))


def _comparison(rows: dict[str, dict[str, Any]]) -> str:
    return table([("median", "measured", "predicted", "ratio", "error of one"), *(
        (name.removesuffix("_s"), format_seconds(row["measured"]), format_seconds(row["predicted"]),
         f"{row['ratio']:.2f}", f"{row['median_error']:.0%}") for name, row in rows.items())])
