"""Where the time of a request goes, by stage; the file opens in ui.perfetto.dev or chrome://tracing."""

import sys

from minillm import LLM, SamplingParams

with LLM("smollm2-135m") as llm, llm.tracing() as trace:
    llm.generate(["The sky is"], SamplingParams(temperature=0, max_tokens=16))
for stage, seconds in trace.by_stage().items():
    print(f"{stage:10} {seconds * 1e3:8.2f} ms")
if len(sys.argv) > 1:
    print("written:", trace.save(sys.argv[1]))
