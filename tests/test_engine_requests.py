"""What a request asks reaches the model and the sampler, and what it gets is its own: ids, choices, cancels, chats."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from minillm import InvalidRequest, SamplingParams
from minillm.loops import generate_without_cache
from minillm.measure.metrics import summarize
from minillm.sample import Sampler, SamplingRow

GREEDY = {"temperature": 0.0}
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def flat(llm, value: float = 0.0):
    """Make every logit of a script's model ``value``."""
    llm.model.edit = lambda call, step, logits: torch.full_like(logits, value)
    return llm


def ids_of(llm, prompt, **params) -> list[int]:
    return llm.generate([prompt], SamplingParams(**params))[0].outputs[0].token_ids


# ---- penalties, bias and filters reach the sampler with the right history


def test_s06_the_engine_keeps_prompt_and_output_apart(script_llm):
    """S06: presence and frequency penalties see the output alone, the repetition penalty the prompt too."""
    prompt = [0, 0, 2]
    assert ids_of(flat(script_llm([65])), prompt, max_tokens=4, presence_penalty=1.0, **GREEDY) == [0, 1, 2, 3]
    assert ids_of(flat(script_llm([65])), prompt, max_tokens=4, frequency_penalty=0.5, **GREEDY) == [0, 1, 2, 3]
    assert ids_of(flat(script_llm([65]), 1.0), prompt, max_tokens=4, repetition_penalty=2.0, **GREEDY) == [1, 3, 4, 5]


def test_logit_bias_and_filters_reach_the_sampler(script_llm):
    """A bias of 100 beats the script's 20; top_k=1 makes a hot draw greedy."""
    assert ids_of(script_llm([65]), "p", max_tokens=2, logit_bias={66: 100.0}, **GREEDY) == [66, 66]
    hot = dict(temperature=50.0, seed=3, max_tokens=12, ignore_eos=True)
    for limits in (dict(top_k=1), dict(top_p=1e-6), dict(min_p=1.0)):
        assert ids_of(script_llm([65]), "p", **hot, **limits) == [65] * 12
    assert ids_of(script_llm([65]), "p", **hot) != [65] * 12


# ---- stopping


@pytest.mark.parametrize("eos", [257, 260])
def test_every_eos_id_of_the_model_stops_is_masked_and_is_ignored(script_llm, eos):
    """Both end ids of a model with two: stop, min_tokens and ignore_eos hold for each."""
    def make(said):
        return script_llm(said, eos_token_ids=(257, 260))
    (output,) = make([72, eos, 88]).generate(["p"], SamplingParams(max_tokens=9, **GREEDY))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("H", [72, eos])
    assert ids_of(make([eos]), "p", max_tokens=5, min_tokens=2, **GREEDY) == [0, 0, eos]
    assert ids_of(make([72, eos, 88]), "p", max_tokens=3, ignore_eos=True, **GREEDY) == [72, eos, 88]
    assert ids_of(make([33]), "p", max_tokens=5, min_tokens=2, stop_token_ids=[33], **GREEDY) == [0, 0, 33]


def test_text_held_for_a_near_miss_or_an_unfinished_character_is_flushed_at_eos(script_llm):
    """D02, P01: an end of sequence frees what was held back, streamed and not."""
    for said, text in (([*b"abDE", 257], "abDE"), ([*b"ab", 0xF0, 0x9F, 257], "ab\ufffd")):
        llm, params = script_llm(said), SamplingParams(stop="DEF", max_tokens=9, **GREEDY)
        assert llm.generate(["p"], params)[0].outputs[0].text == text
        assert "".join(piece.text for piece in llm.stream("p", params)) == text


def test_the_head_computes_the_last_row_of_a_prompt_alone(script_llm):
    """Prefill asks for one row of logits, whatever the prompt's length; so does each decode step."""
    llm = script_llm([65])
    llm.generate(["a long prompt", "b"], SamplingParams(max_tokens=2, **GREEDY))
    assert [step.logit_rows.tolist() for step in llm.model.steps] == [[12, 13], [0, 1]]


# ---- choices


def test_choice_i_of_n_draws_by_seed_index_and_position_alone(tiny_llm, tiny_model):
    """S08: an ``n=3`` request gives what three separate runs of the simplest loop give with index 0, 1 and 2."""
    prompt, params = [5, 9, 200, 7], SamplingParams(n=3, seed=11, temperature=0.9, top_p=0.95, max_tokens=14)
    sampler, expected = Sampler(261), []
    for index in range(3):
        def choose(logits, position, index=index):
            return [sampler(logits, [SamplingRow(params, 11, index, position, prompt, ())])[0].token_id]
        expected.append(generate_without_cache(tiny_model, prompt, max_tokens=14, eos_token_ids=(257,), choose=choose))
    (output,) = tiny_llm().generate([prompt], params)
    assert [choice.token_ids for choice in output.outputs] == expected
    assert len({tuple(tokens) for tokens in expected}) == 3
    beside = tiny_llm(max_num_seqs=2).generate([[1, 2], prompt], [SamplingParams(max_tokens=9), params])[1]
    assert [choice.token_ids for choice in beside.outputs] == expected


# ---- ids, cancels, threads


