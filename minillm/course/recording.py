"""Recorded runs: notebooks' measuring cells, run live in fresh processes on one machine whose card is measured once.

    card ──► kernel of notebook 00: session.measure("request", ...) ──► course_request.json ─┐ kept, unless other work
         ──► kernel of notebook 06: session.measure("growth", ...)  ──► course_growth.json  ─┘ ran on the machine
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from minillm.course.files import CourseError, data_file, data_folder, write_text
from minillm.course.live import VARIABLE
from minillm.measure.card import MachineCard
from minillm.measure.results import Recording, environment
from minillm.measure.waiting import scheduler_seconds, waited_share

RECORD_VARIABLE, FOLDER_VARIABLE = "MINILLM_RECORD", "MINILLM_RECORD_FOLDER"
CARD = "course_card.json"
BUDGET_S = 480.0
MOST_LOAD, MOST_WAITED = 0.7, 0.1
"""A machine is busy above this load average a core before, or this share of the time that threads had to wait."""

Values = dict[str, Any]


def is_recording() -> bool:
    """True in a notebook that :func:`record` runs."""
    return bool(os.environ.get(RECORD_VARIABLE))


def measured(name: str, work: Callable[[], Values]) -> Values:
    """Run a measurement; where this is a recording run, also write it to ``course_NAME.json``, with its card."""
    before = scheduler_seconds()
    values = work()
    waited = waited_share(before, scheduler_seconds())
    if is_recording():
        folder, card = Path(os.environ[FOLDER_VARIABLE]), recording_card()
        Recording(name=f"course_{name}", samples=[values],
                  settings={"notebook": os.environ[RECORD_VARIABLE], "card": asdict(card)},
                  environment=environment(device=card.device, device_name=card.device_name, path="eager",
                                          num_threads=card.num_threads, cpu_share=card.cpu_share, waited_share=waited)
                  ).save(folder / f"course_{name}.json")
    return values


def recording_card() -> MachineCard:
    """The card that all measurements of this recording share."""
    return _loaded(Path(os.environ[FOLDER_VARIABLE]) / CARD)


def recorded(name: str) -> Recording:
    """The recorded run of a measurement: ``.samples[0]`` holds its values, ``.environment`` where it was made.

    In a recording run it is the one just made: a new notebook has no other yet.
    """
    file = f"course_{name}.json"
    fresh = Path(os.environ.get(FOLDER_VARIABLE, "")) / file
    return Recording.load(fresh if is_recording() and fresh.is_file() else data_file(f"measurements/{file}"))


def recorded_card(name: str | None = None) -> MachineCard:
    """The card of the machine that made a recorded run; without ``name``, that of the latest recording.

    Raises:
        CourseError: when the file is missing or cannot be read.
    """
    own = recorded(name).settings.get("card") if name else None
    return MachineCard(**own) if own else _loaded(data_file(f"measurements/{CARD}"))


def _loaded(path: Path) -> MachineCard:
    card = MachineCard.load(path)
    if card is None:
        raise CourseError(f"{path.name} cannot be read; get the project's files again")
    return card


def load_per_core() -> float:
    """Programs that ran or waited to run over the last minute, for each core; 0 where the system does not say."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def record(paths: Sequence[Path], *, force: bool = False, budget_s: float = BUDGET_S,
           say: Callable[[str], object] = print) -> bool:
    """Run the measuring notebooks among ``paths``, each in a fresh kernel, and keep what they measured under
    ``data/measurements``; the notebooks stay as they are. True when all of it was recorded and kept.

    Args:
        force: measure on a busy machine, and keep measurements during which other work ran.
        budget_s: notebooks that have not begun by then are left out, and named.
        say: takes the report, a line at a time.
    Raises:
        CourseError: the machine is busy, and ``force`` is not given.
        OSError: ``data/measurements`` cannot be written; nothing has been measured then.
    """
    end_s = time.monotonic() + budget_s
    if (load := load_per_core()) > MOST_LOAD and not force:
        raise CourseError(f"this machine is busy (load average {load:.1f} per core): a record made now would show "
                          "other work too. Wait until it is idle, or give --force")
    measurements = data_folder() / "measurements"
    measurements.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=measurements):
        pass  # it can be written: better known before the minutes that measuring takes
    with TemporaryDirectory(prefix="minillm-record-") as folder:
        card = measure_card_once(Path(folder))
        say(card.describe())
        if card.busy and not force:
            raise CourseError("other work ran while the card was measured: nothing was recorded. Wait until the "
                              "machine is idle, or give --force")
        kept = [_record_one(path, Path(folder), end_s, force, say) for path in paths]
    return all(own is not None for own in kept)


