"""How likely the model finds given texts: the log-probability of each token, and perplexity."""

import math

from minillm import LLM

with LLM("smollm2-135m", dtype="float32") as llm:
    texts = ["The capital of France is Paris.", "The capital of France is porridge."]
    for text, score in zip(texts, llm.score(texts)):
        known = [value for value in score.logprobs if value is not None]  # nothing comes before the first token
        print(f"perplexity {math.exp(-sum(known) / len(known)):8.1f}  {text}")
