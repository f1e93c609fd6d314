"""A part of your own in the real engine: any callable that maps rows of logits to tokens is a sampler."""

from minillm import LLM, SamplingParams
from minillm.sample import SampledToken


def second_best(logits, rows):
    """Always take the second most likely token, and end-of-text when it is the most likely one."""
    best, second = logits.topk(2, dim=-1).indices.T.tolist()
    return [SampledToken(b if b in row.stop_token_ids else s) for b, s, row in zip(best, second, rows)]


with LLM("smollm2-135m", sampler=second_best) as llm:
    (output,) = llm.generate(["The capital of France is"], SamplingParams(max_tokens=16))
    print(output.prompt + output.outputs[0].text)
