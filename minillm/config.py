"""The engine's options: one frozen :class:`EngineConfig`, validated at construction. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

DType = Literal["auto", "float32", "float64", "bfloat16", "float16"]
SchedulingPolicy = Literal["fcfs", "priority"]
Quantization = Literal["int8", "int4"]
KVCacheDType = Literal["auto", "int8"]
DTYPES, QUANTIZATIONS, KV_CACHE_DTYPES = map(get_args, (DType, Quantization, KVCacheDType))

# vLLM's option names that this version does not have yet: refused by name, never accepted and ignored.
PLANNED_OPTIONS = (
    "tensor_parallel_size",
)

_LEAST = {"max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_prefill_chunk": 1, "block_size": 1,
          "num_kv_blocks": 1, "kv_cache_memory_bytes": 1, "max_waiting": 0}


# What ``speculative_config`` takes: by method beside ``method`` itself, and the default, least and most of each number.
METHODS = {"ngram": ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "table"),
           "draft": ("num_speculative_tokens", "model", "quantization"),
           "mlp_speculator": ("num_speculative_tokens", "model")}
SPECULATION = {"num_speculative_tokens": (4, 1, 32), "prompt_lookup_max": (4, 1, 64), "prompt_lookup_min": (2, 1, 64)}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of ``LLM(model, **options)``, under vLLM's names.

    Args:
        dtype: arithmetic of weights and activations. ``"auto"`` is the fastest path within stated bounds of float32:
            on a CPU that has the kernel, 16-bit weights with float32 activations, else float32; on CUDA bfloat16
            from capability 8, else float16. ``"float32"`` is real float32. Bounds against it on the default model,
            largest logit difference and mean KL a token: ``"auto"`` on a CPU 0.1 and 1e-5, ``"float16"`` 0.5 and
            2e-4, ``"bfloat16"`` 3.0 and 1e-2.
        quantization: ``"int8"`` or ``"int4"``: weights of linear layers in so few bits (see
            :mod:`minillm.model.quantize`), activations in ``dtype``, of which ``"auto"`` is then bfloat16. A head keeps
            8 bits. Default None: as ``dtype`` says. Bounds as above: ``"int8"`` 4.0 and 2e-2, ``"int4"`` 3.0 and 1e-2.
        device: ``"auto"`` (CUDA where there is one, else CPU), ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``.
        max_model_len: longest prompt plus output in tokens; default the model's own limit. A lower value saves memory.
        max_num_seqs: most requests that run at once (default 8: on a CPU more rows stop being nearly free).
        max_num_batched_tokens: most tokens that a step computes, all requests together; above ``max_num_seqs``, so that
            a prompt advances while others decode (default 2048).
        max_prefill_chunk: most tokens of one prompt in a step (default 512); the rest follows in later steps.
        enable_chunked_prefill: whether prompts may be read in several steps (default True). Else a prompt must fit one.
        block_size: tokens in a block of KV cache (default 16).
        num_kv_blocks: blocks in all; when they run out, the last request is preempted and computed again.
        kv_cache_memory_bytes: memory for blocks, in place of their number. Default of the two: what ``max_num_seqs``
            requests of ``max_model_len`` tokens can use, but at most a quarter of the free memory of a CPU, or four
            fifths of a GPU's. ``minillm doctor`` says how much that is.
        kv_cache_dtype: ``"auto"``, keys and values in the activations' dtype (the default), or ``"int8"``: in 8 bit
            with a scale for each token and head, 1.9 times as many blocks in the memory of 16-bit ones.
        enable_prefix_caching: whether a prompt may begin with blocks that an earlier one has computed (default True).
        max_waiting: most requests that wait for a place; one more raises :class:`~minillm.errors.QueueFull` (default
            None: no limit).
        scheduling_policy: ``"fcfs"``, first come, first served (the default), or ``"priority"``: by the ``priority``
            given with a request, lower values first, equals in order of arrival.
        speculative_config: how to guess tokens that one step then checks (default None: not); tokens are those of a run
            without. ``"method"``: ``"ngram"``, what followed the last time that the newest tokens were seen (the
            default); ``"draft"``, what a smaller ``"model"`` with the same tokens says, perhaps with a
            ``"quantization"`` of its own; or ``"mlp_speculator"``, what a small network says that was trained on this
            model's hidden states: ``"model"`` is its file, or ``"smollm2-135m"``, the one that comes with minillm.
            ``"num_speculative_tokens"``: most drafts of a request in a step (default 4);
            the engine takes fewer, or none, where it measures that they do not pay. ``"prompt_lookup_max"`` (4),
            ``"prompt_lookup_min"`` (2): newest tokens to look for; ``"table"``: a file of what mostly follows which
            tokens, for text that copies nothing, or ``"smollm2-135m"``, the one that comes with minillm.
            ``LLM(proposer=...)`` brings the method.
        seed: the seed from which requests without a seed of their own get theirs (default 0: runs repeat).
    Raises:
        ValueError: naming the option and what it accepts.
    """

    dtype: DType = "auto"
    quantization: Quantization | None = None
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_prefill_chunk: int = 512
    enable_chunked_prefill: bool = True
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    enable_prefix_caching: bool = True
    max_waiting: int | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    speculative_config: Mapping[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ValueError(f"quantization must be 'int8', 'int4' or None, got {self.quantization!r}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype must be 'auto' or 'int8', got {self.kv_cache_dtype!r}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and self.__dataclass_fields__[name].default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError("give num_kv_blocks or kv_cache_memory_bytes, not both")
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be above max_num_seqs "
                             f"({self.max_num_seqs}), or no prompt advances while so many decode")
        for name in ("enable_chunked_prefill", "enable_prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.scheduling_policy not in get_args(SchedulingPolicy):
            raise ValueError(f"scheduling_policy must be 'fcfs' or 'priority', got {self.scheduling_policy!r}")
        _check_speculation(self.speculative_config)
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


def _check_speculation(options: Mapping[str, Any] | None) -> None:
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise ValueError(f"speculative_config must map names to values, got {options!r}")
    if str(method := options.get("method", "ngram")) not in METHODS:
        raise ValueError(f"speculative_config's method must be one of {', '.join(METHODS)}, got {method!r}")
    if unknown := sorted(map(str, {*options} - {"method", *METHODS[method]})):
        raise ValueError(f"speculative_config has no {unknown[0]!r}; {method} takes {', '.join(METHODS[method])}")
    if method in ("draft", "mlp_speculator") and not isinstance(options.get("model"), (str, Path)):
        raise ValueError(f"speculative_config's method {method!r} needs a model: a name or a path, got "
                         f"{options.get('model')!r}. A loaded one goes in as proposer=DraftModelProposer(...)")
    if not isinstance(options.get("table", ""), (str, Path)):
        raise ValueError(f"speculative_config's table must be a name or a path, got {options['table']!r}")
    if options.get("quantization") not in (None, *QUANTIZATIONS):
        raise ValueError(f"speculative_config's quantization must be 'int8' or 'int4', got {options['quantization']!r}")
    for name, (default, least, most) in SPECULATION.items():
        value = options.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"speculative_config's {name} must be a whole number from {least} to {most}, "
                             f"got {value!r}")
    shortest, longest = (options.get(name, SPECULATION[name][0]) for name in ("prompt_lookup_min", "prompt_lookup_max"))
    if shortest > longest:
        raise ValueError(f"prompt_lookup_min ({shortest}) must not be above prompt_lookup_max ({longest})")
