"""Small models and tokenizers that many tests share. No download, no GPU."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import minillm
from minillm import LLM, SamplingParams
from minillm.attention.base import AttentionBackend, StepTensors
from minillm.cache.kv import ContiguousCache, SequenceCache
from minillm.course import tiny
from minillm.loops import generate_with_cache
from minillm.model.config import ModelConfig
from minillm.model.decoder import Decoder
from minillm.sample import Sampler, SamplingRow
from minillm.text.tokenizer import Tokenizer, byte_tokenizer

EOS = 257


class ScriptModel:
    """Says what it is told: output token i of a prompt gets logit +20 at ``script(prompt)[i]``, everything else 0.

    ``before(calls)`` may raise, or change the logits, to play a model that fails.
    """

    def __init__(self, script: Callable[[tuple[int, ...]], Sequence[int]], *, vocab_size: int, max_len: int = 4096,
                 eos_token_ids: tuple[int, ...] = (EOS,)):
        self.script = script
        self.config = ModelConfig(
            model_type="llama", vocab_size=vocab_size, hidden_size=4, intermediate_size=4, num_layers=1, num_heads=1,
            num_kv_heads=1, head_dim=4, max_position_embeddings=max_len, eos_token_ids=eos_token_ids,
        )
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.steps: list[StepTensors] = []
        self.edit: Callable[[int, StepTensors, Tensor], Tensor | None] = lambda call, step, logits: None

    def forward(self, step: StepTensors, attention: AttentionBackend) -> Tensor:
        self.steps.append(step)
        logits = torch.zeros(len(step.logit_rows), self.config.vocab_size)
        for row, flat in enumerate(step.logit_rows.tolist()):
            sequence = next(s for s, end in enumerate(step.query_starts[1:]) if flat < end)
            request = step.sequences[sequence]
            script = self.script(request.prompt_token_ids)
            output = step.positions[flat].item() + 1 - len(request.prompt_token_ids)
            logits[row, script[min(output, len(script) - 1)]] = 20.0
        edited = self.edit(len(self.steps), step, logits)
        return logits if edited is None else edited


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def interrupt_at() -> Iterator[Callable[..., list[bool]]]:
    """``interrupt_at(count, handler)``: the handler, as a signal's, at the ``count``-th place of the package's code (or
    of the file ``under``) where CPython looks for signals: after a call, as a function starts, where a loop goes round.
    What it returns is empty until then. ``interrupt_at(0)`` calls it off.
    """
    usual, package = sys.gettrace(), str(Path(minillm.__file__).parent)

    def arm(count: int, handler: Callable[[], None] = ctrl_c, under: str = package) -> list[bool]:
        places, last, came = 0, {}, []

        def on_opcode(frame, event, argument):
            nonlocal places
            frame.f_trace_opcodes = True
            if event == "opcode" and not came:
                before, last[frame] = last.get(frame, ""), dis.opname[frame.f_code.co_code[frame.f_lasti]]
                places += before.startswith("CALL") or before in ("RESUME", "JUMP_BACKWARD")
                if places == count:
                    came.append(True)
                    last.clear()  # it would keep the frames, and what is in them, alive
                    sys.settrace(usual)
                    handler()
            return None if came else on_opcode

        sys.settrace((lambda frame, event, argument: on_opcode(frame, event, argument)
                      if frame.f_code.co_filename.startswith(under) else None) if count else usual)
        return came

    yield arm
    sys.settrace(usual)


@pytest.fixture
def byte_tok() -> Tokenizer:
    """BYTE: ids 0-255 are raw bytes; 256 bos, 257 eos, 258 and 259 the ChatML markers, 260 eot."""
    return byte_tokenizer()


@pytest.fixture
def script_llm(byte_tok: Tokenizer) -> Callable[..., LLM]:
    """``script_llm(ids)``: an LLM over BYTE whose every answer is ``ids`` (the last repeats), or ``script(prompt)``."""
    def make(script: Sequence[int] | Callable[[tuple[int, ...]], Sequence[int]], *, vocab_size: int = 261,
             max_len: int = 4096, eos_token_ids: tuple[int, ...] = (EOS,), **options: object) -> LLM:
        chosen = script if callable(script) else lambda prompt: list(script)
        model = ScriptModel(chosen, vocab_size=vocab_size, max_len=max_len, eos_token_ids=eos_token_ids)
        return LLM(model, tokenizer=byte_tok, **options)
    return make


TINY = replace(tiny.TINY, eos_token_ids=(EOS,))


@pytest.fixture(scope="session")
def tiny_model() -> Decoder:
    """The TINY decoder in float64."""
    return tiny.tiny_decoder(TINY)


@pytest.fixture
def tiny_llm(tiny_model: Decoder, byte_tok: Tokenizer) -> Callable[..., LLM]:
    """``tiny_llm(**options)``: an LLM over TINY and BYTE."""
    return lambda **options: LLM(tiny_model, tokenizer=byte_tok, **options)


class Int8Cache(ContiguousCache):
    """The oracle of keys and values in 8 bit: rows are rounded as they come, each by itself."""

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        rounded = []
        for rows in (key, value):
            rounded.append(rows.clone())
            for row in rounded[-1].flatten(0, 1):
                scale = (row.abs().max().float() * (1 + 2**-8) / 127).clamp(min=1e-30).bfloat16().to(row.dtype)
                row.copy_((row / scale).round().clamp(-127, 127) * scale)
        super().write(layer, start, *rounded)


@pytest.fixture(scope="session")
def int8_cache() -> type[ContiguousCache]:
    """For ``simplest(make_cache=...)``: what ``kv_cache_dtype="int8"`` must give."""
    return Int8Cache


@pytest.fixture(scope="session")
def simplest(tiny_model: Decoder) -> Callable[..., list[int]]:
    """``simplest(prompt, params, most)``: TINY's tokens by the loop with a cache and the sampler's own draws."""
    sampler = Sampler(261)

    def run(prompt: list[int], params: SamplingParams, most: int,
            make_cache: Callable[..., SequenceCache] = ContiguousCache) -> list[int]:
        def choose(logits: Tensor, position: int) -> list[int]:
            row = SamplingRow(params, params.seed, 0, position, prompt, ())
            return [sampler(logits, [row])[0].token_id]

        return generate_with_cache(tiny_model, prompt, max_tokens=min(params.max_tokens, most),
                                   eos_token_ids=(*[EOS] * (not params.ignore_eos), *params.stop_token_ids),
                                   choose=choose, make_cache=make_cache)
    return run


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> str:
    """A folder with a random Llama that both sides load; its tokenizer is a byte a token."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2)
    folder = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    bytewise.save(str(folder / "tokenizer.json"))
    return str(folder)
