"""Every error that minillm raises on purpose. Each message says what to do."""

from __future__ import annotations


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
