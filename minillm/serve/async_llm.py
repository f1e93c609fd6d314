""":class:`AsyncLLM`: the engine for asyncio. Nothing of it runs in the event loop.

    event loop               text threads               engine thread
    await generate(...) ──►  tokenize, validate
                        ───────────────────────────►  queue, step, step ...
    async for piece     ◄──────────────────────────   each piece as it is made
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from minillm.errors import EngineDead
from minillm.llm import LLM
from minillm.measure.metrics import EngineStats
from minillm.measure.trace import Trace
from minillm.model.decoder import Decoder
from minillm.model.hub import DEFAULT_MODEL
from minillm.prompts import Job, Messages, OneOrEach, Prompt
from minillm.request import RequestOutput, SamplingParams, ScoreOutput, StreamPiece
from minillm.serve.loop import Delivery, EngineLoop
from minillm.submission import Submission

T = TypeVar("T")
# Tokenizing is Python, so more threads are no faster; but a short prompt need not wait for a long one.
_TEXT_THREADS = 4
# A step is a thousand operators, each of which gives up the interpreter and must win it back from a thread that
# tokenizes: at Python's 5 ms a turn a long text would hold up everybody for seconds.
_TURN_S = 1e-4


class AsyncLLM:
    """An :class:`~minillm.llm.LLM` to await: the same arguments, promises and errors; what is asked at once is batched.

        async with AsyncLLM("smollm2-135m") as llm:
            async for piece in llm.stream("The sky is", SamplingParams(max_tokens=16)):
                print(piece.text, end="")

    Any number of tasks, event loops and threads may use it; a stream stays in the loop that it began in. A task that is
    cancelled, and a stream that is closed or dropped, cancels its requests before the next step. ``llm`` is the LLM
    beneath, for its tokenizer and config.

    A step that fails ends its own requests with ``finish_reason="error"`` and their ``error``; nothing is raised.
    Where the engine cannot go on, everybody who waits gets ``EngineDead``.
    """

    def __init__(self, model: str | Path | Decoder = DEFAULT_MODEL, **arguments: Any):
        self.llm = LLM(model, **arguments)
        self._loop = EngineLoop(self.llm.engine)
        # Not asyncio's own pool: that leaves its threads behind where an event loop is never closed, as in a notebook.
        self._text_threads = ThreadPoolExecutor(_TEXT_THREADS, "minillm-text")

    async def generate(self, prompts: Prompt | Sequence[Prompt], params: OneOrEach = None, *,
                       priority: int | Sequence[int] = 0) -> list[RequestOutput]:
        """Complete every prompt; see :meth:`LLM.generate`. One that is more than ``max_waiting`` allows queues none."""
        return await self._run(self.llm.prompts.listed, prompts, params, priority)

    async def chat(self, messages: Messages | Sequence[Messages], params: OneOrEach = None, *,
                   priority: int | Sequence[int] = 0, add_generation_prompt: bool = True,
                   continue_final_message: bool = False) -> list[RequestOutput]:
        """Answer a conversation, or several; see :meth:`LLM.chat`."""
        return await self._run(partial(self.llm.prompts.chats, add_generation_prompt=add_generation_prompt,
                                       continue_final_message=continue_final_message), messages, params, priority)

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None, *,
               priority: int = 0) -> AsyncStream:
        """Text as it is made, for one prompt (text, ids, or the messages of a chat). It begins, and a bad prompt
        raises, when the first piece is awaited."""
        return AsyncStream(self, partial(self.llm.prompts.one, prompt, params, priority))

    async def score(self, texts: Prompt | Sequence[Prompt]) -> list[ScoreOutput]:
        """The log-probability of each token of given texts; see :meth:`LLM.score`."""
        encoded = await self._in_text_thread(partial(self.llm.prompts.texts, texts))
        return [ScoreOutput(ids, [None, *await self._call(self.llm.engine.score, ids)]) for ids in encoded]

    async def stats(self) -> EngineStats:
        """Counts since the engine began, and what it holds now: after the step in progress, for which it waits."""
        return await self._call(self.llm.engine.stats)

    def cancel(self, *request_ids: str) -> None:
        """Cancel the requests named, by the ``request_id`` of their outputs, before the next step; never waits."""
        self._loop.cancel(*request_ids)

    def tracing(self) -> AbstractContextManager[Trace]:
        """Record the stages of every request that runs inside the block; see :meth:`LLM.tracing`."""
        return self.llm.tracing()

    def close(self) -> None:
        """Cancel everything in flight and end every thread; any later use raises ``EngineDead``.

        It waits for the step in progress, and for the texts that are being tokenized.
        """
        self._loop.close()
        self._text_threads.shutdown()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    async def _run(self, prepare: Callable[..., list[Job]], *args: Any) -> list[RequestOutput]:
        jobs = await self._in_text_thread(partial(prepare, *args, arrival_s=time.perf_counter()))
        ended = _Ended(sum(job.params.n for job in jobs))
        submissions = await self._submit(jobs, ended)
        try:
            await asyncio.wrap_future(ended.future)
        finally:
            for submission in submissions:
                submission.close()
        return [submission.output for submission in submissions]

    async def _submit(self, jobs: Sequence[Job], deliver: Callable[[Delivery], None]) -> list[Submission]:
        return await asyncio.wrap_future(self._loop.submit(jobs, deliver))

    async def _call(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.wrap_future(self._loop.call(work, *args))

    async def _in_text_thread(self, work: Callable[[], T]) -> T:
        try:
            future = self._text_threads.submit(self._unless_closed, work)
        except RuntimeError:  # the pool has been shut down
            self._loop.check()
            raise
        return await asyncio.wrap_future(future)

    def _unless_closed(self, work: Callable[[], T]) -> T:
        self._loop.check()
        try:
            with _short_turns:
                return work()
        except StopIteration as error:  # no asyncio future can hold one
            raise RuntimeError("tokenizing raised StopIteration") from error


class _ShortTurns:
    """While anybody is inside, Python's threads hand the interpreter over every :data:`_TURN_S` seconds."""

    def __init__(self):
        self._lock, self._num_inside, self._usual_s = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(_TURN_S, self._usual_s))

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                sys.setswitchinterval(self._usual_s)


