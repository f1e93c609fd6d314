"""Under nbval: stderr is not part of a lesson, nothing is timed, and nothing is written to the reader's folder.

A cell's stderr depends on library versions and on what is cached, so it is not compared; that none is *stored* is the
linter's rule. ``MINILLM_LIVE=0`` is how a kernel learns that its outputs are compared or kept.
"""

import os

os.environ["MINILLM_LIVE"] = "0"
collect_ignore = ["mine"]  # the reader's own copies, with exercises to be done


def pytest_collectstart(collector):
    """nbval asks each notebook which outputs to leave out."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
