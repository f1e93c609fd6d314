"""Many requests at once, on every side: minillm, transformers' two ways of batching, llama.cpp. (Needs torch.)

What makes the sides comparable: the same weights, prompts and numbers of new tokens, all requests there at once;
greedy, with end-of-sequence ids ignored; the clock runs from the first request's submission to the last token; only
tokens that were asked for are counted; a short warm-up before, on other ids.

    minillm-DTYPE                  ``LLM.generate``; ``batch_size`` is ``max_num_seqs``; DTYPE may be a quantization
    transformers-static-DTYPE      ``generate`` on ``batch_size`` requests at a time, in the order given, padded on the
                                   left; each batch decodes until its longest answer is done
    transformers-continuous-DTYPE  the manager behind ``generate_batch``, which takes a length for each request
    llamacpp-DTYPE                 ``llama_decode`` on one batch of all running requests, joined and left at each step
                                   as llama.cpp's own server does with its slots; the argmax is taken in NumPy
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch

from minillm import LLM, SamplingParams
from minillm.extras import require
from minillm.measure.bench.compare import TEXT
from minillm.measure.roofline import engine_options
from minillm.model.hub import cache_dir, resolve
from minillm.text.tokenizer import load_tokenizer

PROMPT_TOKENS, OUTPUT_TOKENS = (16, 256), (16, 128)
# One step of llama.cpp and of transformers' continuous batching takes at most so many tokens, prompts included.
STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A prompt's ids, and how many tokens are asked for."""

    prompt_ids: list[int]
    num_new_tokens: int


def text_ids(model: str) -> list[int]:
    """Ids of the benchmark's text in the model's own tokenizer."""
    return load_tokenizer(resolve(model)).encode(TEXT, add_special_tokens=False)


def stretch(text: Sequence[int], count: int, start: int) -> list[int]:
    """``count`` ids of ``text``, which repeats, from place ``start`` on; other places give other beginnings."""
    return list(islice(cycle(text), start, start + count))


def batch_workload(text: Sequence[int], count: int = 32, *, seed: int = 0) -> list[BatchJob]:
    """``count`` jobs with lengths uniform in :data:`PROMPT_TOKENS` and :data:`OUTPUT_TOKENS`; each prompt is a stretch
    of ``text`` from a place of its own. ``ValueError``: the text has fewer places than that."""
    random = Random(seed)
    return [BatchJob(stretch(text, random.randint(*PROMPT_TOKENS), start), random.randint(*OUTPUT_TOKENS))
            for start in random.sample(range(len(text)), count)]


def greedy(max_tokens: int) -> SamplingParams:
    """Greedy, exactly ``max_tokens``."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


class BatchEngine(Protocol):
    """What a side has to offer. ``weight_bytes``: read by all steps since it was made; ``None`` where not known."""

    weight_bytes: int | None

    def run(self, jobs: Sequence[BatchJob]) -> list[list[int]]:
        """Each job's new ids, greedy, exactly as many as it asks for."""

    def close(self) -> None:
        """End threads, where a side has any; without it the process would not end."""


class MinillmBatch(BatchEngine):
    """minillm through its public face."""

    def __init__(self, model: str, dtype: str, device: str, batch_size: int):
        self.llm = LLM(model, device=device, max_num_seqs=batch_size,
                       max_model_len=PROMPT_TOKENS[1] + OUTPUT_TOKENS[1], **engine_options(dtype))

    @property
    def weight_bytes(self) -> int:
        """See :class:`BatchEngine`."""
        return self.llm.stats().num_steps * self.llm.model.bytes_read_per_step

    def run(self, jobs: Sequence[BatchJob]) -> list[list[int]]:
        """See :class:`BatchEngine`."""
        outputs = self.llm.generate([job.prompt_ids for job in jobs], [greedy(job.num_new_tokens) for job in jobs])
        return [output.outputs[0].token_ids for output in outputs]


