"""The setup cell of every notebook: :func:`start` looks at where it runs and returns the reader's :class:`Session`."""

from __future__ import annotations

import os
import platform
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from minillm.course.files import CourseError, Store, cache_folder
from minillm.course.guesses import Ledger
from minillm.course.ladder import Ladder
from minillm.course.live import EMPTY_PANEL, is_live
from minillm.course.recording import (
    is_recording,
    measure_card_once,
    measured,
    recorded,
    recorded_card,
    recording_card,
    with_kernels_apart,
)
from minillm.measure.card import MachineCard

if TYPE_CHECKING:
    from minillm.model.decoder import Decoder

__all__ = ["Session", "recorded", "recorded_card", "start"]


def start(*, seed: int = 0, threads: int | None = None) -> Session:
    """Check the package, fix seeds and threads, find out where this runs. Prints one line.

    Raises:
        CourseError: when ``minillm`` is another project's package, a library is too old, or a library was replaced
            after it had been loaded (then the kernel must restart before any heavy work).
    """
    check_package()
    check_versions()
    import numpy
    import torch

    from minillm.model.device import resolve_device

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    threads = threads or available_cores()
    torch.set_num_threads(threads)
    place = where()
    device = resolve_device()
    live = is_live()
    folder = cache_folder() / "course" if live else None
    print(f"minillm {metadata_version()} · Python {platform.python_version()} · torch {torch.__version__} · {place} · "
          f"{device}, {threads} {'thread' if threads == 1 else 'threads'} · seed {seed}")
    return Session(seed, threads, place, device, live,
                   Ledger(Store(folder and folder / "guesses.json")), Ladder(Store(folder and folder / "ladder.json")))


