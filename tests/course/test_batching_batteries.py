"""The batteries for schedulers and pools: minillm's own and the shortest right ones hold, each fault is caught."""

from __future__ import annotations

import pytest

from minillm import LLM, SamplingParams
from minillm.cache.blocks import BlockPool
from minillm.course import prove_pool, prove_scheduler
from minillm.course.batteries import BatteryFailure
from minillm.schedule.plan import ScheduledRequest, StepPlan
from minillm.schedule.scheduler import Scheduler


class MyScheduler:
    """The shortest right scheduler; each fault changes one method."""

    def __init__(self, max_num_seqs):
        self.places, self.waiting, self.running = max_num_seqs, [], []

    def add(self, request):
        self.waiting.append(request)

    def admit(self):
        while self.waiting and len(self.running) < self.places:
            self.running.append(self.waiting.pop(0))

    def schedule(self):
        self.admit()
        return StepPlan(tuple(ScheduledRequest(r, r.num_computed_tokens, r.num_missing_tokens) for r in self.running))

    def commit(self, plan, token_ids):
        for item in plan.scheduled:
            item.request.num_computed_tokens = item.end
        for item, token_id in zip(plan.sampling, token_ids, strict=True):
            if not item.request.is_finished:
                item.request.token_ids.append(token_id)
                self.finish_if_done(item.request, token_id)

    def finish_if_done(self, request, token_id):
        if token_id in request.eos_token_ids and not request.params.ignore_eos:
            self.finish(request, "stop")
        elif token_id in request.params.stop_token_ids:
            self.finish(request, "stop", stop_reason=token_id)
        elif request.num_known_tokens >= request.max_total_tokens:
            self.finish(request, "length")

    def finish(self, request, reason, *, stop_reason=None, error=None):
        self.forget(request)
        if not request.is_finished:
            request.finish_reason, request.stop_reason, request.error = reason, stop_reason, error

    def forget(self, request):
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)


class Static(MyScheduler):
    def admit(self):
        if not self.running:
            super().admit()


class LastComeFirstServed(MyScheduler):
    def add(self, request):
        self.waiting.insert(0, request)


class Keeps(MyScheduler):
    def forget(self, request):
        if request in self.waiting:
            self.waiting.remove(request)


class TooMany(MyScheduler):
    def admit(self):
        self.places += 1
        super().admit()
        self.places -= 1


class Skips(MyScheduler):
    def schedule(self):
        return StepPlan(super().schedule().scheduled[:2])


class PastTheEnd(MyScheduler):
    def finish_if_done(self, request, token_id):
        if request.num_known_tokens >= request.max_total_tokens:
            self.finish(request, "length")


class AlwaysStops(MyScheduler):
    def finish_if_done(self, request, token_id):
        if token_id in request.eos_token_ids:
            self.finish(request, "stop")
        super().finish_if_done(request, token_id)


class NeverAtAStopId(MyScheduler):
    def finish_if_done(self, request, token_id):
        if token_id not in request.params.stop_token_ids:
            super().finish_if_done(request, token_id)


class SaysNoWhy(MyScheduler):
    def finish(self, request, reason, *, stop_reason=None, error=None):
        super().finish(request, reason)


class GivesToTheGone(MyScheduler):
    def commit(self, plan, token_ids):
        for item, token_id in zip(plan.sampling, token_ids, strict=True):
            if item.request.is_finished:
                item.request.token_ids.append(token_id)
        super().commit(plan, token_ids)


class EndsTwice(MyScheduler):
    def finish(self, request, reason, *, stop_reason=None, error=None):
        self.forget(request)
        request.finish_reason = reason


class Stalls(MyScheduler):
    def schedule(self):
        return StepPlan(())


