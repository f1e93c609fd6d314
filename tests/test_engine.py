"""The engine over a model that says what it is told: stopping, lengths, errors, cancelling, counting."""

from __future__ import annotations

import threading

import pytest
import torch

from minillm import EngineDead, InvalidRequest, SamplingParams

GREEDY = {"temperature": 0.0}


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def one(llm, params: SamplingParams, prompt="p"):
    """The only choice of the only prompt, checked to be the same when streamed."""
    (output,) = llm.generate([prompt], params)
    stream = llm.stream(prompt, params)
    pieces = list(stream)
    choice, streamed = output.outputs[0], stream.output.outputs[0]
    assert "".join(piece.text for piece in pieces) == choice.text == streamed.text
    assert [token for piece in pieces for token in piece.token_ids] == choice.token_ids == streamed.token_ids
    assert pieces[-1].finish_reason == choice.finish_reason == streamed.finish_reason
    return choice


@pytest.mark.parametrize(("said", "stop", "text", "reason", "matched"), [
    ("ABCDEFGHIJKL", ["DEFGHIJ"], "ABC", "stop", "DEFGHIJ"),
    ("ABCDEFGHIX", ["DEFGHIJ"], "ABCDEFGHIX", "length", None),
    ("Paris", ["Pari"], "", "stop", "Pari"),
    ("abcd", ["bcd", "b"], "a", "stop", "b"),
    ("abcDE", ["DEF"], "abcDE", "length", None),
])
def test_p01_stop_strings_cross_tokens_and_near_misses_are_delivered(script_llm, said, stop, text, reason, matched):
    """P01: no part of a stop string is delivered; what was held for a near miss is."""
    choice = one(script_llm(bytes_of(said)), SamplingParams(stop=stop, max_tokens=len(said), **GREEDY))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text, reason, matched)


def test_p01_tokens_of_a_stop_string_are_counted_and_none_after_it(script_llm):
    """The tokens that formed the stop string are in token_ids; nothing after is."""
    choice = one(script_llm(bytes_of("abSTOPxyz")), SamplingParams(stop="STOP", max_tokens=9, **GREEDY))
    assert choice.token_ids == bytes_of("abSTOP")


