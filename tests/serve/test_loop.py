"""The engine thread: who asks never computes, nobody waits for ever, nothing is left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from queue import Full, SimpleQueue

import pytest

from minillm import EngineDead, QueueFull, SamplingParams
from minillm.serve.loop import EngineLoop

GREEDY = {"temperature": 0.0, "ignore_eos": True}
ENDLESS = SamplingParams(**GREEDY)
WAIT = 20


class Asker:
    """A plain thread's way to the loop: submits and reads, each wait bounded."""

    def __init__(self, llm):
        self.llm, self.loop = llm, EngineLoop(llm.engine)

    def ask(self, prompts, params, inbox=None):
        inbox = SimpleQueue() if inbox is None else inbox
        return self.loop.submit(self.llm.prompts.listed(prompts, params, 0), inbox.put).result(WAIT), inbox

    def stats(self):
        return self.loop.call(self.llm.engine.stats).result(WAIT)


def pieces_of(inbox):
    """The pieces of one choice until its last; an error is raised."""
    pieces = []
    while not pieces or pieces[-1].finish_reason is None:
        delivery = inbox.get(timeout=WAIT)
        if isinstance(delivery, EngineDead):
            raise delivery
        pieces.append(delivery[0])
    return pieces


@pytest.fixture
def asker(script_llm):
    askers = []

    def make(script=lambda prompt: [prompt[0]], **options):
        askers.append(Asker(script_llm(script, **{"max_len": 10**5, "num_kv_blocks": 5000, **options})))
        return askers[-1]

    yield make
    for one in askers:
        one.loop.close()


def test_the_thread_starts_when_it_is_needed_and_ends_with_the_loop(asker, own_threads):
    one = asker()
    assert own_threads() == []
    assert one.stats().num_steps == 0 and own_threads() == ["minillm-engine"]
    one.loop.close()
    one.loop.close()
    assert own_threads() == []
    with pytest.raises(EngineDead, match="closed"):
        one.stats()
    with pytest.raises(EngineDead):
        one.loop.check()


def test_it_sleeps_when_idle(asker, monkeypatch):
    """One look for work after each call, none while nobody calls."""
    one, looks = asker(), []
    step = one.llm.engine.step
    monkeypatch.setattr(one.llm.engine, "step", lambda: looks.append(1) or step())
    _, inbox = one.ask("A", SamplingParams(max_tokens=3, **GREEDY))
    pieces_of(inbox)
    one.stats()
    one.stats()
    before = len(looks)
    time.sleep(0.05)
    assert len(looks) <= before + 1 and before <= 3 + 3


def test_threads_get_their_own_pieces_once_and_in_order(tiny_llm):
    llm, oracle, got = tiny_llm(max_num_seqs=3, num_kv_blocks=9), tiny_llm(), {}
    one = Asker(llm)

    def work(number):
        for turn in range(5):
            params = SamplingParams(max_tokens=12, seed=number * 10 + turn)
            held, inbox = one.ask(f"{number}{turn}", params)
            pieces = pieces_of(inbox)
            got[number, turn] = held[0].output, pieces

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert len(got) == 20 and len({output.request_id for output, _ in got.values()}) == 20
    for (number, turn), (output, pieces) in got.items():
        [expected] = oracle.generate(f"{number}{turn}", SamplingParams(max_tokens=12, seed=number * 10 + turn))
        assert [i for piece in pieces for i in piece.token_ids] == expected.outputs[0].token_ids
        assert "".join(piece.text for piece in pieces) == expected.outputs[0].text == output.outputs[0].text
    stats = one.stats()
    assert stats.num_free_blocks == stats.num_blocks == 9
    one.loop.close()


def test_callers_that_never_pause_do_not_keep_tokens_from_being_made(asker):
    """Two of them: while one is answered, the other asks again."""
    one = asker()
    _held, inbox = one.ask("A", SamplingParams(max_tokens=200, **GREEDY))
    done = threading.Event()

    def keep_asking():
        while not done.is_set():
            one.loop.call(time.sleep, 0.001).result(WAIT)

    callers = [threading.Thread(target=keep_asking) for _ in range(4)]
    for caller in callers:
        caller.start()
    try:
        assert "".join(piece.text for piece in pieces_of(inbox)) == "A" * 200
    finally:
        done.set()
        for caller in callers:
            caller.join(WAIT)


