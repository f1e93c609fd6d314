"""Who guesses the next tokens, and how many guesses pay. Plain integers, no torch.

    known tokens      ... t5 t6 | d1 d2 d3        one step computes t6 and the drafts, and samples after each of them
    sampled after           t6->s1  d1->s2  d2->s3  d3->s4
    kept              s1, and s2 if s1 is d1, and s3 if s2 is d2 ...: what would have been sampled without drafts
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from minillm.request import Request

if TYPE_CHECKING:
    from minillm.speculate.table import NgramTable


class ProposerProtocol(Protocol):
    """What ``LLM(proposer=...)`` accepts. It may have a method ``see(requests, rows)`` too, told after each step from
    which row of the runner's ``states`` each request's newest token was sampled."""

    def propose(self, requests: Sequence[Request], num_tokens: int) -> Sequence[Sequence[int]]:
        """For each request at most ``num_tokens`` ids that may follow its ``token_ids``; none where it has no guess."""

    def free(self, request: Request) -> None:
        """Forget a request; an unknown one is no error."""


def seen_before(token_ids: Sequence[int], longest: int, shortest: int) -> Iterator[tuple[int, int]]:
    """Where the newest tokens were last before: how many of them, and the place behind them; the most first."""
    text = array("q", token_ids)
    width, as_bytes = text.itemsize, text.tobytes()
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        newest, end = as_bytes[-length * width:], len(as_bytes) - width
        while (place := as_bytes.rfind(newest, 0, end)) > 0 and place % width:  # it begins within a number
            end = place + len(newest) - 1
        if place >= 0:
            yield length, place // width + length


class NgramProposer:
    """Prompt lookup: what followed the last time that the newest tokens were seen, in prompt or output.

    Tried with the ``longest`` newest tokens first, with ``shortest`` last. Text that repeats itself is continued round
    and round. Costs no forward pass and finds nothing in text that is all new; there a ``table`` of what mostly follows
    which tokens guesses, one token after the other.
    (Yang et al. 2023, "Inference with Reference", arXiv:2304.04487; Saxena 2023, "Prompt Lookup Decoding".)

    Raises:
        ValueError: not 1 <= shortest <= longest.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, table: NgramTable | None = None):
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams of 1 or more tokens, shortest up to longest, got {shortest} to {longest}")
        self.longest, self.shortest, self.table = longest, shortest, table

    def propose(self, requests: Sequence[Request], num_tokens: int) -> list[list[int]]:
        """See :class:`ProposerProtocol`."""
        return [self.continued(request.token_ids, num_tokens) for request in requests]

    def continued(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """At most ``num_tokens`` guesses at what follows ``token_ids``."""
        drafts = self._copied(token_ids, num_tokens)
        while self.table and len(drafts) < num_tokens:
            text = [*token_ids[-self.longest:], *drafts]
            if (guess := self.table.next(text)) is None:
                break
            drafts.append(guess)
        return drafts

    def _copied(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        for _, start in seen_before(token_ids, self.longest, self.shortest):
            return [token_ids[start + i % (len(token_ids) - start)] for i in range(num_tokens)]
        return []

    def free(self, request: Request) -> None:
        """Nothing is kept."""


class Controller:
    """How many drafts a step should check, from what it has seen: acceptance, and seconds by rows of a step.

    A request that checks k drafts of which each is right with probability a gets ``1 + a + ... + a^k`` tokens in a step
    (Leviathan et al. 2023, arXiv:2211.17192), and the step has k more rows for it. Steps of a few rows cost what one
    row costs, as they read the same weights; a full batch pays for every row; and asking takes time, for each draft.

    Args:
        most: most drafts of a request.
        margin: what it must promise to gain.
    """

    SHARE, FOR_TRIALS = 0.1, 0.01  # weight of the newest observation; share of the time that trials may take
    OF_SHORTER = 0.5  # weight of a time below what was expected: the first step of a shape, or a disturbed one, is long

    def __init__(self, most: int, margin: float = 1.05):
        self.most, self.margin = most, margin
        self.checked, self.accepted = 1.0, 0.7  # drafts a step; hopeful, so that it is tried
        self.seconds: dict[int, float] = {}  # by rows of a step
        self.asking_s, self.answered = 0.0, 1.0  # what asking takes a draft, and the share of requests that get some
        self._drafting, self._saved_s = False, 0.0

    @property
    def acceptance(self) -> float:
        """Of the drafts that came to be checked, the share that was right."""
        return self.accepted / self.checked

    def num_drafts(self, num_requests: int) -> int:
        """Drafts for each of ``num_requests`` that decode; 0: none."""
        plain = self.seconds.get(num_requests)
        if plain is None:  # what a plain step costs must be known first
            return 0
        asking, answered = self.asking_s, self.answered
        if asking < 0.01 * plain:  # no decision: what counts is what to do with drafts once somebody has some
            asking, answered = 0.0, max(answered, 1 / num_requests)
        costs, speeds = [plain], [self.margin / plain]
        for count in range(1, self.most + 1):
            costs.append(count * asking + self._seconds(num_requests, num_requests * (1 + answered * count)))
            speeds.append((1 + answered * (self.tokens_per_step(count) - 1)) / costs[-1])
        return self._tried(speeds, costs)

    def _tried(self, speeds: list[float], costs: list[float]) -> int:
        """The fastest, or the other way (drafts or none) once a share of the time since the last trial pays for it:
        text changes, and so does a machine."""
        best = speeds.index(max(speeds))
        other = 0 if best else speeds.index(max(speeds[1:]), 1)
        self._saved_s = self._saved_s + self.FOR_TRIALS * costs[best] if (best > 0) == self._drafting else 0.0
        self._drafting = best > 0
        if self._saved_s < costs[other]:
            return best
        self._saved_s = 0.0
        return other

    def tokens_per_step(self, num_drafts: int) -> float:
        """Expected of one request, at the acceptance seen."""
        return math.fsum(self.acceptance**k for k in range(num_drafts + 1))

    def asked(self, seconds: float, num_requests: int, num_answered: int) -> None:
        """The proposer took so long for a draft, and had some for so many of those that it was asked for."""
        self.asking_s = self._moved(self.asking_s, seconds) if self.asking_s else seconds
        self.answered = self._moved(self.answered, num_answered / num_requests)

    def saw(self, num_rows: int, seconds: float, num_checked: int, num_accepted: int) -> None:
        """A step of decodes alone: its rows and time, and how many of the drafts that came to be checked were right.

        A draft behind a wrong one is not checked, and says nothing. Both numbers are averaged, and not the share of
        each step: a step ends with its first wrong draft, so its own share is too low.
        """
        before = self.seconds.get(num_rows, seconds)
        self.seconds[num_rows] = self._moved(before, seconds, self.OF_SHORTER if seconds < before else self.SHARE)
        if num_checked:
            self.checked = self._moved(self.checked, num_checked)
            self.accepted = self._moved(self.accepted, num_accepted)

    def _moved(self, old: float, new: float, share: float = SHARE) -> float:
        return old + share * (new - old)

    def _seconds(self, num_requests: int, num_rows: float) -> float:
        """Of a step of ``num_rows``, on a line between the nearest that were seen; beyond the last, hoped to cost no
        more than it, so that it is tried."""
        below = max(rows for rows in self.seconds if rows <= num_rows)  # at least num_requests, which was seen
        above = min((rows for rows in self.seconds if rows >= num_rows), default=below)
        share = (num_rows - below) / (above - below) if above > below else 0.0
        return self.seconds[below] + share * (self.seconds[above] - self.seconds[below])
