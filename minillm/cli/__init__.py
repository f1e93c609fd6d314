"""The command ``minillm``. Each command imports what it needs when it runs, so that ``minillm --help`` is instant.

Exit codes: 0 done, 1 failed with one line that says why, 2 wrong usage, 130 stopped by Ctrl-C. No traceback for a
user's mistake, unless MINILLM_DEBUG is set.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import NamedTuple

from minillm import __version__
from minillm.extras import advice


class Command(NamedTuple):
    """A command: its line in ``--help``, and the module whose functions add its arguments and run it.

    ``add_arguments(parser)`` and ``run(args) -> exit code`` are named here, so that the module is imported late.
    """

    help: str
    module: str
    add_arguments: str = "add_arguments"
    run: str = "run"


COMMANDS = {
    "generate": Command("answer a prompt, streamed", "minillm.cli.answer", "add_generate_arguments", "generate"),
    "chat": Command("talk, with history", "minillm.cli.answer", "add_chat_arguments", "chat"),
    "pull": Command("fetch a model into the cache", "minillm.cli.pull"),
    "doctor": Command("check this installation, and say what to do about each problem", "minillm.cli.doctor"),
    "card": Command("measure this machine and keep the result", "minillm.cli.card"),
    "estimate": Command("will a model fit, how fast at best, what limits it: without its weights",
                        "minillm.cli.estimate"),
    "simulate": Command("what thousands of requests would see: the real scheduler without a model",
                        "minillm.cli.simulate"),
    "bench": Command("compare with transformers, or record the notebooks", "minillm.measure.bench.compare", run="main"),
    "course": Command("copy, execute, record and lint the course's notebooks", "minillm.course.commands", run="main"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; ``argv`` defaults to the process's arguments. Returns the exit code (see the module)."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a console that lacks a character shows "?" and goes on
    try:
        args = _parser(argv[0] if argv else "").parse_args(argv)
        command = COMMANDS[args.command]
        return getattr(import_module(command.module), command.run)(args) or 0
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        message = advice(error) if isinstance(error, ModuleNotFoundError) else None
        expected = isinstance(error, (ValueError, OSError)) or type(error).__module__.startswith("minillm.")
        if not (expected or message) or os.environ.get("MINILLM_DEBUG"):
            raise  # a fault of the program: its traceback is worth more than one line
        print(f"minillm: {message or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _parser(chosen: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minillm", description="A small, readable LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"minillm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help, description=command.help)
        if name == chosen:  # the other commands' modules stay unloaded
            getattr(import_module(command.module), command.add_arguments)(own)
    return parser
