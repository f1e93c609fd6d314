"""The scheduler over a pool of blocks: 10,000 random workloads without tensors, and each rule in a case of its own."""

from __future__ import annotations

from collections import Counter

import pytest

from minillm.cache.blocks import BlockPool
from minillm.course.batteries.scheduler import EOS, Replay, Workload, check_pool
from minillm.request import Request, SamplingParams
from minillm.schedule.scheduler import Scheduler


def make(name: int, prompt: int | tuple[int, ...], output: int, priority: int = 0) -> Request:
    """A request of so many different prompt tokens, or of these."""
    ids = tuple(range(100 * name + 1, 100 * name + 1 + prompt)) if isinstance(prompt, int) else prompt
    return Request(request_id=f"req-{name}", prompt_token_ids=ids, params=SamplingParams(), seed=0,
                   max_total_tokens=len(ids) + output, eos_token_ids=(EOS,), priority=priority, arrival_s=float(name))


def scheduler_of(*requests: Request, blocks: int = 64, size: int = 4, caching: bool = True, **options) -> Scheduler:
    scheduler = Scheduler(BlockPool(blocks, size, caching=caching), **options)
    for request in requests:
        scheduler.add(request)
    return scheduler


def step(scheduler: Scheduler) -> dict[Request, int]:
    """One step in which every sampled token is 7; the tokens that each request computed."""
    plan = scheduler.schedule()
    scheduler.commit(plan, [7] * len(plan.sampling))
    return {item.request: item.num_tokens for item in plan.scheduled}


def drain(scheduler: Scheduler) -> None:
    for _ in range(1000):
        if not (scheduler.waiting or scheduler.running):
            return
        step(scheduler)
    raise AssertionError("it never ends")


def step_until_preempted(scheduler: Scheduler, request: Request) -> list[int]:
    """The output that ``request`` had before the step that preempted it."""
    for _ in range(100):
        output = request.output_token_ids
        step(scheduler)
        if request.num_preemptions:
            return output
    raise AssertionError("nobody was preempted")


def test_ten_thousand_random_workloads_give_the_tokens_of_the_simplest_loop():
    """Every invariant holds after every step; and what is hard about it did happen, often."""
    counts: Counter[str] = Counter()
    for seed in range(10_000):
        counts += Replay(Workload.random(seed)).run()
    assert counts["steps"] > 200_000
    least = {"preemptions": 4000, "preempted twice": 400, "evictions": 50_000, "hits": 2000, "waited for a block": 300,
             "mixed steps": 10_000, "chunks": 50_000, "refusals": 5000, "cancelled": 2000, "error": 2000,
             "interrupted": 2000, "stop": 5000, "length": 15_000}
    assert all(counts[what] > number for what, number in least.items()), counts


@pytest.mark.parametrize("fault", ["no claims", "publishes unwritten blocks", "forgets to release", "first is victim"])
def test_the_workloads_catch_a_scheduler_that_breaks_a_promise(fault, monkeypatch):
    """The check can fail."""
    if fault == "no claims":
        monkeypatch.setattr(BlockPool, "may_write", lambda *_: True)
    elif fault == "publishes unwritten blocks":
        publish = BlockPool.publish
        monkeypatch.setattr(BlockPool, "publish", lambda pool, table, ids, _: publish(
            pool, table, ids, len(table.blocks) * pool.block_size))
    elif fault == "forgets to release":
        monkeypatch.setattr(BlockPool, "release", lambda *_: None)
    else:
        monkeypatch.setattr(Scheduler, "_makes_room", lambda self, request, number: (
            self.pool.allocate(request.table, request.num_computed_tokens + number)
            or self._preempt(self.running[0]) or False))
    with pytest.raises((AssertionError, IndexError, KeyError)):
        for seed in range(300):
            Replay(Workload.random(seed)).run()


def test_a_finished_request_gets_no_token():
    """A request cancelled between plan and commit stays as it was."""
    gone, stays = make(0, 3, 5), make(1, 3, 5)
    scheduler = scheduler_of(gone, stays)
    plan = scheduler.schedule()
    scheduler.finish(gone, "cancelled")
    scheduler.commit(plan, [1, 2])
    assert gone.output_token_ids == [] and stays.output_token_ids == [2]
    assert scheduler.running == [stays] and gone.table.blocks == []


def test_priority_goes_before_arrival_and_equals_keep_their_order():
    """Lower priority values first, then arrival."""
    late, early, urgent = make(2, 1, 1), make(1, 1, 1), make(3, 1, 1, priority=-1)
    assert scheduler_of(late, early, urgent).waiting == [early, late, urgent]  # first come, first served
    scheduler = scheduler_of(late, early, urgent, max_num_seqs=1, policy="priority")
    assert scheduler.waiting == [urgent, early, late]
    assert scheduler.schedule().scheduled[0].request is urgent


