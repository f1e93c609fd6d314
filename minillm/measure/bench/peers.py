"""One benchmark sample in a process of its own: minillm, or transformers beside it, on the same ids. (Needs torch.)

``python -m minillm.measure.bench.peers JSON`` takes a :class:`SampleSpec` and prints the sample as its last line;
``--convert MODEL`` only prepares what transformers loads, so that no sample pays for it.

What makes the sides comparable: the same weights, ids and number of new tokens; greedy, with end-of-sequence ids
ignored; tokens timed one by one in the process that makes them, so that decode speed is (N - 1) / (last - first) on
both; a warm-up before, on the ids in reverse, so that no prefix cached from it can help.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from minillm.measure.bench.compare import parse_engine
from minillm.measure.metrics import RequestMetrics
from minillm.measure.report import decode_bytes_per_token, kv_bytes_read
from minillm.model.device import resolve_device

WARMUP_TOKENS = 16


@dataclass(frozen=True)
class SampleSpec:
    """What to time: ``engine`` (``"minillm-DTYPE"`` or ``"transformers-DTYPE"``) continues ``prompt_ids`` by
    ``new_tokens``; then the prefill of ``prefill_ids`` alone (none: left out)."""

    engine: str
    model: str
    prompt_ids: Sequence[int]
    prefill_ids: Sequence[int] = ()
    new_tokens: int = 128
    device: str = "auto"


class BenchEngine(Protocol):
    """What a side has to offer."""

    context_tokens: int

    def generate(self, token_ids: list[int], num_new_tokens: int) -> tuple[RequestMetrics, list[int]]:
        """Greedy, exactly ``num_new_tokens``: the times, and the new ids."""

    def bytes_per_token(self, num_prompt_tokens: int, num_new_tokens: int) -> float:
        """Bytes of weights, K and V that a decode step reads on average."""


class MinillmEngine:
    """minillm through its public face."""

    def __init__(self, model: str, dtype: str, device: str):
        from minillm import LLM

        self.llm = LLM(model, dtype=dtype, device=device, enable_prefix_caching=False)  # each prompt is measured cold
        self.context_tokens = self.llm.engine.limits.max_model_len

    def generate(self, token_ids: list[int], num_new_tokens: int) -> tuple[RequestMetrics, list[int]]:
        """See :class:`BenchEngine`; times are the engine's own."""
        from minillm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
        output = self.llm.generate([token_ids], params)[0]
        return output.metrics, output.outputs[0].token_ids

    def bytes_per_token(self, num_prompt_tokens: int, num_new_tokens: int) -> float:
        """See :class:`BenchEngine`."""
        return decode_bytes_per_token(self.llm.model, num_prompt_tokens, num_new_tokens)


class TransformersEngine:
    """transformers' ``generate`` with its default attention and cache; a streamer tells when each token exists."""

    def __init__(self, model: str, dtype: str, device: str):
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        folder = hugging_face_folder(model)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.device = device
        # Without an end id no token is masked or checked for: the leanest loop that makes exactly N tokens.
        self.model.generation_config.eos_token_id = None
        self.context_tokens = self.model.config.max_position_embeddings

    def generate(self, token_ids: list[int], num_new_tokens: int) -> tuple[RequestMetrics, list[int]]:
        """See :class:`BenchEngine`."""
        metrics = RequestMetrics(time.perf_counter(), num_prompt_tokens=len(token_ids))
        ids = torch.tensor([token_ids], device=self.device)
        rows = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new_tokens, do_sample=False, pad_token_id=0,
            streamer=_TokenClock(metrics.token_times_s))
        metrics.finished_s = time.perf_counter()
        return metrics, rows[0, len(token_ids):].tolist()

    def bytes_per_token(self, num_prompt_tokens: int, num_new_tokens: int) -> float:
        """See :class:`BenchEngine`; an embedding is read whole only where the head shares it."""
        from minillm.model.config import load_config
        from minillm.model.hub import resolve

        weights = {p.data_ptr(): p.nbytes for p in self.model.parameters()}
        embedding = self.model.get_input_embeddings().weight
        if self.model.get_output_embeddings().weight.data_ptr() != embedding.data_ptr():
            weights.pop(embedding.data_ptr())
        config = load_config(resolve(self.model.config.name_or_path))
        if any(config.sparse_layers):
            raise NotImplementedError("bytes read by a mixture of experts are not counted for transformers yet")
        context = num_prompt_tokens + num_new_tokens / 2
        return sum(weights.values()) + kv_bytes_read(config, context, embedding.dtype.itemsize)


