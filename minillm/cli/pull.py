"""``minillm pull``: fetch a model, so that everything afterwards works offline."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model to fetch."""
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Fetch it, and say where it is."""
    from minillm.model.hub import resolve

    print(f"{args.model} is ready: {resolve(args.model)}")
    return 0
