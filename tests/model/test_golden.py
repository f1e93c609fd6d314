"""The default model in float32 says what transformers says on the same GGUF, token for token.

``tests/golden/smollm2_135m.json`` holds 200 greedy tokens a prompt; ``tests/golden/record_golden.py`` made it. Where
the two best logits lie within 1e-3 of each other either token counts: the order of additions may decide.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import ContiguousAttention, UncachedAttention
from minillm.loops import generate_static_batch, generate_with_cache
from minillm.model.config import load_config
from minillm.model.decoder import Decoder
from minillm.model.hub import resolve
from minillm.model.weights import load_weights

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_135m.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
TIE = 1e-3


@pytest.fixture(scope="module")
def model() -> Decoder:
    path = resolve(GOLDEN["model"])
    config = load_config(path)
    return Decoder.from_weights(config, load_weights(path, config), dtype="float32")


def gaps_to_best(model: Decoder, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    """By how much each of ``token_ids`` misses the best logit, given the prompt and those before it: ``[n]``."""
    step = StepTensors.of([prompt_ids + token_ids[:-1]], [0], [0], logits="all")
    step = StepTensors(step.token_ids, step.positions, step.query_starts, step.context_lengths, step.sequences,
                       step.logit_rows[len(prompt_ids) - 1 :])
    logits = model.forward(step, UncachedAttention(model.config))
    chosen = logits.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
    return logits.amax(1) - chosen


def assert_same_but_for_ties(model: Decoder, case: dict, output: list[int]) -> None:
    """``output`` equals the golden tokens up to the first tie at the most."""
    golden = case["token_ids"][: len(output)]
    if output == golden:
        return
    first = next(i for i, (a, b) in enumerate(zip(output, golden)) if a != b)
    for tokens in (output, golden):
        gap = gaps_to_best(model, case["prompt_token_ids"], tokens[: first + 1])[-1].item()
        assert gap < TIE, f"{case['name']}: token {first} differs, {output[first]} for {golden[first]}, gap {gap}"


def test_the_golden_file_is_of_this_model_and_wide_enough() -> None:
    """At least 10 prompts, 200 tokens each, made on the very file that is loaded here."""
    assert sha256(Path(resolve(GOLDEN["model"])).read_bytes()).hexdigest() == GOLDEN["file_sha256"]
    assert len(CASES) >= 10 and all(len(case["token_ids"]) == 200 for case in CASES.values())
    assert {"transformers", "torch", "gguf"} <= GOLDEN["versions"].keys()
    assert len({tuple(case["token_ids"]) for case in CASES.values()}) == len(CASES)


@pytest.mark.parametrize("name", CASES)
def test_200_greedy_tokens_equal_transformers(model: Decoder, name: str) -> None:
    """Each golden token is the best (or tied with it) after the prompt and the golden tokens before it.

    By induction that is greedy decoding, in one forward pass a prompt.
    """
    case = CASES[name]
    gaps = gaps_to_best(model, case["prompt_token_ids"], case["token_ids"])
    wrong = (gaps >= TIE).nonzero().flatten().tolist()
    assert not wrong, f"tokens {wrong[:5]} differ, the first by {gaps[wrong[0]]:.4f}"
    assert (gaps == 0).float().mean() > 0.98, "that many ties are no ties"


@pytest.mark.parametrize("name", ["chat", "emoji"])
def test_decoding_with_a_cache_gives_the_golden_tokens(model: Decoder, name: str) -> None:
    """The real loop, token by token."""
    case = CASES[name]
    assert_same_but_for_ties(model, case, generate_with_cache(model, case["prompt_token_ids"], max_tokens=24))


def test_a_static_batch_gives_the_golden_tokens(model: Decoder) -> None:
    """K03 on the real model: prompts of unequal length side by side."""
    cases = [CASES[name] for name in ("python", "chinese", "one token", "french")]
    outputs = generate_static_batch(model, [case["prompt_token_ids"] for case in cases], max_tokens=16)
    for case, output in zip(cases, outputs, strict=True):
        assert_same_but_for_ties(model, case, output)


def test_auto_stays_within_its_bounds_of_float32(model: Decoder) -> None:
    """The contract's bounds of ``dtype="auto"``: largest logit difference 0.1, KL divergence 1e-5 a token."""
    path = resolve(GOLDEN["model"])
    config = load_config(path)
    fast = Decoder.from_weights(config, load_weights(path, config), dtype="auto")
    if fast.head.kernel != "fbgemm-fp16" and fast.dtype == torch.float32:
        pytest.skip("auto is float32 on this CPU")
    for name in ("python", "russian"):
        ids = CASES[name]["prompt_token_ids"] + CASES[name]["token_ids"][:80]
        step = StepTensors.of([ids], [0], [0], logits="all")
        exact, near = (m.forward(step, ContiguousAttention(config, dtype=m.dtype, device=m.device))
                       for m in (model, fast))
        assert (exact - near).abs().max() < 0.1
        log_p, log_q = exact.double().log_softmax(-1), near.double().log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert divergence.mean() < 1e-5, f"{name}: {divergence.mean():.2e} on average"
