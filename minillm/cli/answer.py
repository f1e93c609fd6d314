"""``minillm generate`` and ``minillm chat``: a question in, an answer streamed, Ctrl-C that keeps what was said."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from minillm.config import DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS
from minillm.errors import InvalidRequest
from minillm.measure.waiting import scheduler_seconds, waited_share
from minillm.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from minillm.llm import LLM
    from minillm.measure.trace import Trace

CHAT_HELP = "Ctrl-C stops an answer, /clear starts anew, /exit or Ctrl-D leaves."
Parser = argparse.ArgumentParser
Arguments = argparse.Namespace


def add_model_arguments(parser: Parser) -> None:
    """Which model, in which number format, on which device."""
    parser.add_argument("--model", default="smollm2-135m", help="name, Hugging Face id or folder, or .gguf file")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="number format (default: auto)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="weights in so few bits (default: none)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")


def _add_generation_arguments(parser: Parser) -> None:
    defaults = SamplingParams()
    add_model_arguments(parser)
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt plus answer, in tokens")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES,
                        help="keys and values (default: auto, as activations)")
    parser.add_argument("--speculate", choices=("ngram",), help="guess tokens and check several in a step")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="longest answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    parser.add_argument("--top-p", type=float, default=defaults.top_p, metavar="P", help="nucleus, above 0 to 1")
    parser.add_argument("--top-k", type=int, default=defaults.top_k, metavar="K", help="k most likely; 0: all")
    parser.add_argument("--repetition-penalty", type=float, default=defaults.repetition_penalty, metavar="R",
                        help="above 1 makes tokens that were seen less likely (default: 1)")
    parser.add_argument("--seed", type=int, help="equal seeds give equal answers")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (may be repeated)")
    parser.add_argument("--stats", action="store_true", help="afterwards, tell where the time went")


def add_generate_arguments(parser: Parser) -> None:
    """What to ask, in which form, and how to generate."""
    parser.add_argument("prompt", nargs="?", help="text; without it (or with -) standard input is read")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", dest="chat", action="store_true", default=None,
                      help="ask as a chat message (the default where the model has a chat template)")
    form.add_argument("--raw", dest="chat", action="store_false", default=None, help="continue the text as it stands")
    parser.add_argument("--trace", metavar="FILE", help="write the stages as a Chrome/Perfetto trace")
    _add_generation_arguments(parser)


def add_chat_arguments(parser: Parser) -> None:
    """What the model is told first, and how to generate."""
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    _add_generation_arguments(parser)


def _params(args: Arguments) -> SamplingParams:
    names = SamplingParams.__dataclass_fields__
    return SamplingParams(**{name: value for name, value in vars(args).items() if name in names})


def load(args: Arguments) -> LLM:
    """The model that the arguments name, ready to answer."""
    from minillm.llm import LLM

    return LLM(args.model, dtype=args.dtype, quantization=args.quantization, device=args.device,
               max_model_len=args.max_model_len, kv_cache_dtype=args.kv_cache_dtype,
               speculative_config=args.speculate and {"method": args.speculate})


@contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """Inside the block, Ctrl-C is put on the list (so that no engine step is torn apart); a second one raises."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def print_answer(llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams,
                 stats: bool) -> tuple[str, bool, Trace]:
    """Print an answer as it arrives, until its end or Ctrl-C, and then its numbers where ``stats``.

    Returns its text, whether it was cut short, and where the time went.
    """
    said = []
    with llm.tracing() as trace, interrupts_noted() as interrupts:
        before = scheduler_seconds()
        stream = llm.stream(prompt, params)
        for piece in stream:
            said.append(piece.text)
            print(piece.text, end="", flush=True)
            if interrupts:
                stream.close()
                break
        print()
        waited = waited_share(before, scheduler_seconds())
    if stats and not interrupts:
        print(f"\n{_report(llm, stream.output, trace, waited)}")
    return "".join(said), bool(interrupts), trace


def generate(args: Arguments) -> int:
    """Stream one answer; 130 when Ctrl-C cut it short (what was said stands)."""
    params, prompt = _params(args), _read_prompt(args)
    with load(args) as llm:
        chat = bool(llm.tokenizer.chat_template) if args.chat is None else args.chat
        asked = [{"role": "user", "content": prompt}] if chat else prompt
        _, stopped, trace = print_answer(llm, asked, params, args.stats)
    if args.trace:
        print(f"trace written: {trace.save(args.trace)} (open it at ui.perfetto.dev)", file=sys.stderr)
    return 130 if stopped else 0


def _read_prompt(args: Arguments) -> str:
    prompt = args.prompt if args.prompt not in (None, "-") else _read_standard_input(args)
    if not (prompt if args.chat is False else prompt.strip()):  # raw text may be all blanks, a question may not
        raise InvalidRequest("the prompt is empty", "prompt")
    return prompt


def _read_standard_input(args: Arguments) -> str:
    if sys.stdin is None or (args.prompt is None and sys.stdin.isatty()):
        raise InvalidRequest('no prompt: give one, as in: minillm generate "The sky is"', "prompt")
    return sys.stdin.read()


def chat(args: Arguments) -> int:
    """Talk until /exit, Ctrl-D or Ctrl-C at the prompt."""
    with suppress(ImportError):
        import readline  # noqa: F401  line editing and recall where the system has it
    params, opening = _params(args), [{"role": "system", "content": args.system}] if args.system else []
    with load(args) as llm:
        print(CHAT_HELP)
        messages = list(opening)
        while (line := _next_line()) is not None:
            if line == "/clear":
                messages = list(opening)
            elif re.match(r"/\w*(\s|$)", line):  # a path or a date, with more than letters, is for the model
                print(CHAT_HELP)
            elif line:
                _answer(llm, messages, line, params, args.stats)
    return 0


def _next_line() -> str | None:
    """What the user typed, or ``None`` to leave."""
    if sys.stdin is None:  # closed by whoever started this process
        return None
    try:
        line = input("\n> ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    return None if line == "/exit" else line


def _answer(llm: LLM, messages: list[dict[str, str]], line: str, params: SamplingParams, stats: bool) -> None:
    """Answer one line; it and what was said of the answer, cut short or not, join ``messages``."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        said, *_ = print_answer(llm, asked, params, stats)
    except InvalidRequest as error:
        print(f"{error}\n/clear starts a new conversation.")
        return
    messages[:] = [*asked, {"role": "assistant", "content": said}]


def _report(llm: LLM, output: RequestOutput, trace: Trace, waited: float | None) -> str:
    import torch

    from minillm.assemble import STORES
    from minillm.cache.store import BlockStore
    from minillm.measure.bench.machine import current_card
    from minillm.measure.report import decode_bytes_per_token, format_report

    device = llm.model.device.type
    card = current_card(device, measure=False)
    if card is None:
        print("\nmeasuring this machine (about ten seconds; kept if nothing else runs) ...", file=sys.stderr)
        card = current_card(device)
    metrics = output.metrics
    config, store, speculation = llm.model.config, STORES[llm.config.kv_cache_dtype], llm.engine.speculation
    item_bytes = store.bytes_per_token(config, llm.model.dtype) / BlockStore.bytes_per_token(config, torch.int8)
    read = None if speculation else decode_bytes_per_token(llm.model, metrics.num_prompt_tokens,
                                                           metrics.num_output_tokens, item_bytes)
    report = format_report(output, trace, bytes_per_token=read, card=card, waited=waited)
    if speculation:
        report += f"\n  drafts       {speculation.num_accepted:5} right of {speculation.num_checked} checked"
    return report
