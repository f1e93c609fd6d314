"""AsyncLLM keeps every promise of LLM, for any number of tasks, loops and threads, and never holds up an event loop."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time

import pytest

import minillm
from minillm import AsyncLLM, EngineDead, InvalidRequest, QueueFull, SamplingParams
from minillm.text.tokenizer import byte_tokenizer

GREEDY = {"temperature": 0.0, "ignore_eos": True}
ENDLESS = SamplingParams(**GREEDY)
CHATML = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
TIGHT = {"num_kv_blocks": 16, "block_size": 4, "max_num_seqs": 5, "max_prefill_chunk": 6}


def answers(outputs):
    return [(o.prompt, o.prompt_token_ids, o.outputs) for o in outputs]


async def until_idle(llm):
    """Wait, step by step, until the engine holds nothing; then all blocks are free."""
    while (stats := await llm.stats()).num_running or stats.num_waiting:
        await asyncio.sleep(0)
    assert stats.num_free_blocks == stats.num_blocks
    return stats


@pytest.fixture
def say(script_llm, to_await):
    """An AsyncLLM that repeats a prompt's first letter for as long as it may."""
    return lambda **options: to_await(script_llm(lambda prompt: [prompt[0]], max_len=10**5),
                                      **{"num_kv_blocks": 5000, **options})


def test_it_answers_as_llm_does(tiny_llm, to_await, within):
    llm = tiny_llm()
    llm.tokenizer.chat_template = CHATML
    params = [SamplingParams(max_tokens=9, n=2, seed=3, logprobs=2), SamplingParams(max_tokens=5, temperature=0),
              SamplingParams(max_tokens=20, stop=["a", "\x0f"], temperature=2.0)]
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]

    async def main():
        async with to_await(llm) as twin:
            given = (await twin.generate(["x", [1, 2, 3], "zz"], params), await twin.generate("one", params[1]),
                     await twin.generate([]), await twin.chat(chats, params[1]), await twin.chat(chats[0], params[1]),
                     await twin.score(["abc", [5, 6]]))
            streams = [[piece async for piece in twin.stream(prompt, params[0])] for prompt in ("x", chats[1])]
            await until_idle(twin)
            return given, streams

    (several, one, none, chatted, chat, scores), streams = within(main)
    assert answers(several) == answers(llm.generate(["x", [1, 2, 3], "zz"], params))
    assert answers(one) == answers(llm.generate("one", params[1])) and none == []
    assert answers(chatted) == answers(llm.chat(chats, params[1])) and answers(chat) == answers(chatted[:1])
    assert scores == llm.score(["abc", [5, 6]])
    for pieces, prompt in zip(streams, ("x", chats[1]), strict=True):
        expected = llm.stream(prompt, params[0])
        assert sorted(pieces, key=lambda piece: piece.index) == sorted(expected, key=lambda piece: piece.index)