class StaticBatch(BatchEngine):
    """transformers' ``generate`` on one batch after the other."""

    def __init__(self, model: str, dtype: str, device: str, batch_size: int):
        self.model, self.device, self.batch_size = load_transformers(model, dtype, device), device, batch_size
        self.weight_bytes = 0
        self._bytes_read_per_step = sum({p.data_ptr(): p.nbytes for p in self.model.parameters()}.values())

    def run(self, jobs: Sequence[BatchJob]) -> list[list[int]]:
        """See :class:`BatchEngine`."""
        batches = [jobs[start:start + self.batch_size] for start in range(0, len(jobs), self.batch_size)]
        return [ids for batch in batches for ids in self._run_batch(batch)]

    def _run_batch(self, jobs: Sequence[BatchJob]) -> list[list[int]]:
        width = max(len(job.prompt_ids) for job in jobs)
        steps = max(job.num_new_tokens for job in jobs)
        padding = [width - len(job.prompt_ids) for job in jobs]
        ids = torch.tensor([[0] * pad + job.prompt_ids for pad, job in zip(padding, jobs)], device=self.device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=self.device)
        rows = self.model.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0)
        self.weight_bytes += steps * self._bytes_read_per_step
        return [row[width:width + job.num_new_tokens].tolist() for row, job in zip(rows, jobs)]


class ContinuousBatch(BatchEngine):
    """transformers' continuous batching; its thread runs, and its cache is there, before any request comes."""

    weight_bytes = None

    def __init__(self, model: str, dtype: str, device: str, batch_size: int):
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self.model, page = load_transformers(model, dtype, device), 32
        longest = -(-(PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]) // page)
        config = ContinuousBatchingConfig(
            page_size=page, num_blocks=batch_size * longest, max_batch_tokens=STEP_TOKENS,
            max_requests_per_batch=batch_size, allow_block_sharing=False)
        settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=OUTPUT_TOKENS[1])
        self.manager = self.model.init_continuous_batching(
            generation_config=settings, continuous_batching_config=config)
        self.manager.warmup()
        self.manager.start()

    def run(self, jobs: Sequence[BatchJob]) -> list[list[int]]:
        """See :class:`BatchEngine`; a request that fails raises ``RuntimeError``."""
        names = [self.manager.add_request(job.prompt_ids, max_new_tokens=job.num_new_tokens) for job in jobs]
        made: dict[str, list[int]] = {}
        while len(made) < len(names):
            result = self.manager.get_result(timeout=1)
            if result is None and not self.manager.is_running():
                raise RuntimeError("transformers' continuous batching ended before its requests")
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                made[result.request_id] = list(result.generated_tokens)
        return [made[name] for name in names]

    def close(self) -> None:
        """See :class:`BatchEngine`."""
        self.manager.stop(block=True, timeout=5)


def load_transformers(model: str, dtype: str, device: str) -> Any:
    """transformers' model with the weights of ``model``, which ends no answer by itself."""
    require("transformers", "accelerate")
    from transformers import AutoModelForCausalLM, logging

    from minillm.measure.bench.peers import hugging_face_folder

    logging.set_verbosity_error()
    loaded = AutoModelForCausalLM.from_pretrained(hugging_face_folder(model), dtype=dtype).to(device).eval()
    loaded.generation_config.eos_token_id = None
    return loaded


@dataclass(slots=True)
class _Slot:
    """A request that runs in llama.cpp: ``pending`` are the ids to compute next."""

    index: int
    left: int
    pending: list[int]
    position: int = 0
    made: list[int] = field(default_factory=list)


