"""The engine: validated requests in, one step at a time, tokens and text out.

``step()`` is the whole engine: schedule, run, commit, deliver. Any thread may submit, cancel or drive; one lock
makes a step atomic, and whoever waits for tokens drives the engine for everybody (:meth:`Engine.advance`).
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_args
from weakref import ref

from minillm.config import EngineConfig
from minillm.errors import EngineDead, InvalidRequest
from minillm.measure.trace import Trace
from minillm.request import FinishReason, Request, SamplingParams, StreamPiece, as_token_id
from minillm.runner import Runner
from minillm.sample import SampledToken, usable_tokens
from minillm.schedule.plan import StepPlan
from minillm.schedule.scheduler import Scheduler, SchedulerProtocol
from minillm.submission import Choice, Submission
from minillm.text.tokenizer import Tokenizer

# A thread that waits for its tokens while another drives the engine looks for them this often.
_HANDOVER_S = 0.005
T = TypeVar("T")


@dataclass(slots=True)
class EngineStats:
    """Counts since the engine began, and what it holds now."""

    num_waiting: int = 0
    num_running: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(FinishReason), 0))


class Engine:
    """Runs requests over one model. ``limits``: ``max_model_len`` tokens in all, ids below ``vocab_size``."""

    def __init__(self, runner: Runner, tokenizer: Tokenizer, config: EngineConfig, *, max_model_len: int,
                 vocab_size: int, eos_token_ids: Sequence[int], bos_token_id: int | None = None,
                 scheduler: SchedulerProtocol | None = None):
        self.runner, self.tokenizer, self.config = runner, tokenizer, config
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.eos_token_ids, self.bos_token_id = tuple(eos_token_ids), bos_token_id
        self.scheduler = Scheduler.of(config, max_model_len) if scheduler is None else scheduler
        self.traces: list[Trace] = []
        self._stats = EngineStats()
        self._in_flight: dict[Request, tuple[ref[Submission], Choice]] = {}
        self._lock = threading.RLock()
        self._in_use = threading.Lock()
        self._to_cancel: deque[frozenset[str] | None] = deque()  # None: every request
        self._num_submissions = 0
        self._closed = False

    # ---- requests in -------------------------------------------------------------------------------------------

    def validate(self, prompt_token_ids: Iterable[int], params: SamplingParams) -> list[int]:
        """The prompt's ids, fit to run.

        Raises:
            InvalidRequest: an empty prompt for a model without a beginning-of-sequence token, a prompt that leaves no
                room for a token, or an id out of range in prompt, ``stop_token_ids`` or ``logit_bias``.
        """
        token_ids = [as_token_id(token_id) for token_id in prompt_token_ids]
        if not token_ids and self.bos_token_id is not None:
            token_ids = [self.bos_token_id]
        if not token_ids:
            raise InvalidRequest("the prompt is empty, and this model has no token to begin from", "prompt")
        self.check_ids("prompt", token_ids)
        self.check_ids("stop_token_ids", params.stop_token_ids)
        self.check_ids("logit_bias", params.logit_bias)
        if len(token_ids) >= self.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens; with max_model_len {self.max_model_len} at most "
                f"{self.max_model_len - 1} leave room for an answer. Shorten it or raise max_model_len", "prompt")
        if isinstance(self.scheduler, Scheduler) and (why := self.scheduler.why_never(len(token_ids))):
            raise InvalidRequest(f"the prompt has {len(token_ids)} tokens; {why}", "prompt")
        return token_ids

    def check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        """Raise :class:`InvalidRequest` naming the first id that this model does not have."""
        wrong = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"{name} holds id {wrong}; this model's run from 0 to {self.vocab_size - 1}", name)

    def submit(self, prompt_token_ids: Iterable[int], params: SamplingParams, *, prompt: str | None = None,
               arrival_s: float | None = None) -> Submission:
        """Validate a prompt and queue its ``n`` choices. ``arrival_s``: when the caller asked (``perf_counter``)."""
        token_ids = self.validate(prompt_token_ids, params)
        arrival_s = time.perf_counter() if arrival_s is None else arrival_s
        return self._exclusively(self._queue, token_ids, params, prompt, arrival_s)

    def _queue(self, token_ids: list[int], params: SamplingParams, prompt: str | None, arrival_s: float) -> Submission:
        number = self._num_submissions
        self._num_submissions += 1
        limit = self.max_model_len if params.max_tokens is None else len(token_ids) + params.max_tokens
        submission = Submission.of([Request(
            request_id=f"req-{number}", prompt_token_ids=tuple(token_ids), params=params, index=index,
            seed=_derived_seed(self.config.seed, number) if params.seed is None else params.seed,
            max_total_tokens=min(limit, self.max_model_len), eos_token_ids=self.eos_token_ids, arrival_s=arrival_s,
        ) for index in range(params.n)], self.tokenizer, prompt, self.cancel)
        try:
            for choice in submission.choices:
                self._in_flight[choice.request] = ref(submission), choice
                self.scheduler.add(choice.request)
        except BaseException as error:
            self._abandon([choice.request for choice in submission.choices], error)
            raise
        return submission

    def cancel(self, *request_ids: str) -> None:
        """Cancel the requests named (none named: nothing), in any state, any number of times, from any thread.

        What they held is free on return, text made so far stays in their outputs, and nobody else is touched. Called
        from inside a step (by a signal handler, a finalizer or a plugged-in part), it takes effect after that step.
        """
        self._cancel(frozenset(request_ids))

    def cancel_all(self) -> None:
        """Cancel every request in flight, as :meth:`cancel` does those named."""
        self._cancel(None)

    def _cancel(self, request_ids: frozenset[str] | None) -> None:
        with self._lock:
            self._to_cancel.append(request_ids)
            if not self._in_use.locked():
                self._cancel_now()

    def _cancel_now(self) -> None:
        while self._to_cancel:
            request_ids = self._to_cancel.popleft()
            for request in [r for r in self._in_flight if request_ids is None or r.request_id in request_ids]:
                self.scheduler.finish(request, "cancelled")
                self._deliver(request, None)

    def close(self) -> None:
        """Cancel everything; any later use raises :class:`EngineDead`."""
        with self._lock:
            self._closed = True
            self.cancel_all()

    def _exclusively(self, work: Callable[..., T], *args: Any) -> T:
        """Call ``work(*args)``; no other thread changes the engine meanwhile, and this one's cancellations wait.

        The lock alone would let the same thread in again, half way through a step: signal handlers, finalizers of
        dropped streams and plugged-in parts run in whatever thread is there.
        """
        with self._lock:
            if self._closed:
                raise EngineDead("this engine has been closed; make a new LLM")
            if self._in_use.locked():
                raise RuntimeError("the engine was called from inside its own step; call it before or after")
            try:
                try:
                    with self._in_use:
                        return work(*args)
                finally:
                    self._cancel_now()
            except StopIteration as error:  # let through, it would look like the end of a stream
                raise RuntimeError("a part of the engine raised StopIteration") from error

    # ---- one step ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one step; False when there was nothing to do.

        An exception from the model, the sampler or what follows ends the requests of that step with
        ``finish_reason="error"``, one from the scheduler all requests; it is raised, and the engine goes on. Ctrl-C
        in the model or sampler ends none: nothing has been committed, so the next step does that one again.
        """
        return self._exclusively(self._step)

    def _step(self) -> bool:
        plan, computing = None, False
        try:
            plan = self.scheduler.schedule()
            if not plan.scheduled:
                if self._in_flight:
                    raise RuntimeError("the scheduler planned nothing although requests wait or run")
                return False
            start_s, computing = time.perf_counter(), True
            sampled = usable_tokens(self.runner.run(plan), len(plan.sampling), self.vocab_size)
            computing = False
            self._commit(plan, sampled, start_s, time.perf_counter())
            return True
        except BaseException as error:
            if isinstance(error, Exception) or not computing:
                planned = [item.request for item in plan.scheduled] if plan else []
                self._abandon(planned or list(self._in_flight), error)
            raise

    def advance(self, submission: Submission) -> None:
        """Return when ``submission`` has a piece to take or is finished, driving the engine meanwhile."""
        while not submission.pieces:
            try:
                if self._lock.acquire(timeout=_HANDOVER_S):
                    # Only between steps: within one, a request is finished before its last piece is there.
                    if submission.pieces or submission.is_finished:
                        return
                    self.step()
            finally:
                try:
                    self._release()
                finally:  # where Ctrl-C came in that line
                    self._release()

    def _release(self) -> None:
        """Let go of the lock, if held (it is asked: Ctrl-C may come between taking it and noting that down)."""
        if self._lock._is_owned():
            self._lock.release()

    def _commit(self, plan: StepPlan, sampled: Sequence[SampledToken], start_s: float, end_s: float) -> None:
        for item, token in zip(plan.sampling, sampled, strict=True):
            if token.error:
                self.scheduler.finish(item.request, "error", error=token.error)
        self._count(plan, start_s, end_s)
        self.scheduler.commit(plan, [token.token_id for token in sampled])
        for item, token in zip(plan.sampling, sampled, strict=True):
            self._deliver(item.request, None if token.error else token, end_s)

    def _count(self, plan: StepPlan, start_s: float, end_s: float) -> None:
        self._stats.num_steps += 1
        for item in plan.scheduled:
            request = item.request
            if item.samples and not request.num_output_tokens:  # all of the prompt is read
                self._stats.num_prompt_tokens += len(request.prompt_token_ids)
            self._stats.num_output_tokens += item.samples and not request.is_finished
            if item.start == request.num_cached_tokens and not request.num_preemptions:
                self.span("queue", request.queued_s, request.admitted_s, request)
            self.span(item.stage, start_s, end_s, request, num_tokens=item.num_tokens, position=item.start)

    def span(self, stage: str, start_s: float, end_s: float, request: Request, **args: int) -> None:
        """Add a span of ``request`` to the traces that are being recorded."""
        for trace in tuple(self.traces):
            trace.add(stage, start_s, end_s, request_id=request.request_id, index=request.index, **args)

    def _abandon(self, requests: Iterable[Request], error: BaseException) -> None:
        for request in requests:
            self.scheduler.finish(request, "error")
            if request in self._in_flight:  # perhaps finished already, and its last token never delivered
                request.finish_reason, request.stop_reason = "error", None
                request.error = f"{type(error).__name__}: {error}"
                self._deliver(request, None)

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

    def score(self, token_ids: list[int]) -> list[float]:
        """See :meth:`Runner.score`; between steps, so that it may be called from any thread."""
        return self._exclusively(self.runner.score, token_ids)

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        with self._lock:
            return replace(self._stats, num_waiting=len(self.scheduler.waiting),
                           num_running=len(self.scheduler.running), num_finished=dict(self._stats.num_finished))


def _derived_seed(seed: int, submission: int) -> int:
    """A request's own seed from the engine's: runs repeat, and two requests of one run differ."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{submission}".encode(), digest_size=8).digest(), "big")
