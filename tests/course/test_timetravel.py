"""The time-travel widget, the small loads beside it, and figures of several lines."""

from collections import Counter

import pytest

from minillm.cache.blocks import BlockPool
from minillm.course.lines import lines
from minillm.course.loads import all_at_once, chats_and_jobs, cramped_history, drive_steps, script, work_of
from minillm.course.timetravel import moments, time_travel
from minillm.schedule.fork import fork
from minillm.schedule.history import Finished
from minillm.schedule.replay import replay
from minillm.schedule.scheduler import Scheduler

HISTORY = cramped_history()
SETTINGS = {"watermark 4": {"watermark": 4}, "priority": {"policy": "priority"}}
WORLDS = "as it was", "watermark 4, from step 10 on"


def test_what_the_notebook_says_of_the_run_and_its_forks():
    ends = {"as it was": moments(HISTORY)} | {name: moments(fork(HISTORY, 0, **own)) for name, own in {
        **SETTINGS, "3 places": {"max_num_seqs": 3}, "chunks of 2": {"max_prefill_chunk": 2},
        "watermark 8": {"watermark": 8}}.items()}
    told = {name: (len(run), run[-1].num_again) for name, run in ends.items()}
    assert (told["as it was"], told["priority"], told["3 places"]) == ((60, 56), (58, 61), (64, 6))
    assert min(told.values()) == told["priority"] and max(told.values(), key=lambda own: own[1]) == told["priority"]
    assert min(told.values(), key=lambda own: own[1]) == told["3 places"]


def test_moments_count_what_snapshots_say():
    run = moments(HISTORY)
    assert [moment.snapshot for moment in run] == list(replay(HISTORY, blocks=True))
    assert len(run[-1].finished) == sum(isinstance(event, Finished) for event in HISTORY.events) == 9
    # Each position is computed once or found in the cache, and all else again. A request's newest token never is.
    positions = Counter()
    for moment in run:
        for item in moment.snapshot.items:
            positions.update((item.request, place) for place in range(item.start, item.start + item.num_tokens))
    assert run[-1].num_again == sum(count - 1 for count in positions.values())
    assert run[-1].num_again == run[-1].snapshot.num_computed_tokens - len(positions)
    assert run[0].state("0")[0] == "runs" and run[0].state("8") == ("not here yet", None)
    assert run[-1].state("0") == ("done", None)
    assert {run[25].state(name)[0] for name in "012345678"} == {"done", "runs", "waits"}


@pytest.fixture(scope="module")
def travel():
    return time_travel(HISTORY, SETTINGS, default={"step": 25, "fork_at": 10, "then": "watermark 4"})


def test_both_worlds_are_the_same_up_to_the_fork_and_differ_later(travel):
    before, later = travel.figure(step=9), travel.figure()
    assert before.header == later.header == ("request", *WORLDS)
    assert all(row[1] == row[2] for row in before.rows)
    assert any(row[1] != row[2] for row in later.rows)
    assert later.alt == ("The scheduler after step 25. as it was: 2 finished, 5 preemptions, 9 tokens computed again; "
                         "watermark 4, from step 10 on: 2 finished, 2 preemptions, 8 tokens computed again.")
    assert later.rows[2] == ("2", "runs, 29 of 30 computed", "runs, 29 of 30 computed")


def test_every_step_of_either_end_can_be_drawn(travel):
    for values in ({"step": 0, "fork_at": 0}, {"step": 59, "fork_at": 59},
                   {"step": 59, "fork_at": 0, "then": "priority"}):  # the fork is over by then
        shown = travel.figure(**values)
        assert shown.png.startswith(b"\x89PNG") and len(shown.rows) == 12
    assert shown.rows[-3:][0][2] == 9


def test_its_sliders_redraw(travel):
    form = travel.form()
    picture = form.children[-1].value
    form.children[0].value = 40
    assert form.children[-1].value != picture and "step 40" in form.children[-1].value


def test_small_loads():
    pair = [script(0, 2, 4), script(1, 2, 3, most=9)]
    assert [own.request.max_total_tokens for own in pair] == [6, 11]
    plans = list(drive_steps(Scheduler(BlockPool(3, 2, caching=False), watermark=0), pair))
    assert [plan.num_tokens for plan in plans] == [4, 1, 1, 1, 3, 1]
    work = work_of(Scheduler(BlockPool(12, 4, caching=False), watermark=0), all_at_once(9, 8, most=20, prompts=(2, 9)))
    assert work.preempted and work.again == work.computed - work.needed > 0 and len(work.running) == work.steps
    assert work.seconds(1, 0.5) == work.steps + 0.5 * work.computed
    load = chats_and_jobs(4.0, 40)
    assert Counter(own.group for own in load) == {"chat": 30, "job": 10}
    assert {own.priority for own in load if own.group == "job"} == {1}


def test_lines_in_panels():
    panels = {"good": {"a": [1, 2], "b": [2, 3]}, "wait, s": {"a": [0.1, 10], "b": [1, 1]}}
    shown = lines([1, 2], panels, x_label="load", finding="Two lines in two panels, one logarithmic.",
                  logarithmic=["wait, s"], level=1, dashed=True)
    assert shown.header == ("load", "a, good", "b, good", "a, wait, s", "b, wait, s")
    both = lines([1, 2], panels, yours=panels, x_label="load", finding="The same lines again as the reader's own.")
    assert "yours: b, wait, s" in both.header and both.rows[1][0] == 2
