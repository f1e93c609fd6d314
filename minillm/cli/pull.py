"""``minillm pull``: fetch a model, so that everything afterwards works offline."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model to fetch."""
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Fetch it, make its weights ready to load, and say where it is."""
    from minillm.model.config import load_config
    from minillm.model.hub import resolve
    from minillm.model.weights import load_weights

    path = resolve(args.model)
    load_weights(path, load_config(path))  # checks every tensor; a GGUF file is dequantized, once
    print(f"{args.model} is ready: {path}")
    return 0
