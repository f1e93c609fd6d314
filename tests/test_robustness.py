"""Bad input, parts that fail, interrupts and cancels at the worst moments: nothing is lost, nothing stays held."""

from __future__ import annotations

import gc
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch

import minillm
from minillm import LLM, InvalidRequest, SamplingParams
from minillm.attention.torch_backend import ContiguousAttention
from minillm.cache.blocks import BlockPool
from minillm.cli import answer
from minillm.sample import SampledToken
from minillm.schedule.plan import StepPlan
from minillm.schedule.scheduler import Scheduler

GREEDY = {"temperature": 0.0, "ignore_eos": True}
FEW = SamplingParams(max_tokens=4, **GREEDY)


def counting(prompt):
    """A script: the prompt's first id, then the ids after it."""
    return [prompt[0] + i for i in range(40)]


def assert_idle_and_serving(llm):
    """Nothing waits, runs or is cached; the next request gets its usual output."""
    stats = llm.stats()
    assert (stats.num_waiting, stats.num_running, llm.attention.num_tokens) == (0, 0, 0)
    assert len(llm.generate("M", FEW)[0].outputs[0].token_ids) == 4
    assert llm.attention.num_tokens == 0


# ---- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [
    None, 5, 1.5, b"abc", bytearray(b"a"), memoryview(b"ab"), {"prompt": "x"}, {1: 2}, {1, 2}, len, np.array(3),
    [[[1]]], [None], [b"a"], [{1: 2}], [1.5], np.array([1.5]), torch.tensor([0.5]), [True], ["a", None],
])
def test_what_is_no_prompt_is_refused_by_every_door(script_llm, prompts):
    """Bytes, mappings and sets are no lists of ids, though Python iterates over them."""
    llm = script_llm([65])
    for use in (llm.generate, llm.score, llm.stream, llm.chat):
        with pytest.raises(InvalidRequest):
            use(prompts)
    assert_idle_and_serving(llm)


@pytest.mark.parametrize(("prompts", "ids"), [
    (np.array([1, 2]), [[1, 2]]), (torch.tensor([1, 2]), [[1, 2]]), ([np.int64(1), torch.tensor(2)], [[1, 2]]),
    (np.array([[1], [2]]), [[1], [2]]), (torch.tensor([[1], [2]]), [[1], [2]]), ((1, 2), [[1, 2]]),
    (np.array(["A", "B"]), [[65], [66]]), (range(1, 3), [[1, 2]]), ((text for text in "AB"), [[65], [66]]),
])
def test_arrays_of_ids_are_prompts(script_llm, prompts, ids):
    """One row is a prompt, several rows are several."""
    outputs = script_llm([65]).generate(prompts, SamplingParams(max_tokens=1))
    assert [output.prompt_token_ids for output in outputs] == ids


@pytest.mark.parametrize("params", [{}, {"max_tokens": 2}, 5, 0, False, "x", SamplingParams, [3]])
def test_params_of_another_type_are_refused(script_llm, params):
    """Falsy ones too: they are a mistake, not a wish for the defaults."""
    llm = script_llm([65])
    for use in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequest, match="SamplingParams"):
            use("p", params)
    assert not llm.model.steps


@pytest.mark.parametrize("params", [
    {"n": 10**5000}, {"n": 1025}, {"temperature": 10**5000}, {"stop_token_ids": [10**5000]},
    {"logit_bias": {10**5000: 1.0}}, {"max_tokens": -10**5000},
], ids=lambda params: next(iter(params)))
def test_numbers_that_python_will_not_write_are_refused_by_name(script_llm, params):
    with pytest.raises(InvalidRequest) as refused:
        script_llm([65]).generate("A", SamplingParams(**params))
    assert refused.value.param == next(iter(params)) and len(str(refused.value)) < 400


def test_an_id_that_python_will_not_write_is_refused_by_index(script_llm):
    with pytest.raises(InvalidRequest, match="prompt 1: .*<int that cannot be written down>"):
        script_llm([65]).generate([[65], [10**5000]], FEW)


