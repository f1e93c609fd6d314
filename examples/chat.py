"""A conversation: the messages are yours to keep, the chat template writes the control tokens."""

from minillm import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    messages = []
    for question in ["What is the capital of France?", "What is it famous for?"]:  # "it" is in the history alone
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    for message in messages:
        print(f"{message['role']}: {message['content']}")