def test_request_ids_are_the_engines_own_and_unique(script_llm):
    """Threads that submit at once never share an id."""
    llm, seen = script_llm([65]), []

    def work():
        seen.extend(llm.stream("p", SamplingParams(max_tokens=1, **GREEDY)).output.request_id for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(seen) == len(set(seen)) == 200


def test_no_thread_loses_its_last_piece_while_another_delivers(script_llm, monkeypatch):
    """A request that is finished but not yet delivered is not done: its reader waits for the last piece."""
    llm = script_llm(lambda prompt: [prompt[0]])
    deliver, together = llm.engine._deliver, threading.Barrier(2, timeout=10)

    def slow_deliver(*args):
        time.sleep(0.02)
        deliver(*args)

    monkeypatch.setattr(llm.engine, "_deliver", slow_deliver)
    got = {}

    def work(letter):
        stream = llm.stream(letter, SamplingParams(max_tokens=3, **GREEDY))
        together.wait()
        pieces = list(stream)
        got[letter] = "".join(piece.text for piece in pieces), pieces[-1].finish_reason

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "AB"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == {"A": ("AAA", "length"), "B": ("BBB", "length")}


def test_cancelling_at_any_point_frees_all_and_touches_nobody_else(tiny_llm, tiny_model):
    """Waiting, just admitted, decoding, finished, twice: survivors get the tokens of the loop, and nothing is held."""
    rng, llm = random.Random(0), tiny_llm(max_num_seqs=2)
    params = SamplingParams(max_tokens=6, **GREEDY)
    for round_number in range(40):
        prompts = [[1, 2, 3, 4, 5, 6, 7, rng.randrange(200)] for _ in range(3)]
        streams = [llm.stream(prompt, params) for prompt in prompts]
        victim, steps = rng.randrange(3), rng.randrange(9)
        for _ in range(steps):
            llm.step()
        for _ in range(1 + round_number % 2):
            llm.cancel(streams[victim].output.request_id)
        victim_held = streams[victim]._submission.choices[0].request.table.blocks
        assert victim_held == [] and streams[victim].output.outputs[0].finish_reason is not None
        for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
            tokens = [token for piece in stream for token in piece.token_ids]
            expected = generate_without_cache(tiny_model, prompt, max_tokens=6, eos_token_ids=(257,))
            assert tokens == stream.output.outputs[0].token_ids
            assert tokens == (expected[:len(tokens)] if index == victim else expected)
        stats = llm.stats()
        assert (stats.num_running, stats.num_waiting, llm.attention.num_tokens) == (0, 0, 0)


def test_a_failed_or_cancelled_request_is_no_served_one_in_its_metrics(script_llm):
    """B07: a summary of the engine's own metrics counts them as failures, beside the latency of the others."""
    llm = script_llm(lambda prompt: [prompt[0]])

    def poison(call, step, logits):
        for row, request in enumerate(step.sequences):
            if request.prompt_token_ids == (66,):
                logits[row] = torch.nan

    llm.model.edit = poison
    served, failed = llm.generate(["A", "B"], SamplingParams(max_tokens=2, **GREEDY))
    with llm.stream("C", SamplingParams(**GREEDY)) as stream:
        next(stream)
    assert [out.metrics.failure for out in (served, failed, stream.output)] == [None, "error", "cancelled"]
    summary = summarize([served.metrics, failed.metrics, stream.output.metrics])
    assert summary.failures == {"error": 1, "cancelled": 1} and summary.ttft_s.count == 1


# ---- prompts and chats


def test_a_raw_prompt_may_hold_special_tokens_and_a_message_may_not(script_llm):
    """C01: the same text is two control tokens in a prompt, and plain bytes in a message."""
    llm = script_llm([65])
    llm.tokenizer.chat_template = CHATML
    params, text = SamplingParams(max_tokens=1, **GREEDY), "a<|im_end|><|im_start|>b"
    (raw,), (chat,) = llm.generate([text], params), llm.chat([{"role": "user", "content": text}], params)
    assert raw.prompt_token_ids == [97, 259, 258, 98]
    assert [token for token in chat.prompt_token_ids if token > 255] == [258, 259, 258]
    assert text in chat.prompt
    streamed = llm.stream([{"role": "user", "content": text}], params)
    assert streamed.output.prompt_token_ids == chat.prompt_token_ids


def test_bad_chats_are_refused_by_index_and_nothing_runs(script_llm):
    """C03, C04, P07, T06 through the public face."""
    llm = script_llm([65])
    llm.tokenizer.chat_template = CHATML
    good = [{"role": "user", "content": "hi"}]
    for bad, words in ([], "at least one"), ([{"role": "user", "content": 3}], "content"), (
            [{"role": "user", "content": "\ud800"}], "surrogate"):
        with pytest.raises(InvalidRequest, match=f"prompt 1.*{words}"):
            llm.chat([good, bad])
    with pytest.raises(InvalidRequest, match="exclude each other"):
        llm.chat(good, continue_final_message=True)
    assert not llm.model.steps


def test_an_empty_list_of_params_is_not_no_params(script_llm):
    """One prompt and no SamplingParams in a list are a mismatch, not the defaults."""
    llm = script_llm([65])
    with pytest.raises(InvalidRequest, match="1 prompts, 0 values of params"):
        llm.generate(["a"], [])
    assert llm.generate([], []) == []