class LlamaCppBatch(BatchEngine):
    """llama.cpp through llama-cpp-python's low-level interface, on a GGUF file of the same weights in ``dtype``."""

    def __init__(self, model: str, dtype: str, device: str, batch_size: int):
        require("llama_cpp")
        import llama_cpp

        if device != "cpu":
            raise ValueError("llama.cpp is compared on the CPU alone")
        self.api, self.batch_size, self.weight_bytes = llama_cpp, batch_size, 0
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_silence(llama_cpp), None)
        path = str(plain_gguf(model, dtype)).encode()
        options = llama_cpp.llama_model_default_params()
        few_bits = dtype in ("int8", "int4")
        one_row = few_bits and batch_size == 1
        # Its AMX kernels for few bits are its quickest for one row, and end the process at more rows (0.3.36).
        options.use_extra_bufts = one_row or not few_bits
        self.model = llama_cpp.llama_model_load_from_file(path, options)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        settings = llama_cpp.llama_context_default_params()
        settings.n_seq_max, settings.n_batch, settings.n_ubatch = batch_size, STEP_TOKENS, 1 if one_row else STEP_TOKENS
        settings.n_ctx = batch_size * (PROMPT_TOKENS[1] + OUTPUT_TOKENS[1])
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        settings.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.batch = llama_cpp.llama_batch_init(STEP_TOKENS, 0, 1)

    def run(self, jobs: Sequence[BatchJob]) -> list[list[int]]:
        """See :class:`BatchEngine`."""
        waiting = deque(_Slot(i, job.num_new_tokens, list(job.prompt_ids)) for i, job in enumerate(jobs))
        slots: dict[int, _Slot] = {}
        made: dict[int, list[int]] = {}
        while waiting or slots:
            for number in range(self.batch_size):
                if number not in slots and waiting:
                    slots[number] = waiting.popleft()
            for number, token_id in self._step(slots).items():
                slot = slots[number]
                slot.made.append(token_id)
                slot.pending = [token_id]
                if len(slot.made) == slot.left:
                    made[slot.index] = slots.pop(number).made
                    self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), number, -1, -1)
        return [made[index] for index in range(len(jobs))]

    def _step(self, slots: dict[int, _Slot]) -> dict[int, int]:
        """One ``llama_decode``, those that decode first; the new id of each slot whose last token was computed."""
        import numpy

        batch, size, last = self.batch, 0, {}
        for number, slot in sorted(slots.items(), key=lambda item: len(item[1].pending)):
            chunk, slot.pending = slot.pending[:STEP_TOKENS - size], slot.pending[STEP_TOKENS - size:]
            for token_id in chunk:
                batch.token[size], batch.pos[size] = token_id, slot.position
                batch.n_seq_id[size], batch.seq_id[size][0], batch.logits[size] = 1, number, 0
                slot.position, size = slot.position + 1, size + 1
            if chunk and not slot.pending:
                batch.logits[size - 1], last[number] = 1, size - 1
        batch.n_tokens = size
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama.cpp found no room for its batch")
        self.weight_bytes += self.api.llama_model_size(self.model)
        rows = {number: self.api.llama_get_logits_ith(self.context, row) for number, row in last.items()}
        return {number: int(numpy.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for number, row in rows.items()}


def _silence(llama_cpp: Any) -> Any:
    """A log callback that says nothing, kept alive as long as the module."""
    if not hasattr(llama_cpp, "_minillm_quiet"):
        llama_cpp._minillm_quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    return llama_cpp._minillm_quiet


def plain_gguf(model: str, dtype: str) -> Path:
    """The weights of a GGUF file in ``dtype``, written once into the cache folder by llama.cpp itself: ``"int8"`` as
    Q8_0, a scale for 32 weights; ``"int4"`` is the file as it is, which the default model's has in Q4_1.

    Raises:
        ValueError: a model that is no GGUF file, or a dtype that is compared with nothing.
    """
    import llama_cpp

    kinds = {"float32": llama_cpp.LLAMA_FTYPE_ALL_F32, "float16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
             "bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16, "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": None}
    path = Path(resolve(model))
    if path.suffix != ".gguf" or dtype not in kinds:
        raise ValueError(f"llama.cpp is compared on a .gguf file in {' or '.join(kinds)}, not on {model} in {dtype}")
    if kinds[dtype] is None:
        return path
    target = cache_dir() / "llamacpp" / f"{path.stem}-{dtype}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype, settings.allow_requantize = kinds[dtype], True
        if llama_cpp.llama_model_quantize(str(path).encode(), str(partial).encode(), settings):
            raise RuntimeError(f"llama.cpp could not write {target.name}")
        partial.replace(target)
    return target


def load_batch_engine(side: str, model: str, device: str, batch_size: int) -> BatchEngine:
    """The engine of a side, ``KIND-DTYPE`` as above; ``ValueError`` for another kind."""
    kind, _, dtype = side.rpartition("-")
    kinds = {"minillm": MinillmBatch, "transformers-static": StaticBatch, "transformers-continuous": ContinuousBatch,
             "llamacpp": LlamaCppBatch}
    if kind not in kinds:
        raise ValueError(f"unknown side {side!r}; known: {', '.join(kinds)}, each with -DTYPE")
    return kinds[kind](model, dtype, device, batch_size)
