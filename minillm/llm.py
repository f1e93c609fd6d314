"""The public face: :class:`LLM`, under vLLM's names and shapes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from minillm.assemble import assemble, load_decoder
from minillm.attention.base import AttentionBackend
from minillm.config import EngineConfig
from minillm.engine import Engine
from minillm.errors import InvalidRequest, ModelError
from minillm.limits import Limits
from minillm.measure.metrics import EngineStats
from minillm.measure.trace import Trace
from minillm.model.decoder import Decoder
from minillm.model.hub import DEFAULT_MODEL, resolve
from minillm.parts import check_part
from minillm.request import RequestOutput, SamplingParams, ScoreOutput, StreamPiece, as_token_id
from minillm.runner import Runner
from minillm.sample import Sampler, SamplerProtocol
from minillm.schedule.scheduler import SchedulerProtocol
from minillm.submission import Submission
from minillm.text.chat import encode_chat
from minillm.text.tokenizer import Tokenizer, load_tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


class LLM:
    """A model ready to answer.

        llm = LLM("smollm2-135m")
        for out in llm.generate(["The sky is"], SamplingParams(max_tokens=16)):
            print(out.outputs[0].text)

    Args:
        model: ``"smollm2-135m"``, a Hugging Face folder or hub id, a ``.gguf`` file (fetched when missing), or a
            :class:`~minillm.model.decoder.Decoder` together with ``tokenizer``.
        tokenizer: in place of the model's own: ``load_tokenizer(path)``, or ``llm.tokenizer.with_encoder(...)``.
        sampler, scheduler, attention_backend: your own part in place of minillm's, any object that meets
            ``SamplerProtocol``, ``SchedulerProtocol`` or ``AttentionBackend``.
        options: see :class:`~minillm.config.EngineConfig`.
    Raises:
        ModelError, DownloadError: the model's files are unusable or cannot be fetched.
        TypeError, ValueError: an option is unknown or out of range; a part lacks what its protocol names.
    """

    def __init__(self, model: str | Path | Decoder = DEFAULT_MODEL, *, tokenizer: Tokenizer | None = None,
                 sampler: SamplerProtocol | None = None, scheduler: SchedulerProtocol | None = None,
                 attention_backend: AttentionBackend | None = None, **options: Any):
        self.config = EngineConfig.from_options(options)
        for name, part, protocol in (
                ("tokenizer", tokenizer, Tokenizer), ("attention_backend", attention_backend, AttentionBackend),
                ("sampler", sampler, SamplerProtocol), ("scheduler", scheduler, SchedulerProtocol)):
            if part is not None:
                check_part(name, part, protocol)
        if isinstance(model, (str, Path)):
            path = resolve(model)
            tokenizer = tokenizer or load_tokenizer(path)
            model = load_decoder(path, dtype=self.config.dtype, device=self.config.device)
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
        self.engine = Engine(runner, scheduler, tokenizer, self.config, limits)

    def _check_loaded(self, model: Decoder) -> None:
        """Options that a model already loaded can no longer follow are refused, not ignored."""
        for name, own in (("dtype", str(model.dtype).removeprefix("torch.")), ("device", str(model.device))):
            if (asked := getattr(self.config, name)) not in ("auto", own, own.partition(":")[0]):
                raise ValueError(f"{name}={asked!r}, but this model is loaded as {own!r}: leave {name} out")

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 priority: int | Sequence[int] = 0) -> list[RequestOutput]:
        """Complete every prompt; one output a prompt, in order. A prompt is text or token ids.

        ``params`` and ``priority`` are one for all prompts, or one for each.

        Raises:
            InvalidRequest: naming the first bad prompt's index; nothing has run then.
            QueueFull: they are more than ``max_waiting`` allows; those queued before are cancelled.
        """
        return self._run(_listed(prompts), self._encode, params, priority)

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             params: SamplingParams | Sequence[SamplingParams] | None = None, *, priority: int | Sequence[int] = 0,
             add_generation_prompt: bool = True, continue_final_message: bool = False) -> list[RequestOutput]:
        """Answer a conversation, or several: messages ``{"role": ..., "content": ...}`` through the chat template."""
        several = isinstance(messages, (list, tuple)) and messages and not isinstance(messages[0], Mapping)
        listed = list(messages) if several else [messages]
        return self._run(listed, partial(self._encode_chat, add_generation_prompt=add_generation_prompt,
                                         continue_final_message=continue_final_message), params, priority)

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *,
               priority: int = 0) -> Stream:
        """Text as it is made, for one prompt (text, ids, or the messages of a chat). ``close()`` cancels."""
        is_chat = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        arrival_s, params = time.perf_counter(), _checked(params)
        text, ids = (self._encode_chat if is_chat else self._encode)(prompt)
        return self._start(text, ids, params, priority, arrival_s, arrival_s, time.perf_counter())

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[ScoreOutput]:
        """The log-probability of each token of given texts under the raw model. Reads no prefix cache.

        Raises:
            InvalidRequest: naming the index of a text that is empty or longer than the context.
        """
        encoded, limits = [], self.engine.limits
        for index, text in enumerate(_listed(texts)):
            with _naming(f"text {index}"):
                ids = [as_token_id(token_id) for token_id in self._encode(text)[1]]
                limits.ids("prompt", ids)
                if not 0 < len(ids) <= limits.max_model_len:
                    raise InvalidRequest(f"it has {len(ids)} tokens; from 1 to {limits.max_model_len} can be scored",
                                         "prompt")
                encoded.append(ids)
        return [ScoreOutput(ids, [None, *self.engine.score(ids)]) for ids in encoded]

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

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        return None, _members(prompt, "a prompt is text or a list of token ids")

    def _encode_chat(self, messages: Sequence[Message], **options: bool) -> tuple[str, list[int]]:
        ids = encode_chat(self.tokenizer, messages, **options)
        return self.tokenizer.decode(ids), ids

    def _run(self, prompts: Sequence[Any], encode: Callable[[Any], tuple[str | None, list[int]]],
             params: SamplingParams | Sequence[SamplingParams] | None,
             priority: int | Sequence[int]) -> list[RequestOutput]:
        """Encode and validate everything, and only then submit and drive it to the end."""
        arrival_s, limits = time.perf_counter(), self.engine.limits
        listed = _one_each("params", params, len(prompts)), _one_each("priority", priority, len(prompts))
        jobs, start_s = [], arrival_s
        for index, (prompt, own, place) in enumerate(zip(prompts, *listed, strict=True)):
            with _naming(f"prompt {index}"):
                text, ids = encode(prompt)
                own = _checked(own)
                ids, place = limits.prompt(ids, own), limits.priority(place)
                jobs.append((text, ids, own, place, arrival_s, start_s, time.perf_counter()))
                start_s = time.perf_counter()
        streams: list[Stream] = []
        try:
            streams += (self._start(*job) for job in jobs)
            for stream in streams:
                deque(stream, maxlen=0)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return [stream.output for stream in streams]

    def _start(self, text: str | None, ids: list[int], params: SamplingParams, priority: int, arrival_s: float,
               start_s: float, end_s: float) -> Stream:
        """Submit a prompt whose tokenizing took from ``start_s`` to ``end_s``."""
        stream = Stream(self.engine, self.engine.submit(ids, params, prompt=text, arrival_s=arrival_s,
                                                        priority=priority))
        for stage, *times in (("arrive", arrival_s, arrival_s), ("tokenize", start_s, end_s)):
            self.engine.span(stage, *times, stream._submission.choices[0].request)
        return stream


class Stream(Iterator[StreamPiece]):
    """The pieces of one prompt, as they are made. ``output`` grows with them and is complete at the end."""

    def __init__(self, engine: Engine, submission: Submission):
        self._engine, self._submission = engine, submission
        self.output = submission.output

    def __next__(self) -> StreamPiece:
        try:
            self._engine.advance(self._submission)
        except BaseException:
            self.close()
            raise
        if not self._submission.pieces:
            raise StopIteration
        piece, made_s = self._submission.pieces.popleft()
        request = self._submission.choices[piece.index].request
        self._engine.span("deliver", made_s, time.perf_counter(), request)
        return piece

    def close(self) -> None:
        """Cancel what is still running; harmless when finished or called again."""
        self._submission.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _listed(prompts: object) -> list[Any]:
    """One prompt (text, or ids in anything that can be indexed) or several, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    listed = _members(prompts, "prompts are text, a list of token ids, or a list of such prompts")
    of_ids = listed and hasattr(listed[0], "__index__") and not getattr(listed[0], "ndim", 0)
    return [listed] if of_ids and hasattr(prompts, "__getitem__") else listed


def _members(value: object, wanted: str) -> list[Any]:
    """The members of a list, an array or a generator; of nothing else that Python happens to iterate over."""
    try:
        if isinstance(value, (bytes, bytearray, memoryview, Mapping, Set)):
            raise TypeError
        members = iter(value)
    except TypeError:
        raise InvalidRequest(f"{wanted}, got {value!r}", "prompt") from None
    return list(members)


def _one_each(name: str, given: object, count: int) -> Sequence[Any]:
    """What was given for each of ``count`` prompts, or the one value for all of them."""
    listed = given if isinstance(given, (list, tuple)) else [given] * count
    if len(listed) != count:
        raise InvalidRequest(f"{count} prompts, {len(listed)} values of {name}: give one, or as many", name)
    return listed


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be SamplingParams(...), got {params!r}", "params")
    return params or SamplingParams()


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Put ``what`` in front of an :class:`InvalidRequest`'s message."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{what}: {error}", error.param) from None