def measure_card_once(folder: Path, threads: int | None = None) -> MachineCard:
    """Measure the card in a process of its own, which gives all its memory back, into ``folder``; with ``threads``
    threads, or as many as there are cores."""
    return _card_of_a_child("measure_card()", folder, threads)


def with_kernels_apart(card: MachineCard, dtypes: Sequence[str], threads: int | None = None) -> MachineCard:
    """``card`` with the kernels of ``dtypes`` measured too (a few seconds each), in a process of its own: weights of
    twice the last cache, which may be hundreds of megabytes, stay out of the notebook."""
    with TemporaryDirectory() as folder:
        card.save(Path(folder) / CARD)
        return _card_of_a_child(f"with_kernels(MachineCard.load(sys.argv[1]), {list(dtypes)!r})", Path(folder), threads)


def _card_of_a_child(made_by: str, folder: Path, threads: int | None) -> MachineCard:
    code = ("import sys, torch; from minillm.course.session import available_cores; "
            "from minillm.measure.bench.machine import measure_card; "
            "from minillm.measure.bench.kernels import with_kernels; from minillm.measure.card import MachineCard; "
            f"torch.set_num_threads(int(sys.argv[2]) or available_cores()); {made_by}.save(sys.argv[1])")
    done = subprocess.run([sys.executable, "-c", code, str(folder / CARD), str(threads or 0)], capture_output=True,
                          text=True)
    if done.returncode:
        raise CourseError(f"the card could not be measured:\n{done.stderr.strip()}")
    return _loaded(folder / CARD)


def _record_one(path: Path, folder: Path, end_s: float, force: bool, say: Callable[[str], object]) -> list[str] | None:
    """Names of what was kept of one notebook; ``None`` when something was not."""
    import nbformat

    from minillm.course.execute import run
    from minillm.course.lint import measure_names

    try:
        notebook = nbformat.read(path, as_version=4)
        names = measure_names(notebook)
    except (ValueError, AttributeError) as error:
        say(f"{path.name}: not recorded, it is no valid notebook: {error}")
        return None
    if not names:
        return []
    start_s = time.monotonic()
    if start_s >= end_s:
        say(f"{path.name}: not recorded, the time is used up")
        return None
    last = max(i for i, cell in enumerate(notebook.cells) if "session.measure(" in cell.source)
    notebook.cells = notebook.cells[:last + 1]  # what comes after the last measurement changes none
    try:
        run(notebook, path.parent, {VARIABLE: "1", RECORD_VARIABLE: path.stem, FOLDER_VARIABLE: str(folder)},
            timeout_s=max(1.0, end_s - start_s))
    except CourseError as error:
        say(f"{path.name}: not recorded: {error}")
        return None
    kept = [name for name in names if _keep(name, folder, force, say)]
    say(f"{path.name}: {', '.join(kept) or 'nothing'} kept, {time.monotonic() - start_s:.0f} s")
    return kept if kept == names else None


def _keep(name: str, folder: Path, force: bool, say: Callable[[str], object]) -> bool:
    """Move a measurement to its place unless other work held its processors."""
    file = folder / f"course_{name}.json"
    if not file.exists():
        say(f"  {name}: the notebook ran and did not measure it")
        return False
    waited = Recording.load(file).environment["waited_share"]
    if waited is not None:
        say(f"  {name}: its threads waited {waited:.1%} of the time that they wanted to run")
    if (waited or 0) > MOST_WAITED and not force:
        say(f"  {name}: not kept, other work ran on this machine; record again when it is idle, or give --force")
        return False
    for fresh in (folder / CARD, file):  # Ctrl-C later leaves a card and its measurements, each whole
        write_text(data_folder() / "measurements" / fresh.name, fresh.read_text("utf-8"))
    return True
