"""The scheduler under random workloads: no torch, thousands of steps in a second."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.request import Request, SamplingParams
from minillm.schedule.scheduler import Scheduler

EOS = 9


def make(name: int, prompt: int, output: int, priority: int = 0) -> Request:
    return Request(request_id=f"req-{name}", prompt_token_ids=tuple(range(prompt)), params=SamplingParams(), seed=0,
                   max_total_tokens=prompt + output, eos_token_ids=(EOS,), priority=priority, arrival_s=float(name))


workloads = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(1, 8), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(workloads, st.integers(1, 5), st.data())
def test_every_request_ends_and_no_step_breaks_an_invariant(workload, max_num_seqs, data):
    """Arrivals at any step, cancels at any step: plans are never empty, never too wide, never skip a position."""
    scheduler = Scheduler(max_num_seqs=max_num_seqs)
    requests = [(step, make(i, prompt, output), cancel)
                for i, (step, prompt, output, cancel) in enumerate(sorted(workload))]
    for step in range(400):
        for arrival, request, _ in requests:
            if arrival == step:
                scheduler.add(request)
        if not (scheduler.waiting or scheduler.running):
            if step > 20:
                break
            continue
        plan = scheduler.schedule()
        assert 0 < len(plan.scheduled) <= max_num_seqs
        assert plan.num_tokens == sum(item.num_tokens for item in plan.scheduled)
        for item in plan.scheduled:
            assert item.start == item.request.num_computed_tokens and item.num_tokens > 0 and item.samples
            assert item.token_ids == item.request.token_ids[item.start:item.end]
        # Whoever waits came after whoever runs.
        if scheduler.waiting:
            assert len(scheduler.running) == max_num_seqs
            assert max(r.arrival_s for r in scheduler.running) < min(r.arrival_s for r in scheduler.waiting)
        for arrival, request, cancel in requests:
            if cancel and arrival <= step and data.draw(st.booleans()):
                scheduler.finish(request, "cancelled")
                scheduler.finish(request, "cancelled")
        tokens = [data.draw(st.sampled_from([1, 2, EOS])) for _ in plan.sampling]
        scheduler.commit(plan, tokens)
    assert not scheduler.waiting and not scheduler.running
    assert all(request.is_finished for _, request, _ in requests)
    for _, request, _ in requests:
        assert request.num_known_tokens <= request.max_total_tokens
        assert EOS not in request.output_token_ids[:-1]


def test_a_finished_request_gets_no_token():
    """A request cancelled between plan and commit stays as it was."""
    scheduler = Scheduler(max_num_seqs=2)
    gone, stays = make(0, 3, 5), make(1, 3, 5)
    scheduler.add(gone)
    scheduler.add(stays)
    plan = scheduler.schedule()
    scheduler.finish(gone, "cancelled")
    scheduler.commit(plan, [1, 2])
    assert gone.output_token_ids == [] and stays.output_token_ids == [2]
    assert scheduler.running == [stays]


def test_priority_goes_before_arrival_and_equals_keep_their_order():
    """Lower priority values first, then arrival."""
    scheduler = Scheduler(max_num_seqs=1)
    for request in (late := make(2, 1, 1), early := make(1, 1, 1), urgent := make(3, 1, 1, priority=-1)):
        scheduler.add(request)
    assert scheduler.waiting == [urgent, early, late]
    assert scheduler.schedule().scheduled[0].request is urgent


def test_stages_follow_from_the_counters():
    """The whole prompt first, then one token a step; the names are derived."""
    scheduler = Scheduler(max_num_seqs=1)
    scheduler.add(make(0, 4, 3))
    seen = []
    while scheduler.waiting or scheduler.running:
        plan = scheduler.schedule()
        seen.append((plan.scheduled[0].stage, plan.scheduled[0].start, plan.num_tokens))
        scheduler.commit(plan, [1])
    assert seen == [("prefill", 0, 4), ("decode", 4, 1), ("decode", 5, 1)]


def test_a_long_prompt_takes_no_step_from_those_who_decode_and_is_read_itself():
    """Every running request that is one token behind is in every plan, and so is the prompt that came meanwhile."""
    scheduler = Scheduler(max_num_seqs=3)
    first, second, long = make(0, 3, 50), make(1, 2, 50), make(2, 400, 5)
    for request in (first, second):
        scheduler.add(request)
    for step in range(8):
        if step == 4:
            scheduler.add(long)
        plan = scheduler.schedule()
        scheduler.commit(plan, [1] * len(plan.sampling))
        assert first.num_output_tokens == second.num_output_tokens == step + 1
        assert long.num_computed_tokens > 0 or step < 4
