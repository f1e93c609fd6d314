"""``minillm doctor``: is everything here that minillm needs, and what to do about what is not."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from minillm.cli.answer import add_model_arguments
from minillm.errors import DownloadError
from minillm.model.hub import cache_dir, is_offline, resolve

DISTRIBUTION = "minillm-course"
# The download, the GGUF unpacked from it, and the converted weights beside it.
ROOM_FOR_MODEL_BYTES = 900_000_000


class Finding(NamedTuple):
    """One thing looked at: ``text`` says what is, ``advice`` what to do where it is not ``ok``."""

    name: str
    ok: bool
    text: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the user means to run."""
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print every finding; 1 when one of them is a problem. Fetches nothing."""
    args.offline = is_offline()
    os.environ["MINILLM_OFFLINE"] = "1"
    problems = 0
    for finding in examine(args):
        problems += not finding.ok
        print(f"{'ok     ' if finding.ok else 'PROBLEM'}  {finding.name:9} {finding.text}")
        if finding.advice:
            print(f"{'':19}→ {finding.advice}")
    print("\nnothing is wrong" if not problems else f"\n{problems} problem{'s' * (problems > 1)} to mend")
    return int(problems > 0)


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Look at one thing after another; a check that itself fails becomes a problem, and the others go on."""
    checks: tuple[Callable[[argparse.Namespace], Finding], ...] = (
        check_python, check_package, check_versions, check_device, check_cache, check_disk, check_model,
    )
    for check in checks:
        try:
            yield check(args)
        except Exception as error:  # whatever is wrong here is what the user came to hear
            yield Finding(check.__name__.removeprefix("check_"), False, f"{type(error).__name__}: {error}")


def check_python(args: argparse.Namespace) -> Finding:
    """The interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    ok = (3, 11) <= sys.version_info < (3, 14)
    return Finding("python", ok, f"{version} in {sys.prefix}", "" if ok else "use Python 3.11, 3.12 or 3.13")


def check_package(args: argparse.Namespace) -> Finding:
    """That ``minillm`` is this one: the name on the package index belongs to another project."""
    folder, names = Path(__file__).parents[1], set(metadata.packages_distributions().get("minillm", []))
    if "minillm" in names:
        return Finding("package", False, "another project's package `minillm` is installed here",
                       f"pip uninstall minillm, then install {DISTRIBUTION} again")
    if DISTRIBUTION not in names:
        return Finding("package", True, f"run from {folder}, not installed", "to have it everywhere: pip install -e .")
    return Finding("package", True, f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)} in {folder}")


def check_versions(args: argparse.Namespace) -> Finding:
    """The packages that minillm needs, against the lower bounds it declares."""
    found, bad = [], []
    for requirement in _requirements():
        name, _, bound = requirement.partition(">=")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            bad.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if _numbers(version) < _numbers(bound):
            bad.append(f"{name} {version} is older than {bound}")
    if bad:
        return Finding("versions", False, "; ".join(bad), "pip install -c constraints.txt -e .")
    return Finding("versions", True, ", ".join(found))


def _requirements() -> list[str]:
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed: the two that matter most
        return ["torch>=2.9", "numpy>=2.1"]
    return [requirement for requirement in declared if ";" not in requirement]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def check_device(args: argparse.Namespace) -> Finding:
    """The device, the number format and the kernels that a run with these arguments would use."""
    import torch

    from minillm.measure.results import cpu_model
    from minillm.model.device import resolve_device
    from minillm.model.quantized import describe_kernels

    device = torch.device(resolve_device(args.device))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    text = f"{device} ({name}{threads}); dtype {args.dtype}: {describe_kernels(args.dtype, device, args.quantization)}"
    unused_gpu = device.type == "cpu" and shutil.which("nvidia-smi") and not torch.version.cuda
    return Finding("device", True, text, "torch is a CPU build here: it cannot use the GPU" if unused_gpu else "")


def check_cache(args: argparse.Namespace) -> Finding:
    """That the cache folder can be written."""
    existing = _existing(cache_dir())
    ok = existing.is_dir() and os.access(existing, os.W_OK)
    return Finding("cache", ok, str(cache_dir()), "" if ok else "set MINILLM_HOME to a folder that you may write to")


def check_disk(args: argparse.Namespace) -> Finding:
    """Room on the cache folder's disk for a model that is not here yet."""
    free = shutil.disk_usage(_existing(cache_dir())).free
    ok = free >= ROOM_FOR_MODEL_BYTES or _find(args.model) is not None
    advice = f"free {ROOM_FOR_MODEL_BYTES / 1e9:.1f} GB, or set MINILLM_HOME to a folder on a larger disk"
    return Finding("disk", ok, f"{free / 1e9:.1f} GB free", "" if ok else advice)


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def check_model(args: argparse.Namespace) -> Finding:
    """That the model is here and answers; one not yet fetched is a problem only where fetching is forbidden."""
    path = _find(args.model)
    if path is None:
        advice = "unset MINILLM_OFFLINE and run: minillm pull" if args.offline else "fetch it now: minillm pull"
        text = f"{args.model} is not here; the first use fetches it"
        return Finding("model", not args.offline, text, f"{advice} {args.model}")
    from minillm import LLM, SamplingParams

    with LLM(path, dtype=args.dtype, quantization=args.quantization, device=args.device) as llm:
        (output,) = llm.generate("One, two,", SamplingParams(temperature=0, max_tokens=4))
        blocks, size = llm.stats().num_blocks, llm.config.block_size
        cache = f"KV cache {llm.attention.num_bytes / 1e9:.2f} GB: {blocks * size:,} tokens in blocks of {size}"
    return Finding("model", True, f"{path} answers: 'One, two,{output.outputs[0].text}'; {cache}")


def _find(model: str) -> Path | None:
    """Where the model is, or ``None`` while it would have to be fetched (``run`` has forbidden that)."""
    try:
        return resolve(model)
    except DownloadError:
        return None