def test_hundreds_of_streams_some_cancelled_in_every_way_give_the_tokens_of_llm(tiny_llm, to_await, within):
    """In a pool so small that requests are preempted; what was said before a cancellation is the answer's beginning."""
    draw, llm = random.Random(5), tiny_llm()
    ways = ["read", "generate", "leave", "cancel the task", "deadline", "by id", "close", "drop"]
    jobs = [("".join(draw.choices("abc", k=draw.randint(1, 25))), draw.choice(ways), draw.randint(1, 8),
             SamplingParams(max_tokens=draw.randint(1, 20), seed=number, n=draw.choice([1, 1, 2]), ignore_eos=True))
            for number in range(240)]
    expected = [[choice.token_ids for choice in output.outputs]
                for output in llm.generate([job[0] for job in jobs], [job[3] for job in jobs])]

    async def ask(twin, prompt, way, after, params):
        said, seen, reached = [[] for _ in range(params.n)], 0, asyncio.Event()
        if way == "generate":
            [output] = await twin.generate(prompt, params)
            return [choice.token_ids for choice in output.outputs], True, output.request_id
        stream = twin.stream(prompt, params)

        async def read():
            nonlocal seen
            async for piece in stream:
                said[piece.index] += piece.token_ids
                seen += 1
                if seen != after:
                    continue
                if way in ("cancel the task", "deadline"):
                    reached.set()
                    await asyncio.Event().wait()
                elif way == "by id":
                    twin.cancel(stream.output.request_id)
                elif way == "close":
                    stream.close()
                elif way in ("leave", "drop"):
                    break

        if way == "cancel the task":
            task, wait = asyncio.create_task(read()), asyncio.create_task(reached.wait())
            await asyncio.wait([task, wait], return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
            wait.cancel()
            await asyncio.wait([task])
        elif way == "deadline":
            try:
                await asyncio.wait_for(read(), draw.random() * 0.05)
            except TimeoutError:
                pass
        else:
            await read()
        request_id = stream.output and stream.output.request_id
        if way != "drop":
            stream.close()
        return said, way == "read", request_id

    async def main():
        async with to_await(llm, **TIGHT) as twin:
            got = await asyncio.gather(*(ask(twin, *job) for job in jobs))
            gc.collect()
            return got, await until_idle(twin)

    got, stats = within(main)
    for (said, whole, _), tokens in zip(got, expected, strict=True):
        for own, all_of_it in zip(said, tokens, strict=True):
            assert own == (all_of_it if whole else all_of_it[:len(own)])
    ids = [request_id for _, _, request_id in got if request_id]
    assert len(ids) == len(set(ids)) > 200
    assert stats.num_preemptions > 10 and stats.num_finished["error"] == 0
    assert stats.num_finished["cancelled"] > 50 and stats.num_finished["length"] > 60


def test_what_is_awaited_at_once_is_batched(say, within):
    async def main():
        async with say(max_num_seqs=8) as llm:
            params = SamplingParams(max_tokens=20, **GREEDY)
            outputs = await asyncio.gather(*(llm.generate(letter, params) for letter in "ABCDEFGH"))
            return [output[0].outputs[0].text for output in outputs], await llm.stats()

    texts, stats = within(main)
    assert texts == [letter * 20 for letter in "ABCDEFGH"]
    assert stats.num_output_tokens == 160 and stats.num_steps <= 40, "20 in the best case, 160 one after another"


def test_a_bad_prompt_is_named_and_nothing_runs(say, within):
    async def main():
        async with say() as llm:
            llm.llm.tokenizer.chat_template = CHATML
            with pytest.raises(InvalidRequest, match="^prompt 1: "):
                await llm.generate(["good", "\ud800"], ENDLESS)
            with pytest.raises(InvalidRequest, match="^prompt 1: "):
                await llm.chat([[{"role": "user", "content": "a"}], [{"role": "user", "content": 5}]], ENDLESS)
            with pytest.raises(InvalidRequest, match="^text 1: "):
                await llm.score(["a", ""])
            with pytest.raises(InvalidRequest, match="priority"):
                await llm.generate("a", ENDLESS, priority=1)
            stream = llm.stream([999], ENDLESS)
            with pytest.raises(InvalidRequest, match="999"):
                await anext(stream)
            assert [piece async for piece in stream] == [] and stream.output is None
            stats = await llm.stats()
            return stats.num_steps, sum(stats.num_finished.values()), stats.num_waiting

    assert within(main) == (0, 0, 0)


def test_a_full_queue_reaches_who_awaits_and_nobody_else(say, within):
    async def main():
        async with say(max_num_seqs=1, max_waiting=1) as llm:
            running = llm.stream("A", SamplingParams(max_tokens=300, **GREEDY))
            await anext(running)
            with pytest.raises(QueueFull):
                await llm.generate(["B", "C"], ENDLESS)
            assert (await llm.stats()).num_waiting == 0
            waits = asyncio.create_task(llm.generate("B", SamplingParams(max_tokens=2, **GREEDY)))
            while not (await llm.stats()).num_waiting:
                pass
            with pytest.raises(QueueFull):
                await anext(llm.stream("C", ENDLESS))
            text = "".join([piece.text async for piece in running])
            return text, (await waits)[0].outputs[0].text

    assert within(main) == ("A" * 299, "BB")


class Slow:
    """A tokenizer that stands still until ``enough`` is set."""

    def __init__(self, inner):
        self.inner, self.enough, self.began = inner, threading.Event(), 0

    def __getattr__(self, name):
        if name == "most_bytes":
            return getattr(self.inner, name)
        self.began += 1
        assert self.enough.wait(20), "the event loop stands still"
        return getattr(self.inner, name)


@pytest.mark.parametrize("call", ["generate", "stream", "chat", "score"])
def test_tokenizing_does_not_hold_up_the_event_loop(script_llm, within, call):
    """It ends here only when the loop has gone on for a hundred turns meanwhile."""
    llm = script_llm([65])
    llm.tokenizer.chat_template = CHATML
    prompt = [{"role": "user", "content": "a"}] if call == "chat" else "a"
    params = () if call == "score" else (SamplingParams(max_tokens=1),)

    async def main():
        async with AsyncLLM(llm.model, tokenizer=llm.tokenizer) as twin:
            twin.llm.prompts.tokenizer = slow = Slow(twin.llm.tokenizer)
            asked = anext(twin.stream(prompt, *params)) if call == "stream" else getattr(twin, call)(prompt, *params)
            task = asyncio.ensure_future(asked)
            for _ in range(100):
                await asyncio.sleep(0)
            assert not task.done()
            slow.enough.set()
            await task

    within(main)


def test_who_tokenizes_gives_the_interpreter_away_often_and_only_meanwhile(say, within):
    """Or each operator of a step waits five milliseconds for it: a long text would freeze everybody."""
    usual_s, seen = sys.getswitchinterval(), []

    async def main():
        async with say() as llm:
            llm.llm.prompts.tokenizer = slow = Slow(llm.llm.tokenizer)
            tasks = [asyncio.create_task(llm.generate("A", SamplingParams(max_tokens=1))) for _ in range(3)]
            while slow.began < 3:
                await asyncio.sleep(0)
            seen.append(sys.getswitchinterval())
            slow.enough.set()
            await asyncio.gather(*tasks)

    within(main)
    assert seen[0] <= 1e-3 < usual_s == sys.getswitchinterval()


def test_a_stream_that_is_closed_while_its_prompt_is_tokenized_is_cancelled(say, within):
    async def main():
        async with say() as llm:
            llm.llm.prompts.tokenizer = slow = Slow(llm.llm.tokenizer)
            stream = llm.stream("A", ENDLESS)
            task = asyncio.create_task(read_all(stream))
            while not slow.began:
                await asyncio.sleep(0)
            stream.close()
            slow.enough.set()
            return (await task)[-1].finish_reason

    assert within(main) == "cancelled"


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_request_arrives_when_it_is_asked_for_and_not_when_a_text_thread_is_free(say, within, call):
    async def main():
        async with say() as llm:
            quick, few = llm.llm.prompts.tokenizer, SamplingParams(max_tokens=1)
            llm.llm.prompts.tokenizer = slow = Slow(quick)
            others = [asyncio.create_task(llm.generate("A", few)) for _ in range(4)]
            while slow.began < 4:
                await asyncio.sleep(0)
            llm.llm.prompts.tokenizer = quick
            asked_s, stream = time.perf_counter(), llm.stream("B", few)
            task = asyncio.ensure_future(llm.generate("B", few) if call == "generate" else read_all(stream))
            await asyncio.sleep(0.1)
            free_s = time.perf_counter()
            slow.enough.set()
            metrics = ((await task)[0] if call == "generate" else (await task, stream.output)[1]).metrics
            await asyncio.gather(*others)
            return asked_s, metrics.arrival_s, free_s, metrics.arrival_s + metrics.ttft_s

    times = within(main)
    assert list(times) == sorted(times)


def test_an_encoder_that_raises_stop_iteration_is_an_error_and_no_wait_without_end(script_llm, to_await, within):
    class Slip:
        def encode_pieces(self, pieces):
            return next(iter([]))

    llm = script_llm([65])
    llm.tokenizer = llm.tokenizer.with_encoder(Slip())

    async def main():
        async with to_await(llm) as twin:
            with pytest.raises(RuntimeError, match="StopIteration"):
                await twin.generate("a", SamplingParams(max_tokens=1))

    within(main)


def test_texts_that_wait_are_not_tokenized_once_it_is_closed(say, within):
    async def main():
        llm = say()
        llm.llm.prompts.tokenizer = slow = Slow(llm.llm.tokenizer)
        tasks = [asyncio.create_task(llm.generate("A", ENDLESS)) for _ in range(30)]
        while slow.began < 4:
            await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(llm.close))
        while not llm._loop._thread._dead:
            await asyncio.sleep(0)
        slow.enough.set()
        await closing
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDead] * 30
        return slow.began

    assert within(main) == 4


