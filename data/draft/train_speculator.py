"""Train the network that guesses from the target's hidden states: ``data/draft/smollm2-135m.safetensors``.

    python data/draft/train_speculator.py FOLDER               75 minutes on two cores; FOLDER keeps the steps
    python data/draft/train_speculator.py FOLDER --minutes 5   a shorter training, to try something

1. The target writes text: answers to many forms of prompt about many topics, at temperatures 0, 0.6 and 1, and answers
   to second prompts that quote the first ones, so that copying is learned too.
2. It reads that text once more, and its hidden states are kept for each token of an answer.
3. The network learns to give logits as the target's, four drafts in a row, each from its own last state. It begins as
   the best linear map (least squares), to which the MLPs add nothing yet: a random start wastes minutes.

How often a draft is right is measured on other forms of prompt about other topics, and on prompts written by hand. Of
the first drafts of the shipped network 0.59 and 0.49 are (0.52 and 0.41 after three minutes, 0.47 and 0.37 at the
start); of what n-grams and the table guess, 0.46 and 0.33.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from make_table import FORMS, MODEL, TABLE, TOPICS
from safetensors.torch import save_file
from torch import Tensor, nn

from minillm import LLM, SamplingParams
from minillm.attention.base import StepTensors
from minillm.attention.torch_backend import UncachedAttention
from minillm.speculate.mlp import NUM_CANDIDATES, Network, context_of, shapes_of
from minillm.speculate.table import NgramTable

TAPS = (9, 19)  # hidden states after these layers, and after the final norm
WIDE, NUM_HEAD_ROWS, NUM_DRAFTS, BATCH = 1152, 8192, 4, 1024
LEARNING_RATE = 1e-3
MORE_FORMS = (
    "Explain {} to me step by step.", "What should a beginner know about {}?", "Write a story about {}.",
    "Make a table about {}.", "Who would like {} and why?", "Write a dialogue between two people about {}.",
    "What is the history of {}?", "Give me a recipe or a plan that has to do with {}.",
    "Ask me three questions about {}.", "Describe {} in one sentence.",
)
MORE_TOPICS = (
    "bicycles", "the desert", "cheese", "the French Revolution", "wind power", "jazz", "dreams", "e-mail", "elephants",
    "taxes", "film cameras", "elections", "card games", "earthquakes", "tea", "ships", "antibiotics", "novels", "Mars",
    "mountains", "keyboards", "running", "archaeology", "prime numbers", "neighbours", "soup", "magnets", "cats",
    "pencils", "the ocean", "opera", "bridges", "grammar", "bees", "villages", "hiking", "sculpture", "drones",
    "a first day at school", "ants", "binary search", "plastic", "folk dances", "black holes", "museums", "windows",
    "summer", "memory", "planning a week", "sharks", "helicopters", "surgery", "calendars", "weddings", "debugging",
    "colours", "lakes", "sugar", "speed reading", "lighthouses", "pyramids", "teamwork", "linked lists", "gardens",
)
SECOND_PROMPTS = (
    "Summarize this text:\n\n{}", "Rewrite this in simpler words:\n\n{}", "List the main points of this:\n\n{}",
    "Correct the mistakes in this text and give it back:\n\n{}", "Write a title for this, then repeat it:\n\n{}",
    "Continue this text:\n\n{}", "What does this text say? Quote it.\n\n{}", "Turn this into bullet points:\n\n{}",
)
SHARE_ASKED = 0.6  # of all forms x topics: what two cores can do in a quarter of an hour
HELD_OUT_FORMS = (
    "I have never understood {}. Can you help?", "Convince me that {} matters.", "Name the parts of {}.",
    "Write a news report about {}.",
)
HELD_OUT_TOPICS = ("honey", "the stock market", "violins", "rockets", "sheep", "traffic", "sleepwalking", "ice cream")
BY_HAND = (
    "My bike has a flat tire and I am ten miles from home. What now?", "Is it ever okay to lie to a friend?",
    "Write a Python function that reverses a string.", "What's the difference between a virus and a bacterium?",
    "Plan a three-day trip to a city by the sea.", "Finish this sentence: The last train left the station and",
    "How do I tell my boss that I am leaving?", "Which planet is closest to the sun, and how hot is it there?",
    "Invent a name for a bakery run by two sisters.", "What would happen if the Earth stopped turning?",
    "Give me a vegetarian dinner that takes twenty minutes.", "Why is the sky blue?",
    "Describe the sound of an old house at night.", "How many legs do three spiders and two dogs have together?",
    "Write a short letter to my landlord about a broken heater.", "What makes a good teacher?",
    "Explain photosynthesis as if I were six.", "Write SQL that finds the ten oldest customers.",
    "Translate to French: Where is the nearest pharmacy?", "Tell me a joke about programmers.",
    "What should I look at when I buy a used car?", "Compare living in a town with living in the country.",
    "Once upon a time a fox found a key in the snow.", "How can I get my child to read more?",
    "What is a black box in an airplane for?", "List the steps to plant a tree.",
)


# ---- 1. text -------------------------------------------------------------------------------------------------------

def write(prompts: list[str], llm: LLM, temperatures: tuple[float, ...], most: int, draw: random.Random) -> list:
    """(prompt ids, answer ids, answer) of each of ``prompts``."""
    params = [SamplingParams(temperature=draw.choice(temperatures), max_tokens=most, seed=number)
              for number in range(len(prompts))]
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    return [(out.prompt_token_ids, out.outputs[0].token_ids, out.outputs[0].text) for out in outputs]


def save_texts(path: Path, texts: list) -> None:
    np.savez(path, ids=np.concatenate([[*prompt, *answer] for prompt, answer, _ in texts]).astype(np.int32),
             prompt=[len(prompt) for prompt, _, _ in texts], answer=[len(answer) for _, answer, _ in texts])


def write_texts(folder: Path) -> None:
    """``train.npz``, ``forms.npz`` and ``hand.npz``."""
    draw = random.Random(5)
    asked = [form.format(topic) for form in FORMS + MORE_FORMS for topic in TOPICS + MORE_TOPICS]
    draw.shuffle(asked)
    asked = asked[:int(len(asked) * SHARE_ASKED)]
    with LLM(MODEL, dtype="bfloat16", max_num_seqs=32, max_model_len=640) as llm:
        first = write(asked, llm, (0.0, 0.6, 1.0), 224, draw)
        quoted = [text for _, _, text in first if 200 < len(text) < 900]
        draw.shuffle(quoted)
        second = [draw.choice(SECOND_PROMPTS).format(text) for text in quoted[:len(asked) // 2]]
        save_texts(folder / "train.npz", first + write(second, llm, (0.0, 0.6, 1.0), 192, draw))
        forms = [form.format(topic) for form in HELD_OUT_FORMS for topic in HELD_OUT_TOPICS]
        for name, prompts in (("forms", forms), ("hand", BY_HAND)):
            save_texts(folder / f"{name}.npz", write(prompts, llm, (0.0,), 128, draw))


# ---- 2. hidden states ----------------------------------------------------------------------------------------------

@torch.inference_mode()
def read_texts(folder: Path, name: str) -> None:
    """Of each token of an answer: states of the row that sampled it, ``[taps, hidden]`` in float16, and its context and
    how many tokens of the answer follow it."""
    data = np.load(folder / f"{name}.npz")
    model, table = LLM(MODEL, dtype="bfloat16", num_kv_blocks=8).model, NgramTable.load(TABLE)
    count, at = int(data["answer"].sum()), 0
    states = np.lib.format.open_memmap(folder / f"{name}_states.npy", "w+", np.float16,
                                       (count, len(TAPS) + 1, model.config.hidden_size))
    contexts = np.zeros((count, 4 + NUM_CANDIDATES), dtype=np.int32)
    for ids, before, own in zip(np.split(data["ids"], np.cumsum(data["prompt"] + data["answer"])[:-1]),
                                data["prompt"].tolist(), data["answer"].tolist(), strict=True):
        ids, attention = ids.tolist(), UncachedAttention(model.config)
        step = StepTensors.of([ids], [0], ["text"], logits_for=[own + 1])
        rows = torch.stack(model.hidden_states(step, attention, TAPS), 1)[:own]
        states[at:at + own] = rows.half().numpy()
        for place in range(own):
            known = ids[:before + place + 1]
            contexts[at + place] = [*context_of(known, table), own - 1 - place]
        at += own
    np.save(folder / f"{name}_contexts.npy", contexts)


# ---- 3. training ---------------------------------------------------------------------------------------------------

class Texts:
    """What :func:`read_texts` has kept. A position stands for the newest token; enough of its answer follows."""

    def __init__(self, folder: Path, name: str):
        self.states = torch.from_numpy(np.load(folder / f"{name}_states.npy"))
        contexts = torch.from_numpy(np.load(folder / f"{name}_contexts.npy")).long()
        self.contexts, left = contexts[:, :-1], contexts[:, -1]
        self.positions = torch.nonzero(left >= NUM_DRAFTS).squeeze(1)

    def at(self, positions: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The states that drafting starts from; and for each draft its context and the target's final state, whose
        logits it should have."""
        return self.states[positions].float(), [
            (self.contexts[positions + number], self.states[positions + number + 1, -1].float())
            for number in range(NUM_DRAFTS)]


