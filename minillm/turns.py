"""Whose turn it is: one thread at a time changes the engine, and cancellations wait until it is at rest.

    threads that submit, drive, score ──► one lock ──► a step, or another piece of work
    cancellations, from any thread and at any line ──► a queue, worked off before the lock is let go
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakMethod

from minillm.errors import EngineDead

T = TypeVar("T")


class Turns:
    """``cancel``, a method, ends the requests named (``None``: all) and returns what plugged-in parts raised meanwhile.

    The lock alone would let the same thread in again, half way through a step: signal handlers, finalizers of dropped
    streams and plugged-in parts run in whatever thread is there.
    """

    def __init__(self, cancel: Callable[[frozenset[str] | None], list[Exception]]):
        self.lock = threading.RLock()
        self._in_use = threading.Lock()
        self._cancel = WeakMethod(cancel)  # an engine that is dropped frees its model at once, and is in no cycle
        self._to_cancel: deque[frozenset[str] | None] = deque()
        self._closed = False

    def exclusively(self, work: Callable[..., T], *args: Any) -> T:
        """Call ``work(*args)``; no other thread changes the engine meanwhile, and this one's cancellations wait.

        Raises:
            EngineDead: after :meth:`close`.
            RuntimeError: called from inside of such work.
        """
        with self.lock:
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

    def cancel(self, request_ids: frozenset[str] | None) -> None:
        """Cancel the requests named (``None``: all), now or at the end of the work in progress."""
        self._to_cancel.append(request_ids)
        with self.lock:
            self._cancel_now()

    def cancel_soon(self, request_id: str) -> None:
        """As :meth:`cancel`, and never waits: where another thread has the lock, that one does it before it lets go.

        For the finalizers of what was dropped, which run in any thread, whatever locks that may hold.
        """
        self._to_cancel.append(frozenset([request_id]))
        mine = False
        try:
            if mine := self.lock.acquire(blocking=False):
                self._cancel_now()
        finally:
            if mine:
                self.lock.release()

    def close(self) -> None:
        """Cancel everything and refuse all further work."""
        with self.lock:
            self._closed = True
            self.cancel(None)

    def let_go(self) -> None:
        """Release the lock, if held (it is asked: Ctrl-C may come between taking it and noting that down)."""
        if self.lock._is_owned():
            self.lock.release()

    def _cancel_now(self) -> None:
        """Does nothing within other work, or within itself (a signal handler may come at any line): that will see what
        has come."""
        failures = []
        while self._to_cancel and not self._in_use.locked():
            with self._in_use:
                while self._to_cancel:
                    failures += self._cancel()(self._to_cancel[0])
                    self._to_cancel.popleft()  # only now: where Ctrl-C comes in between, it is done again
        if failures:
            raise failures[0]
