"""The batteries that prove minillm's own parts, for yours: ``prove_cache(MyCache)`` says that it holds, or shows the
smallest case in which it does not.

Each runs edge cases and seeded random workloads against the simplest thing that is surely right. They prove what a
part gives, not how fast.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minillm.parts import check_part

if TYPE_CHECKING:
    from minillm.cache.blocks import PoolProtocol
    from minillm.cache.kv import SequenceCache
    from minillm.sample import SamplerProtocol
    from minillm.schedule.scheduler import SchedulerProtocol
    from minillm.text.tokenizer import Tokenizer

SAMPLER_CLAIMS = frozenset({"greedy", "temperature", "top_k", "top_p", "min_p", "penalties", "seed", "nan"})
"""What a sampler may claim to do; see :func:`prove_sampler`."""


class BatteryFailure(AssertionError):
    """A part does not hold; the message shows the smallest case in words."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case: in words, how large it is, and a function that says why it fails (``""`` when it holds)."""

    what: str
    size: int
    fault: Callable[[], str]


def prove_tokenizer(tokenizer: Tokenizer, like: Tokenizer | None = None) -> None:
    """Prove that a tokenizer with your encoder gives the right ids: those of merging by looking again at every pair
    after every merge. Text must survive the way to ids and back.

    ``prove_tokenizer(llm.tokenizer.with_encoder(MyEncoder(...)), llm.tokenizer)``

    Args:
        like: whose vocabulary and merges it follows; its own encoder's (``vocab``, ``merges``) by default.
    Raises:
        BatteryFailure: showing the smallest case that fails.
        TypeError: it is no tokenizer, or there is no byte-level vocabulary to compare with.
    """
    from minillm.course.batteries.tokenizer import cases
    from minillm.text.tokenizer import Tokenizer

    check_part("tokenizer", tokenizer, Tokenizer)
    _hold("tokenizer", cases(tokenizer, (like or tokenizer).encoder))


def prove_sampler(sampler: SamplerProtocol, claims: Collection[str] = SAMPLER_CLAIMS) -> None:
    """Prove that a sampler chooses greedily and draws from the distribution that a request asks for, enumerated in
    plain Python; that a row of a batch gets the token it gets alone; and that the logits stay as they were.

    Args:
        claims: what the sampler does, of :data:`SAMPLER_CLAIMS`; a simpler one claims less and is asked for less.
            ``"seed"``: draws depend on (seed, choice, position) alone; ``"nan"``: an unusable row ends in an error
            token while the others go on.
    Raises:
        BatteryFailure: showing the smallest case that fails.
        TypeError, ValueError: it cannot be called; naming a claim that there is not.
    """
    if unknown := sorted(set(claims) - SAMPLER_CLAIMS):
        raise ValueError(f"no claim {unknown[0]!r}; there are {', '.join(sorted(SAMPLER_CLAIMS))}")
    from minillm.course.batteries.sampler import cases
    from minillm.sample import SamplerProtocol

    check_part("sampler", sampler, SamplerProtocol)
    _hold("sampler", cases(sampler, frozenset(claims)))


def prove_cache(make_cache: Callable[..., SequenceCache]) -> None:
    """Prove a KV cache, made as ``make_cache(config, capacity=..., dtype=..., device=...)``: keys and values against
    plain lists, attention over several sequences, and a tiny model's tokens against the loop without a cache.

    Raises:
        BatteryFailure: showing the smallest case that fails.
    """
    from minillm.course.batteries.cache import cases

    _hold("cache", cases(make_cache))


def prove_scheduler(make_scheduler: Callable[[int], SchedulerProtocol]) -> None:
    """Prove a scheduler that hands out no blocks, made as ``make_scheduler(max_num_seqs)``: every request gets the
    tokens of the simplest loop, each that lacks one token is in every step, places are taken in order of arrival and
    as soon as they are free, and who is finished or cancelled is gone.

    Raises:
        BatteryFailure: showing the smallest case that fails.
    """
    from minillm.course.batteries.batching import scheduler_cases

    _hold("scheduler", scheduler_cases(make_scheduler))


def prove_pool(make_pool: Callable[[int, int], PoolProtocol], *, caching: bool = False) -> None:
    """Prove a pool of blocks, made as ``make_pool(num_blocks, block_size)``, under minillm's own scheduler: no block is
    in two tables, none is lost, every request gets the tokens of the simplest loop through preemption and refusal.

    With ``caching`` blocks may be shared, and as many prompt tokens must be found as in minillm's own pool while
    nothing is evicted; a block that was overwritten or belongs to other text gives wrong tokens.

    Raises:
        BatteryFailure: showing the smallest case that fails.
    """
    from minillm.course.batteries.batching import pool_cases

    _hold("pool", pool_cases(make_pool, caching))


def _hold(name: str, cases: Iterable[Case]) -> None:
    """Run the cases from the smallest to the largest; stop at the first that fails, else print one line."""
    ordered = sorted(cases, key=lambda case: case.size)
    for case in ordered:
        try:
            why = _fault(case)
        except KeyboardInterrupt:
            print(f"{name}: stopped in this case, which had not come to an end: {case.what}")
            raise
        if why:
            raise BatteryFailure(f"{name} fails; of {len(ordered)} cases, this is the smallest that does:\n"
                                 f"  case     {case.what}\n  because  {why}")
    print(f"{name}: {len(ordered)} cases hold")


def _fault(case: Case) -> str:
    try:
        return case.fault()
    except Exception as error:  # whatever a reader's part does must become an explanation
        return f"it raised {type(error).__name__}: {error}"


def differs(what: str, got: Any, expected: Any) -> str:
    """A sentence when two plain values are not equal, else ``""``."""
    return "" if got == expected else f"{what} is {_short(got)}, expected {_short(expected)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:156] + " ..."
