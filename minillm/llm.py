"""The public face: :class:`LLM`, under vLLM's names and shapes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from minillm.attention.base import AttentionBackend
from minillm.attention.torch_backend import ContiguousAttention
from minillm.config import EngineConfig
from minillm.engine import Engine, EngineStats
from minillm.errors import InvalidRequest, ModelError
from minillm.measure.trace import Trace
from minillm.model.config import load_config
from minillm.model.decoder import Decoder
from minillm.model.device import resolve_device
from minillm.model.hub import DEFAULT_MODEL, resolve
from minillm.model.weights import load_weights
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
        if attention_backend is None:
            attention_backend = ContiguousAttention(model.config, dtype=model.dtype, device=model.device)
        self.attention, sampler = attention_backend, Sampler(vocab_size) if sampler is None else sampler
        runner = Runner(model.forward, self.attention, sampler, device=model.device)
        bos = model.config.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.engine = Engine(runner, tokenizer, self.config, max_model_len=max_model_len, vocab_size=vocab_size,
                             eos_token_ids=model.config.eos_token_ids, bos_token_id=bos, scheduler=scheduler)

    def _check_loaded(self, model: Decoder) -> None:
        """Options that a model already loaded can no longer follow are refused, not ignored."""
        for name, own in (("dtype", str(model.dtype).removeprefix("torch.")), ("device", str(model.device))):
            if (asked := getattr(self.config, name)) not in ("auto", own, own.partition(":")[0]):
                raise ValueError(f"{name}={asked!r}, but this model is loaded as {own!r}: leave {name} out")

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
        """Complete every prompt; one output a prompt, in order. A prompt is text or token ids.

        Raises:
            InvalidRequest: naming the first bad prompt's index; nothing has run then.
        """
        return self._run(_listed(prompts), self._encode, params)

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             params: SamplingParams | Sequence[SamplingParams] | None = None, *, add_generation_prompt: bool = True,
             continue_final_message: bool = False) -> list[RequestOutput]:
        """Answer a conversation, or several: messages ``{"role": ..., "content": ...}`` through the chat template."""
        several = isinstance(messages, (list, tuple)) and messages and not isinstance(messages[0], Mapping)
        listed = list(messages) if several else [messages]
        return self._run(listed, partial(self._encode_chat, add_generation_prompt=add_generation_prompt,
                                         continue_final_message=continue_final_message), params)

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Stream:
        """Text as it is made, for one prompt (text, ids, or the messages of a chat). ``close()`` cancels."""
        is_chat = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        arrival_s, params = time.perf_counter(), _checked(params)
        text, ids = (self._encode_chat if is_chat else self._encode)(prompt)
        return self._start(text, ids, params, arrival_s, arrival_s, time.perf_counter())

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[ScoreOutput]:
        """The log-probability of each token of given texts under the raw model. Reads no prefix cache.

        Raises:
            InvalidRequest: naming the index of a text that is empty or longer than the context.
        """
        encoded, most = [], self.engine.max_model_len
        for index, text in enumerate(_listed(texts)):
            with _naming(f"text {index}"):
                ids = [as_token_id(token_id) for token_id in self._encode(text)[1]]
                self.engine.check_ids("prompt", ids)
                if not 0 < len(ids) <= most:
                    raise InvalidRequest(f"it has {len(ids)} tokens; from 1 to {most} can be scored", "prompt")
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
             params: SamplingParams | Sequence[SamplingParams] | None) -> list[RequestOutput]:
        """Encode and validate everything, and only then submit and drive it to the end."""
        arrival_s = time.perf_counter()
        listed = [_checked(own) for own in params] if isinstance(params, (list, tuple)) else \
            [_checked(params)] * len(prompts)
        if len(listed) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, {len(listed)} SamplingParams: give one or as many", "params")
        jobs, start_s = [], arrival_s
        for index, (prompt, own) in enumerate(zip(prompts, listed, strict=True)):
            with _naming(f"prompt {index}"):
                text, ids = encode(prompt)
                jobs.append((text, self.engine.validate(ids, own), own, arrival_s, start_s, time.perf_counter()))
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

    def _start(self, text: str | None, ids: list[int], params: SamplingParams, arrival_s: float, start_s: float,
               end_s: float) -> Stream:
        """Submit a prompt whose tokenizing took from ``start_s`` to ``end_s``."""
        stream = Stream(self.engine, self.engine.submit(ids, params, prompt=text, arrival_s=arrival_s))
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


def load_decoder(path: Path, *, dtype: str = "auto", device: str = "auto") -> Decoder:
    """The decoder of a resolved folder or ``.gguf`` file, on ``device``, see :func:`resolve_device`."""
    device, config = resolve_device(device), load_config(path)
    return Decoder.from_weights(config, load_weights(path, config), dtype=dtype, device=device)
