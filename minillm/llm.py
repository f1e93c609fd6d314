"""The public face: :class:`LLM`, under vLLM's names and shapes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from minillm.assemble import assemble, load_decoder, speculation_of
from minillm.attention.base import AttentionBackend
from minillm.config import EngineConfig
from minillm.engine import Engine
from minillm.errors import ModelError
from minillm.limits import Limits
from minillm.measure.metrics import EngineStats
from minillm.measure.trace import Trace
from minillm.model.decoder import Decoder
from minillm.model.hub import DEFAULT_MODEL, resolve
from minillm.parts import check_part
from minillm.prompts import Job, Messages, OneOrEach, Prompt, Prompts
from minillm.request import RequestOutput, SamplingParams, ScoreOutput, StreamPiece
from minillm.runner import Runner
from minillm.sample import Sampler, SamplerProtocol
from minillm.schedule.scheduler import SchedulerProtocol
from minillm.speculate.propose import ProposerProtocol
from minillm.submission import Submission
from minillm.text.tokenizer import Tokenizer, load_tokenizer


class LLM(AbstractContextManager["LLM"]):
    """A model ready to answer.

        llm = LLM("smollm2-135m")
        for out in llm.generate(["The sky is"], SamplingParams(max_tokens=16)):
            print(out.outputs[0].text)

    Args:
        model: ``"smollm2-135m"``, a Hugging Face folder or hub id, a ``.gguf`` file (fetched when missing), or a
            :class:`~minillm.model.decoder.Decoder` together with ``tokenizer``.
        tokenizer: in place of the model's own: ``load_tokenizer(path)``, or ``llm.tokenizer.with_encoder(...)``.
        sampler, scheduler, attention_backend, proposer: your own part in place of minillm's, any object that meets
            ``SamplerProtocol``, ``SchedulerProtocol``, ``AttentionBackend`` or ``ProposerProtocol``.
        options: see :class:`~minillm.config.EngineConfig`.
    Raises:
        ModelError, DownloadError: the model's files are unusable or cannot be fetched.
        TypeError, ValueError: an option is unknown or out of range; a part lacks what its protocol names.
    """

    def __init__(self, model: str | Path | Decoder = DEFAULT_MODEL, *, tokenizer: Tokenizer | None = None,
                 sampler: SamplerProtocol | None = None, scheduler: SchedulerProtocol | None = None,
                 attention_backend: AttentionBackend | None = None, proposer: ProposerProtocol | None = None,
                 **options: Any):
        self.config = EngineConfig.from_options(options)
        for name, part, protocol in (
                ("tokenizer", tokenizer, Tokenizer), ("attention_backend", attention_backend, AttentionBackend),
                ("sampler", sampler, SamplerProtocol), ("scheduler", scheduler, SchedulerProtocol),
                ("proposer", proposer, ProposerProtocol)):
            if part is not None:
                check_part(name, part, protocol)
        if isinstance(model, (str, Path)):
            path = resolve(model)
            tokenizer = tokenizer or load_tokenizer(path)
            model = load_decoder(path, dtype=self.config.dtype, device=self.config.device,
                                 quantization=self.config.quantization)
        elif not hasattr(model, "forward"):
            raise TypeError(f"model must be a name, a path or a Decoder, got {model!r}")
        elif tokenizer is None:
            raise ModelError("LLM(model=<a Decoder>) also needs tokenizer=")
        else:
            self._check_loaded(model)
        self.model, self.tokenizer = model, tokenizer
        limit = model.config.max_position_embeddings
        max_model_len = self.config.max_model_len or limit
        if max_model_len > limit:
            raise ValueError(f"max_model_len {max_model_len} is above what the model was made for: {limit}")
        vocab_size = min(tokenizer.vocab_size, model.config.vocab_size)
        scheduler, self.attention = assemble(self.config, options, model, max_model_len, scheduler, attention_backend)
        bos = model.config.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        limits = Limits(max_model_len, vocab_size, bos, getattr(scheduler, "why_never", lambda num_tokens: ""),
                        getattr(scheduler, "policy", None) != "fcfs")
        runner = Runner(model, self.attention, Sampler(vocab_size) if sampler is None else sampler)
        speculation = speculation_of(self.config, proposer, scheduler, runner, tokenizer, vocab_size)
        self.engine = Engine(runner, scheduler, tokenizer, self.config, limits, speculation)
        self.prompts = Prompts(tokenizer, limits)

    def _check_loaded(self, model: Decoder) -> None:
        """Options that a model already loaded can no longer follow are refused, not ignored."""
        if self.config.quantization is not None:
            raise ValueError("quantization is for a model that is loaded here: Decoder.from_weights(quantization=...)")
        for name, own in (("dtype", str(model.dtype).removeprefix("torch.")), ("device", str(model.device))):
            if (asked := getattr(self.config, name)) not in ("auto", own, own.partition(":")[0]):
                raise ValueError(f"{name}={asked!r}, but this model is loaded as {own!r}: leave {name} out")

    def generate(self, prompts: Prompt | Sequence[Prompt], params: OneOrEach = None, *,
                 priority: int | Sequence[int] = 0) -> list[RequestOutput]:
        """Complete every prompt; one output a prompt, in order. A prompt is text or token ids.

        ``params`` and ``priority`` are one for all prompts, or one for each.

        Raises:
            InvalidRequest: naming the first bad prompt's index; nothing has run then.
            QueueFull: they are more than ``max_waiting`` allows; those queued before are cancelled.
        """
        return self._run(self.prompts.listed(prompts, params, priority))

    def chat(self, messages: Messages | Sequence[Messages], params: OneOrEach = None, *,
             priority: int | Sequence[int] = 0, add_generation_prompt: bool = True,
             continue_final_message: bool = False) -> list[RequestOutput]:
        """Answer a conversation, or several: messages ``{"role": ..., "content": ...}`` through the chat template."""
        return self._run(self.prompts.chats(messages, params, priority, add_generation_prompt=add_generation_prompt,
                                            continue_final_message=continue_final_message))

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None, *, priority: int = 0) -> Stream:
        """Text as it is made, for one prompt (text, ids, or the messages of a chat). ``close()`` cancels."""
        return self._start(self.prompts.one(prompt, params, priority))

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[ScoreOutput]:
        """The log-probability of each token of given texts under the raw model. Reads no prefix cache.

        Raises:
            InvalidRequest: naming the index of a text that is empty or longer than the context.
        """
        return [ScoreOutput(ids, [None, *self.engine.score(ids)]) for ids in self.prompts.texts(texts)]

    def cancel(self, *request_ids: str) -> None:
        """Cancel the requests named, by the ``request_id`` of their outputs; see :meth:`Engine.cancel`."""
        self.engine.cancel(*request_ids)

    def cancel_all(self) -> None:
        """Cancel every request in flight; see :meth:`Engine.cancel`."""
        self.engine.cancel_all()

    def step(self) -> bool:
        """Run one engine step by hand; False when there was nothing to do."""
        return self.engine.step()

    def stats(self) -> EngineStats:
        """Counts since the engine began, and what it holds now."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget what finished requests have left in the prefix cache, so that the next prompt is computed whole."""
        self.engine.reset_prefix_cache()

    @contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Record the stages of every request that runs inside the block."""
        trace = Trace()
        self.engine.traces.append(trace)
        try:
            yield trace
        finally:
            self.engine.traces.remove(trace)

    def close(self) -> None:
        """Cancel everything in flight; any later use raises ``EngineDead``."""
        self.engine.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, jobs: Sequence[Job]) -> list[RequestOutput]:
        self.engine.check_room(sum(job.params.n for job in jobs))  # all or none
        with ExitStack() as at_the_end:  # closes them all, which cancels what is not finished
            streams = [at_the_end.enter_context(self._start(job)) for job in jobs]
            for stream in streams:
                deque(stream, maxlen=0)
        return [stream.output for stream in streams]

    def _start(self, job: Job) -> Stream:
        return Stream(self.engine, self.engine.submit(job))


class Stream(Iterator[StreamPiece], AbstractContextManager["Stream"]):
    """The pieces of one prompt, as they are made. ``output`` grows with them and is complete at the end."""

    def __init__(self, engine: Engine, submission: Submission):
        self._engine, self._submission = engine, submission
        self.output = submission.output

    def __next__(self) -> StreamPiece:
        try:
            while self._engine.advance(self._submission):
                with suppress(IndexError):  # another thread that reads this stream was quicker
                    piece, made_s = self._submission.pieces.popleft()
                    request = self._submission.choices[piece.index].request
                    self._engine.span("deliver", made_s, time.perf_counter(), request)
                    return piece
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Cancel what is still running; harmless when finished or called again."""
        self._submission.close()

    def __exit__(self, *exception: object) -> None:
        self.close()