@pytest.mark.parametrize("ask", [
    lambda llm, text: llm.generate(["A", text], FEW), lambda llm, text: llm.score(["A", text]),
    lambda llm, text: llm.chat([[{"role": "user", "content": text}]], FEW)], ids=["generate", "score", "chat"])
def test_a_text_that_cannot_fit_is_refused_unread(script_llm, monkeypatch, ask):
    llm = script_llm([65], max_len=50)
    llm.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **options: [65] if len(text) < 600 else 1 / 0)
    with pytest.raises(InvalidRequest, match="the text has 601 characters; max_model_len 50 tokens hold at most 600"):
        ask(llm, "x" * 601)


def test_a_seed_of_any_length_is_a_seed(script_llm):
    """Python writes no decimals of such a number; the sampler must not fall over it, and with it the whole batch."""
    llm = script_llm([65])
    llm.model.edit = lambda call, step, logits: torch.zeros_like(logits)
    first, second = (llm.generate("p", SamplingParams(seed=10**5000 + i, max_tokens=8))[0] for i in (0, 1))
    assert first.outputs[0].token_ids != second.outputs[0].token_ids


def test_text_that_is_no_string_and_messages_without_end_are_refused(byte_tok, script_llm):
    """By name; not with whatever Python would say."""
    for text in (None, b"a", 5):
        with pytest.raises(InvalidRequest, match="string"):
            byte_tok.encode(text)
    endless = {"role": "user", "content": "a"}
    endless["more"] = [endless]
    llm = script_llm([65])
    llm.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(InvalidRequest, match="nested"):
        llm.chat([endless])


def test_a_loaded_model_refuses_another_dtype_or_device(script_llm):
    """What can no longer be followed is not ignored; what fits is accepted."""
    assert script_llm([65], dtype="float32", device="cpu").model.dtype == torch.float32
    for option in ({"dtype": "bfloat16"}, {"device": "cuda"}):
        with pytest.raises(ValueError, match="leave"):
            script_llm([65], **option)
    with pytest.raises(TypeError, match="name, a path or a Decoder"):
        LLM(5)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99", 1.5])
def test_a_device_that_is_not_here_is_refused_before_any_file_is_read(device, tmp_path):
    """With what to do instead."""
    from minillm.assemble import load_decoder
    with pytest.raises(ValueError, match="try device='cpu'"):
        load_decoder(tmp_path / "missing", device=device)


def test_chat_without_standard_input_leaves(monkeypatch):
    """Started with standard input closed, there is nobody to talk to."""
    monkeypatch.setattr(sys, "stdin", None)
    assert answer._next_line() is None


# ---- parts that fail ---------------------------------------------------------------------------------------------


class FailingScheduler(Scheduler):
    """Raises once in the method named ``where``, before or (``"commit, late"``) after its work."""

    where = ""

    def fail_in(self, name):
        if self.where == name:
            self.where = ""
            raise RuntimeError(f"broken {name}")

    def add(self, request):
        self.fail_in("add")
        super().add(request)

    def schedule(self):
        self.fail_in("schedule")
        return StepPlan(()) if self.where == "nothing" else super().schedule()

    def commit(self, plan, token_ids):
        self.fail_in("commit")
        super().commit(plan, token_ids)
        self.fail_in("commit, late")


@pytest.mark.parametrize("where", ["add", "schedule", "commit", "commit, late"])
def test_a_scheduler_that_raises_leaves_nothing_behind(script_llm, where):
    """Nobody loses a token unseen: a reader gets all of them, or an error."""
    llm = script_llm(counting, scheduler=FailingScheduler(BlockPool(64), max_num_seqs=4))
    other = llm.stream("M", FEW)
    tokens = next(other).token_ids
    llm.engine.scheduler.where = where
    with pytest.raises(RuntimeError, match="broken"):
        llm.generate(["A", "B"], FEW)
    tokens = tokens + [token for piece in other for token in piece.token_ids]
    reason = other.output.outputs[0].finish_reason
    assert tokens == counting([77])[:len(tokens)] and reason == ("error" if len(tokens) < 4 else "length")
    assert_idle_and_serving(llm)


