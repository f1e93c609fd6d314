"""Several prompts at once, and the numbers of each."""

from minillm import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=24, seed=1)
    for output in llm.generate(["The sky is blue because", "The first rule of cooking is"], params):
        answer, metrics = output.outputs[0], output.metrics
        print(f"{output.prompt}{answer.text}")
        print(f"  [{len(answer.token_ids)} tokens, {answer.finish_reason}; first after {metrics.ttft_s * 1e3:.0f} ms, "
              f"then one each {metrics.tpot_s * 1e3:.0f} ms]")
