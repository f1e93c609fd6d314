"""One engine's speculation: whom to ask for drafts, and what of them is kept. No torch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from minillm.errors import shown, told
from minillm.request import Request
from minillm.schedule.plan import StepPlan
from minillm.speculate.propose import Controller, ProposerProtocol

if TYPE_CHECKING:
    from minillm.sample import SampledToken


class Speculation:
    """Asks ``proposer`` for as many drafts as ``controller`` says, and tells the controller what came of them.

    A proposer that fails is not asked again (``failure`` says why, and a warning does): nobody needs its drafts.
    ``num_checked`` drafts came to be checked so far (those before them were right), and ``num_accepted`` were right.
    """

    def __init__(self, proposer: ProposerProtocol, controller: Controller, vocab_size: int):
        self.proposer, self.controller, self.vocab_size = proposer, controller, vocab_size
        self._see = getattr(proposer, "see", None)  # of a proposer that looks at the target's rows
        self.num_checked = self.num_accepted = 0
        self.failure: str | None = None

    def propose(self, running: Sequence[Request]) -> None:
        """Set the drafts of those requests that decode; of others none."""
        decoding = []
        for request in running:
            request.draft_token_ids = request.draft_distributions = ()
            if request.num_missing_tokens == 1:
                decoding.append(request)
        if self.failure or not decoding or not (count := self.controller.num_drafts(len(decoding))):
            return
        start_s = time.perf_counter()
        try:
            proposed = [tuple(drafts)[:count] for drafts in self.proposer.propose(decoding, count)]
            if len(proposed) != len(decoding):
                raise ValueError(f"it must return {len(decoding)} lists of ids, and returned {len(proposed)}")
            if junk := [drafts for drafts in proposed for draft in drafts
                        if type(draft) is not int or not 0 <= draft < self.vocab_size]:
                raise ValueError(f"it guessed {shown(junk[0])}; ids are ints from 0 to {self.vocab_size - 1}")
        except Exception as error:
            self._fail(error)
            return
        for request, drafts in zip(decoding, proposed):
            request.draft_token_ids = drafts
        self.controller.asked((time.perf_counter() - start_s) / count, len(decoding), sum(map(bool, proposed)))

    def accept(self, plan: StepPlan, sampled: Sequence[SampledToken], seconds: float) -> list[list[SampledToken]]:
        """For each item of ``plan.sampling`` the tokens it gets, one at least: those sampled after its last known token
        and after every draft that is what was sampled before it, in order."""
        kept, newest, start, num_checked, num_accepted = [], [], 0, 0, 0
        for item in plan.sampling:
            drafts, own = item.draft_token_ids, sampled[start:start + 1 + len(item.draft_token_ids)]
            right = next((i for i, draft in enumerate(drafts) if own[i].token_id != draft), len(drafts))
            num_checked += min(right + 1, len(drafts))
            num_accepted += right
            kept.append(list(own[:right + 1]))
            newest.append(start + right)
            start += len(own)
        self.num_checked, self.num_accepted = self.num_checked + num_checked, self.num_accepted + num_accepted
        if self._see and newest and not self.failure:
            self._tell(self._see, [item.request for item in plan.sampling], newest)
        if all(item.stage == "decode" for item in plan.scheduled):
            self.controller.saw(plan.num_tokens, seconds, num_checked, num_accepted)
        return kept

    def free(self, request: Request) -> None:
        """A request has ended."""
        self._tell(self.proposer.free, request)

    def _tell(self, method: Callable[..., None], *news: object) -> None:
        try:
            method(*news)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failure = told(error)
        warnings.warn(f"the proposer failed, the engine goes on without drafts: {self.failure}", RuntimeWarning,
                      stacklevel=2)