def test_a_scheduler_that_plans_nothing_ends_the_loop(script_llm):
    """No request waits silently: the error names the scheduler."""
    llm = script_llm(counting, scheduler=FailingScheduler(BlockPool(64), max_num_seqs=4))
    llm.engine.scheduler.where = "nothing"
    with pytest.raises(RuntimeError, match="planned nothing"):
        llm.generate("A", FEW)
    assert llm.step() is False
    llm.engine.scheduler.where = ""
    assert_idle_and_serving(llm)


@pytest.mark.parametrize("answers", [
    [], [SampledToken(65)] * 3, None, [65, 65], [SampledToken(65, {10**6: (0.0, 1)})] * 2,
], ids=str)
def test_a_sampler_that_answers_nonsense_ends_its_step_and_no_more(script_llm, answers):
    """At the third step, on the last token of the other request: that token is not lost without a word."""
    calls = []

    def sampler(logits, rows):
        calls.append(rows)
        return answers if len(calls) == 3 else [SampledToken(66) for _ in rows]

    llm = script_llm(counting, sampler=sampler)
    params = SamplingParams(max_tokens=3, logprobs=0, **GREEDY)
    other = llm.stream("M", params)
    next(other)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        llm.generate("A", params)
    assert [token for piece in other for token in piece.token_ids] == [66]
    assert other.output.outputs[0].finish_reason == "error" and other.output.outputs[0].error
    assert_idle_and_serving(llm)