def test_stop_string_wins_over_length_on_the_last_token(script_llm):
    """A stop string completed by the last allowed token is a stop."""
    choice = one(script_llm(bytes_of("abST")), SamplingParams(stop="ST", max_tokens=4, **GREEDY))
    assert (choice.text, choice.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("stop", [None, []])
def test_p02_no_stop_strings_means_none(script_llm, stop):
    """P02: null and the empty list are no stops."""
    assert one(script_llm(bytes_of("abc")), SamplingParams(stop=stop, max_tokens=3, **GREEDY)).text == "abc"


@pytest.mark.parametrize("stop", ["", ["", "x"]])
def test_p02_an_empty_stop_string_is_refused(stop):
    """P02: an empty string would end every answer at once."""
    with pytest.raises(InvalidRequest, match="stop"):
        SamplingParams(stop=stop)


def test_p03_a_hidden_special_token_can_be_a_stop_string(script_llm):
    """P03: stop strings see special tokens that the text hides."""
    choice = one(script_llm([72, 105, 259, 88, 88]), SamplingParams(stop="<|im_end|>", max_tokens=5, **GREEDY))
    assert (choice.text, choice.finish_reason) == ("Hi", "stop")


@pytest.mark.parametrize("max_tokens", [0, -1, "5", 1.5, True])
def test_p05_max_tokens_must_be_a_whole_number_of_at_least_one(max_tokens):
    """P05: anything else is refused by name."""
    with pytest.raises(InvalidRequest, match="max_tokens"):
        SamplingParams(max_tokens=max_tokens)


def test_p05_max_tokens_is_a_hard_cap_and_absent_runs_to_the_context(script_llm):
    """P05: one asked is one made; none asked ends at the context limit with "length"."""
    llm = script_llm([65], max_len=64)
    capped = one(llm, SamplingParams(max_tokens=1, **GREEDY))
    assert (capped.token_ids, capped.finish_reason) == ([65], "length")
    endless = one(llm, SamplingParams(**GREEDY), prompt="four")
    assert (len(endless.token_ids), endless.finish_reason) == (60, "length")


@pytest.mark.parametrize("length", [64, 65])
def test_p06_a_prompt_that_fills_the_context_is_refused_and_the_next_is_served(script_llm, length):
    """P06: refused with limit and length named, before anything runs."""
    llm = script_llm([65], max_len=64)
    with pytest.raises(InvalidRequest, match=f"{length} tokens.*64"):
        llm.stream("x" * length, SamplingParams(max_tokens=10))
    assert not llm.model.steps
    assert one(llm, SamplingParams(max_tokens=2, **GREEDY)).text == "AA"


def test_p06_a_prompt_one_short_of_the_context_gets_one_token(script_llm):
    """P06: 63 of 64 leaves room for one."""
    choice = one(script_llm([65], max_len=64), SamplingParams(max_tokens=10, **GREEDY), prompt="x" * 63)
    assert (choice.token_ids, choice.finish_reason) == ([65], "length")


def test_p07_an_empty_prompt_starts_from_bos_or_is_refused(script_llm):
    """P07: from the beginning-of-sequence token where there is one, else a clear refusal; the engine goes on."""
    llm = script_llm([65])
    (output,) = llm.generate([""], SamplingParams(max_tokens=1, **GREEDY))
    assert output.prompt_token_ids == [256]
    llm.engine.limits.bos_token_id = None
    with pytest.raises(InvalidRequest, match="empty"):
        llm.generate([""], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="prompt 0.*empty"):
        llm.generate([[]], SamplingParams(max_tokens=1))
    assert llm.generate([], SamplingParams()) == []
    assert one(llm, SamplingParams(max_tokens=1, **GREEDY)).text == "A"


def test_every_eos_id_stops_and_is_counted_but_not_text(script_llm):
    """The end-of-sequence id is in token_ids and usage; the text has no trace of it, hidden or not."""
    for skip in (True, False):
        params = SamplingParams(max_tokens=9, skip_special_tokens=skip, **GREEDY)
        choice = one(script_llm([72, 105, 257, 88]), params)
        assert (choice.text, choice.token_ids, choice.finish_reason) == ("Hi", [72, 105, 257], "stop")


def test_ignore_eos_and_min_tokens(script_llm):
    """ignore_eos makes end ids ordinary; min_tokens masks them until then."""
    ignored = one(script_llm([72, 257, 105]), SamplingParams(ignore_eos=True, max_tokens=3, **GREEDY))
    assert ignored.token_ids == [72, 257, 105]
    masked = one(script_llm([257, 257, 257]), SamplingParams(min_tokens=2, max_tokens=5, **GREEDY))
    assert masked.token_ids == [0, 0, 257] and masked.finish_reason == "stop"


def test_stop_token_ids_stop_and_name_themselves(script_llm):
    """A stop id of the request's own ends it, with the id as the reason."""
    choice = one(script_llm([72, 105, 33]), SamplingParams(stop_token_ids=[33], max_tokens=9, **GREEDY))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("Hi", "stop", 33)


def test_d02_a_character_cut_by_max_tokens_is_flushed(script_llm):
    """D02 (a): held bytes are flushed as U+FFFD, streamed and not; four tokens are counted."""
    choice = one(script_llm([0x48, 0x69, 0xF0, 0x9F]), SamplingParams(max_tokens=4, **GREEDY))
    assert choice.text == "Hi\ufffd" and len(choice.token_ids) == 4 and choice.finish_reason == "length"


@pytest.mark.parametrize("end", [[], [257]])
def test_a_stop_string_completed_by_the_flushed_replacement_character_stops(script_llm, end):
    """At the length or at an end token: half a character becomes U+FFFD, which may be what a stop string waits for."""
    llm = script_llm([65, 66, 0xE2, *end])
    choice = one(llm, SamplingParams(stop=["B\ufffd"], max_tokens=3 + len(end), **GREEDY))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("A", "stop", "B\ufffd")
    assert len(choice.token_ids) == 3 + len(end) and llm.stats().num_finished["stop"] == 2


def test_a_cancelled_request_stays_cancelled_whatever_its_flushed_text_completes(script_llm):
    stream = script_llm([65, 0xE2, 0x82, 0x41]).stream("p", SamplingParams(stop=["\ufffd"], **GREEDY))
    stream._engine.step(), stream._engine.step()
    stream.close()
    choice = stream.output.outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("A", "cancelled", None)


def test_n_tokens_take_one_prefill_and_n_minus_one_decode_steps(script_llm):
    """Prefill yields the first token; the end-of-sequence token takes a step like any other."""
    llm = script_llm([72, 105, 257])
    llm.generate(["four"], SamplingParams(max_tokens=9, **GREEDY))
    assert [len(step.token_ids) for step in llm.model.steps] == [4, 1, 1]
    assert [step.positions.tolist() for step in llm.model.steps] == [[0, 1, 2, 3], [4], [5]]


@pytest.mark.parametrize(("prompt", "params", "field"), [
    ([0, 999999], {}, "prompt"), ([-1], {}, "prompt"), (["a", "b"], {}, "prompt"), ([1.5], {}, "prompt"),
    ([65], {"stop_token_ids": [999999]}, "stop_token_ids"), ([65], {"logit_bias": {999999: 5}}, "logit_bias"),
])
def test_s10_ids_out_of_range_are_refused_and_the_engine_goes_on(script_llm, prompt, params, field):
    """S10: refused at submission by field; the next request gives its usual output."""
    llm = script_llm([65])
    with pytest.raises(InvalidRequest) as refusal:
        llm.generate([prompt], SamplingParams(**params))
    assert refusal.value.param == field
    assert one(llm, SamplingParams(max_tokens=1, **GREEDY)).text == "A"


def test_s10_padded_rows_of_the_head_are_never_emitted(script_llm):
    """S10: the head has 320 rows, the tokenizer 261 ids; the largest logit stands at 310."""
    choice = one(script_llm([310], vocab_size=320), SamplingParams(max_tokens=2, **GREEDY))
    assert choice.token_ids == [0, 0]


def test_s11_nan_logits_end_their_own_request_alone(script_llm):
    """S11: request 2 of 3 gets NaN at step 4; 1 and 3 are untouched and a later request works."""
    llm = script_llm(lambda prompt: [prompt[0]])

    def poison(call, step, logits):
        for row, request in enumerate(step.sequences):
            if request.prompt_token_ids == (66,) and call == 4:
                logits[row] = torch.nan

    llm.model.edit = poison
    first, second, third = llm.generate(["A", "B", "C"], SamplingParams(max_tokens=6, **GREEDY))
    assert (first.outputs[0].text, third.outputs[0].text) == ("AAAAAA", "CCCCCC")
    assert second.outputs[0].finish_reason == "error" and second.outputs[0].text == "BBB" and second.outputs[0].error
    assert llm.generate(["B"], SamplingParams(max_tokens=2, **GREEDY))[0].outputs[0].text == "BB"
    assert llm.stats().num_finished == {"stop": 0, "length": 3, "cancelled": 0, "error": 1}


def test_generate_names_the_bad_prompt_and_runs_nothing(script_llm):
    """All prompts are validated before any runs."""
    llm = script_llm([65], max_len=16)
    with pytest.raises(InvalidRequest, match="prompt 2"):
        llm.generate(["a", "b", "c" * 20], SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequest, match="prompt 1"):
        llm.generate(["a", "\ud800"], SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequest, match="2 prompts, 3 values of params"):
        llm.generate(["a", "b"], [SamplingParams()] * 3)
    assert not llm.model.steps and llm.stats().num_waiting == 0


def test_an_exception_in_the_model_ends_the_requests_of_that_step_alone(script_llm):
    """The exception reaches the caller, what ran is freed, and the engine serves the next request."""
    llm = script_llm([65])

    def fail(call, step, logits):
        if call == 2:
            raise RuntimeError("out of memory")

    llm.model.edit = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(["a", "b"], SamplingParams(max_tokens=5, **GREEDY))
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == 0 and stats.num_finished["error"] == 2
    assert llm.attention.num_tokens == 0
    assert one(llm, SamplingParams(max_tokens=1, **GREEDY)).text == "A"


def test_stop_iteration_from_a_part_is_an_error_and_no_end(script_llm):
    """generate, stream and step raise; without that, a stream would just seem to end."""
    llm = script_llm([65])

    def fail(call, step, logits):
        raise StopIteration

    llm.model.edit = fail
    with pytest.raises(RuntimeError, match="StopIteration"):
        llm.generate(["a"], SamplingParams(max_tokens=5, **GREEDY))
    stream = llm.stream("a", SamplingParams(max_tokens=5, **GREEDY))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(stream)
    assert stream.output.outputs[0].finish_reason == "error" and llm.stats().num_running == 0


def test_cancel_ends_those_named_and_cancel_all_everybody(script_llm):
    llm = script_llm(lambda prompt: [prompt[0]])
    streams = [llm.stream(letter, SamplingParams(max_tokens=3, **GREEDY)) for letter in "ABCD"]
    llm.cancel(*[])
    assert llm.stats().num_waiting == 4
    llm.cancel(streams[0].output.request_id, streams[2].output.request_id)
    assert [stream.output.outputs[0].finish_reason for stream in streams] == ["cancelled", None, "cancelled", None]
    assert "".join(piece.text for piece in streams[1]) == "BBB"
    streams += [llm.stream(letter, SamplingParams(**GREEDY)) for letter in "EF"]
    llm.step()
    llm.cancel_all()
    assert [stream.output.outputs[0].finish_reason for stream in streams[4:]] == ["cancelled"] * 2
    assert llm.stats().num_running == llm.stats().num_waiting == 0
    assert one(llm, SamplingParams(max_tokens=1, **GREEDY)).text == "p"


def test_closing_a_stream_cancels_and_keeps_what_was_said(script_llm):
    """close() any number of times; the text so far stays in the output."""
    llm = script_llm([65])
    stream = llm.stream("p", SamplingParams(**GREEDY))
    said = next(stream).text + next(stream).text
    stream.close()
    stream.close()
    choice = stream.output.outputs[0]
    assert (choice.text, choice.finish_reason) == (said, "cancelled")
    assert llm.stats().num_running == 0 and llm.attention.num_tokens == 0


def test_a_dropped_stream_frees_what_it_held(script_llm):
    """Garbage collection of an unfinished stream cancels it."""
    llm = script_llm([65])
    stream = llm.stream("p", SamplingParams(**GREEDY))
    next(stream)
    del stream
    assert llm.stats().num_running == 0


def test_cancel_from_another_thread_ends_generate(script_llm):
    """generate returns with "cancelled" and the text so far; the others go on."""
    llm = script_llm(lambda prompt: [prompt[0]], max_len=10**6)
    running = threading.Event()
    llm.model.edit = lambda call, step, logits: running.set() if call == 5 else None
    results = {}
    thread = threading.Thread(target=lambda: results.update(out=llm.generate(["A"], SamplingParams(**GREEDY))))
    thread.start()
    assert running.wait(10)
    llm.cancel_all()
    thread.join(10)
    choice = results["out"][0].outputs[0]
    assert choice.finish_reason == "cancelled" and set(choice.text) == {"A"}
    assert llm.generate(["B"], SamplingParams(max_tokens=1, **GREEDY))[0].outputs[0].text == "B"


def test_threads_share_one_engine(script_llm):
    """Eight threads stream at once; each gets its own text, whole and in order."""
    llm = script_llm(lambda prompt: [prompt[0]], max_num_seqs=3)
    texts = {}

    def work(letter):
        texts[letter] = "".join(piece.text for piece in llm.stream(letter, SamplingParams(max_tokens=20, **GREEDY)))

    threads = [threading.Thread(target=work, args=(letter,)) for letter in "ABCDEFGH"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert texts == {letter: letter * 20 for letter in "ABCDEFGH"}


def test_waiting_requests_run_first_come_first_served(script_llm):
    """With one place, requests run one after another in the order in which they came."""
    llm = script_llm(lambda prompt: [prompt[0]], max_num_seqs=1)
    llm.generate(["A", "B", "C"], SamplingParams(max_tokens=2, **GREEDY))
    assert [step.token_ids.tolist() for step in llm.model.steps] == [[65], [65], [66], [66], [67], [67]]


def test_each_choice_has_its_own_draws_and_an_index(script_llm):
    """n=3: three requests, three outputs, the same three on a rerun with the same seed."""
    llm = script_llm([65])
    llm.model.edit = lambda call, step, logits: torch.zeros_like(logits)
    params = SamplingParams(n=3, seed=42, max_tokens=8, ignore_eos=True)
    (first,), (second,) = llm.generate(["p"], params), llm.generate(["p"], params)
    texts = [tuple(choice.token_ids) for choice in first.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2] and len(set(texts)) == 3
    assert texts == [tuple(choice.token_ids) for choice in second.outputs]


def test_s08_equal_seeds_and_prompts_agree_wherever_they_stand(script_llm):
    """S08: alone, twice at once, and at any place in a list; unseeded requests differ, and runs repeat."""
    def fresh():
        llm = script_llm([65])
        llm.model.edit = lambda call, step, logits: torch.zeros_like(logits)
        return llm

    seeded = SamplingParams(seed=42, max_tokens=8, ignore_eos=True)
    alone = fresh().generate(["p"], seeded)[0].outputs[0].token_ids
    outputs = fresh().generate(["q", "p", "p"], seeded)
    assert [out.outputs[0].token_ids for out in outputs[1:]] == [alone, alone]
    free = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = (out.outputs[0].token_ids for out in fresh().generate(["p", "p"], free))
    assert first != second
    assert fresh().generate(["p"], free)[0].outputs[0].token_ids == first


def test_logprobs_come_with_each_token(script_llm):
    """One entry a token, the chosen one and the most likely; a part of a character shows its bytes."""
    choice = one(script_llm([72, 0xF0]), SamplingParams(max_tokens=2, logprobs=2, **GREEDY))
    assert len(choice.logprobs) == 2
    assert all(token in entry for entry, token in zip(choice.logprobs, choice.token_ids, strict=True))
    assert choice.logprobs[0][72].rank == 1 and choice.logprobs[0][72].decoded_token == "H"
    assert choice.logprobs[1][0xF0].decoded_token == "\\xf0"
    assert len(choice.logprobs[0]) == 2


def test_metrics_and_stats_count_what_happened(script_llm):
    """Token times, counts and order of the clock's readings."""
    llm = script_llm([72, 105, 257])
    (output,) = llm.generate(["four"], SamplingParams(max_tokens=9, **GREEDY))
    metrics = output.metrics
    assert metrics.arrival_s <= metrics.admitted_s <= metrics.first_token_s <= metrics.finished_s
    assert len(metrics.token_times_s) == 3 and len(metrics.itl_s) == 2 and metrics.num_prompt_tokens == 4
    stats = llm.stats()
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_output_tokens) == (3, 4, 3)


def test_a_trace_names_every_stage_and_its_times_nest(script_llm):
    """One request passes arrive, queue, tokenize, prefill, decode, detokenize and deliver."""
    llm = script_llm([72, 105, 257])
    with llm.tracing() as trace:
        llm.generate(["four"], SamplingParams(max_tokens=9, **GREEDY))
    llm.generate(["four"], SamplingParams(max_tokens=9, **GREEDY))
    stages = [span.stage for span in trace.spans]
    assert set(stages) == {"arrive", "queue", "tokenize", "prefill", "decode", "detokenize", "deliver"}
    assert stages.count("prefill") == 1 and stages.count("decode") == 2 and stages.count("detokenize") == 3
    assert all(span.start_s <= span.end_s for span in trace.spans)
    ordered = sorted(trace.spans, key=lambda span: (span.start_s, span.end_s))
    assert all(before.end_s <= after.start_s for before, after in zip(ordered, ordered[1:], strict=False))


def test_a_closed_engine_says_so(script_llm):
    """close() cancels what runs and refuses what comes."""
    llm = script_llm([65])
    stream = llm.stream("p", SamplingParams(**GREEDY))
    with llm:
        next(stream)
    assert stream.output.outputs[0].finish_reason == "cancelled"
    for use in (lambda: llm.generate(["a"]), lambda: llm.score(["ab"]), llm.step):
        with pytest.raises(EngineDead):
            use()


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"tensor_parallel_size": 2}, TypeError, "tensor_parallel_size.*not built yet"),
    ({"nonsense": 1}, TypeError, "nonsense"),
    ({"max_num_seqs": 0}, ValueError, "max_num_seqs"), ({"dtype": "int3"}, ValueError, "dtype"),
    ({"max_model_len": 10**9}, ValueError, "max_model_len"), ({"max_model_len": 2.5}, ValueError, "max_model_len"),
])
def test_options_are_refused_by_name(script_llm, options, error, words):
    """Unknown, not yet built and out-of-range options are errors, never ignored."""
    with pytest.raises(error, match=words):
        script_llm([65], **options)