class _TokenClock:
    """A streamer in transformers' sense (``put``, ``end``) that only looks at the clock."""

    def __init__(self, times_s: list[float]):
        self.times_s, self._prompt_seen = times_s, False

    def put(self, token_ids: torch.Tensor) -> None:
        """Called with the prompt first, then with each new token."""
        if self._prompt_seen:
            self.times_s.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""


def hugging_face_folder(model: str) -> Path:
    """``model`` as a folder that transformers loads quickly: itself, or a GGUF file converted once, to float32, into
    the cache folder (needs transformers and accelerate)."""
    from minillm.model.hub import cache_dir, resolve

    path = Path(resolve(model))
    if path.is_dir():
        return path
    folder = cache_dir() / "transformers" / f"{path.stem}-float32"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}.part")
        try:
            _convert_gguf(path, partial)
            partial.replace(folder)
        except OSError:
            if not folder.exists():  # else another process was quicker, and its folder is as good
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _convert_gguf(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):  # a model that says it is quantized is refused by save_pretrained
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)


def load_engine(name: str, model: str, device: str) -> BenchEngine:
    """The engine of that name.

    Raises:
        ValueError: a name that is none.
    """
    side, dtype = parse_engine(name)
    return {"minillm": MinillmEngine, "transformers": TransformersEngine}[side](model, dtype, device)


def take_sample(spec: SampleSpec) -> dict[str, Any]:
    """Load, warm up, time one request, then a long prefill; every number is of the timed runs alone, but for
    ``peak_rss_bytes``, which is the process's, loading included."""
    device = resolve_device(spec.device)
    start_s = time.perf_counter()
    engine = load_engine(spec.engine, spec.model, device)
    load_s = time.perf_counter() - start_s
    metrics, token_ids = _timed(engine, spec.prompt_ids, spec.new_tokens)
    bytes_per_token = engine.bytes_per_token(len(spec.prompt_ids), spec.new_tokens)
    speed = metrics.decode_tokens_per_s
    prefill_s = None
    if 0 < len(spec.prefill_ids) < engine.context_tokens:
        prefill_s = _timed(engine, spec.prefill_ids, 1)[0].ttft_s
    return {
        "engine": spec.engine, "decode_tokens_per_s": speed, "ttft_s": metrics.ttft_s, "prefill_s": prefill_s,
        "e2e_s": metrics.e2e_s, "token_times_s": [t - metrics.arrival_s for t in metrics.token_times_s],
        "bytes_per_token": bytes_per_token, "read_bytes_per_s": bytes_per_token * speed if speed else None,
        "peak_rss_bytes": peak_rss_bytes(), "load_s": load_s, "device": device,
        "num_threads": torch.get_num_threads(), "tokens_sha256": _digest(token_ids),
    }


def _timed(engine: BenchEngine, ids: Sequence[int], num_new: int) -> tuple[RequestMetrics, list[int]]:
    """A warm-up of the same length, then the run that counts."""
    engine.generate(list(reversed(ids)), min(num_new, WARMUP_TOKENS))
    metrics, token_ids = engine.generate(list(ids), num_new)
    if not len(token_ids) == len(metrics.token_times_s) == num_new:
        raise RuntimeError(f"{num_new} tokens asked, {len(token_ids)} made, {len(metrics.token_times_s)} timed")
    return metrics, token_ids


def _digest(token_ids: list[int]) -> str:
    """A short name for the tokens: equal names, equal tokens."""
    return hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()[:16]


def peak_rss_bytes() -> int | None:
    """Most memory this process ever held in RAM; ``None`` where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024
    except (OSError, AttributeError):
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        hugging_face_folder(sys.argv[2])
    else:
        print(json.dumps(take_sample(SampleSpec(**json.loads(sys.argv[1]))), allow_nan=False))