def test_attention_that_cannot_free_is_reported_once(script_llm):
    """The request is off the books all the same."""
    llm = script_llm([65])
    free, llm.attention.free = llm.attention.free, lambda request: (_ for _ in ()).throw(RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        llm.generate("A", FEW)
    llm.attention.free = free
    assert_idle_and_serving(llm)


def test_parts_that_fail_again_while_a_step_is_given_up_hide_no_token(script_llm):
    """The first request's end fails, then the second's; the third is told, and goes without no token unseen."""
    llm = script_llm(counting)
    streams = [llm.stream(letter, SamplingParams(max_tokens=most, **GREEDY)) for letter, most in zip("AMZ", (2, 6, 6))]
    llm.step()
    free, llm.attention.free = llm.attention.free, lambda request: (_ for _ in ()).throw(RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        llm.step()
    llm.attention.free = free
    said = [[token for piece in stream for token in piece.token_ids] for stream in streams]
    assert [stream.output.outputs[0].finish_reason for stream in streams] == ["length", "error", "error"]
    assert said[0] == [65, 66] and streams[2].output.outputs[0].error
    assert_idle_and_serving(llm)


class Unreadable(Exception):
    def __str__(self):
        return self.args[1]


def test_an_error_that_cannot_be_read_ends_its_step_alone(script_llm):
    llm = script_llm(counting)

    def fail_once(call, step, logits):
        if call == 1:
            raise Unreadable("only one")

    llm.model.edit = fail_once
    with pytest.raises(Unreadable):
        llm.generate("A", FEW)
    assert_idle_and_serving(llm)


@pytest.mark.parametrize("plan", [StepPlan((1, 2)), "no plan"], ids=str)
def test_a_plan_of_something_else_ends_who_was_there_and_no_more(script_llm, plan):
    llm = script_llm(counting, scheduler=FailingScheduler(BlockPool(64), max_num_seqs=4))
    llm.engine.scheduler.schedule = lambda: plan
    stream = llm.stream("A", FEW)
    with pytest.raises((AttributeError, TypeError)):
        llm.step()
    del llm.engine.scheduler.schedule
    assert [piece.finish_reason for piece in stream] == ["error"] and stream.output.outputs[0].error
    assert_idle_and_serving(llm)


def test_who_drives_does_not_pay_for_anothers_failed_step(script_llm):
    """The first request fails alone, in a step that the second one's reader drives."""
    llm = script_llm(counting, max_num_seqs=1)

    def fail_once(call, step, logits):
        if call == 1:
            raise RuntimeError("the first request's step")

    llm.model.edit = fail_once
    first, second = llm.stream("A", FEW), llm.stream("M", FEW)
    assert [token for piece in second for token in piece.token_ids] == counting([77])[:4]
    assert [piece.finish_reason for piece in first] == ["error"]
    assert "the first request's step" in first.output.outputs[0].error
    assert_idle_and_serving(llm)


class SilentScheduler(Scheduler):
    """Does not say when it admits."""

    def schedule(self):
        plan = super().schedule()
        for item in plan.scheduled:
            item.request.admitted_s = None
        return plan


def test_a_scheduler_that_does_not_say_when_it_admits_can_be_traced(script_llm):
    llm = script_llm(counting, scheduler=SilentScheduler(BlockPool(64), max_num_seqs=4))
    with llm.tracing() as trace:
        assert llm.generate("A", FEW)[0].outputs[0].finish_reason == "length"
    assert [span.stage for span in trace.spans].count("queue") == 1


# ---- cancelling and interrupts at the worst moments --------------------------------------------------------------


class HookedAttention(ContiguousAttention):
    """Calls ``hook`` once, in the middle of a forward pass."""

    hook = None

    def write(self, layer, key, value, step):
        if layer == 1 and self.hook is not None:
            hook, self.hook = self.hook, None
            hook()
        super().write(layer, key, value, step)


@pytest.fixture
def hooked_llm(tiny_model, byte_tok):
    """TINY with an attention backend that can be interrupted."""
    attention = HookedAttention(tiny_model.config, dtype=tiny_model.dtype, device=tiny_model.device)
    return LLM(tiny_model, tokenizer=byte_tok, attention_backend=attention)


@pytest.mark.parametrize("how", ["close", "collect", "close engine"])
def test_cancelling_in_the_middle_of_a_step_by_its_own_thread_waits_for_its_end(hooked_llm, how):
    """As a signal handler or the garbage collector does it; the other request of the batch gets all its tokens."""
    llm = hooked_llm
    params = SamplingParams(max_tokens=6, **GREEDY)
    expected = llm.generate("other", params)[0].outputs[0].token_ids
    victim, other = llm.stream("victim", params), llm.stream("other", params)
    next(victim)
    if how == "collect":
        ring = [victim]
        ring.append(ring)
        del ring, victim
        llm.attention.hook = gc.collect
    else:
        llm.attention.hook = victim.close if how == "close" else llm.close
    if how == "close engine":
        while llm.engine._in_flight:
            llm.step()
        assert llm.attention.num_tokens == 0 and other.output.outputs[0].finish_reason == "cancelled"
        return
    list(other)
    assert other.output.outputs[0].token_ids == expected
    assert llm.stats().num_finished["cancelled"] == 1
    assert_idle_and_serving(llm)


def test_the_engine_refuses_to_be_driven_from_inside_its_own_step(hooked_llm):
    """A clear error in place of a step inside a step."""
    hooked_llm.attention.hook = hooked_llm.step
    with pytest.raises(RuntimeError, match="inside its own step"):
        hooked_llm.generate("p", FEW)
    assert_idle_and_serving(hooked_llm)


def ctrl_c():
    raise KeyboardInterrupt


def test_ctrl_c_in_the_model_costs_nobody_else_a_token(hooked_llm):
    """Nothing has been committed, so the step is simply done again; who was interrupted is cancelled."""
    llm = hooked_llm
    params = SamplingParams(max_tokens=6, **GREEDY)
    expected = llm.generate("other", params)[0].outputs[0].token_ids
    other = llm.stream("other", params)
    next(other)
    llm.attention.hook = ctrl_c
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], params)
    list(other)
    assert other.output.outputs[0].token_ids == expected
    assert llm.stats().num_finished["cancelled"] == 2
    assert_idle_and_serving(llm)


