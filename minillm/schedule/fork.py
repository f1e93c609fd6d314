"""What would have happened under other settings: a recorded run, gone on with from any of its steps. No torch."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, linear_regression
from typing import Any

from minillm.schedule import history as record
from minillm.schedule.drive import Script, drive
from minillm.schedule.plan import StepPlan
from minillm.schedule.recording import RecordingScheduler, settings_of
from minillm.schedule.replay import Player, request_of


def mean_step_seconds(history: record.History) -> Callable[[StepPlan], float]:
    """What a step costs by the record itself: the straight line of its steps' seconds over their tokens.

    From plan to commit, by least squares. Where all had equally many tokens, or more took no longer: their mean.

    Raises:
        ValueError: the record has no step that was computed.
    """
    tokens, seconds, planned = [], [], None
    for event in history.events:
        if isinstance(event, record.Planned):
            planned = event
        elif isinstance(event, record.Committed) and planned:
            tokens.append(sum(item.num_tokens for item in planned.items))
            seconds.append(event.time_s - planned.time_s)
    if not tokens:
        raise ValueError("the record has no computed step, so nothing says what one costs: give step_seconds")
    slope, fixed = linear_regression(tokens, seconds) if len(set(tokens)) > 1 else (0.0, 0.0)
    if slope <= 0 or fixed < 0:
        slope, fixed = (0.0, fmean(seconds)) if slope <= 0 else (sum(seconds) / sum(tokens), 0.0)
    return lambda plan: fixed + slope * plan.num_tokens


def fork(history: record.History, step: int, *, step_seconds: Callable[[StepPlan], float] | None = None,
         **settings: Any) -> record.History:
    """What would have happened, had the scheduler had other ``settings`` from ``step`` on (0: from the beginning).

    Requests come when they came and get the output that they got. One that the scheduler did not end itself
    (cancelled, stopped by a string, cut off by the end of the record) ends after as many tokens; one without any, at
    the recorded time, or where its first token would be due. The prefix cache is emptied when it was. A step takes
    ``step_seconds(plan)``; left out, what :func:`mean_step_seconds` says. Who no longer has a place is preempted.

    Args:
        settings: of the scheduler, see :data:`~minillm.schedule.history.SCHEDULER_SETTINGS`; at step 0 also of the
            pool, :data:`~minillm.schedule.history.POOL_SETTINGS`. A watermark that was not given follows the pool.
    Raises:
        ValueError: there is no such step or setting, a setting is out of range, a prompt can never run under it, or
            the record is a fork itself, from a later step: what it changed there would be lost.
    """
    allowed = record.SCHEDULER_SETTINGS if step else (*record.POOL_SETTINGS, *record.SCHEDULER_SETTINGS)
    if unknown := settings.keys() - set(allowed):
        raise ValueError(f"cannot change {', '.join(sorted(unknown))} at step {step}: {', '.join(allowed)} can be")
    places = [place for place, event in enumerate(history.events) if isinstance(event, record.Planned)]
    if not 0 <= step < len(places):
        raise ValueError(f"there is no step {step}: the record has {len(places)}, from 0")
    player = Player(history.settings if step else history.settings | settings)
    begun = places[step] if step else 0
    before, rest = history.events[:begun], history.events[begun:]
    if any(isinstance(event, record.Changed) for event in rest):
        raise ValueError(f"this record was forked itself, later than step {step}: fork that one, or at a later step")
    for event in before:
        player.apply(event)
    forked = record.History(history.settings if step else settings_of(player.scheduler), before)
    if step:
        player.change(settings)
        forked.events.append(record.Changed(time_s=player.clock(), settings=settings))
    scripts = _scripts_of(history, player)
    for script in scripts:
        num_tokens = len(script.request.prompt_token_ids)
        if why := player.scheduler.why_never(num_tokens):
            raise ValueError(f"the prompt of {script.request.request_id} has {num_tokens} tokens; {why}")
    recorder = RecordingScheduler(player.scheduler, forked)
    forgets_s = [event.time_s for event in rest if isinstance(event, record.Forgotten)]
    for _ in drive(recorder, scripts, step_seconds or mean_step_seconds(history), player.clock, forgets_s):
        pass
    return forked


def _scripts_of(history: record.History, player: Player) -> list[Script]:
    """What each request of ``history`` does; ``player`` has those that came already."""
    scripts: dict[str, Script] = {}
    for event in history.events:
        if isinstance(event, record.Added):
            request = player.requests.get(event.request) or request_of(event)
            scripts[event.request] = Script(request, event.arrival_s, [], "cancelled")
        elif isinstance(event, record.Committed):
            for name, token_id in event.token_ids.items():
                scripts[name].output_token_ids.append(token_id)
        elif isinstance(event, record.Finished):
            scripts[event.request].reason, scripts[event.request].leaves_s = event.reason, event.time_s
    return [script for script in scripts.values() if not script.request.is_finished]