@dataclass(frozen=True)
class Session:
    """What a notebook knows about its reader: machine, guesses, ladder, and whether this run is theirs (``live``)."""

    seed: int
    threads: int
    place: str
    device: str
    live: bool
    ledger: Ledger
    ladder: Ladder
    _cards: list[MachineCard] = field(default_factory=list, repr=False, compare=False)

    def card(self, *, again: bool = False) -> MachineCard:
        """The machine card: the reader's own, measured once (about ten seconds) and kept; in a run whose outputs are
        kept for everybody, the recorded machine's, which is named.

        One that was measured while other work ran serves this session alone: the next one measures again. ``again``
        measures now.
        """
        if not self.live:
            print("recorded card (yours appears when you run this)")
            return recorded_card()
        if is_recording():
            return recording_card()
        if again or not self._cards:
            from minillm.measure.bench.machine import current_card

            card = None if again else current_card(measure=False)
            if card is None or card.busy:
                with TemporaryDirectory() as folder:  # apart: its buffer of a gigabyte stays out of the notebook
                    card = measure_card_once(Path(folder), self.threads)
                if card.busy:
                    print("used for this session and not kept: other work ran while it was measured")
                else:
                    card.save()
            self._cards[:] = [card]
        return self._cards[0]

    def card_with_kernels(self, *dtypes: str) -> MachineCard:
        """:meth:`card` with the rates that this machine's kernels reach under the engine's ``dtypes``, measured now."""
        return with_kernels_apart(self.card(), dtypes, self.threads)

    def measure(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Run a measurement and return its values; ``None``, with a line that says so, where outputs are kept.

        ``minillm bench record`` (``minillm course record NN`` for one notebook) runs this and writes the values to
        ``data/measurements/course_NAME.json``, so that recorded and live numbers come from the same cell. A notebook
        may measure several things, each under a name that no other notebook uses.
        """
        if not self.live:
            print(f"Recorded run only: {EMPTY_PANEL}.")
            return None
        from minillm.course.measuring import give_memory_back

        give_memory_back()
        return measured(name, work)

    @property
    def measure_device(self) -> str:
        """Where measuring cells run: ``"cuda"`` where there is one, else ``"cpu"``. All other cells stay on the CPU."""
        return "cuda" if self.device.startswith("cuda") else "cpu"

    @property
    def measure_shape(self) -> str:
        """The shape (:func:`~minillm.model.shapes.find_config`) of the model that measuring cells run: the default one
        on a CPU, and wherever outputs are kept; on CUDA one large enough that its bytes outweigh its calls."""
        from minillm.course.measuring import shape_for
        from minillm.model.hub import DEFAULT_MODEL

        return shape_for(self.card()) if self.live and self.measure_device == "cuda" else DEFAULT_MODEL

    def measure_model(self, default: Decoder) -> Decoder:
        """The model that measuring cells run: ``default`` on a CPU. On CUDA one of :attr:`measure_shape` in the same
        dtype, with random weights (for timing alone), whose size is printed."""
        from minillm.course.measuring import give_memory_back, random_decoder
        from minillm.model.shapes import find_config

        give_memory_back()
        if self.measure_device == "cpu":
            return default
        dtype = str(default.dtype).removeprefix("torch.")
        model = random_decoder(find_config(self.measure_shape), device=self.measure_device, dtype=dtype)
        print(f"measured: a model of the shape of {self.measure_shape}, {model.num_bytes / 1e9:.2f} GB of random "
              f"weights in {dtype}, on the GPU")
        return model


def where() -> str:
    """``"colab"``, ``"binder"`` or ``"local"``."""
    if _has_module("google.colab"):
        return "colab"
    return "binder" if "BINDER_SERVICE_HOST" in os.environ else "local"


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # raised where the parent, here `google`, is absent
        return False


def available_cores() -> int:
    """CPU cores this process may use: OMP_NUM_THREADS, else the scheduler's mask cut by a container's quota."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no quota
        pass
    return cores


def check_package() -> None:
    """Refuse a package of the same import name that is not this one (PyPI's ``minillm`` is another project)."""
    import minillm

    ours = Path(__file__).resolve().parents[1]
    loaded = Path(getattr(minillm, "__file__", None) or "nowhere").resolve().parent
    if loaded != ours or not hasattr(minillm, "SamplingParams"):
        raise CourseError(f"the loaded 'minillm' (from {loaded}) is another project's package. Run "
                          "`pip uninstall minillm`, install `minillm-course` again and restart the kernel.")


def check_versions() -> None:
    """Refuse libraries that are too old, or whose loaded version is not the installed one."""
    problems = [problem for name in ("torch", "numpy", "transformers", "ipywidgets", "matplotlib")
                if (problem := version_problem(name, loaded_version(name), installed_version(name)))]
    if problems:
        raise CourseError("before going on: " + "; ".join(problems))


def version_problem(name: str, loaded: str | None, installed: str | None) -> str:
    """What is wrong with a library's version, or ``""``. Bounds come from this distribution's own requirements."""
    from packaging.version import Version

    if loaded and installed and Version(loaded).public != Version(installed).public:
        return f"{name} {loaded} is loaded but {installed} is installed now: restart the kernel"
    for requirement in requirements():
        if requirement.name == name and installed and not requirement.specifier.contains(installed, prereleases=True):
            return f"{name} {installed} is installed, {requirement.specifier} is needed: pip install -U '{requirement}'"
    return ""


def requirements() -> list[Any]:
    """The distribution's requirements with their lower bounds; empty where it runs from a bare checkout."""
    from packaging.requirements import Requirement

    try:
        return [Requirement(line.partition(";")[0]) for line in metadata.requires("minillm-course") or []]
    except metadata.PackageNotFoundError:
        return []


def loaded_version(name: str) -> str | None:
    """The version of a module that this process has already imported."""
    return getattr(sys.modules.get(name), "__version__", None)


def installed_version(name: str) -> str | None:
    """The version on disk."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def metadata_version() -> str:
    """The package's own version."""
    import minillm

    return minillm.__version__
