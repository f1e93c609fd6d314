"""Several questions at once from asyncio: one engine thread, each answer streamed as it is made."""

import asyncio

from minillm import AsyncLLM, SamplingParams

QUESTIONS = ["The sky is", "Water boils at", "One, two, three,", "The capital of France is"]


async def ask(llm: AsyncLLM, question: str) -> str:
    pieces = [piece.text async for piece in llm.stream(question, SamplingParams(temperature=0, max_tokens=16))]
    return question + "".join(pieces)


async def main() -> None:
    async with AsyncLLM("smollm2-135m") as llm:
        for answer in await asyncio.gather(*(ask(llm, question) for question in QUESTIONS)):
            print(answer.replace("\n", " "))
        stats = await llm.stats()
    print(f"{stats.num_output_tokens} tokens in {stats.num_steps} steps; "
          f"{stats.num_free_blocks} of {stats.num_blocks} blocks free")


asyncio.run(main())
