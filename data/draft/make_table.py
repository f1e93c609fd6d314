"""Make the table of n-grams that guesses where a text copies nothing: ``data/draft/smollm2-135m.npz``.

    python data/draft/make_table.py                        some minutes on two cores
    python data/draft/make_table.py MODEL TABLE.npz        for another model

The model itself writes the text, so that the table guesses as it would: answers to each of ``FORMS`` about each of
``TOPICS``, drawn at temperature 0.6. Then it is counted what mostly follows one, two and three tokens; of two and of
three what was seen once is left out. The story prompts that drafts are measured with (``minillm bench
serving --only speculation``) have other forms and other topics than these.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from minillm import LLM, SamplingParams
from minillm.speculate.table import LONGEST, NgramTable, key

MODEL, TABLE = "smollm2-135m", Path(__file__).with_name("smollm2-135m.npz")
LEAST_SEEN, ANSWER_TOKENS = {1: 1, 2: 2, 3: 2}, 256
FORMS = (
    "What is {}?", "Give me five tips about {}.", "Write a short paragraph about {}.", "List three facts about {}.",
    "How does {} work?", "Why do people care about {}?", "Compare {} with something similar.",
    "Write a poem about {}.", "Tell a child what {} is.", "Write an email to a friend about {}.",
    "What are the advantages and disadvantages of {}?", "Write a Python function that has to do with {}.",
)
TOPICS = (
    "rain", "the heart", "bread", "football", "the Roman Empire", "solar energy", "music", "a good night's sleep",
    "the Internet", "whales", "money", "photography", "democracy", "chess", "volcanoes", "coffee", "trains", "vaccines",
    "poetry", "the Moon", "forests", "computers", "swimming", "history", "mathematics", "friendship", "cooking",
    "electricity", "dogs", "paper", "climate change", "the theatre", "batteries", "languages", "spiders", "cities",
    "travelling by bus", "painting", "robots", "a job interview", "insects", "sorting numbers", "recycling", "dancing",
    "gravity", "libraries", "glass", "winter", "the human brain", "time management", "fish", "airplanes", "medicine",
    "maps", "a birthday party", "writing tests", "light", "rivers", "salt", "learning to read", "clocks", "castles",
    "public speaking", "data structures",
)


def written(model: str) -> tuple[list[list[int]], int]:
    """Ids of each prompt, as the chat template makes it, with its answer; and how many ids there are."""
    questions = [form.format(topic) for form in FORMS for topic in TOPICS]
    params = [SamplingParams(temperature=0.6, max_tokens=ANSWER_TOKENS, seed=number)
              for number in range(len(questions))]
    with LLM(model, dtype="bfloat16", max_num_seqs=32, max_model_len=512) as llm:
        outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
    return [[*own.prompt_token_ids, *own.outputs[0].token_ids] for own in outputs], llm.tokenizer.vocab_size


def counted(texts: Iterable[Sequence[int]], vocab_size: int) -> NgramTable:
    """The table of ``texts``, each a list of ids. Of two that are as frequent the smaller id is kept."""
    texts, following = list(texts), {}
    for length in range(1, LONGEST + 1):
        seen: dict[int, Counter[int]] = defaultdict(Counter)
        for ids in texts:
            for end in range(length, len(ids)):
                seen[key(ids[end - length:end], vocab_size)][ids[end]] += 1
        following[length] = {before: min(after, key=lambda token, after=after: (-after[token], token))
                             for before, after in sorted(seen.items()) if max(after.values()) >= LEAST_SEEN[length]}
    return NgramTable(vocab_size, following)


def save(table: NgramTable, path: str | Path) -> None:
    """As ``NgramTable.load`` reads it."""
    arrays = {"vocab_size": np.array(table.vocab_size)}
    for length, entries in table.following.items():
        arrays[f"keys_{length}"] = np.diff(np.array(sorted(entries), dtype=np.int64), prepend=0)
        arrays[f"ids_{length}"] = np.array([entries[own] for own in sorted(entries)], dtype=np.int32)
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    model, path = sys.argv[1:] or (MODEL, TABLE)
    start_s = time.perf_counter()
    texts, vocab_size = written(model)
    print(f"{sum(map(len, texts)):,} tokens in {time.perf_counter() - start_s:.0f} s", flush=True)
    table = counted(texts, vocab_size)
    save(table, path)
    sizes = ", ".join(f"{len(entries):,}" for entries in table.following.values())
    print(f"{path}: {sizes} entries, {Path(path).stat().st_size:,} bytes")
