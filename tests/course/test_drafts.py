"""Drafts are counted in calls of the engine, for an answer that is known."""

from __future__ import annotations

import pytest

from minillm import SamplingParams
from minillm.course.drafts import calls_with


def test_calls_are_counted_without_the_prompts_and_another_answer_is_refused(tiny_llm):
    llm, prompt = tiny_llm(), [1, 2, 3]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answer = llm.generate([prompt], params)[0].outputs[0].token_ids
    assert 1 <= calls_with(llm, {}, prompt, answer, 4) <= len(answer) - 1
    told = [*prompt, *answer, *prompt]  # all that follows was there before
    again = llm.generate([told], params)[0].outputs[0].token_ids
    assert calls_with(llm, {}, told, again, 1) <= len(again) - 1
    with pytest.raises(ValueError, match="compare in float32"):
        calls_with(llm, {}, prompt, [*answer[:-1], (answer[-1] + 1) % 261], 4)