class Student(nn.Module):
    """The network with gradients, and its logits over ``head_ids`` and the candidates."""

    def __init__(self, embedding: Tensor, head_ids: Tensor):
        super().__init__()
        shapes = shapes_of(embedding.shape[1], len(TAPS) + 1, WIDE)
        self.lengths = nn.Parameter(torch.zeros(shapes.pop("lengths")))
        self.linear = nn.ModuleDict({name: nn.Linear(inputs, outputs, bias=False)
                                     for name, (outputs, inputs) in shapes.items()})
        for name in self.linear:
            if name.startswith("down"):
                nn.init.zeros_(self.linear[name].weight)
        self.embedding, self.head_ids, self.rows = embedding, head_ids, embedding[head_ids]
        self.in_head = torch.zeros(len(embedding), dtype=torch.bool).index_fill_(0, head_ids, True)
        self.network = Network(self.linear, self.lengths, lambda ids: nn.functional.embedding(ids, embedding))

    def scores(self, state: Tensor, context: Tensor) -> Tensor:
        """``[B, head_ids + candidates]``; a candidate that the head has, or that is none, scores nothing."""
        ids = context[:, 2:2 + NUM_CANDIDATES]
        own = (state.unsqueeze(1) * self.embedding[ids.clamp(min=0)].to(state.dtype)).sum(-1)
        own = own.masked_fill((ids < 0) | self.in_head[ids], -1e4)
        return torch.cat([state @ self.rows.T.to(state.dtype), own], 1)

    def drafts(self, state: Tensor, context: Tensor) -> Tensor:
        """The most likely id ``[B]``."""
        best = self.scores(state, context).argmax(-1, keepdim=True)
        ids = context[:, 2:2 + NUM_CANDIDATES].gather(1, (best - len(self.head_ids)).clamp(min=0))
        return torch.where(best < len(self.head_ids), self.head_ids[best.clamp(max=len(self.head_ids) - 1)], ids)[:, 0]


