"""A conversation: the messages are yours to keep, the chat template writes the control tokens."""

from minillm import LLM, SamplingParams

with LLM("smollm2-135m") as llm:
    messages = []
    for question in ["Name three primary colours.", "Which of them is the colour of the sky?"]:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=48))
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    for message in messages:
        print(f"{message['role']}: {message['content']}")