def test_stages_follow_from_the_counters():
    """The prompt first, in chunks, then one token a step; the names are derived."""
    scheduler, seen = scheduler_of(make(0, 4, 3), max_prefill_chunk=3), []
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        seen.append((plan.scheduled[0].stage, plan.scheduled[0].start, plan.num_tokens, len(plan.sampling)))
        scheduler.commit(plan, [1] * len(plan.sampling))
    assert seen == [("prefill", 0, 3, 0), ("prefill", 3, 1, 1), ("decode", 4, 1, 1), ("decode", 5, 1, 1)]


def test_q04_a_long_prompt_takes_no_step_from_those_who_decode_and_is_read_itself():
    """Q04: 400 tokens under a budget of 32: whoever is one behind is in every plan, and the prompt advances in each."""
    first, second, long = make(0, 3, 50), make(1, 2, 50), make(2, 400, 5)
    scheduler = scheduler_of(first, second, blocks=200, max_num_seqs=3, max_num_batched_tokens=32)
    for number in range(12):
        if number == 4:
            scheduler.add(long)
        computed = step(scheduler)
        assert first.num_output_tokens == second.num_output_tokens == number + 1
        assert computed.get(long, 0) == (30 if number >= 4 else 0)


def test_two_prompts_advance_side_by_side_under_the_chunk_size():
    scheduler = scheduler_of(one := make(0, 40, 1), two := make(1, 40, 1), max_num_batched_tokens=16,
                             max_prefill_chunk=10)
    assert [step(scheduler) for _ in range(3)] == [{one: 10, two: 6}] * 3
    assert [step(scheduler) for _ in range(3)] == [{one: 10, two: 6}, {two: 10}, {two: 6}]


def test_without_chunks_a_prompt_is_read_whole_or_not_yet():
    scheduler = scheduler_of(one := make(0, 10, 4), two := make(1, 10, 1), max_num_seqs=2, max_num_batched_tokens=14,
                             chunked=False)
    assert scheduler.max_whole_prompt == 12
    assert [step(scheduler) for _ in range(2)] == [{one: 10}, {one: 1, two: 10}]


def test_admission_waits_for_all_that_a_request_knows_and_what_is_promised_to_others():
    """The first holds one block of four that its prompt needs: the other two aren't free for anybody."""
    first, second = make(0, 16, 1), make(1, 8, 1)
    scheduler = scheduler_of(first, second, blocks=5, max_prefill_chunk=4, watermark=0)
    assert step(scheduler) == {first: 4} and scheduler.waiting == [second] and second.table.blocks == []
    drain(scheduler)
    assert second.finish_reason == "length" and scheduler.num_preempted == 0


def test_the_watermark_is_kept_while_something_runs_and_waived_when_nothing_does():
    scheduler = scheduler_of(first := make(0, 4, 9), second := make(1, 4, 1), blocks=3, watermark=2)
    assert step(scheduler) == {first: 4} and step(scheduler) == {first: 1}
    assert scheduler.waiting == [second]
    scheduler.finish(first, "cancelled")
    assert step(scheduler) == {second: 4}


def test_q03_the_last_of_the_order_is_preempted_keeps_its_tokens_and_goes_on():
    """Q03: six blocks of four, two requests of 6 + 10 tokens: both get all their tokens, each once."""
    first, second = make(0, 6, 10), make(1, 6, 10)
    scheduler = scheduler_of(first, second, blocks=6, caching=False, watermark=0)
    kept = step_until_preempted(scheduler, second)
    assert second.output_token_ids == kept and len(kept) > 2
    assert second.num_computed_tokens == 0 and second.table.blocks == [] and scheduler.waiting == [second]
    assert first.num_preemptions == 0
    drain(scheduler)
    assert first.num_output_tokens == second.num_output_tokens == 10
    assert scheduler.pool.num_available == 6


def test_a_preempted_request_waits_before_those_who_came_later():
    """Also before its equals in priority and arrival."""
    first, second, third = make(0, 6, 10), make(1, 6, 10), make(1, 6, 10)
    scheduler = scheduler_of(first, second, third, blocks=6, max_num_seqs=2, caching=False, watermark=0)
    step_until_preempted(scheduler, second)
    assert scheduler.waiting == [second, third]


def test_q01_why_a_prompt_can_never_run_is_said_and_what_to_do():
    scheduler = scheduler_of(blocks=10)
    assert scheduler.why_never(40) == ""
    assert "10 blocks of 4. Shorten it or raise num_kv_blocks" in scheduler.why_never(41)
    whole = scheduler_of(max_num_batched_tokens=20, chunked=False)
    assert whole.why_never(12) == "" and "at most 12 fit one step" in whole.why_never(13)


def test_q01_a_lone_request_that_outgrows_the_pool_ends_when_it_is_full():
    """Q01: ten blocks of four hold 40 tokens; the 41st needs no room, as nobody computes it."""
    scheduler = scheduler_of(request := make(0, 20, 30), blocks=10)
    drain(scheduler)
    assert request.finish_reason == "length" and request.num_output_tokens == 21 and request.num_preemptions == 0


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_k04_the_same_prompt_again_computes_its_last_token_and_what_fills_no_block(length, hit):
    """K04: on a hit at least one token is computed, at its own position."""
    prompt = tuple(range(1, length + 1))
    scheduler = scheduler_of(make(0, prompt, 1))
    assert sum(step(scheduler).values()) == length
    for name in (1, 2):
        scheduler.add(again := make(name, prompt, 1))
        plan = scheduler.schedule()
        assert (plan.scheduled[0].start, plan.num_tokens, again.num_cached_tokens) == (hit, length - hit, hit)
        scheduler.commit(plan, [7])


