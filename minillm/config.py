"""The engine's options: one frozen :class:`EngineConfig`, validated at construction. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

DType = Literal["auto", "float32", "float64", "bfloat16", "float16"]
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")

# vLLM's option names that this version does not have yet: refused by name, never accepted and ignored.
PLANNED_OPTIONS = (
    "kv_cache_memory_bytes", "enable_prefix_caching", "scheduling_policy", "max_waiting", "quantization",
    "kv_cache_dtype", "speculative_config", "proposer", "tensor_parallel_size",
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of ``LLM(model, **options)``, under vLLM's names.

    Args:
        dtype: arithmetic of weights and activations. ``"auto"`` is the fastest path within stated bounds of float32:
            on a CPU that has the kernel, 16-bit weights with float32 activations, else float32; on CUDA bfloat16
            from capability 8, else float16. ``"float32"`` is real float32. Bounds against it on the default model,
            largest logit difference and mean KL a token: ``"auto"`` on a CPU 0.1 and 1e-5, ``"float16"`` 0.5 and
            2e-4, ``"bfloat16"`` 3.0 and 1e-2.
        device: ``"auto"`` (CUDA where there is one, else CPU), ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.
        max_model_len: longest prompt plus output in tokens; default the model's own limit. A lower value saves memory.
        max_num_seqs: most requests that run at once (default 8: on a CPU more rows stop being nearly free).
        max_num_batched_tokens: most tokens that a step computes, all requests together; above ``max_num_seqs``, so that
            a prompt advances while others decode (default 2048).
        max_prefill_chunk: most tokens of one prompt in a step (default 512); the rest follows in later steps.
        enable_chunked_prefill: whether prompts may be read in several steps (default True). Else a prompt must fit one.
        block_size: tokens in a block of KV cache (default 16).
        num_kv_blocks: blocks in all; when they run out, the last request is preempted and computed again. Default:
            enough for ``max_num_seqs`` requests of ``max_model_len`` tokens.
        seed: the seed from which requests without a seed of their own get theirs (default 0: runs repeat).
    Raises:
        ValueError: naming the option and what it accepts.
    """

    dtype: DType = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_prefill_chunk: int = 512
    enable_chunked_prefill: bool = True
    block_size: int = 16
    num_kv_blocks: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "block_size",
                     "num_kv_blocks"):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "num_kv_blocks"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be above max_num_seqs "
                             f"({self.max_num_seqs}), or no prompt advances while so many decode")
        if not isinstance(self.enable_chunked_prefill, bool):
            raise ValueError(f"enable_chunked_prefill must be true or false, got {self.enable_chunked_prefill!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """The config of keyword arguments; an unknown or not yet built option raises ``TypeError`` by name."""
        known = cls.__dataclass_fields__
        for name in options:
            if name in PLANNED_OPTIONS:
                raise TypeError(f"option {name!r} is not built yet in this version of minillm; leave it out")
            if name not in known:
                raise TypeError(f"unknown option {name!r}; known: {', '.join(known)}")
        return cls(**options)
