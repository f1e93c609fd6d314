"""Drafts from the target's hidden states: always those of the newest token's row, and no token changes (X05)."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM, SamplingParams
from minillm.config import EngineConfig
from minillm.course.tiny import TINY, tiny_decoder
from minillm.errors import ModelError
from minillm.model.decoder import Decoder
from minillm.model.weights import expected_tensors
from minillm.speculate.mlp import MLPProposer, context_of, shapes_of
from minillm.speculate.propose import Controller, NgramProposer
from minillm.speculate.table import NgramTable

MAKER = runpy.run_path(str(Path(__file__).parents[2] / "data/draft/make_table.py"))
PROMPTS = [[1, 2, 3], [9] * 16, [200, 100], [9] * 16 + [4] * 5]
PARAMS = [SamplingParams(temperature=temperature, seed=4, top_p=0.9, max_tokens=24, ignore_eos=True)
          for temperature in (0.0, 1.0, 0.0, 0.0)]
WIDE, TAPS = 24, (0,)


class Always(Controller):
    def num_drafts(self, num_requests: int) -> int:
        return self.most


@pytest.fixture
def speculator(tiny_model, tmp_path):
    """A file of random weights for TINY, with its table beside it."""
    size, generator = tiny_model.config.hidden_size, torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=generator)
               for name, shape in shapes_of(size, len(TAPS) + 1, WIDE).items()}
    path = tmp_path / "tiny.safetensors"
    save_file(weights | {"head_ids": torch.arange(0, 261, 2, dtype=torch.int32)}, path,
              {"taps": " ".join(map(str, TAPS))})
    MAKER["save"](MAKER["counted"]([[1, 2, 3, 4, 5, 1, 2, 3]], 261), path.with_suffix(".npz"))
    return path


def answers(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("options", [
    {}, {"max_num_batched_tokens": 12, "max_prefill_chunk": 5}, {"max_num_seqs": 1},
    {"num_kv_blocks": 16, "block_size": 4}, {"block_size": 4}], ids=["batch", "chunks", "one", "preempted", "prefix"])
def test_x05_drafts_are_made_from_the_row_that_sampled_the_newest_token(tiny_llm, tiny_model, speculator, monkeypatch,
                                                                        options):
    """A greedy request's newest token is what the head says of its state, also after preemption and a prefix hit. Who
    has no token yet (one of the prompt's is left, in "chunks") gets no drafts."""
    expected, seen, unseen = answers(tiny_llm()), [], []
    propose = MLPProposer.propose

    def checked(self, requests, num_tokens):
        made = propose(self, requests, num_tokens)
        for request, drafts in zip(requests, made, strict=True):
            (seen if request in self._states else unseen).append(request)
            assert (request in self._states) == (request.num_output_tokens > 0) == bool(drafts)
            if request in self._states and request.params.temperature == 0:
                assert tiny_model.logits(self._states[request][-1:]).argmax() == request.token_ids[-1]
        return made

    monkeypatch.setattr(MLPProposer, "propose", checked)
    with tiny_llm(speculative_config={"method": "mlp_speculator", "model": speculator}, **options) as llm:
        llm.engine.speculation.controller = Always(3)
        for _ in range(2):
            assert answers(llm) == expected
        speculation = llm.engine.speculation
        assert speculation.failure is None and speculation.num_checked > 50 < len(seen)
        assert not speculation.proposer._states, "all requests have ended"
        assert "max_prefill_chunk" not in options or unseen
        assert "num_kv_blocks" not in options or llm.engine.scheduler.num_preempted > 0


def test_a_draft_is_what_the_network_says_step_by_step(tiny_llm, tiny_model, speculator):
    """By hand: context, inputs, two MLPs, logits over the head's rows and the candidates'."""
    weights = {name: weight.double() for name, weight in load_file(speculator).items()}
    with tiny_llm(speculative_config={"method": "mlp_speculator", "model": speculator}) as llm:
        proposer = llm.engine.speculation.proposer
        made = []
        proposer.drawn = lambda requests, logits, rows: made.append(logits) or proposer.sampler(logits, rows)
        llm.engine.speculation.controller = Always(2)
        stream = llm.stream([1, 2, 3, 1, 2], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        first = next(iter(stream)).token_ids[0]
        (request, state), = proposer._states.items()
        state, text = state.clone(), [1, 2, 3, 1, 2, first]
        next(iter(stream))
    unit = lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    for place in range(2):
        *ids, length = context_of(text, proposer.table)
        tokens = [unit(tiny_model.embedding[i]) if i >= 0 else torch.zeros(tiny_model.config.hidden_size) for i in ids]
        x = torch.cat([unit(state).flatten(), *tokens]) @ weights["later" if place else "first"].T
        x = x + weights["lengths"][length]
        for number in range(2):
            gate, up, down = (weights[f"{part}_{number}"] for part in ("gate", "up", "down"))
            x = x + down @ (torch.nn.functional.silu(gate @ unit(x)) * (up @ unit(x)))
        state, logits = x, torch.full((261,), -torch.inf, dtype=torch.float64)
        allowed = sorted({*weights["head_ids"].long().tolist(), *(max(0, own) for own in ids[2:])})
        logits[allowed] = tiny_model.embedding[allowed] @ x
        torch.testing.assert_close(made[place][0].double(), logits, rtol=1e-5, atol=1e-4)
        text.append(int(logits.argmax()))


def test_the_context_is_the_newest_tokens_two_copies_and_the_tables_guess():
    table = NgramTable(100, {1: {7: 50}, 2: {}, 3: {}})
    assert context_of([1, 2], table) == [2, 1, -1, -1, -1, 0]
    assert context_of([5, 6, 7, 8, 5, 6, 7], table) == [7, 6, 8, -1, 50, 3]
    assert context_of([5, 6, 7, 8, 7, 9, 5, 6, 7], table) == [7, 6, 8, 9, 50, 3], "the shorter match disagrees"


def test_another_file_or_one_for_another_model_is_refused_by_name(tiny_llm, speculator, tmp_path):
    asked = {"method": "mlp_speculator", "model": tmp_path / "other.safetensors"}
    with pytest.raises(ModelError, match="other.npz is no table"):
        tiny_llm(speculative_config=asked)
    shutil.copy(speculator.with_suffix(".npz"), tmp_path / "other.npz")
    with pytest.raises(ModelError, match="other.safetensors is no speculator"):
        tiny_llm(speculative_config=asked)
    weights = load_file(speculator)
    for broken, metadata, words in (
            (weights, {}, "is no speculator"),
            ({name: own for name, own in weights.items() if name != "up_0"}, {"taps": "0"}, "is no speculator"),
            ({name: own for name, own in weights.items() if name != "down_1"}, {"taps": "0"}, "another kind"),
            (weights | {"up_0": weights["up_0"][:, 1:]}, {"taps": "0"}, "another kind"),
            (weights, {"taps": "0 1"}, "another kind"), (weights, {"taps": "9"}, "another kind"),
                (weights, {"taps": "-1"}, "another kind"), (weights, {"taps": ""}, "another kind"),
                (weights | {"head_ids": torch.zeros(0, dtype=torch.int32)}, {"taps": "0"}, "another kind"),
                (weights | {"head_ids": torch.zeros(2, 3, dtype=torch.int32)}, {"taps": "0"}, "another kind"),
                (weights | {"head_ids": torch.tensor([-1])}, {"taps": "0"}, "another kind"),
                (weights, {"taps": "one"}, "is no speculator"),
            (weights | {"head_ids": torch.tensor([300])}, {"taps": "0"}, "another kind")):
        save_file({name: own.contiguous() for name, own in broken.items()}, tmp_path / "other.safetensors", metadata)
        with pytest.raises(ModelError, match=words):
            tiny_llm(speculative_config=asked)
    with pytest.raises(ModelError, match="no speculator is called 'unknown'"):
        tiny_llm(speculative_config={"method": "mlp_speculator", "model": "unknown"})
    with pytest.raises(ValueError, match="method 'mlp_speculator' needs a model"):
        EngineConfig(speculative_config={"method": "mlp_speculator"})


def test_a_model_whose_forward_is_its_own_is_refused(speculator, byte_tok):
    class Flipped(Decoder):
        def forward(self, step, attention):
            return -super().forward(step, attention)

    model = tiny_decoder(TINY)
    model.__class__ = Flipped
    with pytest.raises(ModelError, match="needs the hidden states of minillm's own Decoder"):
        LLM(model, tokenizer=byte_tok, speculative_config={"method": "mlp_speculator", "model": speculator})


def test_a_proposer_that_fails_to_see_is_not_asked_again_and_nobody_loses_a_token(tiny_llm):
    class Blind(NgramProposer):
        def see(self, requests, rows):
            raise RuntimeError("blind")

    with tiny_llm(proposer=Blind()) as llm, pytest.warns(RuntimeWarning, match="blind"):
        assert answers(llm) == answers(tiny_llm()) and llm.engine.speculation.failure.endswith("blind")


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}],
                         ids=lambda options: "".join(options.values()))
def test_a_target_in_any_number_format_has_drafts(speculator, options, byte_tok):
    """Whose network is in 4 bit where a kernel is, and that in float32 change no token."""
    generator, made = torch.Generator().manual_seed(2), []
    model = Decoder.from_weights(TINY, {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.4
        for name, shape in expected_tensors(TINY).items()}, **options)
    for asked in (None, {"method": "mlp_speculator", "model": speculator}):
        with LLM(model, tokenizer=byte_tok, speculative_config=asked) as llm:
            if asked:
                llm.engine.speculation.controller = Always(3)
            made.append(answers(llm))
            assert not asked or llm.engine.speculation.failure is None and llm.engine.speculation.num_checked > 50
    assert made[0] == made[1] or options.get("dtype") != "float32"
