"""What the tests of the engine thread share. Every wait in them is bounded, so that a fault fails and never hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

from minillm.serve.async_llm import AsyncLLM

SECONDS = 60


@pytest.fixture(autouse=True)
def one_core_for_torch() -> Iterator[None]:
    """These models are so small that threads of OpenMP would wait for one another most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def within() -> Callable[[Callable[[], Coroutine]], Any]:
    """``within(main)``: the result of ``asyncio.run(main())``, in a thread that is given up after a minute."""
    def run(main: Callable[[], Coroutine]) -> Any:
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                outcome["result"] = asyncio.run(asyncio.wait_for(main(), SECONDS))
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(SECONDS + 10)
        assert not thread.is_alive(), "the event loop hangs"
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]
    return run


@pytest.fixture
def to_await() -> Callable[..., AsyncLLM]:
    """``to_await(llm, **options)``: an AsyncLLM over the model of an LLM."""
    return lambda llm, **options: AsyncLLM(llm.model, tokenizer=llm.tokenizer, **options)


@pytest.fixture
def own_threads() -> Callable[[], list[str]]:
    """The names of minillm's threads that run now."""
    return lambda: sorted(t.name for t in threading.enumerate() if t.name.startswith("minillm"))
