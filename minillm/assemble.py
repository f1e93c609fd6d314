"""What the engine is put together from: the model, and a scheduler and attention over one pool of blocks."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from minillm.attention.base import AttentionBackend
from minillm.attention.paged import PagedAttention
from minillm.attention.torch_backend import ContiguousAttention
from minillm.cache.blocks import BlockPool
from minillm.cache.store import BlockStore, Int8BlockStore
from minillm.config import SPECULATION, EngineConfig
from minillm.errors import ModelError
from minillm.measure.results import shipped_file
from minillm.model.config import load_config
from minillm.model.decoder import Decoder
from minillm.model.device import free_bytes, resolve_device
from minillm.model.hub import resolve
from minillm.model.quantize import Scheme
from minillm.model.weights import load_weights
from minillm.runner import Runner
from minillm.schedule.scheduler import Scheduler, SchedulerProtocol
from minillm.speculate.draft import DraftModelProposer, check_same_tokens
from minillm.speculate.mlp import MLPProposer
from minillm.speculate.propose import Controller, NgramProposer, ProposerProtocol
from minillm.speculate.speculation import Speculation
from minillm.speculate.table import NgramTable
from minillm.text.tokenizer import Tokenizer, load_tokenizer

# What a pool and a scheduler are made of: given together with a part that brings its own, such an option would be
# ignored.
POOL_OPTIONS = ("block_size", "num_kv_blocks", "kv_cache_memory_bytes", "enable_prefix_caching")
SCHEDULER_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk", "enable_chunked_prefill",
                     "scheduling_policy")
STORES = {"auto": BlockStore, "int8": Int8BlockStore}
# Of the memory that is free once the weights are loaded. A CPU's is shared with whatever else runs.
SHARE_OF_FREE = {"cpu": 0.25, "cuda": 0.8}


def assemble(config: EngineConfig, given: Collection[str], model: Decoder, max_model_len: int,
             scheduler: SchedulerProtocol | None, attention: AttentionBackend | None,
             ) -> tuple[SchedulerProtocol, AttentionBackend]:
    """The scheduler and the attention backend; ``given`` names the options that the caller set.

    A backend with a ``pool`` is paged: the scheduler hands out the blocks of that pool. A backend without keeps its
    caches by sequence, so blocks are only counted and nothing is shared; so does a scheduler without a ``pool``, for
    which there are no blocks at all.

    Raises:
        ValueError: an option that a part of the caller's own makes meaningless, two parts over different pools, a pool
            that would share blocks which the attention backend does not have, or more blocks than memory holds.
    """
    pool = getattr(attention, "pool", None) if scheduler is None else getattr(scheduler, "pool", None)
    taken = {"scheduler": SCHEDULER_OPTIONS} if scheduler is not None else {}
    if scheduler is not None or pool is not None:
        taken["scheduler or attention_backend"] = POOL_OPTIONS
    elif attention is not None and config.enable_prefix_caching and "enable_prefix_caching" in given:
        raise ValueError("enable_prefix_caching needs an attention_backend over a pool of blocks: leave it out")
    for part, options in taken.items():
        if clash := [name for name in options if name in given]:
            raise ValueError(f"{clash[0]} is what your own {part} brings: set it there")
    if config.kv_cache_dtype != "auto" and (attention is not None or scheduler is not None and pool is None):
        raise ValueError(f"kv_cache_dtype={config.kv_cache_dtype!r} is for minillm's own attention over blocks: leave "
                         "it out beside an attention_backend of your own, or a scheduler without a pool")
    options, store = {"dtype": model.dtype, "device": model.device}, STORES[config.kv_cache_dtype]
    if pool is None and scheduler is None:
        count, caching = num_blocks(config, model, max_model_len), config.enable_prefix_caching and attention is None
        if attention is None:  # refused here if it does not fit, before the pool's own lists fill what memory there is
            store(model.config, count, config.block_size, **options)
        pool = BlockPool(count, config.block_size, caching=caching)
    if attention is not None and getattr(attention, "pool", pool) is not pool:
        raise ValueError("scheduler and attention_backend are over different pools: give both the same one")
    if attention is not None and not hasattr(attention, "pool") and getattr(pool, "caching", False):
        raise ValueError("an attention_backend without blocks needs a scheduler over BlockPool(..., caching=False)")
    if attention is None:
        attention = ContiguousAttention(model.config, **options) if pool is None else \
            PagedAttention(model.config, pool, store=store, **options)
    if scheduler is None:
        scheduler = Scheduler(pool, max_num_seqs=config.max_num_seqs, policy=config.scheduling_policy,
                              max_num_batched_tokens=config.max_num_batched_tokens,
                              max_prefill_chunk=config.max_prefill_chunk, chunked=config.enable_chunked_prefill)
    return scheduler, attention


def num_blocks(config: EngineConfig, model: Decoder, max_model_len: int) -> int:
    """Blocks of KV cache by the options: their number, or what a memory budget holds.

    Without either, as many as ``max_num_seqs`` requests of ``max_model_len`` tokens can use, but not more than a share
    of the free memory (:data:`SHARE_OF_FREE`), and enough for one such request.

    Raises:
        ValueError: ``kv_cache_memory_bytes`` holds not even one block.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    each = config.block_size * STORES[config.kv_cache_dtype].bytes_per_token(model.config, model.dtype)
    if config.kv_cache_memory_bytes is not None:
        if config.kv_cache_memory_bytes < each:
            raise ValueError(f"kv_cache_memory_bytes {config.kv_cache_memory_bytes} holds no block: one of "
                             f"{config.block_size} tokens takes {each} bytes")
        return config.kv_cache_memory_bytes // each
    one = -(-max_model_len // config.block_size)
    device = model.device.type if hasattr(model.device, "type") else str(model.device).partition(":")[0]
    budget = int(free_bytes(model.device) * SHARE_OF_FREE.get(device, SHARE_OF_FREE["cpu"]))
    return max(one, min(config.max_num_seqs * one, budget // each))


def _shipped(kind: str, name: str | Path, suffix: str) -> Path:
    """That path, or the file that comes with minillm under that name."""
    try:
        return Path(name) if Path(name).suffix else shipped_file(f"draft/{name}{suffix}")
    except FileNotFoundError:
        raise ModelError(f"no {kind} is called {str(name)!r}; give the path of a {suffix} file") from None


def _table(name: str | Path, tokenizer: Tokenizer) -> NgramTable:
    table = NgramTable.load(_shipped("table of n-grams", name, ".npz"))
    if table.vocab_size != tokenizer.vocab_size:
        raise ModelError(f"the table {name} is for {table.vocab_size} token ids, the model's tokenizer has "
                         f"{tokenizer.vocab_size}")
    return table


def speculation_of(config: EngineConfig, proposer: ProposerProtocol | None, scheduler: SchedulerProtocol,
                   runner: Runner, tokenizer: Tokenizer, vocab_size: int) -> Speculation | None:
    """Whom the engine asks for drafts; None where nobody is to be asked.

    Raises:
        ValueError: two proposers, or a scheduler that plans no drafts.
        ModelError: a draft model that cannot be loaded, or speaks other tokens.
    """
    asked = dict(config.speculative_config or {})
    if config.speculative_config is None and proposer is None:
        return None
    if proposer is not None and (own := {*asked} - {"num_speculative_tokens"}):
        raise ValueError(f"speculative_config's {sorted(own)[0]} is what your own proposer brings: leave it out")
    if not getattr(type(scheduler), "plans_drafts", False):  # not a recorder's, whose history has no word for drafts
        raise ValueError(f"speculation needs a scheduler that plans drafts, which {type(scheduler).__name__} does not")
    numbers = {name: asked.get(name, default) for name, (default, _, _) in SPECULATION.items()}
    if proposer is None and asked.get("method") == "draft":
        path = resolve(asked["model"])
        check_same_tokens(load_tokenizer(path), tokenizer)
        draft = load_decoder(path, dtype=config.dtype, device=config.device, quantization=asked.get("quantization"))
        if draft.config.vocab_size < vocab_size:
            raise ModelError(f"the draft model has {draft.config.vocab_size} rows for the target's {vocab_size} tokens")
        proposer = DraftModelProposer(draft, runner.sampler)
    elif proposer is None and asked.get("method") == "mlp_speculator":
        proposer = MLPProposer(_shipped("speculator", asked["model"], ".safetensors"), runner, vocab_size)
    elif proposer is None:
        table = _table(asked["table"], tokenizer) if "table" in asked else None
        proposer = NgramProposer(numbers["prompt_lookup_max"], numbers["prompt_lookup_min"], table)
    return Speculation(proposer, Controller(numbers["num_speculative_tokens"]), vocab_size)


def load_decoder(path: Path, *, dtype: str = "auto", device: str = "auto",
                 quantization: str | Scheme | None = None) -> Decoder:
    """The decoder of a resolved folder or ``.gguf`` file, on ``device``, see :func:`resolve_device`; ``quantization``
    is a name of :data:`~minillm.model.quantize.SCHEMES`, or a scheme."""
    device, config = resolve_device(device), load_config(path)
    # Weights that a GGUF file holds in 4 bit are not quantized again, unless a scheme says how.
    weights = load_weights(path, config, keep_blocks=quantization == "int4")
    return Decoder.from_weights(config, weights, dtype=dtype, device=device, quantization=quantization)
