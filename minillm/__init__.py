"""minillm: a small, readable LLM inference engine, and the course that builds it.

``import minillm`` is quick: torch is loaded when :class:`LLM` is first touched.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from minillm.errors import DownloadError, EngineDead, InvalidRequest, ModelError, QueueFull
from minillm.request import CompletionOutput, Logprob, RequestOutput, SamplingParams, ScoreOutput, StreamPiece

if TYPE_CHECKING:
    from minillm.engine import Engine
    from minillm.llm import LLM
    from minillm.serve.async_llm import AsyncLLM

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "Engine", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob", "ScoreOutput",
    "StreamPiece", "InvalidRequest", "QueueFull", "ModelError", "DownloadError", "EngineDead", "__version__",
]
# How long an idle thread of GNU OpenMP spins before it sleeps; read when torch loads. Its own default is 30 times as
# long: no faster on an idle machine, and where other work takes a core, threads that spin keep those from running that
# they wait for (a step was seen to take 50 times as long). Sleeping at once nearly doubles the time of a step.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

_LAZY = {"LLM": "minillm.llm", "Engine": "minillm.engine", "AsyncLLM": "minillm.serve.async_llm"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
