"""Every error that minillm raises on purpose. Each message says what to do."""

from __future__ import annotations


def shown(value: object) -> str:
    """``value`` for a message: its ``repr``, cut short; Python writes no integers of thousands of digits."""
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be written down>"
    return text if len(text) <= 200 else f"{text[:200]}..."


def told(error: BaseException) -> str:
    """``error`` in a line: its type and its message, where it has one that can be read."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class InvalidRequest(ValueError):
    """A request that can never be served as asked: a parameter out of range, a prompt too long, bad text.

    ``param`` names the offending field (a server puts it into its error body), or is ``None``.
    """

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class ModelError(Exception):
    """A model's files cannot be used: a missing or extra tensor, an unknown model type, tokenizer or RoPE type."""


class DownloadError(Exception):
    """A model could not be fetched: offline, interrupted, corrupt, or no room on the disk."""


class QueueFull(RuntimeError):
    """Too many requests wait already (option ``max_waiting``): try again later."""


class EngineDead(RuntimeError):
    """The engine has been closed, or failed beyond one request; make a new one."""