def start_linear(student: Student, texts: Texts) -> None:
    """"first" and "later" become the least-squares map from their inputs to the target's next final state."""
    chosen = texts.positions[torch.randperm(len(texts.positions))[:60_000]]
    states, ((context, target), *_) = texts.at(chosen)
    for name, state in (("first", states), ("later", states[:, -1])):
        x = student.network.inputs(state, context).double()
        gram = x.T @ x
        gram += 1e-3 * gram.diagonal().mean() * torch.eye(len(gram))
        weight = torch.linalg.solve(gram, x.T @ target.double()).T
        student.linear[name].weight.data = weight.float().contiguous()
        left = (target - x @ weight.T).square().mean() / target.square().mean()
        print(f"{name}: least squares leaves {left:.2f} of the next state", flush=True)


@torch.no_grad()
def acceptance(student: Student, texts: Texts, most: int = 4000) -> list[float]:
    """By place, the share of drafts that the greedy target would accept, of those that come to be checked."""
    chosen = texts.positions[torch.randperm(len(texts.positions), generator=torch.Generator().manual_seed(1))[:most]]
    state, drafts = texts.at(chosen)
    alive, shares = torch.ones(len(chosen), dtype=torch.bool), []
    for context, target in drafts:
        state = student.network(state, context)
        right = student.drafts(state, context) == (target @ student.embedding.T).argmax(-1)
        shares.append((right & alive).sum().item() / max(1, alive.sum().item()))
        alive &= right
    return shares


