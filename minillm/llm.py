"""The public face: :class:`LLM`, under vLLM's names and shapes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from minillm.attention.base import AttentionBackend
from minillm.attention.torch_backend import ContiguousAttention
from minillm.config import EngineConfig
from minillm.engine import Engine, EngineStats, as_token_id
from minillm.errors import InvalidRequest, ModelError
from minillm.measure.trace import Trace
from minillm.model.config import load_config
from minillm.model.decoder import Decoder
from minillm.model.hub import DEFAULT_MODEL, resolve
from minillm.model.weights import load_weights
from minillm.request import RequestOutput, SamplingParams, ScoreOutput, StreamPiece
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
        tokenizer: in place of the model's own.
        sampler, scheduler, attention_backend: your own part in place of minillm's, any object that meets
            ``SamplerProtocol``, ``SchedulerProtocol`` or ``AttentionBackend``.
        options: see :class:`~minillm.config.EngineConfig`.
    Raises:
        ModelError, DownloadError: the model's files are unusable or cannot be fetched.
        TypeError, ValueError: an option is unknown or out of range.
    """

    def __init__(self, model: str | Path | Decoder = DEFAULT_MODEL, *, tokenizer: Tokenizer | None = None,
                 sampler: SamplerProtocol | None = None, scheduler: SchedulerProtocol | None = None,
                 attention_backend: AttentionBackend | None = None, **options: Any):
        self.config = EngineConfig.from_options(options)
        if isinstance(model, (str, Path)):
            path = resolve(model)
            tokenizer = tokenizer or load_tokenizer(path)
            model = load_decoder(path, dtype=self.config.dtype, device=self.config.device)
        elif tokenizer is None:
            raise ModelError("LLM(model=<a Decoder>) also needs tokenizer=")
        self.model, self.tokenizer = model, tokenizer
        limit = model.config.max_position_embeddings
        max_model_len = self.config.max_model_len or limit
        if max_model_len > limit:
            raise ValueError(f"max_model_len {max_model_len} is above what the model was made for: {limit}")
        vocab_size = min(tokenizer.vocab_size, model.config.vocab_size)
        self.attention = attention_backend or ContiguousAttention(model.config, dtype=model.dtype, device=model.device)
        runner = Runner(model.forward, self.attention, sampler or Sampler(vocab_size), device=model.device)
        bos = model.config.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self.engine = Engine(runner, tokenizer, self.config, max_model_len=max_model_len, vocab_size=vocab_size,
                             eos_token_ids=model.config.eos_token_ids, bos_token_id=bos, scheduler=scheduler)

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
        """Complete every prompt; one output a prompt, in order. A prompt is text or token ids.

        Raises:
            InvalidRequest: naming the first bad prompt's index; nothing has run then.
        """
        return self._run([prompts] if _is_prompt(prompts) else list(prompts), self._encode, params)

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             params: SamplingParams | Sequence[SamplingParams] | None = None, *, add_generation_prompt: bool = True,
             continue_final_message: bool = False) -> list[RequestOutput]:
        """Answer a conversation, or several: messages ``{"role": ..., "content": ...}`` through the chat template."""
        listed = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        return self._run(listed, partial(self._encode_chat, add_generation_prompt=add_generation_prompt,
                                         continue_final_message=continue_final_message), params)

    def stream(self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None) -> Stream:
        """Text as it is made, for one prompt (text, ids, or the messages of a chat). ``close()`` cancels."""
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        arrival_s = time.perf_counter()
        text, ids = (self._encode_chat if is_chat else self._encode)(prompt)
        return Stream(self.engine, self._submit(text, ids, params or SamplingParams(), arrival_s, arrival_s,
                                                time.perf_counter()))

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[ScoreOutput]:
        """The log-probability of each token of given texts under the raw model. Reads no prefix cache.

        Raises:
            InvalidRequest: naming the index of a text that is empty or longer than the context.
        """
        encoded, most = [], self.engine.max_model_len
        for index, text in enumerate([texts] if _is_prompt(texts) else list(texts)):
            with _naming(f"text {index}"):
                ids = [as_token_id(token_id) for token_id in self._encode(text)[1]]
                self.engine.check_ids("prompt", ids)
                if not 0 < len(ids) <= most:
                    raise InvalidRequest(f"it has {len(ids)} tokens; from 1 to {most} can be scored", "prompt")
                encoded.append(ids)
        return [ScoreOutput(ids, [None, *self.engine.score(ids)]) for ids in encoded]

    def cancel(self, *request_ids: str) -> None:
        """Cancel requests by id, or all when none is named; see :meth:`Engine.cancel`."""
        self.engine.cancel(*request_ids)

    def step(self) -> bool:
        """Run one engine step by hand; False when there was nothing to do."""
        return self.engine.step()

    def stats(self) -> EngineStats:
        """Counts since the engine began, and what it holds now."""
        return self.engine.stats()

    @contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Record the stages of every request that runs inside the block."""
        trace, before = Trace(), self.engine.trace
        self.engine.trace = trace
        try:
            yield trace
        finally:
            self.engine.trace = before

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
        if not isinstance(prompt, Iterable):
            raise InvalidRequest(f"a prompt is text or a list of token ids, got {prompt!r}", "prompt")
        return None, list(prompt)

    def _encode_chat(self, messages: Sequence[Message], **options: bool) -> tuple[str, list[int]]:
        ids = encode_chat(self.tokenizer, messages, **options)
        return self.tokenizer.decode(ids), ids

    def _run(self, prompts: Sequence[Any], encode: Callable[[Any], tuple[str | None, list[int]]],
             params: SamplingParams | Sequence[SamplingParams] | None) -> list[RequestOutput]:
        """Encode and validate everything, and only then submit and drive it to the end."""
        arrival_s, params = time.perf_counter(), SamplingParams() if params is None else params
        listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(listed) != len(prompts):
            raise InvalidRequest(f"{len(prompts)} prompts, {len(listed)} SamplingParams: give one or as many", "params")
        jobs, start_s = [], arrival_s
        for index, (prompt, own) in enumerate(zip(prompts, listed, strict=True)):
            with _naming(f"prompt {index}"):
                text, ids = encode(prompt)
                jobs.append((text, self.engine.validate(ids, own), own, arrival_s, start_s, time.perf_counter()))
                start_s = time.perf_counter()
        submissions: list[Submission] = []
        try:
            submissions += (self._submit(*job) for job in jobs)
            for submission in submissions:
                for _ in Stream(self.engine, submission):
                    pass
        except BaseException:
            for submission in submissions:
                self.cancel(submission.output.request_id)
            raise
        return [submission.output for submission in submissions]

    def _submit(self, text: str | None, ids: list[int], params: SamplingParams, arrival_s: float, start_s: float,
                end_s: float) -> Submission:
        """Submit a prompt whose tokenizing took from ``start_s`` to ``end_s``."""
        submission = self.engine.submit(ids, params, prompt=text, arrival_s=arrival_s)
        self.engine.span("arrive", arrival_s, arrival_s, submission.choices[0].request)
        self.engine.span("tokenize", start_s, end_s, submission.choices[0].request)
        return submission


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
        if not self._submission.is_finished:
            self._engine.cancel(self.output.request_id)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _is_prompt(value: object) -> bool:
    """Text, or a non-empty sequence of ids; a sequence of prompts is not one."""
    return isinstance(value, str) or (isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], int))


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Put ``what`` in front of an :class:`InvalidRequest`'s message."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{what}: {error}", error.param) from None


def load_decoder(path: Path, *, dtype: str = "auto", device: str = "auto") -> Decoder:
    """The decoder of a resolved folder or ``.gguf`` file, on ``device`` (``"auto"``: CUDA where there is one)."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    config = load_config(path)
    return Decoder.from_weights(config, load_weights(path, config), dtype=dtype, device=device)