def test_a_reader_that_reads_late_holds_up_nobody(asker):
    one = asker()
    _held, late = one.ask("A", SamplingParams(max_tokens=30, **GREEDY))
    held, inbox = one.ask("B", SamplingParams(max_tokens=40, **GREEDY))
    assert "".join(piece.text for piece in pieces_of(inbox)) == "B" * 40
    assert late.qsize() == 30 and "".join(piece.text for piece in pieces_of(late)) == "A" * 30


def test_a_step_that_fails_ends_its_own_requests_and_the_loop_goes_on(asker, caplog):
    one = asker(max_num_seqs=1)
    fails = {1, 4, 5}

    def edit(call, step, logits):
        if call in fails:
            raise RuntimeError(f"no step {call}")

    one.llm.model.edit = edit
    held, inbox = one.ask(["A", "B", "C", "D", "E"], SamplingParams(max_tokens=2, **GREEDY))
    reasons = [[piece.finish_reason for piece in pieces_of(inbox)][-1] for _ in held]
    assert reasons == ["error", "length", "error", "error", "length"]
    assert held[0].output.outputs[0].error == "RuntimeError: no step 1" and caplog.text.count("a step failed") == 3
    stats = one.stats()
    assert stats.num_finished["error"] == 3 and stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("fault", [RuntimeError, SystemExit])
def test_a_fault_beyond_one_request_reaches_everybody_who_waits(asker, own_threads, fault):
    """A scheduler that can end nobody any more; an exception that is meant to end the thread."""
    one, fails, waiting = asker(max_num_seqs=1), threading.Event(), []

    def edit(call, step, logits):
        if fails.is_set():
            waiting.append(one.loop.call(one.llm.engine.stats))
            raise fault("no more")

    def finish(*args, **kwargs):
        raise fault("no more")

    one.llm.model.edit = edit
    asked = [one.ask(letter, ENDLESS) for letter in "ABC"]
    one.llm.engine.scheduler.finish = finish
    fails.set()
    for _, inbox in asked:
        with pytest.raises(EngineDead, match=f"the engine failed, make a new one: {fault.__name__}: no more"):
            pieces_of(inbox)
    with pytest.raises(EngineDead) as caught:
        waiting[0].result(WAIT)
    assert isinstance(caught.value.__cause__, fault)
    one.loop.close()
    with pytest.raises(EngineDead, match="the engine failed"):
        one.loop.call(print)
    assert own_threads() == []


def test_closing_in_the_middle_cancels_all_and_answers_all(asker, own_threads):
    one = asker(max_num_seqs=2)
    asked = [one.ask(letter, ENDLESS) for letter in "ABCD"]
    assert asked[0][1].get(timeout=WAIT)[0].finish_reason is None
    began, go = threading.Event(), threading.Event()
    blocked = one.loop.call(lambda: (began.set(), go.wait(WAIT)))
    assert began.wait(WAIT)
    closing = threading.Thread(target=one.loop.close)
    closing.start()
    while True:  # from here on nobody is let in
        try:
            one.loop.check()
        except EngineDead:
            break
    go.set()
    closing.join(WAIT)
    assert blocked.result(0) and own_threads() == []
    assert [pieces_of(inbox)[-1].finish_reason for _, inbox in asked] == ["cancelled"] * 4
    pool = one.llm.engine.scheduler.pool
    assert pool.num_available == pool.num_blocks and not one.llm.engine.scheduler.running


def test_a_call_that_comes_after_the_end_was_asked_for_is_answered(asker):
    one = asker()
    one.stats()
    began, go = threading.Event(), threading.Event()
    one.loop.call(lambda: (began.set(), go.wait(WAIT)))
    assert began.wait(WAIT)
    one.loop._thread.calls.put(None)
    late = one.loop.call(one.llm.engine.stats)
    go.set()
    with pytest.raises(EngineDead):
        late.result(WAIT)


def test_it_can_be_closed_before_it_began_and_by_its_own_thread(asker, own_threads):
    one, other = asker(), asker()
    one.loop.close()
    with pytest.raises(EngineDead):
        one.llm.generate("A", SamplingParams(max_tokens=1))
    other.loop.call(other.loop.close).result(WAIT)
    other.loop.close()
    assert own_threads() == []


def test_closing_what_cannot_be_ended_still_tells_everybody(asker, own_threads):
    one = asker()
    asked = [one.ask(letter, ENDLESS) for letter in "AB"]

    def finish(*args, **kwargs):
        raise RuntimeError("no more")

    one.loop.call(setattr, one.llm.engine.scheduler, "finish", finish).result(WAIT)
    one.loop.close()
    for _, inbox in asked:
        with pytest.raises(EngineDead, match="closed"):
            pieces_of(inbox)
    assert own_threads() == []