def train(student: Student, texts: Texts, tests: dict[str, Texts], minutes: float) -> None:
    """Cross-entropy to the target's distribution at each of the drafts, a later one counting less."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.02)
    begin_s, shown_s, step, losses, batches = time.perf_counter(), 0.0, 0, [], iter(())
    while (spent_s := time.perf_counter() - begin_s) < 60 * minutes:
        if (chosen := next(batches, None)) is None:
            batches = iter(texts.positions[torch.randperm(len(texts.positions))].split(BATCH))
            chosen = next(batches)
        left = 0.5 * (1 + math.cos(math.pi * spent_s / (60 * minutes)))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 100) * (0.02 + 0.98 * left)
        state, drafts = texts.at(chosen)
        loss = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for number, (context, target) in enumerate(drafts):
                state = student.network(state, context)
                with torch.no_grad():
                    wanted = student.scores(target, context).float().softmax(-1)
                scores = student.scores(state, context).float()
                loss = loss + 0.8**number * nn.functional.cross_entropy(scores, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        step += 1
        losses.append(loss.item())
        if spent_s - shown_s > 60:
            shown_s = spent_s
            right = "   ".join(f"{name} " + " ".join(f"{share:.3f}" for share in acceptance(student, own))
                               for name, own in tests.items())
            rounds = step * BATCH / len(texts.positions)
            print(f"{spent_s:6.0f} s  {rounds:5.2f} rounds  loss {np.mean(losses[-50:]):.3f}   {right}", flush=True)


def save_student(student: Student, path: Path) -> None:
    """As :class:`~minillm.speculate.mlp.MLPProposer` reads it."""
    weights = {name: layer.weight.detach().bfloat16().contiguous() for name, layer in student.linear.items()}
    weights |= {"lengths": student.lengths.detach().bfloat16(), "head_ids": student.head_ids.int()}
    save_file(weights, path, {"taps": " ".join(map(str, TAPS))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=42)
    args = parser.parse_args()
    torch.manual_seed(0)
    args.folder.mkdir(exist_ok=True)
    if not (args.folder / "hand.npz").exists():
        write_texts(args.folder)
    for name in ("train", "forms", "hand"):
        if not (args.folder / f"{name}_contexts.npy").exists():
            read_texts(args.folder, name)
    texts, *held_out = (Texts(args.folder, name) for name in ("train", "forms", "hand"))
    tests = dict(zip(("forms", "hand"), held_out, strict=True))
    embedding = LLM(MODEL, dtype="float32", num_kv_blocks=8).model.embedding.detach().clone()
    counts = torch.bincount(texts.contexts[:, 0], minlength=len(embedding))
    head_ids = counts.topk(NUM_HEAD_ROWS).indices.sort().values
    covered = counts[head_ids].sum() / counts.sum()
    print(f"{len(texts.positions):,} positions; the head has {covered:.3f} of their tokens", flush=True)
    student = Student(embedding, head_ids)
    start_linear(student, texts)
    print("start", {name: acceptance(student, own) for name, own in tests.items()}, flush=True)
    train(student, texts, tests, args.minutes)
    print("end", {name: acceptance(student, own, 20_000) for name, own in tests.items()})
    save_student(student, TABLE.with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