@pytest.mark.parametrize("start", range(5))
def test_ctrl_c_anywhere_loses_nothing_and_holds_nothing(script_llm, interrupt_at, start):
    """A bystander's stream gets every token, or ends with "error"; never silently fewer. The engine goes on."""
    for count in range(10 + 41 * start, 1300, 205):
        llm = script_llm(counting, max_num_seqs=3)
        other = llm.stream("M", FEW)
        tokens = next(other).token_ids
        came = interrupt_at(count)
        with suppress(KeyboardInterrupt):
            llm.generate(["A", "B"], SamplingParams(max_tokens=4, n=2, **GREEDY))
        interrupt_at(0)
        assert came, "the run is shorter than this test thinks"
        tokens = tokens + [token for piece in other for token in piece.token_ids]
        whole = other.output.outputs[0].finish_reason == "length"
        assert tokens == counting([77])[:4 if whole else len(tokens)], count
        assert whole or other.output.outputs[0].error
        assert_idle_and_serving(llm)


def test_a_signal_handler_that_cancels_anywhere_in_a_cancellation(tiny_llm, interrupt_at):
    """One last piece, and every block is free once: nothing is ended twice, or in the middle of its end."""
    for count in range(1, 400):
        llm = tiny_llm(num_kv_blocks=40, block_size=4)
        stream = llm.stream(list(range(20)), SamplingParams(max_tokens=30, **GREEDY))
        next(stream)
        came = interrupt_at(count, llm.engine.cancel_all)
        stream.close()
        interrupt_at(0)
        assert [piece.finish_reason for piece in stream].count("cancelled") == 1, count
        pool = llm.engine.scheduler.pool
        assert pool.num_available == pool.num_blocks and not any(pool._references), count
        if not came:
            break
    assert 20 < count < 399, "the run is shorter or longer than this test thinks"


def test_collecting_a_dropped_stream_never_waits_for_the_engine(script_llm):
    """The collector runs in any thread, which may hold a lock that the step in progress needs."""
    llm, needed, in_step = script_llm(lambda prompt: [prompt[0]]), threading.Lock(), threading.Event()
    dropped = llm.stream("B", SamplingParams(**GREEDY))
    ring = [dropped]
    ring.append(ring)

    def wait_in_step(call, step, logits):
        in_step.set()
        assert needed.acquire(timeout=10), "the collector waits for the engine"
        needed.release()

    llm.model.edit = wait_in_step
    got = []
    driver = threading.Thread(target=lambda: got.extend(llm.generate("M", FEW)))
    with needed:
        driver.start()
        assert in_step.wait(10)
        del dropped, ring
        gc.collect()
    driver.join(20)
    assert got[0].outputs[0].text == "MMMM" and llm.stats().num_finished["cancelled"] == 1
    assert llm.stats().num_running == 0


@pytest.mark.parametrize("attempt", range(20))
def test_threads_that_read_one_stream_share_its_pieces(script_llm, attempt):
    stream, taken, failures = script_llm([65]).stream("A", SamplingParams(max_tokens=100, **GREEDY)), [], []

    def read():
        try:
            taken.extend(piece.text for piece in stream)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not failures and "".join(taken) == "A" * 100


def test_traces_of_several_threads_do_not_end_each_other(script_llm):
    """Each records until its own block ends, in whatever order the blocks end."""
    llm = script_llm([65])
    first, second = llm.tracing(), llm.tracing()
    one, two = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    llm.generate("p", FEW)
    second.__exit__(None, None, None)
    llm.generate("p", FEW)
    assert not one.spans and {span.request_id for span in two.spans} == {"req-0"}
    assert not llm.engine.traces


def test_closing_while_threads_stream_ends_them_all(script_llm):
    """Each ends with what it has or with EngineDead; nobody hangs, nothing is held."""
    llm, ended = script_llm(lambda prompt: [prompt[0]], max_len=10**6), []

    def work(letter):
        try:
            for _ in llm.stream(letter, SamplingParams(**GREEDY)):
                pass
            ended.append("cancelled")
        except minillm.EngineDead:
            ended.append("dead")

    threads = [threading.Thread(target=work, args=(letter,), daemon=True) for letter in "ABCDEF"]
    for thread in threads:
        thread.start()
    while llm.stats().num_output_tokens < 20:
        pass
    llm.close()
    for thread in threads:
        thread.join(10)
    assert len(ended) == 6 and llm.attention.num_tokens == 0 and llm.stats().num_running == 0