_short_turns = _ShortTurns()  # one, as the interval is the interpreter's


class _Ended:
    """Takes deliveries; ``future`` is done when all of ``num_choices`` have had their last."""

    def __init__(self, num_choices: int):
        self.future: Future[None] = Future()
        self._num_open = num_choices
        self.future.set_running_or_notify_cancel()  # so that who stops waiting for it does not cancel it
        self._end_if_all()

    def __call__(self, delivery: Delivery) -> None:
        if self.future.done():
            return
        if isinstance(delivery, EngineDead):
            self.future.set_exception(delivery)
            return
        self._num_open -= delivery[0].finish_reason is not None
        self._end_if_all()

    def _end_if_all(self) -> None:
        if not self._num_open:
            self.future.set_result(None)


class AsyncStream(AsyncIterator[StreamPiece]):
    """The pieces of one prompt, as they are made, for ``async for``.

    ``output`` is ``None`` before the first piece, then grows with them and is complete at the end. Pieces that are
    not read wait here (at most one a token) and hold up nobody. A deadline (``asyncio.timeout``) that strikes while a
    piece is awaited cancels the request.
    """

    def __init__(self, llm: AsyncLLM, prepare: Callable[..., Job]):
        self._llm, self._prepare = llm, prepare
        self._deliveries: asyncio.Queue[Delivery] = asyncio.Queue()
        self._turn = asyncio.Lock()  # two tasks that read one stream take turns
        self._submission: Submission | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_open, self._closed = 0, False

    @property
    def output(self) -> RequestOutput | None:
        """What has been made so far."""
        return self._submission and self._submission.output

    async def __anext__(self) -> StreamPiece:
        if self._loop not in (None, asyncio.get_running_loop()):
            self.close()
            raise RuntimeError("this stream began in another event loop, where its pieces go: ask for a new one here")
        self._loop = asyncio.get_running_loop()
        try:
            async with self._turn:
                return await self._next()
        except BaseException:
            self.close()
            raise

    async def _next(self) -> StreamPiece:
        if self._submission is None and not self._closed:
            await self._begin()
        if not self._num_open:
            raise StopAsyncIteration
        delivery = await self._deliveries.get()
        if isinstance(delivery, EngineDead):
            self._num_open = 0
            raise delivery
        piece, made_s = delivery
        self._num_open -= piece.finish_reason is not None
        self._llm.llm.engine.span("deliver", made_s, time.perf_counter(),
                                  self._submission.choices[piece.index].request)
        return piece

    async def _begin(self) -> None:
        job = await self._llm._in_text_thread(partial(self._prepare, arrival_s=time.perf_counter()))
        deliver = partial(asyncio.get_running_loop().call_soon_threadsafe, self._deliveries.put_nowait)
        [self._submission] = await self._llm._submit([job], deliver)
        self._num_open = job.params.n
        if self._closed:
            self._submission.close()

    def close(self) -> None:
        """Cancel what is still running; harmless when finished or called again. Pieces made so far can still be read.
        """
        self._closed = True
        if self._submission is not None:
            self._submission.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()