def test_an_engine_that_was_closed_by_others_ends_the_loop(asker):
    one = asker()
    _held, inbox = one.ask("A", ENDLESS)
    inbox.get(timeout=WAIT)
    one.llm.close()
    assert pieces_of(inbox)[-1].finish_reason == "cancelled"
    with pytest.raises(EngineDead, match="closed"):
        one.ask("A", ENDLESS)


def test_a_submission_that_nobody_holds_is_cancelled_and_so_is_one_that_is_named(asker):
    one = asker()
    held, inbox = one.ask("A", ENDLESS)
    inbox.get(timeout=WAIT)
    del held
    while one.stats().num_finished["cancelled"] == 0:
        pass
    named, inbox = one.ask(["A", "B"], ENDLESS)
    one.loop.cancel("no such id", named[0].output.request_id)
    one.loop.cancel(named[0].output.request_id)
    assert pieces_of(inbox)[-1].finish_reason == "cancelled"
    named[1].close()
    assert pieces_of(inbox)[-1].finish_reason == "cancelled"
    stats = one.stats()
    assert stats.num_finished["cancelled"] == 3 and stats.num_free_blocks == stats.num_blocks


def test_too_many_at_once_are_refused_all_and_those_before_stay(asker):
    one = asker(max_num_seqs=1, max_waiting=1)
    _held, inbox = one.ask("A", SamplingParams(max_tokens=1000, **GREEDY))  # still runs when the loop is held
    inbox.get(timeout=WAIT)
    go = threading.Event()
    one.loop.call(go.wait, WAIT)
    refused = one.loop.submit(one.llm.prompts.listed(["B", "C"], ENDLESS, 0), inbox.put)
    after = one.loop.call(one.llm.engine.stats)
    go.set()
    with pytest.raises(QueueFull):
        refused.result(WAIT)
    assert after.result(WAIT).num_waiting == 0 and after.result(0).num_running == 1
    assert pieces_of(inbox)[-1].finish_reason == "length"
    assert one.stats().num_finished["cancelled"] == 0


@pytest.mark.parametrize("error", [RuntimeError("Event loop is closed"), Full(), ValueError("its own")], ids=repr)
def test_a_reader_that_cannot_be_reached_is_cancelled_alone(asker, error):
    one, seen = asker(), []

    def gone(delivery):
        seen.append(delivery)
        raise error

    jobs = one.llm.prompts.listed("A", ENDLESS, 0)
    held = one.loop.submit(jobs, gone).result(WAIT)
    _held, inbox = one.ask("B", SamplingParams(max_tokens=20, **GREEDY))
    assert "".join(piece.text for piece in pieces_of(inbox)) == "B" * 20
    assert held[0].output.outputs[0].finish_reason == "cancelled" and len(seen) <= 3


def test_another_thread_may_drive_the_same_engine(asker):
    one = asker()
    held, inbox = one.ask("A", SamplingParams(max_tokens=200, **GREEDY))
    assert one.llm.generate("B", SamplingParams(max_tokens=100, **GREEDY))[0].outputs[0].text == "B" * 100
    assert "".join(piece.text for piece in pieces_of(inbox)) == "A" * 200 == held[0].output.outputs[0].text


def test_a_loop_that_is_dropped_ends(asker, own_threads):
    loop = EngineLoop(asker().llm.engine)
    loop.call(print, "").result(WAIT)
    [thread] = [t for t in threading.enumerate() if t.name == "minillm-engine"]
    del loop
    gc.collect()
    thread.join(WAIT)
    assert own_threads() == []


FORGOTTEN = """
from minillm import LLM, SamplingParams
from minillm.course.tiny import tiny_decoder
from minillm.serve.loop import EngineLoop
from minillm.text.tokenizer import byte_tokenizer
import queue
llm = LLM(tiny_decoder(), tokenizer=byte_tokenizer())
loop, inbox = EngineLoop(llm.engine), queue.SimpleQueue()
job = llm.prompts.one("ab", SamplingParams(ignore_eos=True, max_tokens=60), 0)
held = loop.submit([job], inbox.put).result(20)
inbox.get(timeout=20)
print("end")
"""


def test_a_forgotten_loop_lets_the_program_end_in_the_middle_of_its_work():
    done = subprocess.run([sys.executable, "-c", FORGOTTEN], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
