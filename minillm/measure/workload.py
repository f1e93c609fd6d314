"""Requests to come: when, how long, what they share. Read from JSON lines, or drawn from a seed. No torch.

The files of ``data/workloads`` are made by ``python -m minillm.measure.workload``.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from zlib import crc32

from minillm.measure.results import shipped_file, shown_path

_WANTED = ('give a request a line, such as {"arrival_s": 0.5, "num_prompt_tokens": 120, "num_output_tokens": 40}, with '
           "priority, prefix and group if need be, and nothing else")
_STRIDE = 15_485_863  # a prime above any prompt's length: no two requests have tokens in common by accident


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request of a workload.

    Args:
        arrival_s: when it comes, from the beginning.
        num_prompt_tokens, num_output_tokens: at least 1 each.
        priority: lower values first, where the scheduler heeds it.
        prefix: name and length of how the prompt begins: equal names begin with equal tokens. Shorter than the prompt.
        group: whose it is ("chat", "batch" ...), to be summed up apart.
    Raises:
        ValueError: naming the field.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    priority: int = 0
    prefix: tuple[str, int] | None = None
    group: str = ""

    def __post_init__(self) -> None:
        if not (isinstance(self.arrival_s, int | float) and 0 <= self.arrival_s <= sys.float_info.max):
            raise ValueError(f"arrival_s must be seconds from 0 on, got {self.arrival_s!r}")
        for name, least in (("num_prompt_tokens", 1), ("num_output_tokens", 1), ("priority", -math.inf)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number{' of at least 1' * (least == 1)}, got {value!r}")
        if not isinstance(self.group, str) or self.group == "all":
            raise ValueError(f"group must be text, and not 'all', which every request is in, got {self.group!r}")
        if self.prefix is not None and not (isinstance(self.prefix, tuple) and [*map(type, self.prefix)] == [str, int]
                                            and 0 < self.prefix[1] < self.num_prompt_tokens):
            raise ValueError('prefix must be ["name", tokens] with 1 token to below num_prompt_tokens, got '
                             f"{json.dumps(self.prefix, default=repr)}")

    def prompt_token_ids(self, number: int, vocab_size: int | None = None) -> tuple[int, ...]:
        """Its prompt as request ``number`` of a workload; ids below ``vocab_size``, else as large as it takes."""
        name, shared = self.prefix or ("", 0)
        first, own = -(crc32(name.encode()) + 1) * _STRIDE, (number + 1) * _STRIDE
        ids = (*range(first, first + shared), *range(own + shared, own + self.num_prompt_tokens))
        return ids if vocab_size is None else tuple(token_id % vocab_size for token_id in ids)


def load_arrivals(path: str | Path, positions: float = math.inf) -> list[Arrival]:
    """A workload from JSON lines, one object of :class:`Arrival`'s fields a line, in order of arrival.

    Args:
        positions: of the model: most tokens of a request, prompt and output.
    Raises:
        ValueError: naming the line that is no such request, or one too long.
        OSError: it cannot be read.
    """
    try:
        lines, arrivals = Path(path).read_bytes().splitlines(), []
    except OSError as error:
        raise type(error)(f"cannot read {path} ({error.strerror}): give one like data/workloads/chat.jsonl") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                arrivals.append(own := _arrival_of(line))
                if (num_tokens := own.num_prompt_tokens + own.num_output_tokens) > positions:
                    raise ValueError(f"{num_tokens:,} tokens in all; the model has positions for {positions:,}")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    if not arrivals:
        raise ValueError(f"{path} holds no request: {_WANTED}")
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def _arrival_of(line: bytes) -> Arrival:
    known = [each.name for each in fields(Arrival)]
    try:
        own = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({str(error).replace(': line 1', ',')}): {_WANTED}") from None
    if not isinstance(own, dict) or not set(known[:3]) <= own.keys() <= set(known):
        raise ValueError(f"no request: {_WANTED}")
    return Arrival(**{name: tuple(value) if isinstance(value, list) else value for name, value in own.items()})


def save_arrivals(arrivals: Iterable[Arrival], path: str | Path) -> Path:
    """Write JSON lines that :func:`load_arrivals` reads; fields at their default are left out."""
    lines = [json.dumps({name: value for name, value in asdict(arrival).items() if value or name == "arrival_s"},
                        allow_nan=False) for arrival in arrivals]
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Path(path)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any length from ``low`` to ``high`` tokens, both included, equally likely."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """One length."""
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Most lengths near ``median``, some far longer, as people write: the logarithm is normal with deviation ``sigma``.
    Cut to ``low`` .. ``high``."""

    median: float
    sigma: float = 0.7
    low: int = 1
    high: int = 100_000

    def draw(self, source: random.Random) -> int:
        """One length."""
        return min(max(round(source.lognormvariate(math.log(self.median), self.sigma)), self.low), self.high)


