"""Cases for a sampler: distributions against enumeration, greedy ties, batch and alone, seeds, unusable rows."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from minillm.course.batteries import Case, differs
from minillm.course.batteries.enumeration import probabilities, row, told
from minillm.sample import SampledToken, SamplerProtocol, SamplingRow

_DRAWS, _RANDOM_DRAWS, _NUM_RANDOM = 300, 120, 20
_UNLIKELY = 5.5  # in standard deviations: one right sampler in fifty million is called wrong
_LOGITS = (1.5, 0.0, 2.0, -1.0, 1.0, 0.5)


def cases(sampler: SamplerProtocol, claims: frozenset[str]) -> Iterator[Case]:
    """Every case of :func:`~minillm.course.batteries.prove_sampler` that asks only for what is claimed."""
    for make in (_shape, _greedy, _penalties, _distributions, _random_rows, _alone, _seeds, _unusable):
        for needs, case in make(sampler):
            if needs <= claims:
                yield case


Needed = Iterator[tuple[frozenset[str], Case]]


def ask(sampler: SamplerProtocol, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """One call; what every call must keep is checked here.

    Raises:
        AssertionError: the logits were changed, or what came back is not a token a row.
    """
    before = logits.clone()
    tokens = sampler(logits, rows)
    if not torch.equal(before.nan_to_num(), logits.nan_to_num()) or not torch.equal(before.isnan(), logits.isnan()):
        raise AssertionError("the sampler changed the logits it was given; work on a copy")
    if not isinstance(tokens, list) or len(tokens) != len(rows) or not all(
            isinstance(token, SampledToken) and type(token.token_id) is int for token in tokens):
        raise AssertionError(f"{len(rows)} rows must give a list of {len(rows)} SampledToken(token_id), token_id an "
                             f"int; got {tokens!r:.120}")
    wrong = [token.token_id for token in tokens if not token.error and not 0 <= token.token_id < logits.shape[1]]
    if wrong:
        raise AssertionError(f"it chose id {wrong[0]}, of a vocabulary of {logits.shape[1]}")
    return tokens


def _ids(sampler: SamplerProtocol, logits: Sequence[Sequence[float]], rows: Sequence[SamplingRow],
         dtype: torch.dtype = torch.float32) -> list[int]:
    return [token.token_id for token in ask(sampler, torch.tensor(logits, dtype=dtype), rows)]


def _case(what: str, size: int, fault: Callable[[], str], *needs: str) -> tuple[frozenset[str], Case]:
    return frozenset(needs), Case(what, size, fault)


def _shape(sampler: SamplerProtocol) -> Needed:
    for options, claim in (({"temperature": 0}, "greedy"), ({"temperature": 1.0}, "temperature")):
        for count in (1, 3):
            def fault(count: int = count, options: dict[str, Any] = options) -> str:
                ask(sampler, torch.zeros(count, 1), [row(seed=i, **options) for i in range(count)])
                return ""
            yield _case(f"{count} rows over a vocabulary of 1, temperature {options['temperature']:g}", count, fault,
                        claim)


def _greedy(sampler: SamplerProtocol) -> Needed:
    """The largest logit, the lowest id among equals, at temperature 0 and at tiny ones, in every format."""
    generator = torch.Generator().manual_seed(0)
    tied = [[0.0, 0.0], [1.0, 3.0, 3.0], [-0.0, 0.0], [-5.0, -5.0, -5.0], [2.0, -math.inf, 2.0], [-math.inf, -6e4]]
    tied += [torch.randint(-2, 1, (size,), generator=generator).tolist() for size in (3, 7, 40, 1000)]
    tied += [torch.randn(size, generator=generator).mul(8).tolist() for size in (2, 50)]
    for logits in tied:
        for temperature, dtype in ((0.0, torch.float32), (0.0, torch.bfloat16), (0.0, torch.float16),
                                   (0.0, torch.float64)):
            values = torch.tensor(logits, dtype=dtype).tolist()
            yield _case(f"{str(dtype)[6:]} logits {logits if len(logits) < 8 else f'({len(logits)} of them)'}, "
                        "temperature 0", len(logits),
                        lambda values=values, t=temperature, dtype=dtype: differs(
                            "the token", _ids(sampler, [values], [row(temperature=t)], dtype),
                            [values.index(max(values))]), "greedy")
    wide = [0.0] * 999 + [1.0]
    yield _case("a vocabulary of 1000, the largest logit last", 40, lambda: differs(
        "the token", _ids(sampler, [wide], [row(temperature=0)]), [999]), "greedy")
    for temperature in (1e-10, 1e-38, 5e-324):
        yield _case(f"logits [2.875, 2.955, 11.0625], temperature {temperature}: as good as 0", 3,
                    lambda t=temperature: differs("the tokens of 20 seeds", set(_ids(
                        sampler, [[2.875, 2.955, 11.0625]] * 20, [row(seed=i, temperature=t) for i in range(20)])),
                        {2}), "temperature")


def _penalties(sampler: SamplerProtocol) -> Needed:
    """Rules of penalties that a greedy choice makes visible."""
    table: tuple[tuple[str, list[float], dict[str, Any], int], ...] = (
        ("a repeated token's positive logit is divided", [2.0, 1.5], {"prompt": [0], "repetition_penalty": 2.0}, 1),
        ("its negative logit is multiplied", [-1.0, -1.5], {"prompt": [0], "repetition_penalty": 2.0}, 1),
        ("output counts as the prompt does", [2.0, 1.5], {"output": [0], "repetition_penalty": 2.0}, 1),
        ("once a token, however often it was seen", [2.0, 0.9], {"prompt": [0, 0], "output": [0],
                                                                 "repetition_penalty": 2.0}, 0),
        ("presence is subtracted after the division", [2.0, 0.25], {"output": [0], "repetition_penalty": 2.0,
                                                                    "presence_penalty": 1.0}, 1),
        ("below 1 it makes a token more likely", [1.0, 1.5], {"prompt": [0], "repetition_penalty": 0.5}, 0),
        ("presence is taken off once", [2.0, 0.9], {"output": [0, 0, 0], "presence_penalty": 1.0}, 0),
        ("presence is taken off at all", [2.0, 1.1], {"output": [0], "presence_penalty": 1.0}, 1),
        ("presence leaves the prompt alone", [2.0, 1.1], {"prompt": [0], "presence_penalty": 1.0}, 0),
        ("frequency is taken off for each time", [2.0, 0.6], {"output": [0, 0, 0], "frequency_penalty": 0.5}, 1),
        ("frequency, but for no more times than that", [2.0, 0.9], {"output": [0, 0], "frequency_penalty": 0.5}, 0),
        ("frequency leaves the prompt alone", [2.0, 0.9], {"prompt": [0, 0, 0], "frequency_penalty": 0.5}, 0),
    )
    for rule, logits, options, expected in table:
        item = row(temperature=0, **options)
        yield _case(f"{rule}: {told(logits, item)}", len(logits) + len(item.output_token_ids),
                    lambda logits=logits, item=item, expected=expected: differs(
                        "the token", _ids(sampler, [logits], [item]), [expected]), "greedy", "penalties")


def _needs(params: dict[str, Any]) -> list[str]:
    """The claims that options ask for."""
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return ["temperature", *(name for name in ("top_k", "top_p", "min_p") if name in params),
            *(["penalties"] if any(name in params for name in penalties) else [])]


def _distributions(sampler: SamplerProtocol) -> Needed:
    """Chosen options; seed, choice and position each alone must draw from the distribution."""
    for options in ({"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 2.5}, {"top_k": 1}, {"top_k": 3},
                    {"top_k": 100}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 1e-6}, {"min_p": 0.3}, {"min_p": 1.0},
                    {"temperature": 0.6, "top_k": 4, "top_p": 0.8}, {"temperature": 2.0, "min_p": 0.3},
                    {"temperature": 2.5, "top_k": 3, "top_p": 0.7},
                    {"repetition_penalty": 1.8}, {"presence_penalty": 1.0, "frequency_penalty": 0.4},
                    {"repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": 0.4}):
        item = row(prompt=[3, 3, 1], output=[2, 2, 5], **options)
        yield _case(told(_LOGITS, item), 10 + len(options), lambda options=options: drawn_wrongly(
            sampler, _LOGITS, [row(i, prompt=[3, 3, 1], output=[2, 2, 5], **options) for i in range(_DRAWS)]),
            *_needs(options))
    ties = [1.0, 2.0, 2.0, 2.0, 0.0]
    yield _case(f"top_k 2 among equals keeps the lowest ids: {told(ties, row(top_k=2))}", 5, lambda: drawn_wrongly(
        sampler, ties, [row(i, top_k=2) for i in range(_DRAWS)]), "temperature", "top_k")
    for logits, options in (([1.0, 1.05, 1.1], {"temperature": 0.1}), ([1.0, 1.0], {"top_k": -1})):
        yield _case(told(logits, row(**options)), 3, lambda logits=logits, options=options: drawn_wrongly(
            sampler, logits, [row(i, **options) for i in range(_DRAWS)]), *_needs(options))
    yield _case("four equal logits, top_p 0.5: two hold half of the mass, so no more stay", 4, lambda: differs(
        "the tokens drawn", set(_ids(sampler, [[0.0] * 4] * 60, [row(i, top_p=0.5) for i in range(60)])), {0, 1}),
        "temperature", "top_p")
    huge = [1e4, 1e4 - 1, -1e4]
    yield _case(f"large logits do not overflow: {told(huge, row())}", 3, lambda: drawn_wrongly(
        sampler, huge, [row(i) for i in range(_DRAWS)]), "temperature")
    for name in ("index", "position"):
        yield _case(f"{_DRAWS} rows of one seed that differ in {name} alone: {told(_LOGITS, row())}", 12,
                    lambda name=name: drawn_wrongly(
                        sampler, _LOGITS, [row(7, **{name: i}) for i in range(_DRAWS)]), "temperature", "seed")


def _random_rows(sampler: SamplerProtocol) -> Needed:
    """Seeded random logits and options, each against its enumerated distribution."""
    generator = random.Random(1)
    made = 0
    while made < _NUM_RANDOM:
        logits = [round(generator.gauss(0, 1.5) * 4) / 4 for _ in range(generator.randint(2, 8))]
        options: dict[str, Any] = {"temperature": generator.choice((0.3, 0.7, 1.0, 1.8))}
        for name, values in (("top_k", (1, 2, 3, 5)), ("top_p", (0.2, 0.6, 0.95)), ("min_p", (0.05, 0.4)),
                             ("repetition_penalty", (0.7, 1.5)), ("frequency_penalty", (0.5, -0.5))):
            if generator.random() < 0.3:
                options[name] = generator.choice(values)
        seen = {"prompt": generator.choices(range(len(logits)), k=2), "output": generator.choices(
            range(len(logits)), k=2)}
        item = row(**seen, **options)
        if probabilities(logits, item) is None:
            continue
        made += 1
        rows = [row(1000 * made + i, **seen, **options) for i in range(_RANDOM_DRAWS)]
        yield _case(told(logits, item), 20 + len(logits) + 3 * len(options),
                    lambda logits=logits, rows=rows: drawn_wrongly(sampler, logits, rows), *_needs(options))


def drawn_wrongly(sampler: SamplerProtocol, logits: Sequence[float], rows: Sequence[SamplingRow]) -> str:
    """Draw a token for each of many rows that ask the same; why their counts are not those of the distribution.

    Pearson's chi-squared test, tokens with fewer than 5 expected draws put together; its normal approximation is that
    of Wilson and Hilferty (1931). A token of probability 0 may never be drawn.
    """
    expected = [share * len(rows) for share in probabilities(logits, rows[0]) or ()]
    counts = Counter(_ids(sampler, [logits] * len(rows), rows))
    for token_id in sorted(counts):
        if not expected[token_id]:
            return f"token {token_id} was drawn {counts[token_id]} times of {len(rows)}; it must never be"
    rare = [i for i, share in enumerate(expected) if share < 5]
    bins = [(expected[i], counts[i], f"token {i}") for i in range(len(expected)) if i not in rare]
    if (left := sum(expected[i] for i in rare)) >= 5:
        bins.append((left, sum(counts[i] for i in rare), f"one of tokens {rare}"))
    if len(bins) < 2:
        return ""
    squares = [(got - share) ** 2 / share for share, got, _ in bins]
    freedom = len(bins) - 1
    deviation = ((sum(squares) / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
    share, got, name = bins[squares.index(max(squares))]
    return "" if deviation < _UNLIKELY else f"{name} was drawn {got} times of {len(rows)}, about {share:.0f} expected"


def _alone(sampler: SamplerProtocol) -> Needed:
    """A row of a mixed batch gets the token that it gets alone."""
    generator = torch.Generator().manual_seed(5)
    for count in (2, 7):
        logits = torch.randn(count, 30, generator=generator).mul(2).tolist()
        greedy = [row(temperature=0, seed=i) for i in range(count)]
        mixed = [row(seed=i, temperature=(0.0, 0.7, 1.3)[i % 3], top_k=i, position=i) for i in range(count)]
        for rows, needs in ((greedy, ("greedy",)), (mixed, ("greedy", "temperature", "top_k", "seed"))):
            def fault(rows: list[SamplingRow] = rows, logits: list[list[float]] = logits) -> str:
                alone = [_ids(sampler, [values], [item])[0] for values, item in zip(logits, rows)]
                backwards = _ids(sampler, logits[::-1], rows[::-1])[::-1]
                return differs("together the tokens", _ids(sampler, logits, rows), alone) or \
                    differs("in reverse order the tokens", backwards, alone)
            kind = "greedy" if rows is greedy else "mixed"
            yield _case(f"{count} {kind} rows in a batch, and each alone", count * 30, fault, *needs)


def _seeds(sampler: SamplerProtocol) -> Needed:
    """Equal (seed, choice, position) draw the same, whatever came before; different ones draw independently."""
    needs, flat = ("temperature", "seed"), [[0.0] * 16]

    def again() -> str:
        rows = [row(seed=seed, position=3) for seed in range(8)]
        first = _ids(sampler, flat * 8, rows)
        _ids(sampler, flat * 5, [row(seed=99 + i) for i in range(5)])
        torch.manual_seed(12345)
        return differs("the second time the tokens", _ids(sampler, flat * 8, rows), first)

    yield _case("8 seeds, asked again after other draws and another global seed", 16, again, *needs)
    def apart() -> str:
        rows = [row(seed=i % 6, index=i // 6 % 6, position=i // 36) for i in range(216)]
        kinds = len(set(_ids(sampler, [[0.0] * 1000] * len(rows), rows)))
        return "" if kinds > 150 else f"they draw {kinds} different tokens, about 194 expected: keys of draws coincide"

    yield _case("216 rows over 1000 equal logits, no two alike in seed, choice and position", 50, apart, *needs)
    for name, change in (("seed", lambda i: {"seed": i}), ("seed's upper bits", lambda i: {"seed": i << 40}),
                         ("choice", lambda i: {"index": i}), ("position", lambda i: {"position": i})):
        yield _case(f"40 rows over 16 equal logits that differ in {name} alone", 16, lambda change=change: ""
                    if len(set(_ids(sampler, flat * 40, [row(**change(i)) for i in range(40)]))) > 4
                    else "they draw (nearly) the same token", *needs)


def _unusable(sampler: SamplerProtocol) -> Needed:
    """NaN, infinity, nothing finite: that row alone ends in an error token, with a reason."""
    good = [0.0, 2.0, 1.0]
    for bad in ([0.0, math.nan, 1.0], [math.inf, 0.0, 0.0], [-math.inf] * 3):
        for temperature, claim in ((0.0, "greedy"), (1.0, "temperature")):
            def fault(bad: list[float] = bad, temperature: float = temperature) -> str:
                rows = [row(seed=i, temperature=t) for i, t in enumerate((0.0, temperature, 0.0))]
                tokens = ask(sampler, torch.tensor([good, bad, good]), rows)
                if tokens[1].token_id != -1 or not tokens[1].error:
                    return f"the unusable row gives {tokens[1]}, expected SampledToken(-1, error=<the reason>)"
                return differs("the rows beside it", [tokens[0].token_id, tokens[2].token_id], [1, 1])
            yield _case(f"a row of logits {bad} between good ones, temperature {temperature:g}", 3, fault, "nan",
                        "greedy", claim)
