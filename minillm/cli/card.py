"""``minillm card``: measure the machine card, keep it, print it."""

from __future__ import annotations

import argparse

from minillm.config import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The device to measure."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    parser.add_argument("--kernels", nargs="*", choices=DTYPES, default=[], metavar="DTYPE", help="measure what real "
                        "kernels reach in these number formats too, for closer estimates (5-10 s each)")


def run(args: argparse.Namespace) -> int:
    """Measure, save, print (about ten seconds, without ``--kernels``)."""
    from minillm.measure.bench.kernels import with_kernels
    from minillm.measure.bench.machine import measure_card

    card = with_kernels(measure_card(args.device), args.kernels)
    print(f"{card.describe()}\nkept in {card.save()}")
    return 0
