"""The script that trains the speculator: it learns what is there to learn, and the engine drafts as it was trained."""

from __future__ import annotations

import itertools
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minillm import SamplingParams
from minillm.speculate.mlp import context_of
from minillm.speculate.propose import Controller
from minillm.speculate.table import NgramTable

FOLDER = Path(__file__).parents[2] / "data/draft"


@pytest.fixture
def script(monkeypatch, tiny_model):
    """Its names, made for TINY; it is run anew, as its numbers are read inside of its functions."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = runpy.run_path(str(FOLDER / "train_speculator.py"))
    own = names["Student"].__init__.__globals__
    monkeypatch.setitem(own, "TAPS", (0,))
    monkeypatch.setitem(own, "WIDE", 16)
    monkeypatch.setitem(own, "BATCH", 64)
    yield SimpleNamespace(**names)
    sys.modules.pop("make_table", None)


def texts_of(student, count: int = 600) -> SimpleNamespace:
    """A language where each token follows from the one before: states say it, in another basis."""
    generator = torch.Generator().manual_seed(3)
    size = student.embedding.shape[1]
    tokens = torch.arange(count + 5) * 7 % 261
    final = student.embedding[(torch.arange(1, count + 6)) * 7 % 261] * 30
    states = torch.stack([final @ torch.randn(size, size, generator=generator), final], 1)
    contexts = torch.zeros(count + 5, 6, dtype=torch.long)
    contexts[:, 0], contexts[1:, 1], contexts[:, 2:5] = tokens, tokens[:-1], -1

    def at(positions):
        return states[positions], [(contexts[positions + n], states[positions + n + 1, -1]) for n in range(4)]
    return SimpleNamespace(positions=torch.arange(1, count), at=at)


def test_least_squares_is_a_good_start_and_training_makes_every_draft_better(script, tiny_model, monkeypatch):
    torch.manual_seed(0)
    embedding = tiny_model.embedding.float().clone()  # of an inference tensor, which cannot be trained on
    student = script.Student(embedding, torch.arange(261))
    texts = texts_of(student)
    before = script.acceptance(student, texts)
    script.start_linear(student, texts)
    start = script.acceptance(student, texts)
    ticks = itertools.count()
    monkeypatch.setitem(script.train.__globals__, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    script.train(student, texts, {"own": texts}, minutes=5)  # by that clock a step takes a second
    end = script.acceptance(student, texts)
    assert before[0] < 0.1 and start[0] > 0.7, (before, start)
    assert all(after > first for first, after in zip(start, end, strict=True)) and end[0] > 0.85, (start, end)


def test_the_engine_drafts_what_the_student_would(script, tiny_llm, tiny_model, tmp_path):
    """Random weights, a head of every third id: copies and the table's guess are drafted though the head lacks them."""
    torch.manual_seed(1)
    student = script.Student(tiny_model.embedding.float().clone(), torch.arange(0, 261, 3))
    for name in ("down_0", "down_1"):
        torch.nn.init.normal_(student.linear[name].weight)
    script.save_student(student, tmp_path / "tiny.safetensors")
    sys.modules["make_table"].save(NgramTable(261, {1: {9: 100}, 2: {}, 3: {}}), tmp_path / "tiny.npz")
    with tiny_llm(speculative_config={"method": "mlp_speculator", "model": tmp_path / "tiny.safetensors"}) as llm:
        controller = Controller(3)
        controller.num_drafts = lambda num_requests: 3
        llm.engine.speculation.controller, proposer = controller, llm.engine.speculation.proposer
        proposed, propose = [], proposer.propose

        def kept(requests, num_tokens):
            states = [proposer._states[request].float() for request in requests]
            texts = [request.token_ids for request in requests]
            proposed.append((states, [list(text) for text in texts], propose(requests, num_tokens)))
            return proposed[-1][-1]

        proposer.propose = kept
        llm.generate([[9] * 8, [5, 10, 5, 10, 5]], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    student = student.bfloat16().float()  # as it was saved
    student.rows = student.embedding[student.head_ids]
    for states, texts, drafts in proposed:
        state = torch.stack(states)
        for place in range(3):
            context = torch.tensor([context_of(text, proposer.table) for text in texts])
            with torch.no_grad():
                state = student.network(state, context)
                assert student.drafts(state, context).tolist() == [own[place] for own in drafts]
            for text, own in zip(texts, drafts, strict=True):
                text.append(own[place])