class MyPool:
    """The shortest right pool without a prefix cache."""

    caching = False

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size, self.free = num_blocks, block_size, list(range(num_blocks))

    @property
    def num_available(self):
        return len(self.free)

    def num_missing(self, table, num_tokens):
        return max(0, -(-num_tokens // self.block_size) - len(table.blocks))

    def allocate(self, table, num_tokens):
        count = self.num_missing(table, num_tokens)
        if count > len(self.free):
            return False
        table.blocks += [self.take() for _ in range(count)]
        return True

    def take(self):
        return self.free.pop()

    def release(self, table):
        self.free += table.blocks
        table.blocks.clear()

    def match(self, table, token_ids):
        return 0

    def may_write(self, table, token_ids):
        return True

    def publish(self, table, token_ids, num_written):
        pass


class Leaks(MyPool):
    def release(self, table):
        self.free += table.blocks[:-1]
        table.blocks.clear()


class GivesTwice(MyPool):
    def take(self):
        block = self.free.pop()
        if len(self.free) == 3:
            self.free.append(block)
        return block


class OneTooMany(MyPool):
    def num_missing(self, table, num_tokens):
        return max(0, num_tokens // self.block_size + 1 - len(table.blocks))


class TakesWhatThereIs(MyPool):
    def allocate(self, table, num_tokens):
        table.blocks += [self.take() for _ in range(min(len(self.free), self.num_missing(table, num_tokens)))]
        return len(table.blocks) * self.block_size >= num_tokens


class WithoutTheParent(BlockPool):
    def _name(self, table, token_ids, index):
        return 0, super()._name(table, token_ids, index)[1]


class ByHash(BlockPool):
    def _name(self, table, token_ids, index):
        chain, tokens = super()._name(table, token_ids, index)
        return chain, (hash(tokens),)


class MatchesTheLastToken(BlockPool):
    def _next_name(self, table, token_ids, to_compute=1):
        index = len(table.chains)
        return self._name(table, token_ids, index) if (index + 1) * self.block_size <= len(token_ids) else None


class PublishesTooEarly(BlockPool):
    def publish(self, table, token_ids, num_written):
        super().publish(table, token_ids, min(len(table.blocks) * self.block_size, len(token_ids)))


class FindsNothing(BlockPool):
    def publish(self, table, token_ids, num_written):
        self._drop_claim(table)


class FreesSharedBlocks(BlockPool):
    def release(self, table):
        for block in table.blocks:
            self._references[block] = 1
        super().release(table)


def test_minillms_own_parts_and_the_shortest_right_ones_hold(capsys):
    prove_scheduler(MyScheduler)
    prove_scheduler(lambda places: Scheduler(BlockPool(500, 4, caching=False), max_num_seqs=places))
    prove_pool(MyPool)
    prove_pool(lambda blocks, size: BlockPool(blocks, size, caching=False))
    prove_pool(BlockPool, caching=True)
    assert capsys.readouterr().out.count("cases hold") == 5


@pytest.mark.parametrize(("fault", "words"), [
    (Static, "1 of 2 places are free, 1 wait, and none was admitted"), (LastComeFirstServed, "first come"),
    (Keeps, "is finished and still in running"), (TooMany, "2 requests run at once; max_num_seqs is 1"),
    (Skips, "lacks one token and is not in the plan"), (PastTheEnd, "finish_reason and stop_reason of req-"),
    (AlwaysStops, "the output of req-"), (NeverAtAStopId, "the output of req-|no finish_reason"),
    (SaysNoWhy, "finish_reason and (stop_reason|error) of req-"), (GivesToTheGone, "tokens of req-., cancelled after"),
    (EndsTwice, "finish_reason and error of req-"),
    (Stalls, "the plan is empty although a request waits"), (lambda places: Scheduler, "is a class: make one")])
def test_each_fault_of_a_scheduler_is_caught_in_a_small_case(fault, words):
    with pytest.raises(BatteryFailure, match=words) as failure:
        prove_scheduler(fault)
    assert str(failure.value).count("prompt") <= 6


@pytest.mark.parametrize(("fault", "caching", "words"), [
    (Leaks, False, "num_available is 0, expected 1"), (GivesTwice, False, "num_available|a table holds a block twice"),
    (OneTooMany, False, "num_missing of 1 tokens"), (TakesWhatThereIs, False, "must say False and change nothing"),
    (WithoutTheParent, True, "gave .* alone"),
    (ByHash, True, "taken for the other's"), (MatchesTheLastToken, True, "nothing left to compute"),
    (PublishesTooEarly, True, "KeyError|gave .* alone"), (FindsNothing, True, "found in the cache is 0, expected"),
    (FreesSharedBlocks, True, "num_available|ValueError|KeyError|gave"), (lambda blocks, size: None, False, "lacks")])
def test_each_fault_of_a_pool_is_caught(fault, caching, words):
    with pytest.raises(BatteryFailure, match=words):
        prove_pool(fault, caching=caching)


def test_proved_parts_serve_real_requests(tiny_model, byte_tok):
    prompts, params = [[1, 2, 3], [4] * 30, [5, 6]], SamplingParams(temperature=0.0, max_tokens=9)
    expected = [out.outputs[0].token_ids for out in LLM(tiny_model, tokenizer=byte_tok).generate(prompts, params)]
    for own in (MyScheduler(2), Scheduler(MyPool(14, 4))):
        llm = LLM(tiny_model, tokenizer=byte_tok, scheduler=own)
        assert [out.outputs[0].token_ids for out in llm.generate(prompts, params)] == expected
        llm.reset_prefix_cache()
        assert llm.stats().num_blocks in (None, 14) and llm.stats().num_running == 0
