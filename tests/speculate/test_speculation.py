"""Speculation changes no token, whoever guesses: greedy or not, in batches, chunks, preempted, stopped (X05)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from minillm.cache.blocks import BlockPool
from minillm.config import EngineConfig
from minillm.sample import Sampler
from minillm.schedule.recording import RecordingScheduler
from minillm.schedule.scheduler import Scheduler
from minillm.speculate import draft
from minillm.speculate.draft import DraftModelProposer
from minillm.speculate.propose import NgramProposer

VOCAB = 261


class Always:
    """A controller that always asks for as many."""

    def __init__(self, count: int):
        self.count, self.seen = count, []

    def num_drafts(self, num_requests: int) -> int:
        return self.count

    def asked(self, seconds: float, num_requests: int, num_answered: int) -> None:
        assert seconds > 0 and 0 <= num_answered <= num_requests

    def saw(self, num_rows: int, seconds: float, num_checked: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_checked and seconds > 0
        self.seen.append((num_rows, num_checked, num_accepted))


class Oracle:
    """Guesses from the answers it was told: all right, all wrong, or each right with a probability."""

    def __init__(self, prompts: list[list[int]], params: list[SamplingParams], answers: list[list[int]], right: float):
        self.answers = {self.key(tuple(prompt), own): answer
                        for prompt, own, answer in zip(prompts, params, answers, strict=True)}
        self.right, self.draw, self.freed = right, random.Random(0), []

    @staticmethod
    def key(prompt: tuple[int, ...], params: SamplingParams) -> tuple:
        return prompt, params.seed, params.temperature, params.max_tokens

    def propose(self, requests, num_tokens):
        return [self.guess(request, num_tokens) for request in requests]

    def guess(self, request, num_tokens):
        answer = self.answers[self.key(request.prompt_token_ids, request.params)]
        following = answer[request.num_output_tokens:][:num_tokens]
        return [token if self.draw.random() < self.right else (token + 1) % VOCAB for token in following]

    def free(self, request):
        self.freed.append(request)


def speculating(make_llm, proposer, count: int, **options) -> LLM:
    llm = make_llm(proposer=proposer, **options)
    llm.engine.speculation.controller = Always(count)
    return llm


PROMPTS = [[1, 2, 3, 1, 2], [7] * 9, [5, 6, 7, 8, 9, 10, 11, 12], [200], list(range(20)), [3, 1, 3, 1, 3]]


def params_of(index: int) -> SamplingParams:
    """Greedy, sampled, penalized, biased, filtered, with a minimum: each in some request."""
    kinds = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5},
             {"temperature": 1.3, "repetition_penalty": 1.3, "min_tokens": 4},
             {"temperature": 0.0, "frequency_penalty": 1.0}, {"temperature": 0.9, "top_k": 5, "min_p": 0.05})
    return SamplingParams(max_tokens=8 + index, seed=index, logprobs=2, **kinds[index])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("right", [1.0, 0.0, 0.6, None], ids=["perfect", "wrong", "mixed", "ngram"])
def test_x05_tokens_logprobs_and_text_are_those_without_drafts(tiny_llm, right, count):
    params = [params_of(index) for index in range(len(PROMPTS))]
    with tiny_llm() as llm:
        expected = [llm.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, params, strict=True)]
    answers = [out.outputs[0].token_ids for out in expected]
    proposer = NgramProposer(3, 1) if right is None else Oracle(PROMPTS, params, answers, right)
    with speculating(tiny_llm, proposer, count, max_num_batched_tokens=24, max_prefill_chunk=6) as llm:
        outputs = llm.generate(PROMPTS, params)
        speculation, stats = llm.engine.speculation, llm.stats()
    for out, same in zip(outputs, expected, strict=True):
        ours, theirs = out.outputs[0], same.outputs[0]
        assert (ours.token_ids, ours.text, ours.finish_reason) == (theirs.token_ids, theirs.text, theirs.finish_reason)
        assert [[*step] for step in ours.logprobs] == [[*step] for step in theirs.logprobs]
        for step, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert [step[token].logprob for token in step] == pytest.approx([other[token].logprob for token in step])
    assert stats.num_output_tokens == sum(len(out.outputs[0].token_ids) for out in outputs)
    if right is not None:
        rate = speculation.num_accepted / speculation.num_checked
        assert rate == right if right in (0, 1) else 0.3 < rate < 0.9
        assert len(proposer.freed) == len(PROMPTS)


def test_perfect_drafts_take_a_fraction_of_the_steps(tiny_llm):
    own = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
    with tiny_llm() as llm:
        (out,) = llm.generate([PROMPTS[0]], own)
    with speculating(tiny_llm, Oracle(PROMPTS[:1], [own], [out.outputs[0].token_ids], 1.0), 5) as llm:
        (again,) = llm.generate([PROMPTS[0]], own)
        assert again.outputs[0].token_ids == out.outputs[0].token_ids
        assert llm.stats().num_steps == 1 + 4  # the prompt, and four steps of six tokens, of which one is cut short
        seen = llm.engine.speculation.controller.seen
        assert seen == [(6, 5, 5), (6, 5, 5), (6, 5, 5), (5, 4, 4)]  # of rows, checked, right; not of the prompt's step


def test_drafts_beyond_those_asked_for_are_left_out(tiny_llm):
    own = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (expected,) = tiny_llm().generate([PROMPTS[0]], own)

    class Eager(Oracle):
        def propose(self, requests, num_tokens):
            return super().propose(requests, num_tokens + 3)

    with speculating(tiny_llm, Eager(PROMPTS[:1], [own], [expected.outputs[0].token_ids], 1.0), 2) as llm:
        (out,) = llm.generate([PROMPTS[0]], own)
        assert max(rows for rows, *_ in llm.engine.speculation.controller.seen) == 3
    assert out.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.parametrize("right", [1.0, 0.5])
def test_x05_where_blocks_run_out_every_counter_stands_for_tokens_that_are_known(tiny_model, byte_tok, simplest,
                                                                                right):
    """60 workloads of random sizes: after each step no request has computed more than it knows or has room for, and
    when all have ended every block is free."""
    draw, num_preempted, num_accepted = random.Random(1), 0, 0
    for _ in range(60):
        pool = BlockPool(draw.randint(9, 14), 4)
        scheduler = Scheduler(pool, max_num_seqs=draw.randint(1, 5), max_num_batched_tokens=draw.randint(6, 20),
                              max_prefill_chunk=draw.randint(1, 8))
        prompts = [[draw.randrange(3) for _ in range(draw.randint(1, 16))] for _ in range(draw.randint(1, 6))]
        params = [SamplingParams(temperature=float(i % 2), seed=draw.randrange(99), max_tokens=draw.randint(1, 14))
                  for i in range(len(prompts))]
        answers = [simplest(prompt, own, 64) for prompt, own in zip(prompts, params, strict=True)]
        proposer = Oracle(prompts, params, answers, right)
        with LLM(tiny_model, tokenizer=byte_tok, scheduler=scheduler, proposer=proposer) as llm:
            llm.engine.speculation.controller = Always(draw.randint(1, 5))
            streams = [llm.engine.submit(job) for job in llm.prompts.listed(prompts, params, 0)]
            while llm.step():
                for request in scheduler.running:
                    assert request.num_missing_tokens >= 1
                    held = len(request.table.blocks) * pool.block_size
                    assert request.num_computed_tokens <= held
            outputs = [stream.choices[0].output.token_ids for stream in streams]
            num_accepted += llm.engine.speculation.num_accepted
        assert outputs == answers
        assert pool.num_available == pool.num_blocks
        num_preempted += scheduler.num_preempted
    assert num_preempted > 10 and num_accepted > 100, (num_preempted, num_accepted)


def test_a_stop_in_the_middle_of_accepted_drafts_ends_there(script_llm):
    """A stop string, a stop id and an end id among tokens all guessed right: nothing behind them comes out."""
    script = [104, 101, 108, 108, 111, 33, 104, 105, 257, 120]  # "hello!hi", the end, "x"
    cases = [(SamplingParams(temperature=0.0, stop=["lo"]), "hel", "stop", "lo"),
             (SamplingParams(temperature=0.0, stop_token_ids=[33]), "hello", "stop", 33),
             (SamplingParams(temperature=0.0), "hello!hi", "stop", None),
             (SamplingParams(temperature=0.0, max_tokens=3), "hel", "length", None)]
    for params, text, reason, stop in cases:
        with script_llm(script) as llm:
            (expected,) = llm.generate([[1, 2]], params)
        proposer = Oracle([[1, 2]], [params], [script], 1.0)
        with speculating(lambda **options: script_llm(script, **options), proposer, 5) as llm:
            (out,) = llm.generate([[1, 2]], params)
            assert llm.engine.speculation.num_accepted > 0
        own, same = out.outputs[0], expected.outputs[0]
        assert (own.text, own.finish_reason, own.stop_reason) == (text, reason, stop)
        assert (own.token_ids, own.text) == (same.token_ids, same.text)


@pytest.mark.parametrize("answer, words", [
    ([], "1 lists of ids, and returned 0"), (None, "NoneType"), ([None], "NoneType"), ([5], "int"), (7, "int"),
    ([[VOCAB]], "ids are ints"), ([[-1]], "ids are ints"), ([[True]], "ids are ints"), ([["a"]], "ids are ints"),
    ([[1.0]], "ids are ints"), (ZeroDivisionError("oh"), "ZeroDivisionError: oh")], ids=str)
def test_a_proposer_that_fails_is_told_and_not_asked_again_and_nobody_loses_a_token(tiny_llm, answer, words):
    class Junk(NgramProposer):
        def propose(self, requests, num_tokens):
            if isinstance(answer, Exception):
                raise answer
            return answer

    own = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
    (expected,) = tiny_llm().generate([[1, 2, 3]], own)
    with speculating(tiny_llm, Junk(), 3) as llm:
        with pytest.warns(RuntimeWarning, match=f"goes on without drafts.*{words}"):
            (out,) = llm.generate([[1, 2, 3]], own)
        assert out.outputs[0].token_ids == expected.outputs[0].token_ids and words in llm.engine.speculation.failure
        assert llm.generate([[1, 2, 3]], own)[0].outputs[0].token_ids == expected.outputs[0].token_ids  # and no warning


def test_a_proposer_that_cannot_forget_ends_nobody(tiny_llm):
    class Keeps(NgramProposer):
        def free(self, request):
            raise OSError("full")

    with speculating(tiny_llm, Keeps(2, 1), 3) as llm:
        with pytest.warns(RuntimeWarning, match="full"):
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True))
    assert [out.outputs[0].finish_reason for out in outputs] == ["length"] * len(PROMPTS)


def test_ctrl_c_in_a_proposer_or_its_model_loses_nothing(tiny_llm, tiny_model, interrupt_at):
    """At any place: the step is done again, and the tokens are those without drafts."""
    own = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    (expected,) = tiny_llm().generate([[1, 2, 3]], own)
    with speculating(tiny_llm, DraftModelProposer(tiny_model, Sampler(VOCAB)), 3) as llm:
        for place in range(1, 400, 7):
            stream = llm.stream([1, 2, 3], own)
            came = interrupt_at(place, under=str(Path(draft.__file__)))
            while True:
                try:
                    if not llm.step():
                        break
                except KeyboardInterrupt:
                    pass
            interrupt_at(0)
            list(stream)
            assert stream.output.outputs[0].token_ids == expected.outputs[0].token_ids, place
            if not came:
                break
        assert place > 50 and llm.engine.speculation.failure is None


def test_what_cannot_be_speculated_is_refused_by_name(tiny_llm, tiny_model, byte_tok):
    for options, words in (
            ({"method": "eagle"}, "method must be one of ngram, draft"), ({"tokens": 3}, "no 'tokens'"),
            ("ngram", "must map"), ({"method": "draft"}, "needs a model"), ({"method": ["ngram"]}, "one of"),
            ({"model": "x"}, "no 'model'; ngram takes"),
            ({"method": "draft", "model": "x", "quantization": "int3"}, "quantization must be"),
            ({"num_speculative_tokens": 0}, "num_speculative_tokens.*1 to 32"),
            ({"num_speculative_tokens": True}, "num_speculative_tokens"),
            ({"prompt_lookup_min": 5}, "prompt_lookup_min .5. must not be above")):
        with pytest.raises(ValueError, match=words):
            EngineConfig(speculative_config=options)
    with pytest.raises(ValueError, match="prompt_lookup_max is what your own proposer brings"):
        tiny_llm(proposer=NgramProposer(), speculative_config={"prompt_lookup_max": 3})
    with pytest.raises(ValueError, match="RecordingScheduler does not"):
        tiny_llm(scheduler=RecordingScheduler(Scheduler(BlockPool(8))), speculative_config={"method": "ngram"})
    with pytest.raises(TypeError, match="proposer"):
        tiny_llm(proposer=object())
