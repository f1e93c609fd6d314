"""Guess tokens and check several in one step: the same answer, in fewer steps where it repeats what is known."""

from minillm import LLM, SamplingParams

LIST = "\n".join(f"{number}. Chapter {number}: page {number * 12}" for number in range(1, 9))
PARAMS = SamplingParams(temperature=0, max_tokens=96)

answers, steps = [], []
for config in (None, {"method": "ngram", "num_speculative_tokens": 4}):
    with LLM("smollm2-135m", speculative_config=config) as llm:
        (output,) = llm.generate([f"{LIST}\n\nThe same list again:\n\n1. Chapter 1:"], PARAMS)
        answers.append(output.outputs[0].text)
        steps.append(llm.stats().num_steps)

print(answers[0])
print(f"{steps[0]} steps without drafts, {steps[1]} with; the answers are equal: {answers[0] == answers[1]}")