def test_the_loop_goes_on_while_a_real_long_prompt_is_tokenized(say, within):
    async def main():
        async with say() as llm:
            task, turns = asyncio.create_task(llm.generate("word " * 200_000, ENDLESS)), 0
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
            with pytest.raises(InvalidRequest, match="1000000 tokens"):
                await task
            return turns

    assert within(main) > 20


def test_a_step_does_not_hold_up_the_event_loop(say, within):
    """While the model stands still: cancel, leave, ask and be refused; what needs the engine waits for it alone."""
    async def main():
        async with say() as llm:
            stop, began, go, threads = threading.Event(), threading.Event(), threading.Event(), set()

            def edit(call, step, logits):
                threads.add(threading.current_thread().name)
                if stop.is_set():
                    began.set()
                    assert go.wait(20), "the event loop stands still"

            llm.llm.model.edit = edit
            left, named, stays = (llm.stream(letter, ENDLESS) for letter in "ABC")
            for stream in (left, named, stays):
                await anext(stream)
            stop.set()
            while not began.is_set():
                await asyncio.sleep(0)
            left.close()
            del left
            llm.cancel(named.output.request_id)
            asked = asyncio.create_task(llm.generate("D", SamplingParams(max_tokens=1, **GREEDY)))
            given_up = asyncio.create_task(llm.generate("E", ENDLESS))
            stats = asyncio.create_task(llm.stats())
            with pytest.raises(InvalidRequest):
                await llm.generate([999], ENDLESS)
            given_up.cancel()
            await asyncio.wait([given_up])
            assert not asked.done() and not stats.done()
            go.set()
            counted = await stats
            assert (await asked)[0].outputs[0].text == "D"
            assert [piece async for piece in named][-1].finish_reason == "cancelled"
            assert counted.num_finished["cancelled"] == 2 and threads == {"minillm-engine"}
            stays.close()
            await until_idle(llm)

    within(main)


