"""The engine: validated requests in, one step at a time, tokens and text out.

``step()`` is the whole engine: schedule, run, commit, deliver. Any thread may submit, cancel or drive; one lock
makes a step atomic, and whoever waits for tokens drives the engine for everybody (:meth:`Engine.advance`).
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args
from weakref import ref

from minillm.config import EngineConfig
from minillm.errors import QueueFull, told
from minillm.limits import Limits
from minillm.measure.metrics import EngineStats
from minillm.measure.trace import Trace
from minillm.prompts import Job
from minillm.request import FinishReason, Request, StreamPiece
from minillm.runner import Runner
from minillm.sample import SampledToken, usable_tokens
from minillm.schedule.plan import ScheduledRequest, StepPlan
from minillm.schedule.scheduler import SchedulerProtocol
from minillm.speculate.speculation import Speculation
from minillm.submission import Choice, Submission
from minillm.text.tokenizer import Tokenizer
from minillm.turns import Turns

# A thread that waits for its tokens while another drives the engine looks for them this often.
_HANDOVER_S = 0.005


class Engine:
    """Runs requests over one model, within ``limits``."""

    def __init__(self, runner: Runner, scheduler: SchedulerProtocol, tokenizer: Tokenizer, config: EngineConfig,
                 limits: Limits, speculation: Speculation | None = None):
        self.runner, self.scheduler, self.tokenizer, self.config = runner, scheduler, tokenizer, config
        self.limits, self.speculation = limits, speculation
        self.turns = Turns(self._cancel)
        self.traces: list[Trace] = []
        self._stats = EngineStats(num_finished=Counter(dict.fromkeys(get_args(FinishReason), 0)))
        self._in_flight: dict[Request, tuple[ref[Submission], Choice]] = {}
        self._num_submissions = 0

    # ---- requests in -------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> Submission:
        """Queue the ``n`` choices of a prompt that :class:`~minillm.prompts.Prompts` has made fit to run.

        Raises:
            QueueFull: ``max_waiting`` requests wait already; nothing has been queued.
        """
        submission = self.turns.exclusively(self._queue, job)
        request = submission.choices[0].request
        self.span("arrive", job.arrival_s, job.arrival_s, request)
        self.span("tokenize", job.start_s, job.end_s, request)
        return submission

    def check_room(self, num_requests: int) -> None:
        """Raise :class:`QueueFull` when so many more requests are more than may wait, free places aside."""
        if self.config.max_waiting is None:
            return
        places = max(0, getattr(self.scheduler, "max_num_seqs", self.config.max_num_seqs) - len(self.scheduler.running))
        if len(self.scheduler.waiting) + num_requests > places + self.config.max_waiting:
            raise QueueFull(f"{num_requests} more: {len(self.scheduler.waiting)} requests wait already, {places} can "
                            f"start, and max_waiting is {self.config.max_waiting}. Try again later, ask for fewer at "
                            "once, or raise it")

    def _queue(self, job: Job) -> Submission:
        params, most, number = job.params, self.limits.max_model_len, self._num_submissions
        self.check_room(params.n)
        self._num_submissions += 1
        limit = most if params.max_tokens is None else len(job.token_ids) + params.max_tokens
        submission = Submission([Request(
            request_id=f"req-{number}", prompt_token_ids=tuple(job.token_ids), params=params, index=index,
            seed=_derived_seed(self.config.seed, number) if params.seed is None else params.seed,
            max_total_tokens=min(limit, most), priority=job.priority, arrival_s=job.arrival_s,
            eos_token_ids=self.runner.model.config.eos_token_ids,
        ) for index in range(params.n)], self.tokenizer, job.text, self.cancel, self.turns.cancel_soon)
        try:
            for choice in submission.choices:
                self._in_flight[choice.request] = ref(submission), choice
                self.scheduler.add(choice.request)
        except BaseException as error:
            self._end([choice.request for choice in submission.choices], "error", told(error))
            raise
        return submission

    def cancel(self, *request_ids: str) -> None:
        """Cancel the requests named (none named: nothing), in any state, any number of times, from any thread.

        What they held is free on return, text made so far stays in their outputs, and nobody else is touched. Called
        from inside a step (by a signal handler, a finalizer or a plugged-in part), it takes effect after that step.
        """
        self.turns.cancel(frozenset(request_ids))

    def cancel_all(self) -> None:
        """Cancel every request in flight, as :meth:`cancel` does those named."""
        self.turns.cancel(None)

    def _cancel(self, request_ids: frozenset[str] | None) -> list[Exception]:
        return self._end([request for request in tuple(self._in_flight)
                          if request_ids is None or request.request_id in request_ids], "cancelled")

    def _end(self, requests: Iterable[Request], reason: FinishReason, error: str | None = None) -> list[Exception]:
        """End those of ``requests`` that are in flight. A plugged-in part or a reader that raises at one keeps no other
        from its end; returns what was raised."""
        failures = []
        for request in requests:
            try:
                self.scheduler.finish(request, reason, error=error)
                if request in self._in_flight:
                    # It may have finished before, and its last token never been delivered.
                    request.finish_reason, request.stop_reason, request.error = reason, None, error
                    self._deliver(request, None)
            except Exception as failure:
                failures.append(failure)
        return failures

    def close(self) -> None:
        """Cancel everything; any later use raises :class:`EngineDead`."""
        self.turns.close()

    # ---- one step ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step; False when there was nothing to do.

        An exception from the model, the sampler or what follows ends the requests of that step with
        ``finish_reason="error"``, one from the scheduler all requests; it is raised, and the engine goes on. Ctrl-C
        in the proposer, model or sampler ends none: nothing has been committed, so the next step does that one again.
        """
        return self.turns.exclusively(self._step)

    def _step(self) -> bool:
        plan, computing = None, True
        try:
            if self.speculation is not None:
                self.speculation.propose(self.scheduler.running)
            computing = False
            plan = self.scheduler.schedule()
            if not plan.scheduled:
                if self._in_flight:
                    raise RuntimeError("the scheduler planned nothing although requests wait or run")
                return False
            start_s, computing = time.perf_counter(), True
            num_rows = sum(1 + len(item.draft_token_ids) for item in plan.sampling)
            sampled = usable_tokens(self.runner.run(plan), num_rows, self.limits.vocab_size)
            computing = False
            self._commit(plan, sampled, start_s, time.perf_counter())
            return True
        except BaseException as error:
            if isinstance(error, Exception) or not computing:
                planned = [getattr(item, "request", None) for item in getattr(plan, "scheduled", ())]  # or junk
                in_step = [request for request in planned if request in self._in_flight]
                self._end(in_step or list(self._in_flight), "error", told(error))
            raise

    @property
    def num_ended(self) -> int:
        """How many requests have ended, in whatever way: a failed step that ended none would fail again."""
        return sum(self._stats.num_finished.values())

    def advance(self, submission: Submission) -> bool:
        """Drive the engine until ``submission`` has a piece to take; False when it is finished and none is left.

        Raises what a step raises that ends ``submission``, or nobody: who drives does not pay for others' failures.
        """
        while not submission.pieces:
            try:
                if self.turns.lock.acquire(timeout=_HANDOVER_S):
                    # Only between steps: within one, a request is finished before its last piece is there.
                    if submission.pieces or submission.is_finished:
                        return bool(submission.pieces)
                    num_ended = self.num_ended
                    try:
                        self.step()
                    except Exception:
                        if submission.is_finished or self.num_ended == num_ended:
                            raise
            finally:
                try:
                    self.turns.let_go()
                finally:  # where Ctrl-C came in that line
                    self.turns.let_go()
        return True

    def _commit(self, plan: StepPlan, sampled: Sequence[SampledToken], start_s: float, end_s: float) -> None:
        """Commit a step; one whose drafts were right is committed as the steps of one token that it stands for."""
        tokens = [[token] for token in sampled] if self.speculation is None else \
            self.speculation.accept(plan, sampled, end_s - start_s)
        self._count(plan, start_s, end_s)
        while plan.scheduled:
            now = list(zip(plan.sampling, tokens, strict=True))
            for item, (token, *_) in now:
                if token.error:
                    self.scheduler.finish(item.request, "error", error=token.error)
            self._stats.num_output_tokens += sum(not item.request.is_finished for item, _ in now)
            self.scheduler.commit(plan, [token.token_id for _, (token, *_) in now])
            for item, (token, *_) in now:
                self._deliver(item.request, None if token.error else token, end_s)
            more = [(ScheduledRequest(item.request, item.end, 1), later) for item, (_, *later) in now
                    if later and not item.request.is_finished]
            plan, tokens = StepPlan(tuple(item for item, _ in more)), [later for _, later in more]

    def _count(self, plan: StepPlan, start_s: float, end_s: float) -> None:
        self._stats.num_steps += 1
        for item in plan.scheduled:
            request = item.request
            if item.samples and not request.num_output_tokens:  # all of the prompt is read
                self._stats.num_prompt_tokens += len(request.prompt_token_ids)
                self._stats.num_cached_tokens += request.num_cached_tokens
            if item.start == request.num_cached_tokens and not request.num_preemptions:
                if request.admitted_s is None:  # not every scheduler says
                    request.admitted_s = start_s
                self.span("queue", request.queued_s, request.admitted_s, request)
            self.span(item.stage, start_s, end_s, request, num_tokens=item.num_tokens, position=item.start)

    def span(self, stage: str, start_s: float, end_s: float, request: Request, **args: int) -> None:
        """Add a span of ``request`` to the traces that are being recorded."""
        for trace in tuple(self.traces):
            trace.add(stage, start_s, end_s, request_id=request.request_id, index=request.index, **args)

    # ---- text out ----------------------------------------------------------------------------------------------

    def _deliver(self, request: Request, token: SampledToken | None, time_s: float = 0.0) -> None:
        """Turn a request's new token into text and a piece; on its last, flush the text and free what it held."""
        if request not in self._in_flight:  # cancelled since the step began
            return
        reader, choice = self._in_flight[request]
        start_s = time.perf_counter()
        text = "" if token is None else choice.add_token(token.token_id, token.logprobs, time_s)
        if request.is_finished:
            text += choice.flush()
        if choice.stop_string is not None and request.finish_reason not in ("error", "cancelled"):
            # It also wins over a "length" or an end token that came with what completed it.
            self.scheduler.finish(request, "stop")
            request.finish_reason, request.stop_reason = "stop", choice.stop_string
        if request.is_finished:
            if request.finished_s is None:
                request.finished_s = time_s or start_s
            choice.close()
        end_s = time.perf_counter()
        self.span("detokenize", start_s, end_s, request)
        piece = StreamPiece(text, [] if token is None else [token.token_id], request.index, request.finish_reason)
        if (submission := reader()) is not None:
            submission.pieces.append((piece, end_s))
        if request.is_finished:
            del self._in_flight[request]
            self._stats.num_finished[request.finish_reason] += 1
            self.runner.attention.free(request)
            if self.speculation is not None:
                self.speculation.free(request)

    def score(self, token_ids: list[int]) -> list[float]:
        """See :meth:`Runner.score`; between steps, so that it may be called from any thread."""
        return self.turns.exclusively(self.runner.score, token_ids)

    def reset_prefix_cache(self) -> None:
        """Forget what finished requests have left in the prefix cache; a no-op where there is none."""
        pool = getattr(self.scheduler, "pool", None)
        if (reset := getattr(self.scheduler, "reset_prefix_cache", getattr(pool, "forget", None))) is not None:
            self.turns.exclusively(reset)

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        with self.turns.lock:
            scheduler, pool = self.scheduler, getattr(self.scheduler, "pool", None)
            return replace(self._stats, num_waiting=len(scheduler.waiting), num_running=len(scheduler.running),
                           num_finished=dict(self._stats.num_finished), num_blocks=pool and pool.num_blocks,
                           num_free_blocks=pool and pool.num_available,
                           num_preemptions=getattr(scheduler, "num_preempted", 0))


def _derived_seed(seed: int, submission: int) -> int:
    """A request's own seed from the engine's: runs repeat, and two requests of one run differ."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{submission}".encode(), digest_size=8).digest(), "big")