Lengths = Uniform | Lognormal


def random_arrivals(num_requests: int, *, rate: float, prompt: Lengths, output: Lengths, seed: int = 0, cv: float = 1.0,
                    prefixes: Mapping[str, int] | None = None, priority: int = 0, group: str = "",
                    start_s: float = 0.0) -> list[Arrival]:
    """Requests that come at random, ``rate`` a second on average; equal arguments draw equal ones.

    The gaps between them are gamma distributed with a coefficient of variation (deviation over mean) of ``cv``: 1 is
    a Poisson process, below 1 more regular, above 1 in bursts.

    Args:
        prefixes: lengths by name; each prompt begins with one of them, drawn, to which its ``prompt`` length adds.
        start_s: when it begins; the first comes a gap later.
    Raises:
        ValueError: ``num_requests`` below 1, or ``rate`` or ``cv`` not above 0.
    """
    if num_requests < 1 or not (0 < rate < math.inf and 0 < cv < math.inf):
        raise ValueError(f"at least 1 request, at a rate and a cv above 0, got {num_requests}, {rate} and {cv}")
    source, time_s, arrivals = random.Random(seed), start_s, []
    for _ in range(num_requests):
        time_s += source.gammavariate(1 / cv**2, cv**2 / rate)
        name, shared = source.choice(sorted(prefixes.items())) if prefixes else ("", 0)
        arrivals.append(Arrival(arrival_s=round(time_s, 6), num_prompt_tokens=shared + prompt.draw(source),
                                num_output_tokens=output.draw(source), priority=priority, group=group,
                                prefix=(name, shared) if shared else None))
    return arrivals


def shipped_workloads() -> dict[str, list[Arrival]]:
    """The workloads of ``data/workloads``, by file name.

    ``chat``: short prompts, answers of some length, in mild bursts. ``long_prompts``: the same with a prompt of
    thousands of tokens now and then. ``agents``: three agents whose prompts begin with their instructions and tools.
    ``engine_check``: what the simulation was compared with the engine on, ``minillm simulate --check-engine``.
    """
    chat = random_arrivals(200, rate=4.0, cv=1.5, seed=1, group="chat", prompt=Lognormal(60, high=600),
                           output=Lognormal(80, high=400))
    long = random_arrivals(12, rate=0.25, seed=2, group="document", priority=1, prompt=Uniform(2000, 4000),
                           output=Uniform(30, 100))
    agents = random_arrivals(150, rate=3.0, cv=2.0, seed=3, group="agent", prompt=Lognormal(50, high=300),
                             output=Lognormal(30, high=150), prefixes={"coder": 1200, "browser": 800, "planner": 500})
    check = random_arrivals(16, rate=2.0, seed=4, prompt=Uniform(16, 128), output=Uniform(8, 48))
    mixed = sorted(chat[:150] + long, key=lambda arrival: arrival.arrival_s)
    return {"chat": chat, "long_prompts": mixed, "agents": agents, "engine_check": check}


if __name__ == "__main__":
    for name, workload in shipped_workloads().items():
        print(shown_path(save_arrivals(workload, shipped_file("workloads/event_log.json").with_name(f"{name}.jsonl"))))