def test_leaving_cancelling_and_dropping_free_all_blocks_within_a_step(say, within):
    async def main():
        async with say() as llm:
            async for _ in llm.stream("A", ENDLESS):
                break
            async with llm.stream("B", ENDLESS) as stream:
                await anext(stream)
            dropped = llm.stream("C", ENDLESS)
            await anext(dropped)
            del dropped
            task = asyncio.create_task(llm.generate(["D", "E"], ENDLESS))
            while (await llm.stats()).num_running < 2:
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as _kept:  # and with it all that its frames hold
                await task
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(llm.generate("F", ENDLESS), 0.05)
            unread = llm.stream("G", ENDLESS)
            unread.close()
            assert [piece async for piece in unread] == []
            steps = (await llm.stats()).num_steps
            stats = await until_idle(llm)
            assert stats.num_steps <= steps + 1
            return stats.num_finished["cancelled"]

    assert within(main) == 6


def test_a_reader_that_reads_late_holds_up_nobody_and_loses_nothing(say, within):
    async def main():
        async with say() as llm:
            late = llm.stream("A", SamplingParams(max_tokens=50, **GREEDY))
            first = await anext(late)
            await llm.generate("B", SamplingParams(max_tokens=100, **GREEDY))
            assert (await llm.stats()).num_running == 0
            return first.text + "".join([piece.text async for piece in late])

    assert within(main) == "A" * 50


def test_two_tasks_that_read_one_stream_share_its_pieces(say, within):
    async def main():
        async with say() as llm:
            stream = llm.stream("A", SamplingParams(max_tokens=21, **GREEDY))

            async def read():
                return [piece async for piece in stream]

            one, other = await asyncio.gather(read(), read())
            return one, other

    one, other = within(main)
    assert len(one) + len(other) == 21 and one and other


def test_a_step_that_fails_ends_its_own_requests_and_raises_nothing(say, within, caplog):
    async def main():
        async with say(max_num_seqs=2) as llm:
            def edit(call, step, logits):
                if call == 3:
                    raise RuntimeError("no step 3")

            llm.llm.model.edit = edit
            outputs = await llm.generate(list("ABCD"), SamplingParams(max_tokens=5, **GREEDY))
            await until_idle(llm)
            return [(output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].error)
                    for output in outputs]

    failed = "error", "RuntimeError: no step 3"
    assert within(main) == [("AA", *failed), ("BB", *failed), ("CCCCC", "length", None), ("DDDDD", "length", None)]
    assert "no step 3" in caplog.text


def test_an_engine_that_cannot_go_on_tells_everybody_who_waits(say, within, own_threads):
    async def main():
        llm = say(max_num_seqs=2)

        def edit(call, step, logits):
            if call > 4:
                raise SystemExit("gone")

        llm.llm.model.edit = edit
        never = llm.stream("C", ENDLESS)
        asked = [llm.generate(["A", "B"], ENDLESS), read_all(never), llm.generate("D", ENDLESS),
                 read_all(llm.stream("E", ENDLESS))]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in errors] == [EngineDead] * 4, errors
        assert all("gone" in str(error) for error in errors) and [piece async for piece in never] == []
        for later in (llm.generate("A", ENDLESS), llm.score("A"), llm.stats(), anext(llm.stream("A", ENDLESS))):
            with pytest.raises(EngineDead, match="gone"):
                await later
        llm.close()

    within(main)
    assert own_threads() == []


