"""A recorded run: saved, loaded, replayed step by step, told in words, forked, and shown in a trace viewer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minillm import SamplingParams
from minillm.cache.blocks import BlockPool
from minillm.course.batteries.scheduler import Replay, Workload
from minillm.request import Request
from minillm.schedule.drive import Clock, Script, drive
from minillm.schedule.fork import fork, mean_step_seconds
from minillm.schedule.history import Added, Changed, Committed, Finished, Forgotten, History, Planned
from minillm.schedule.recording import RecordingScheduler, name_of
from minillm.schedule.replay import Player, describe, replay, trace_of
from minillm.schedule.scheduler import Scheduler


def script(name: str, prompt: range, num_output: int, comes_s: float, reason: str = "length",
           most: int | None = None) -> Script:
    """A request of which ``most`` tokens were asked and ``num_output`` came."""
    request = Request(request_id=name, prompt_token_ids=tuple(prompt), params=SamplingParams(), seed=0,
                      max_total_tokens=len(prompt) + (most or num_output), arrival_s=comes_s)
    return Script(request, comes_s, range(100, 100 + num_output), reason)


def recorded(*scripts: Script, blocks: int = 8, step_seconds=lambda plan: 1.0, forgets_s=(), **options) -> History:
    clock = Clock()
    recorder = RecordingScheduler(Scheduler(BlockPool(blocks, 4), clock=clock, **options))
    for _ in drive(recorder, scripts, step_seconds, clock, forgets_s):
        pass
    return recorder.history


def story() -> History:
    """Three requests in eight blocks of four; the first four tokens of ``c`` are those of ``a``."""
    return recorded(script("a", range(1, 6), 9, 0), script("b", range(20, 30), 8, 1), script("c", range(1, 6), 6, 2),
                    max_num_seqs=3, max_num_batched_tokens=8, max_prefill_chunk=4)


def outputs(history: History) -> dict[str, list[int]]:
    tokens = {event.request: [] for event in history.events if isinstance(event, Added)}
    for event in history.events:
        if isinstance(event, Committed):
            for name, token_id in event.token_ids.items():
                tokens[name].append(token_id)
    return tokens


def reasons(history: History) -> dict[str, str]:
    return {event.request: event.reason for event in history.events if isinstance(event, Finished)}


def test_a_short_schedule_is_told_step_by_step():
    """A prompt in chunks beside a decode, a prefix that is found, a preemption, and what was cached meanwhile."""
    assert [describe(snapshot) for snapshot in replay(story())] == [
        "step 0: a reads 0-3; admits a | runs a, waits b | 1 held, 0 cached, 7 free",
        "step 1: a reads 4; b reads 0-3; admits b | runs a b, waits c | 3 held, 0 cached, 5 free",
        "step 2: a decodes 5; b reads 4-7; c reads 4; admits c with 4 cached | runs a b c | 5 held, 0 cached, 3 free",
        "step 3: a decodes 6; c decodes 5; b reads 8-9 | runs a b c | 6 held, 0 cached, 2 free",
        "step 4: a decodes 7; b decodes 10; c decodes 6 | runs a b c | 6 held, 0 cached, 2 free",
        "step 5: a decodes 8; b decodes 11; c decodes 7 | runs a b c | 7 held, 0 cached, 1 free",
        "step 6: a decodes 9; b decodes 12; preempts c | runs a b, waits c | 7 held, 0 cached, 1 free",
        "step 7: a decodes 10; b decodes 13 | runs a b, waits c | 7 held, 0 cached, 1 free",
        "step 8: a decodes 11; b decodes 14 | runs a b, waits c | 7 held, 0 cached, 1 free",
        "step 9: a decodes 12; b decodes 15; a ends (length) | runs b, waits c | 4 held, 3 cached, 1 free",
        "step 10: b decodes 16; b ends (length) | waits c | 0 held, 7 cached, 1 free",
        "step 11: c decodes 8; admits c with 8 cached | runs c | 3 held, 5 cached, 0 free",
        "step 12: c decodes 9; c ends (length) | idle | 0 held, 7 cached, 1 free",
    ]


def test_a_snapshot_holds_queues_blocks_and_counts():
    snapshots = list(replay(story(), blocks=True))
    third, seventh, last = snapshots[2], snapshots[6], snapshots[-1]
    assert (third.start_s, third.end_s, third.admitted) == (2.0, 3.0, ("c",))
    assert third.running[0] == ("a", 7, 6, 5, 2, 0) and third.running[1] == ("b", 10, 8, 10, 0, 0)
    assert sorted(block.holders for block in third.blocks if block.state == "held") == [
        ("a",), ("a", "c"), ("b",), ("b",), ("c",)]
    assert snapshots[1].added == ("c",) and third.num_hit_tokens == 4
    assert seventh.waiting == (("c", 9, 0, 5, 4, 1),) and seventh.num_preempted == 1
    assert last.num_evicted == 0 and last.num_hit_tokens == 4, "its own tokens, found again, were no hit"
    assert last.num_computed_tokens == sum(item.num_tokens for each in snapshots for item in each.items)


class Watched(RecordingScheduler):
    """Notes how things stand before each step."""

    def __init__(self, scheduler: Scheduler):
        super().__init__(scheduler)
        self.states: list[tuple] = []

    def schedule(self):
        self.states.append((
            [(name_of(request), request.num_known_tokens, request.num_computed_tokens) for request in self.waiting],
            [(name_of(request), request.num_known_tokens, request.num_computed_tokens) for request in self.running],
            [tuple(request.table.blocks) for request in self.running], self.pool.num_cached, self.pool.num_evicted))
        return super().schedule()


def test_hundreds_of_workloads_replay_to_every_state_they_had(tmp_path):
    """With cancellations, unusable logits and interrupted steps; through the file."""
    num_steps = num_preempted = 0
    for seed in range(300):
        made = []
        Replay(Workload.random(seed)).run(lambda *args, made=made, **keys: made.append(
            Watched(Scheduler(*args, **keys))) or made[0])
        watched, = made
        loaded = History.load(watched.history.save(tmp_path / "history.jsonl"))
        assert loaded == watched.history
        snapshots = list(replay(loaded, blocks=True))
        assert len(snapshots) == len(watched.states) == loaded.num_steps
        for snapshot, (waiting, running, tables, num_cached, num_evicted) in zip(snapshots, watched.states[1:]):
            assert [tuple(state[:3]) for state in snapshot.waiting] == waiting, seed
            assert [tuple(state[:3]) for state in snapshot.running] == running, seed
            held = {block for table in tables for block in table}
            assert {number for number, block in enumerate(snapshot.blocks) if block.state == "held"} == held
            assert (snapshot.num_held, snapshot.num_cached) == (len(held), num_cached)
            assert snapshot.num_free == len(snapshot.blocks) - len(held) - num_cached
            assert snapshot.num_evicted == num_evicted
        num_steps += len(snapshots)
        num_preempted += snapshots[-1].num_preempted if snapshots else 0
    assert num_steps > 5000 and num_preempted > 100


def test_another_schedulers_record_is_no_history_of_this_one():
    history = story()
    place = next(place for place, event in enumerate(history.events) if isinstance(event, Planned) and event.admitted)
    history.events[place] = replace(history.events[place], items=[])
    with pytest.raises(ValueError, match=r"step 0 was nothing, and is a 0\+4 now: another scheduler"):
        list(replay(history))
    with pytest.raises(ValueError, match="recorded from a scheduler without block_size, caching, num_blocks"):
        list(replay(History({**history.settings, "num_blocks": None, "block_size": None, "caching": None})))


def test_a_request_of_the_same_name_is_refused_and_the_record_stays_whole():
    recorder = RecordingScheduler(Scheduler(BlockPool(8, 4)))
    recorder.add(script("a", range(3), 1, 0).request)
    with pytest.raises(ValueError, match="has a request a already"):
        recorder.add(script("a", range(3), 1, 0).request)
    assert len(recorder.waiting) == len(recorder.history.events) == 1


SETTINGS = ('{"format": "minillm history 1", "settings": {"num_blocks": 8, "block_size": 4, "caching": true, '
            '"max_num_seqs": 3, "max_num_batched_tokens": 8, "max_prefill_chunk": 4, "chunked": true, '
            '"watermark": null, "policy": "fcfs"}}')


@pytest.mark.parametrize(("number", "line", "words"), [
    (1, '{"some": "file"}', "the first line must have"), (1, "[1, 2]", "line 1"),
    (3, '{"event": "planned", "tim', "line 3"), (3, '{"event": "slept"}', "must be one of added, planned"),
    (3, '{"event": "finished"}', "missing or unknown: by_token"),
    (3, '{"event": "committed", "time_s": "soon", "token_ids": {}}', "time_s cannot be 'soon'"),
    (3, '{"event": "committed", "time_s": 1.0, "token_ids": {"z": 1}}', "z was not added before"),
    (3, '{"event": "planned", "time_s": 1.0, "items": [["a", 0]], "admitted": [], "preempted": []}', "line 3"),
    (3, '{"event": "forgotten", "time_s": NaN}', "time_s cannot be nan"),
    (3, '{"event": "forgotten", "time_s": 1' + "0" * 400 + "}", "time_s cannot be 1000"),
    (3, '{"event": "changed", "time_s": 0.0, "settings": {"speed": 1}}', "settings cannot be {'speed': 1}"),
    (3, '{"event": "changed", "time_s": 0.0, "settings": {"watermark": true}}', "settings cannot be"),
    (1, SETTINGS.replace('"num_blocks": 8', '"num_blocks": "8"'), "each of its type, got .*'num_blocks': '8'"),
    (1, SETTINGS.replace('"caching": true', '"caching": 1'), "each of its type"), (3, "\udcff", "utf-8"),
])
def test_a_damaged_or_foreign_file_is_refused_by_the_line(tmp_path, number, line, words):
    lines = story().save(path := tmp_path / "run.jsonl").read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError, match=f"run.jsonl, line {number}, .*{words}" if "line" not in words else words):
        History.load(path)


def test_a_history_begins_with_the_settings_that_were_given(tmp_path):
    assert story().save(tmp_path / "run.jsonl").read_text().splitlines()[0] == SETTINGS


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "run.jsonl").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        History.load(tmp_path / "run.jsonl")


@pytest.mark.parametrize("step", [0, 1, 6, 12])
def test_a_fork_that_changes_nothing_is_the_record(step):
    history = story()
    forked = fork(history, step, step_seconds=lambda plan: 1.0)
    assert forked.settings == history.settings
    assert [event for event in forked.events if not isinstance(event, Changed)] == history.events


@pytest.mark.parametrize(("step", "settings"), [
    (3, {"max_num_seqs": 1}), (3, {"policy": "priority"}), (2, {"max_prefill_chunk": 1, "watermark": 0}),
    (0, {"num_blocks": 40}), (0, {"block_size": 2, "num_blocks": 16, "caching": False}),
    (5, {"chunked": False, "max_num_batched_tokens": 16}), (1, {"max_num_batched_tokens": 4})], ids=str)
def test_a_fork_keeps_the_past_and_everybodys_tokens_and_can_be_replayed(step, settings):
    history = story()
    forked = fork(history, step, step_seconds=lambda plan: 1.0, **settings)
    assert outputs(forked) == outputs(history) and reasons(forked) == reasons(history)
    snapshots = list(replay(forked))
    assert [s.items for s in snapshots[:step]] == [s.items for s in list(replay(history))[:step]]
    assert len(snapshots[-1].running) == 0 and snapshots[-1].num_held == 0
    most = settings.get("max_num_seqs", 3)
    assert all(len(snapshot.items) <= most for snapshot in snapshots[step:])
    assert all(item.num_tokens <= settings.get("max_prefill_chunk", 16) for s in snapshots[step:] for item in s.items)


def test_with_blocks_enough_the_fork_preempts_nobody_and_ends_earlier():
    slow = list(replay(story()))
    quick = list(replay(fork(story(), 0, step_seconds=lambda plan: 1.0, num_blocks=40)))
    assert (slow[-1].num_preempted, quick[-1].num_preempted) == (1, 0)
    assert quick[-1].end_s < slow[-1].end_s


def test_a_fork_derives_again_what_was_not_given():
    """Not so a watermark or a chunk that was."""
    one = script("a", range(64), 40, 0)
    wide, whole = recorded(one, blocks=5000), recorded(script("a", range(64), 2, 0), blocks=40, chunked=False)
    for history, settings, name, expected in (
            (wide, {"num_blocks": 60}, "watermark", 1), (whole, {"chunked": True}, "max_prefill_chunk", 512),
            (recorded(script("a", range(9), 2, 0), watermark=3), {"num_blocks": 60}, "watermark", 3)):
        forked = fork(history, 0, step_seconds=lambda plan: 1.0, **settings)
        assert getattr(Player(forked.settings).scheduler, name) == expected
    later = fork(whole, 1, step_seconds=lambda plan: 1.0, chunked=True)
    player = Player(later.settings)
    for event in later.events:
        player.apply(event)
    assert player.scheduler.max_prefill_chunk == 512


def test_a_fork_is_forked_only_from_where_it_became_one():
    """Before, what it changed would be lost without a word."""
    forked = fork(story(), 3, step_seconds=lambda plan: 1.0, max_num_seqs=1)
    again = fork(forked, 3, step_seconds=lambda plan: 1.0)
    assert [event for event in again.events if not isinstance(event, Changed)] == [
        event for event in forked.events if not isinstance(event, Changed)]
    for step in (0, 2):
        with pytest.raises(ValueError, match=f"was forked itself, later than step {step}"):
            fork(forked, step)


@pytest.mark.parametrize("forget_s", [1.5, 15.0, 40.0])
def test_an_emptied_prefix_cache_is_in_the_record_in_its_file_and_in_its_forks(tmp_path, forget_s):
    """While one runs, between two, and after all."""
    history = recorded(script("a", range(1, 10), 5, 0), script("b", range(1, 10), 5, 20), forgets_s=[forget_s])
    assert sum(isinstance(event, Forgotten) for event in history.events) == 1
    assert History.load(history.save(tmp_path / "run.jsonl")) == history
    assert list(replay(history))[-1].num_hit_tokens == (0 if forget_s == 15.0 else 8)
    for step in (0, 3):
        forked = fork(history, step, step_seconds=lambda plan: 1.0)
        assert [event for event in forked.events if not isinstance(event, Changed)] == history.events


def test_who_was_cancelled_or_stopped_goes_after_as_many_tokens():
    """Also one that went before its first token, and one of whom the record does not tell the end."""
    history = recorded(
        script("a", range(1, 6), 3, 0, "cancelled", most=50), script("b", range(30, 36), 4, 0, "stop", most=50),
        script("c", range(50, 56), 0, 0, "cancelled", most=9), script("d", range(60, 70), 8, 0),
        max_num_seqs=2, max_num_batched_tokens=8)
    ends = reasons(history)
    assert ends == {"a": "cancelled", "b": "stop", "c": "cancelled", "d": "length"}
    history.events = [event for event in history.events
                      if not (isinstance(event, Finished) and event.request == "d")][:-1]
    forked = fork(history, 2, max_num_seqs=3)
    assert outputs(forked) == outputs(history)
    assert reasons(forked) == {**ends, "d": "cancelled"}


def test_a_fork_at_no_step_or_of_no_setting_is_refused():
    history = story()
    for step in (-1, 13):
        with pytest.raises(ValueError, match=f"there is no step {step}: the record has 13"):
            fork(history, step)
    with pytest.raises(ValueError, match="cannot change num_blocks at step 1: max_num_seqs"):
        fork(history, 1, num_blocks=9)
    with pytest.raises(ValueError, match="prompt of b has 10 tokens; the KV cache holds 2 blocks of 4"):
        fork(history, 0, num_blocks=2)
    with pytest.raises(ValueError, match="policy must be"):
        fork(history, 0, policy="lifo")
    with pytest.raises(ValueError, match="no computed step"):
        mean_step_seconds(History(history.settings))


def test_a_step_costs_what_the_record_says():
    history = recorded(script("a", range(1, 30), 9, 0), blocks=20, max_prefill_chunk=8,
                       step_seconds=lambda plan: 0.5 + 0.25 * plan.num_tokens)
    seconds = mean_step_seconds(history)
    assert fork(history, 0).events == history.events
    other = fork(history, 0, max_prefill_chunk=16)
    assert list(replay(other))[0].end_s == pytest.approx(0.5 + 0.25 * 16)
    plain = recorded(script("a", range(1), 9, 0))
    assert mean_step_seconds(plain)(Scheduler(BlockPool(4)).schedule()) == 1.0 and seconds is not None


def test_the_engine_records_a_run_that_replays_and_forks(tiny_llm):
    """Chunks, a hit, preemptions, a stop string, a cancellation; the tokens are those of an engine without record."""
    prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9], [7] * 6, [8, 9, 10]]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True)
    plain = [out.outputs[0].token_ids for out in tiny_llm().generate(prompts, params)]
    recorder = RecordingScheduler(
        Scheduler(BlockPool(8, 4), max_num_seqs=3, max_num_batched_tokens=8, max_prefill_chunk=4))
    llm, stopped = tiny_llm(scheduler=recorder), tiny_llm().generate(prompts[3:], params)[0].outputs[0]
    stopping = [params, params, params, replace(params, stop=[stopped.text[4:6]])]
    streams = [llm.stream(prompt, own) for prompt, own in zip(prompts, stopping, strict=True)]
    for _ in range(9):
        llm.step()
    streams[0].close()
    texts = [list(stream) and stream.output.outputs[0] for stream in streams[1:]]
    assert [own.token_ids for own in texts[:2]] == plain[1:3]
    assert texts[2].finish_reason == "stop" and texts[2].token_ids == plain[3][:len(texts[2].token_ids)] != plain[3]
    history = recorder.history
    assert outputs(history)["req-1"] == plain[1]
    assert [reasons(history)[f"req-{number}"] for number in range(4)] == ["cancelled", "length", "length", "stop"]
    snapshots = list(replay(history))
    assert snapshots[-1].num_preempted == llm.stats().num_preemptions > 0
    assert all(a.start_s < a.end_s <= b.start_s for a, b in zip(snapshots, snapshots[1:]))
    forked = fork(history, 0, num_blocks=60)
    assert outputs(forked) == outputs(history) and reasons(forked) == reasons(history)
    assert list(replay(forked))[-1].num_preempted == 0


def test_resetting_the_prefix_cache_of_an_engine_is_recorded_and_its_idle_steps_are_not(tiny_llm):
    recorder = RecordingScheduler(Scheduler(BlockPool(40, 4)))
    llm, params = tiny_llm(scheduler=recorder), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for _ in range(2):
        llm.generate([list(range(20))], params)
        llm.reset_prefix_cache()
        assert not llm.step()
    assert recorder.history.num_steps == llm.stats().num_steps == 8
    *_, last = replay(recorder.history)
    assert (last.num_hit_tokens, last.num_cached, last.num_evicted) == (0, 0, 10)
    assert outputs(fork(recorder.history, 0)) == outputs(recorder.history)


def test_a_scheduler_that_has_begun_is_recorded_only_with_its_history(tiny_llm):
    """Else nothing would tell of what waits, runs or is cached."""
    for caching in (True, False):
        scheduler = Scheduler(BlockPool(40, 4, caching=caching))
        tiny_llm(scheduler=scheduler).generate([list(range(20))], SamplingParams(max_tokens=1))
        if caching:
            with pytest.raises(ValueError, match="record a new scheduler over a new pool"):
                RecordingScheduler(scheduler)
        else:
            RecordingScheduler(scheduler)
    scheduler.add(script("a", range(3), 1, 0).request)
    with pytest.raises(ValueError, match="record a new scheduler"):
        RecordingScheduler(scheduler)


def test_a_request_that_was_refused_for_its_name_ends_nobody_elses(tiny_llm):
    recorder = RecordingScheduler(Scheduler(BlockPool(40, caching=False)))
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    tiny_llm(scheduler=recorder).generate([[1, 2, 3]], params)
    ended = list(recorder.history.events)
    with pytest.raises(ValueError, match="has a request req-0 already"):
        tiny_llm(scheduler=recorder).generate([[1, 2, 3]], params)
    assert recorder.history.events == ended and reasons(recorder.history) == {"req-0": "length"}


def test_a_trace_has_a_row_a_request_and_tracks_of_counts():
    history = story()
    chrome = trace_of(history).to_chrome()["traceEvents"]
    spans = [event for event in chrome if event["ph"] == "X"]
    names = [event["args"]["name"] for event in chrome if event["ph"] == "M"]
    counts = [event for event in chrome if event["ph"] == "C"]
    assert sorted(names) == ["request a", "request b", "request c"]
    assert sum(span["name"] in ("prefill", "decode") for span in spans) == sum(
        len(snapshot.items) for snapshot in replay(history))
    away, = (span for span in spans if span["name"] == "preempted")
    assert (away["ts"], away["dur"]) == (6e6, 5e6)
    assert [event["args"] for event in counts if event["ts"] == 7e6] == [
        {"running": 2, "waiting": 1}, {"held": 7, "cached": 0, "free": 1}]
    by_row: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span["ts"]):
        assert span["ts"] >= by_row.get(span["tid"], 0.0), "spans of a request overlap"
        by_row[span["tid"]] = span["ts"] + span["dur"]
