"""Text as it is made, and a stream that is closed early."""

from minillm import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    prompt = "Once upon a time"
    print(prompt, end="")
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=200))
    said = ""
    for piece in stream:
        said += piece.text
        print(piece.text, end="", flush=True)
        if len(said) > 80:
            stream.close()  # cancels; what it held is free at once
            break
    print(f"\n[{stream.output.outputs[0].finish_reason} after {len(stream.output.outputs[0].token_ids)} tokens]")