async def read_all(stream):
    return [piece async for piece in stream]


def test_closing_in_the_middle_ends_every_task_and_leaves_no_thread(say, within, own_threads):
    async def main():
        llm = say(max_num_seqs=4)
        tasks = [asyncio.create_task(read_all(llm.stream(letter, ENDLESS)) if number % 2
                                     else llm.generate([letter, letter], ENDLESS))
                 for number, letter in enumerate("ABCDEFGHIJKL")]
        while (await llm.stats()).num_output_tokens < 20:
            pass
        late = [asyncio.create_task(llm.generate("Z" * 10_000, ENDLESS)) for _ in range(12)]
        await asyncio.sleep(0)
        llm.close()
        llm.close()
        assert own_threads() == []
        for result in await asyncio.gather(*tasks, *late, return_exceptions=True):
            if isinstance(result, EngineDead):
                continue
            last = result[-1]
            reasons = [last.finish_reason] if hasattr(last, "finish_reason") else [
                output.outputs[0].finish_reason for output in result]
            assert set(reasons) == {"cancelled"}
        pool = llm.llm.engine.scheduler.pool
        assert pool.num_available == pool.num_blocks
        with pytest.raises(EngineDead, match="closed"):
            await llm.generate("A", ENDLESS)

    within(main)


def test_tasks_and_threads_at_once_and_loops_one_after_another(tiny_llm, to_await, within):
    """Fifty tasks of one loop and four threads with loops of their own; then a loop that left a stream unread."""
    llm, got = tiny_llm(), {}
    twin = to_await(llm, **TIGHT)

    def params(name):
        return SamplingParams(max_tokens=12, seed=len(name) + ord(name[-1]))

    async def ask(name):
        got[name] = "".join([piece.text async for piece in twin.stream(name, params(name))])

    async def main(prefix, count):
        await asyncio.gather(*(ask(f"{prefix}{number}") for number in range(count)))

    threads = [threading.Thread(target=asyncio.run, args=(main(letter, 10),), daemon=True) for letter in "wxyz"]
    for thread in threads:
        thread.start()
    within(lambda: main("task", 50))
    for thread in threads:
        thread.join(30)
    assert len(got) == 90
    for name, text in got.items():
        assert text == llm.generate(name, params(name))[0].outputs[0].text
    left = []

    async def leave():
        left.append(twin.stream("left", SamplingParams(max_tokens=60, ignore_eos=True)))
        await anext(left[0])

    within(leave)
    within(lambda: main("later", 3))
    within(lambda: until_idle(twin))
    twin.close()


def test_a_stream_is_read_in_the_loop_where_it_began_and_nowhere_else(say, within):
    llm = say()
    stream = llm.stream("A", ENDLESS)
    within(lambda: anext(stream))
    with pytest.raises(RuntimeError, match="another event loop"):
        within(lambda: anext(stream))
    while llm.llm.stats().num_running:
        time.sleep(0.001)
    llm.close()


def test_a_stream_of_a_loop_that_was_closed_is_cancelled(say, within):
    llm, left = say(), []

    async def leave():
        left.append(llm.stream("A", ENDLESS))
        await anext(left[0])

    within(leave)
    assert within(lambda: until_idle(llm)).num_finished["cancelled"] == 1
    assert left[0].output.outputs[0].finish_reason == "cancelled"
    llm.close()


def test_a_dropped_one_ends_its_threads(say, within, own_threads):
    within(lambda: say().generate("A", SamplingParams(max_tokens=2, **GREEDY)))
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("minillm"):
            thread.join(20)
    assert own_threads() == []


def test_stages_are_traced_up_to_the_delivery(say, within):
    async def main():
        async with say() as llm:
            with llm.tracing() as trace:
                await read_all(llm.stream("A", SamplingParams(max_tokens=3, **GREEDY)))
            return [span.stage for span in trace.spans]

    stages = within(main)
    assert stages.count("deliver") == 3 == stages.count("detokenize")
    assert {"arrive", "tokenize", "queue", "prefill", "decode"} <= set(stages)


def test_it_takes_the_arguments_of_llm(script_llm):
    model = script_llm([65]).model
    assert minillm.AsyncLLM is AsyncLLM
    with pytest.raises(TypeError, match="unknown option 'blocks'"):
        AsyncLLM(model, tokenizer=byte_tokenizer(), blocks=3)
    llm = AsyncLLM(model, tokenizer=byte_tokenizer(), max_num_seqs=2)
    assert llm.llm.config.max_num_seqs == 2
    llm.close()