def test_k07_who_needs_a_block_that_another_is_writing_waits_and_goes_on_when_the_writer_goes():
    """K07: two equal prompts of 9 in chunks of 6; with the writer and without it, no block is computed twice."""
    prompt = tuple(range(1, 10))
    for cancel in (False, True):
        writer, waiter = make(0, prompt, 1), make(1, prompt, 1)
        scheduler = scheduler_of(writer, waiter, max_num_seqs=2, max_prefill_chunk=6)
        assert step(scheduler) == {writer: 6} and scheduler.running == [writer, waiter]
        if cancel:
            scheduler.finish(writer, "cancelled")
            assert step(scheduler) == {waiter: 5} and waiter.num_cached_tokens == 4
        else:
            assert step(scheduler) == {writer: 3}
            assert step(scheduler) == {waiter: 1} and waiter.num_cached_tokens == 8
        assert waiter.finish_reason == "length" and scheduler.pool.num_available == 64


def test_what_a_request_computed_before_it_was_preempted_is_no_hit():
    first, second = make(0, 6, 10), make(1, 6, 10)
    scheduler = scheduler_of(first, second, blocks=6, watermark=0)
    drain(scheduler)
    assert second.num_preemptions and second.num_cached_tokens == first.num_cached_tokens == 0


def test_a_hit_is_what_a_request_never_computed_itself():
    """Preempted before it computed anything, it still may have one; computing all again, it had none."""
    prompt = tuple(range(1, 10))
    first, again = make(0, prompt, 9), make(1, prompt, 9)
    scheduler = scheduler_of(first, again, max_num_seqs=2, max_prefill_chunk=4)
    assert step(scheduler) == {first: 4} and scheduler.running == [first, again]
    scheduler._preempt(again)
    assert [step(scheduler) for _ in range(3)] == [{first: 4}, {first: 1, again: 1}, {first: 1, again: 1}]
    assert (again.num_preemptions, again.num_cached_tokens, first.num_cached_tokens) == (1, 8, 0)
    for _ in range(2):  # found again, preempted before it computed more, and found again
        scheduler._preempt(again)
        scheduler.schedule()
        assert again.num_cached_tokens == 8
    scheduler._preempt(again)
    scheduler.finish(first, "cancelled")
    scheduler.pool.forget()
    assert step(scheduler) == {again: 4} and again.num_cached_tokens == 0
    scheduler.finish(again, "cancelled")
    assert not scheduler._again


def test_a_block_that_a_prompts_last_token_fills_is_waited_for():
    """Its writer is one token behind, so it is planned like one that decodes."""
    prompt = tuple(range(1, 9))
    writer, longer = make(0, prompt, 2), make(1, (*prompt, 20, 21), 1)
    scheduler = scheduler_of(writer, longer, max_num_seqs=2, max_prefill_chunk=7)
    assert [step(scheduler) for _ in range(3)] == [{writer: 7}, {writer: 1}, {writer: 1, longer: 2}]
    assert longer.num_cached_tokens == 8


@pytest.mark.parametrize("when", ["waiting", "mid-chunk", "decoding", "finished", "twice"])
def test_k09_two_hundred_rounds_of_cancelling_leave_every_block_free(when):
    """K09: three requests that share a prefix of 8, one of them cancelled at each stage of its life."""
    scheduler = scheduler_of(blocks=12, max_num_seqs=2 if when == "waiting" else 3, max_num_batched_tokens=8)
    for number in range(200):
        prefix = tuple(range(1, 9))
        requests = [make(number, (*prefix, 50 + i, 60 + i, 70 + i), 4) for i in range(3)]
        for request in requests:
            scheduler.add(request)
        victim = requests[2] if when == "waiting" else requests[0]
        for _ in range({"waiting": 0, "mid-chunk": 1, "decoding": 3, "finished": 9, "twice": 2}[when]):
            step(scheduler)
        for _ in range(2 if when == "twice" else 1):
            scheduler.finish(victim, "cancelled")
        check_pool(scheduler.pool, [request.table for request in requests])
        drain(scheduler)
        assert scheduler.pool.num_available == 12 and not any(scheduler.pool._references)
        assert all(r.num_output_tokens == 4 for r in requests if r is not victim)


@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 8}, {"max_num_seqs": 0}, {"max_prefill_chunk": 0}])
def test_sizes_that_would_let_nothing_advance_are_refused(options):
    with pytest.raises(ValueError, match="max_num_batched_tokens .* above max_num_seqs"):
        Scheduler(BlockPool(4), **options)


def test_a_watermark_below_0_is_refused():
    """It would admit what there is no room for."""
    with pytest.raises(ValueError, match=r"watermark \(-1\) at least 0"):
        Scheduler(BlockPool(4), watermark=-1)
