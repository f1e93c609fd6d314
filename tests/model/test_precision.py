"""How far each dtype of the default model is from float32, and that float32 through the engine gives the golden tokens.

Bounds, over a few dozen positions of real text in several scripts: the largest difference of any logit, and the mean
Kullback-Leibler divergence of the next-token distributions. Beside each, the worst that was measured here on a CPU:

    dtype        largest difference    mean KL
    auto         0.1    (0.055)        1e-5   (6.9e-6)    the contract's
    float16      0.5    (0.19)         2e-4   (4.3e-5)
    bfloat16     3.0    (1.6)          1e-2   (4.1e-3)    the most likely token agrees in 9 of 10 places
    int8         4.0    (2.4)          2e-2   (1.2e-2)    with activations in bfloat16
    int4         3.0    (1.7)          1e-2   (5.4e-3)    the same; these weights were made in 4 bit, and flatter it
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.assemble import load_decoder
from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import UncachedAttention
from minillm.config import QUANTIZATIONS
from minillm.model.decoder import Decoder
from minillm.model.hub import resolve

TESTS = Path(__file__).parents[1]
GOLDEN = json.loads((TESTS / "golden" / "smollm2_135m.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
BOUNDS = {"auto": (0.1, 1e-5), "float16": (0.5, 2e-4), "bfloat16": (3.0, 1e-2), "int8": (4.0, 2e-2),
          "int4": (3.0, 1e-2)}
TIE = 1e-3


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(GOLDEN["model"], dtype="float32", device="cpu")


def all_logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits at every position of a text, float64 ``[len(ids), vocab]``."""
    with torch.inference_mode():
        return model.forward(StepTensors.of([ids], [0], [0], logits="all"), UncachedAttention(model.config)).double()


@pytest.mark.parametrize("dtype", BOUNDS)
def test_each_dtype_of_the_default_model_stays_within_its_bounds_of_float32(llm: LLM, dtype: str) -> None:
    """On two paragraphs of prose in different scripts, every position."""
    options = {"quantization": dtype} if dtype in QUANTIZATIONS else {"dtype": dtype}
    model = load_decoder(resolve(GOLDEN["model"]), **options, device="cpu")
    largest, divergence = BOUNDS[dtype]
    paragraphs = (TESTS / "text" / "corpus.txt").read_text(encoding="utf-8").split("\n\n")
    for text in (paragraphs[0], paragraphs[3]):
        ids = llm.tokenizer.encode(text)[:40]
        exact, near = all_logits(llm.model, ids), all_logits(model, ids)
        log_p, log_q = exact.log_softmax(-1), near.log_softmax(-1)
        assert (exact - near).abs().max() < largest
        assert (log_p.exp() * (log_p - log_q)).sum(-1).mean() < divergence
        assert (exact.argmax(-1) == near.argmax(-1)).double().mean() > 0.8


def assert_golden(llm: LLM, case: dict, output: list[int]) -> None:
    """``output`` equals the golden tokens; at the first difference both must be tied with the best logit."""
    golden = case["token_ids"][:len(output)]
    first = next((i for i, pair in enumerate(zip(output, golden, strict=True)) if pair[0] != pair[1]), None)
    if first is not None:
        logits = all_logits(llm.model, case["prompt_token_ids"] + golden[:first])[-1]
        gap = logits.max() - logits[[output[first], golden[first]]].min()
        assert gap < TIE, f"{case['name']}: token {first} is {output[first]}, golden {golden[first]}, gap {gap:.4f}"


def test_the_engine_in_float32_gives_the_golden_tokens_from_text(llm: LLM) -> None:
    """Tokenizer, engine and decode loop together, alone: a chat's text gives the golden's ids and 24 of its tokens."""
    case = CASES["chat"]
    (output,) = llm.generate([case["prompt"]], SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    assert output.prompt_token_ids == case["prompt_token_ids"] and len(output.outputs[0].token_ids) == 24
    assert_golden(llm, case, output.outputs[0].token_ids)


def test_the_engine_in_float32_gives_the_golden_tokens_in_a_batch(llm: LLM) -> None:
    """Five prompts, three places, unequal lengths: nobody's tokens change."""
    cases = [CASES[name] for name in ("python", "one token", "chinese", "emoji", "french")]
    params = [SamplingParams(temperature=0.0, max_tokens=6 + 2 * i, ignore_eos=True) for i in range(len(cases))]
    places, llm.engine.scheduler.max_num_seqs = llm.engine.scheduler.max_num_seqs, 3
    try:
        outputs = llm.generate([case["prompt_token_ids"] for case in cases], params)
    finally:
        llm.engine.scheduler.max_num_seqs = places
    for case, own, output in zip(cases, params, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == own.max_tokens
        assert_golden(llm, case, output.outputs[0].token_ids)
