"""``minillm card``: measure the machine card, keep it, print it."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The device to measure."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")


def run(args: argparse.Namespace) -> int:
    """Measure, save, print (about ten seconds)."""
    from minillm.measure.bench import measure_card

    card = measure_card(args.device)
    print(f"{card.describe()}\nkept in {card.save()}")
    return 0
