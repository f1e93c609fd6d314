"""One prompt in flight: its ``n`` choices, and how each choice's tokens become text, pieces and metrics. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from minillm.measure.metrics import RequestMetrics
from minillm.request import CompletionOutput, Logprob, Request, RequestOutput, StreamPiece
from minillm.text.detokenizer import Detokenizer
from minillm.text.tokenizer import Tokenizer


class Choice:
    """One choice of a prompt: the scheduler's request beside the text that comes of it."""

    def __init__(self, request: Request, tokenizer: Tokenizer):
        params = request.params
        self.request, self.tokenizer = request, tokenizer
        self.output = CompletionOutput(request.index, logprobs=None if params.logprobs is None else [])
        self.metrics = RequestMetrics(arrival_s=request.arrival_s, num_prompt_tokens=len(request.prompt_token_ids))
        self._detokenizer = Detokenizer(tokenizer, stop=params.stop, skip_special_tokens=params.skip_special_tokens)

    def add_token(self, token_id: int, logprobs: Mapping[int, tuple[float, int]] | None, time_s: float) -> str:
        """Take a token that existed at ``time_s``; returns the text that may be delivered now."""
        self.output.token_ids.append(token_id)
        self.metrics.token_times_s.append(time_s)
        if self.output.logprobs is not None:
            self.output.logprobs.append({
                key: Logprob(value, rank, self.tokenizer.token_bytes(key).decode("utf-8", "backslashreplace"))
                for key, (value, rank) in (logprobs or {}).items()
            })
        # An id that ended the request is counted, and is no part of the text.
        text = "" if self.request.finish_reason == "stop" else self._detokenizer.add([token_id])
        self.output.text += text
        return text

    @property
    def stop_string(self) -> str | None:
        """The stop string that the text has reached."""
        return self._detokenizer.stop_string

    def flush(self) -> str:
        """After the request's last token: the text still held back. Its U+FFFD may yet complete a stop string."""
        text = self._detokenizer.finish()
        self.output.text += text
        return text

    def close(self) -> None:
        """Copy the finished request's reasons and times to output and metrics."""
        for name in ("finish_reason", "stop_reason", "error"):
            setattr(self.output, name, getattr(self.request, name))
        for name in ("admitted_s", "finished_s", "num_cached_tokens", "num_preemptions"):
            setattr(self.metrics, name, getattr(self.request, name))
        if self.output.finish_reason in ("error", "cancelled"):
            self.metrics.failure = self.output.finish_reason


class Submission:
    """A prompt's choices and output, held by whoever reads it; the engine holds it weakly, so that dropping it cancels.

    ``requests``: one a choice, in the order of their index. ``pieces``: what has been made and not yet taken, each with
    when it was made. ``cancel`` and ``drop`` take the request's id and cancel it; ``drop`` is for the garbage
    collector, and must not wait.
    """

    choices: Sequence[Choice] = ()  # until all are made: nothing to drop where that fails

    def __init__(self, requests: list[Request], tokenizer: Tokenizer, prompt: str | None,
                 cancel: Callable[[str], None], drop: Callable[[str], None]):
        self.cancel, self.drop = cancel, drop
        self.pieces: deque[tuple[StreamPiece, float]] = deque()
        choices = [Choice(request, tokenizer) for request in requests]
        self.output = RequestOutput(requests[0].request_id, prompt, list(requests[0].prompt_token_ids),
                                    [choice.output for choice in choices], [choice.metrics for choice in choices])
        self.choices = choices

    @property
    def is_finished(self) -> bool:
        """True once every choice has its finish reason."""
        return all(choice.request.is_finished for choice in self.choices)

    def close(self) -> None:
        """Cancel what is still running; harmless when finished or called again."""
        if not self.is_finished:
            self.cancel(self.output.request_id)

    def __del__(self) -> None:
        if not self.is_finished:
            self.drop(self.output.request_id)
