"""minillm: a small, readable LLM inference engine, and the course that builds it.

``import minillm`` is quick: torch is loaded when :class:`LLM` is first touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minillm.errors import DownloadError, EngineDead, InvalidRequest, ModelError
from minillm.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, ScoreOutput, StreamPiece

if TYPE_CHECKING:
    from minillm.engine import Engine
    from minillm.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM", "Engine", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob", "ScoreOutput", "StreamPiece",
    "InvalidRequest", "ModelError", "DownloadError", "EngineDead", "__version__",
]
_LAZY = {"LLM": "minillm.llm", "Engine": "minillm.engine"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")
