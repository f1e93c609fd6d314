"""N-gram drafts against a search by eye, and a controller that speculates where it pays."""

from __future__ import annotations

import random

import pytest

from minillm.request import Request, SamplingParams
from minillm.speculate.propose import Controller, NgramProposer


def by_eye(ids: list[int], longest: int, shortest: int, num_tokens: int) -> list[int]:
    """The newest earlier place of the newest tokens, the longest first."""
    for length in range(longest, shortest - 1, -1):
        newest = ids[-length:]
        for start in range(len(ids) - length - 1, -1, -1):
            if length < len(ids) and ids[start:start + length] == newest:
                text, place = list(ids), start + length
                while len(text) - len(ids) < num_tokens:
                    text.append(text[place])
                    place += 1
                return text[len(ids):]
    return []


def test_ngram_drafts_are_what_followed_the_newest_tokens_last():
    draw = random.Random(0)
    found = 0
    for _ in range(3000):
        ids = [draw.choice([0, 1, 2, 255, 256, 2**16, 2**24]) for _ in range(draw.randint(1, 30))]
        shortest = draw.randint(1, 3)
        longest, count = shortest + draw.randint(0, 3), draw.randint(1, 6)
        drafts = NgramProposer(longest, shortest).continued(ids, count)
        assert drafts == by_eye(ids, longest, shortest, count), (ids, longest, shortest)
        found += bool(drafts)
    assert 1000 < found < 2900


def test_text_that_repeats_itself_is_continued_round_and_round():
    assert NgramProposer().continued([9, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert NgramProposer().continued([5, 5, 5], 4) == [5, 5, 5, 5]


def test_nothing_seen_before_gives_no_drafts():
    for ids in ([1], [1, 2], [1, 2, 3, 4], list(range(100)), [256, 1, 0, 256]):
        assert NgramProposer().continued(ids, 4) == []


def test_requests_are_answered_in_order_and_lengths_checked():
    params = SamplingParams()
    requests = [Request(request_id=str(i), prompt_token_ids=tuple(ids), params=params, seed=0, max_total_tokens=64)
                for i, ids in enumerate(([1, 2, 1, 2], [1, 2, 3]))]
    assert NgramProposer().propose(requests, 2) == [[1, 2], []]
    for longest, shortest in ((1, 2), (0, 0), (3, 0)):
        with pytest.raises(ValueError, match="n-grams"):
            NgramProposer(longest, shortest)


# ---- how many pay ----------------------------------------------------------------------------------------------------


def driven(controller: Controller, num_requests: int, acceptance: float, seconds_of, steps: int = 400,
           num_answered: int | None = None) -> list[int]:
    """Drafts that it asked for in each step, on a machine whose step of n rows takes ``seconds_of(n)``;
    ``num_answered`` of the requests (all) have some."""
    draw, asked, num_answered = random.Random(0), [], num_requests if num_answered is None else num_answered
    for _ in range(steps):
        count = controller.num_drafts(num_requests)
        right = [next((k for k in range(count) if draw.random() > acceptance), count) for _ in range(num_answered)]
        rows = num_requests + num_answered * count
        if count:
            controller.asked(1e-5, num_requests, num_answered)
        controller.saw(rows, seconds_of(rows), sum(min(k + 1, count) for k in right), sum(right))
        asked.append(count)
    return asked


def memory_bound(rows: int) -> float:
    """8 rows cost what one costs; beyond them each costs."""
    return 0.02 * max(1, rows / 8)


def test_the_first_step_is_plain_and_good_drafts_are_checked_soon_and_for_good():
    asked = driven(Controller(4), 1, 0.9, memory_bound)
    assert asked[0] == 0 and asked[20:].count(4) > 0.94 * len(asked[20:])


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9])
def test_the_acceptance_is_that_of_drafts_that_came_to_be_checked(acceptance):
    """A step ends with its first wrong draft: averaging the shares of steps would say 0.31, 0.52, 0.80."""
    controller, seen = Controller(4), []
    draw = random.Random(0)
    for _ in range(4000):
        right = next((k for k in range(4) if draw.random() > acceptance), 4)
        controller.saw(5, 0.02, min(right + 1, 4), right)
        seen.append(controller.acceptance)
    assert sum(seen[100:]) / len(seen[100:]) == pytest.approx(acceptance, abs=0.03)


