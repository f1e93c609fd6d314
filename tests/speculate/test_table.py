"""The table of n-grams: what it counts, keeps, guesses and refuses."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import SamplingParams
from minillm.config import EngineConfig
from minillm.errors import ModelError
from minillm.speculate.propose import Controller, NgramProposer
from minillm.speculate.table import LONGEST, NgramTable

MAKER = runpy.run_path(str(Path(__file__).parents[2] / "data/draft/make_table.py"))
counted, save, LEAST_SEEN = MAKER["counted"], MAKER["save"], MAKER["LEAST_SEEN"]
VOCAB = 5
TEXTS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=30), max_size=4)


def looked_up(texts: list[list[int]], newest: list[int]) -> int | None:
    """By going through all texts for each question."""
    for length in range(min(LONGEST, len(newest)), 0, -1):
        after = Counter(ids[end] for ids in texts for end in range(length, len(ids))
                        if ids[end - length:end] == newest[-length:])
        if after and max(after.values()) >= LEAST_SEEN[length]:
            return min(token for token, count in after.items() if count == max(after.values()))
    return None


@settings(deadline=None)
@given(TEXTS, st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_the_next_id_is_the_most_frequent_after_the_longest_context_that_was_seen(texts, newest):
    assert counted(texts, VOCAB).next(newest) == looked_up(texts, newest)


def test_ids_of_a_large_vocabulary_are_told_apart():
    largest = 262_143
    table = counted([[largest, largest, 1, largest, largest, 1], [0, largest, 2]], largest + 1)
    assert table.next([largest, largest]) == 1 and table.next([0]) == largest and table.next([7]) is None


@settings(deadline=None, max_examples=25)
@given(texts=TEXTS)
def test_a_file_gives_back_what_was_saved(texts, tmp_path_factory):
    table, path = counted(texts, VOCAB), tmp_path_factory.mktemp("table") / "own.npz"
    save(table, path)
    kept = NgramTable.load(path)
    assert (kept.vocab_size, kept.following) == (table.vocab_size, table.following)


@pytest.mark.parametrize("content", [None, b"", b"no archive", b"PK\x03\x04 and then nothing"])
def test_another_file_is_refused_by_name(content, tmp_path):
    path = tmp_path / "own.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match="own.npz is no table of n-grams"):
        NgramTable.load(path)


def test_a_table_whose_ids_are_beyond_its_vocabulary_is_refused(tmp_path):
    for token in (-1, 7):
        save(NgramTable(7, {1: {1: token}, 2: {}, 3: {}}), tmp_path / "own.npz")
        with pytest.raises(ModelError, match="own.npz is no table of n-grams.*beyond its vocab_size"):
            NgramTable.load(tmp_path / "own.npz")


def test_it_guesses_where_the_context_repeats_nothing_and_goes_on_from_its_own_guesses():
    table = counted([[1, 2, 3, 4, 1, 2, 3, 4]], 10)
    proposer = NgramProposer(table=table)
    assert proposer.continued([9, 1], 3) == [2, 3, 4]
    assert proposer.continued([7, 8, 9, 7, 8], 3) == [9, 7, 8], "a copy goes first, and is whole"
    assert proposer.continued([9], 3) == [] and NgramProposer().continued([9, 1], 3) == []


def test_an_end_of_the_table_ends_the_drafts():
    assert NgramProposer(table=counted([[1, 2, 3]], 10)).continued([1], 5) == [2, 3]


# ---- in the engine ---------------------------------------------------------------------------------------------------


class Always(Controller):
    def num_drafts(self, num_requests: int) -> int:
        return self.most


def test_the_engine_takes_a_table_by_path_and_its_tokens_stay(tiny_llm, byte_tok, tmp_path):
    prompts, params = [[5, 9, 2, 7], [1, 2]], SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)
    with tiny_llm() as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    path = tmp_path / "own.npz"
    save(counted([prompt + answer for prompt, answer in zip(prompts, plain)], byte_tok.vocab_size), path)
    with tiny_llm(speculative_config={"table": str(path)}) as llm:
        llm.engine.speculation.controller = Always(4)
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == plain
        assert llm.engine.speculation.num_accepted > 10, "it was counted over these very answers"


def test_a_table_for_other_tokens_or_none_at_all_is_refused(tiny_llm, tmp_path):
    save(counted([[1, 2]], 7), tmp_path / "other.npz")
    with pytest.raises(ModelError, match=r"other.npz is for 7 token ids, the model's tokenizer has \d+"):
        tiny_llm(speculative_config={"table": tmp_path / "other.npz"})
    with pytest.raises(ModelError, match="no table of n-grams is called 'unknown'"):
        tiny_llm(speculative_config={"table": "unknown"})
    with pytest.raises(ValueError, match="table must be a name or a path, got 3"):
        EngineConfig(speculative_config={"table": 3})
    with pytest.raises(ValueError, match="has no 'table'; draft takes"):
        EngineConfig(speculative_config={"method": "draft", "model": "m", "table": "t"})


def test_the_table_that_comes_with_minillm_is_for_the_default_model():
    from minillm.measure.results import shipped_file
    path = Path(shipped_file("draft/smollm2-135m.npz"))
    table = NgramTable.load(path)
    assert table.vocab_size == 49_152 and path.stat().st_size < 4e6
    assert all(0 <= token < 49_152 for entries in table.following.values() for token in entries.values())
