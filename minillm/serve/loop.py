"""The engine in a thread of its own, so that nobody who asks ever computes.

    callers' threads                     engine thread
    tokenize, validate ── submit ──►  calls: one queue in  ──► step, step, step ...
    read pieces        ◄── deliver ──  each piece, to its own caller, as it is made

It steps while a request is in flight and sleeps otherwise. Between two steps it answers the calls that have come:
requests, cancellations, anything that must find the engine at rest.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet, finalize

from minillm.engine import Engine
from minillm.errors import EngineDead, told
from minillm.prompts import Job
from minillm.request import StreamPiece
from minillm.submission import Submission

T = TypeVar("T")
# A piece and when it was made (``perf_counter`` seconds); the error is the last thing that a reader gets.
Delivery = tuple[StreamPiece, float] | EngineDead
Deliver = Callable[[Delivery], None]
_CLOSED = "this engine has been closed; make a new one"
_log = logging.getLogger(__name__)


class EngineLoop:
    """Runs ``engine`` in one thread, from the first call until :meth:`close`; any thread may call it.

    The thread is a daemon, or a loop that nobody closed would keep the interpreter alive; a daemon that computes while
    the interpreter is taken down can crash it, so it is ended when the program exits. A loop that is dropped ends too.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._thread = _EngineThread(engine)
        # Not joined here: what collects the garbage may hold a lock that the step in progress needs.
        finalize(self, self._thread.calls.put, None).atexit = False

    def call(self, work: Callable[..., T], *args: Any) -> Future[T]:
        """Have the engine thread call ``work(*args)`` between two steps.

        Raises:
            EngineDead: at once, or from the future when the engine ends before it comes to that.
        """
        return self._thread.call(partial(work, *args))

    def submit(self, jobs: Sequence[Job], deliver: Deliver) -> Future[list[Submission]]:
        """Queue ``jobs``, all or none; whoever holds their submissions keeps them running.

        ``deliver`` takes each piece in the engine thread and must not block. The last piece of a choice has a
        ``finish_reason``; an :class:`EngineDead` in place of a piece is the last thing that comes.

        Raises:
            EngineDead, QueueFull: from the future; then nothing has been queued.
        """
        return self.call(self._thread.submit, jobs, deliver)

    def cancel(self, *request_ids: str) -> None:
        """Cancel the requests named before the next step; never waits, harmless at any time."""
        self._thread.cancel(frozenset(request_ids))

    def check(self) -> None:
        """Raise :class:`EngineDead` when closed or failed."""
        self._thread.check()

    def close(self) -> None:
        """Cancel everything in flight, close the engine and end the thread; waits for the step in progress."""
        self._thread.end()


class _Outbox(deque[tuple[StreamPiece, float]]):
    """In place of a submission's ``pieces``: hands each on as it is made, in the thread that made it."""

    def __init__(self, deliver: Deliver, cancel: Callable[[], None]):
        super().__init__()
        self._deliver, self._cancel = deliver, cancel

    def append(self, delivery: Delivery) -> None:
        try:
            self._deliver(delivery)
        except Exception as error:
            if not isinstance(error, RuntimeError):  # as of an event loop that has been closed: nobody will read this
                _log.exception("a reader failed, and its request is cancelled")
            self._cancel()


class _Call:
    def __init__(self, work: Callable[[], Any]):
        self.work, self.future = work, Future()

    def answer(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.future.set_result(result)


class _EngineThread(threading.Thread):
    """What runs. It knows no :class:`EngineLoop`, so that one can be dropped."""

    def __init__(self, engine: Engine):
        super().__init__(name="minillm-engine", daemon=True)
        self.engine = engine
        # A simple queue's put may interrupt itself, as the finalizer of a dropped submission does. None ends the loop.
        self.calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._readers: WeakSet[Submission] = WeakSet()
        self._guard = threading.RLock()  # of _dead, and of starting once; a signal handler may close meanwhile
        self._dead: str | None = None

    # ---- called from any thread

    def check(self) -> None:
        if self._dead:
            raise EngineDead(self._dead)

    def call(self, work: Callable[[], T]) -> Future[T]:
        call = _Call(work)
        with self._guard:
            self.check()
            if self.ident is None:
                self.start()
            self.calls.put(call)
        return call.future

    def cancel(self, request_ids: frozenset[str]) -> None:
        if self.is_alive():
            self.calls.put(_Call(partial(self.engine.cancel, *request_ids)))

    def end(self) -> None:
        with self._guard:
            self._dead = self._dead or _CLOSED
            self.calls.put(None)
        if self.ident is None:
            self.engine.close()
        elif threading.current_thread() is not self:
            self.join()

    # ---- called in this thread

    def submit(self, jobs: Sequence[Job], deliver: Deliver) -> list[Submission]:
        submissions = []
        self.engine.check_room(sum(job.params.n for job in jobs))
        try:
            for job in jobs:
                with self.engine.turns.lock:  # or another thread that drives could make a piece before the end
                    submission = self.engine.submit(job)
                    submission.cancel = submission.drop = self._cancel_one
                    submission.pieces = _Outbox(deliver, partial(self._cancel_one, submission.output.request_id))
                self._readers.add(submission)
                submissions.append(submission)
        except BaseException:
            self.engine.cancel(*(submission.output.request_id for submission in submissions))
            raise
        return submissions

    def _cancel_one(self, request_id: str) -> None:
        self.cancel(frozenset([request_id]))

    def run(self) -> None:
        error = None
        try:
            busy = False
            while self._answer_calls(wait=not busy):
                busy = self._step()
        except EngineDead:  # somebody has closed the engine itself
            pass
        except BaseException as caught:
            error = caught
        self._die(error)

    def _answer_calls(self, wait: bool) -> bool:
        """Answer what has come, or the first to come; False when the loop shall end.

        What comes meanwhile is left for after a step: who calls again and again must not keep tokens from being made.
        """
        try:
            for _ in range(max(1, self.calls.qsize())):
                if (call := self.calls.get(wait)) is None:
                    return False
                call.answer()
                wait = False
        except Empty:
            pass
        return True

    def _step(self) -> bool:
        """One step; False when there was nothing to do. What fails with its own requests fails nobody else."""
        num_ended = self.engine.num_ended
        try:
            return self.engine.step()
        except EngineDead:
            raise
        except Exception:
            if self.engine.num_ended == num_ended:  # the next step would be this one again
                raise
            _log.exception("a step failed, and the requests in it; the engine goes on")
            return True

    def _die(self, error: BaseException | None) -> None:
        """Close the engine and tell everybody who still waits."""
        with self._guard:
            if error is not None and not self._dead:
                self._dead = f"the engine failed, make a new one: {told(error)}"
                _log.error("the engine failed", exc_info=error)
            self._dead = self._dead or _CLOSED
        if error is not None:
            self._tell_readers(error)
        try:
            self.engine.close()  # gives readers who have not been told a last piece
        except BaseException:
            _log.exception("the engine failed while it was closed")
        self._tell_readers(error)
        while True:
            try:
                call = self.calls.get(block=False)
            except Empty:
                return
            if call is not None and call.future.set_running_or_notify_cancel():
                call.future.set_exception(self._error(error))

    def _tell_readers(self, cause: BaseException | None) -> None:
        for submission in tuple(self._readers):
            submission.pieces.append(self._error(cause))
            submission.pieces = deque()  # nothing comes after it

    def _error(self, cause: BaseException | None) -> EngineDead:
        error = EngineDead(self._dead)
        error.__cause__ = cause
        return error


@atexit.register
def _end_all() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, _EngineThread):
            thread.end()