@pytest.mark.parametrize("num_requests, acceptance, most", [(1, 0.0, 4), (32, 0.6, 4), (32, 0.0, 8), (32, 0.0, 32)])
def test_drafts_that_do_not_pay_are_off_but_for_trials_that_take_a_small_share_of_the_time(num_requests, acceptance,
                                                                                          most):
    asked = driven(Controller(most), num_requests, acceptance, memory_bound, 3000)[300:]
    plain = memory_bound(num_requests)
    spent = sum(memory_bound(num_requests * (1 + count)) for count in asked)
    assert any(asked) and spent < (1.02 + Controller.FOR_TRIALS) * plain * len(asked)


def test_a_batch_pays_for_the_rows_that_its_drafts_have_and_for_no_others():
    """A quarter of 32 requests have a draft, always right: 40 rows take 1.25 times as long, for 1.25 times the tokens.
    Were steps of 32 to 63 rows taken for one kind, drafts would look free."""
    asked = driven(Controller(4), 32, 1.0, memory_bound, 2000, num_answered=8)[300:]
    assert 0 < sum(count > 0 for count in asked) < 0.05 * len(asked)
    asked = driven(Controller(4), 32, 1.0, lambda rows: 0.02 * max(1, rows / 40), 2000, num_answered=8)[300:]
    assert sum(asked) / len(asked) > 0.9, "the first eight rows more are free"


def test_the_first_step_of_each_shape_may_take_long():
    """As it does where kernels are made for each: forty times as long."""
    seen = set()

    def seconds_of(rows: int) -> float:
        first = rows not in seen
        seen.add(rows)
        return memory_bound(rows) * (40 if first else 1)

    asked = driven(Controller(4), 1, 0.9, seconds_of, 3000)
    assert asked[-1000:].count(4) > 900


def test_a_first_step_that_was_slow_by_chance_is_forgotten():
    """Cold, it took three times as long; no draft is ever right, and a row costs 15 %."""
    controller = Controller(4)
    controller.saw(1, 0.06, 0, 0)
    asked = driven(controller, 1, 0.0, lambda rows: 0.02 * (0.85 + 0.15 * rows), 2000)
    assert sum(count > 0 for count in asked[-500:]) < 30


def test_a_few_drafts_are_checked_where_many_take_too_long_to_make():
    """3 ms a draft beside a step of 20 ms, each right with one half: one or two pay, four do not."""
    controller, draw, asked = Controller(4), random.Random(0), []
    for _ in range(1500):
        count = controller.num_drafts(1)
        right = next((k for k in range(count) if draw.random() > 0.5), count)
        if count:
            controller.asked(0.003, 1, 1)
        controller.saw(1 + count, 0.02, min(right + 1, count), right)
        asked.append(count)
    assert sum(count in (1, 2) for count in asked[-800:]) > 600


@pytest.mark.parametrize("answers", [True, False])
def test_a_proposer_that_takes_longer_than_it_saves_is_hardly_asked(answers):
    """A step of 20 ms, 50 ms for drafts that are always right, or that never come."""
    controller, asked = Controller(4), 0
    for _ in range(1000):
        count = controller.num_drafts(1)
        if count:
            asked += 1
            controller.asked(0.05 / count, 1, int(answers))
        checked = count if answers else 0
        controller.saw(1 + checked, 0.02, checked, min(checked, 1))
    assert asked < 60


def test_asking_that_costs_nothing_goes_on_however_seldom_there_is_a_draft():
    controller = Controller(4)
    for _ in range(200):
        if controller.num_drafts(1):
            controller.asked(1e-5, 1, 0)
        controller.saw(1, 0.02, 0, 0)
    assert controller.num_drafts(1) > 0


def test_it_turns_on_again_when_the_text_changes():
    controller = Controller(4)
    driven(controller, 1, 0.0, memory_bound, 200)
    assert sum(count > 0 for count in driven(controller, 1, 0.95, memory_bound, 2000)[-500:]) > 400
