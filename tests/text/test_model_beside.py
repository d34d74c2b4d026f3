"""What takes long to understand keeps neither the event loop nor other prompts waiting."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from text.toy import LETTERS, WAIT_S, toy_generator

from gpuinfer.api import Request
from gpuinfer.errors import BackendDied, BackendError, BadPrompt, Closed, GpuinferError
from gpuinfer.generation import Constraint, Generation, Prompt, Sampling
from gpuinfer.text.generator import Driver
from gpuinfer.text.model import FEW, LONG, SHORT, TextModel

HARD = {"constraint": Constraint(regex="[a-c]+")}


class Slow:
    """Prepares prompts that hold a "?" no sooner than it may; notes the thread of each."""

    def __init__(self) -> None:
        self.generator = toy_generator(slots=16)
        self.driver = Driver(self.generator)
        self.go = threading.Event()
        self.threads: dict[str, int] = {}
        self._prepare = self.generator.prepare
        self.generator.prepare = self.prepare

    def prepare(self, prompts, enter=lambda station: None):
        for prompt in prompts:
            self.threads[prompt.text or ""] = threading.get_ident()
        if any("?" in prompt.text for prompt in prompts):
            assert self.go.wait(WAIT_S)
        return self._prepare(prompts, enter)

    async def reached(self, count):
        while len(self.threads) < count:  # noqa: ASYNC110  other threads'
            await asyncio.sleep(0)

    async def closed(self):
        """Wait until the driver takes no more prompts."""
        while self.driver.alive:  # noqa: ASYNC110  another thread's
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def opened():
    held = Slow()
    model = TextModel(held.driver, lambda rows, seconds: None)
    try:
        async with asyncio.timeout(WAIT_S):
            yield held, model
    finally:
        held.go.set()
        await model.close()


def asked(text: str, begun=(), **sampling) -> Request:
    return Request(Prompt(text=text, sampling=Sampling(max_tokens=4, **sampling), begun=begun))


@pytest.mark.parametrize("slow", [asked("a?", **HARD), asked("a?" * LONG)], ids=["constraint", "text"])
async def test_a_prompt_that_takes_long_keeps_no_other_of_its_batch_waiting(slow):
    async with opened() as (held, model):
        batch = [slow, *(asked(letter) for letter in "bcd")]
        stream = model.stream(batch)
        others = [await anext(stream) for _ in range(3)]
        assert {event.request for event in others} == set(batch[1:])
        assert all(isinstance(event.value, Generation) for event in others)
        held.go.set()
        assert [event.request async for event in stream] == batch[:1]


@pytest.mark.parametrize(
    ("batch", "beside"),
    [
        pytest.param([asked("a")], False, id="a short text"),
        pytest.param([asked("b" * SHORT * 2)], True, id="a longer text"),
        pytest.param([asked("c", **HARD)], True, id="a constraint"),
        pytest.param([asked("d", begun=((1,),))], True, id="an answer that has begun"),
        pytest.param([asked(letter) for letter in LETTERS[: FEW + 1]], True, id="many"),
    ],
)
async def test_what_takes_time_is_understood_in_another_thread(batch, beside):
    async with opened() as (held, model):
        assert len([event async for event in model.stream(batch)]) == len(batch)
        assert {thread != threading.get_ident() for thread in held.threads.values()} == {beside}


async def test_what_is_cancelled_or_closed_while_it_is_understood_is_told_so():
    async with opened() as (held, model):
        request = asked("a?", **HARD)
        stream = model.stream([request])
        first = asyncio.ensure_future(anext(stream))
        await held.reached(1)
        model.cancel(request)
        held.go.set()
        assert isinstance((await first).error, BackendError)
        assert [event async for event in stream] == []
    async with opened() as (held, model):
        stream = model.stream([asked("a?", **HARD), asked("b?" * SHORT)])
        first = asyncio.ensure_future(anext(stream))
        await held.reached(2)
        closing = asyncio.ensure_future(model.close())
        await held.closed()
        held.go.set()
        events = [await first, *[event async for event in stream]]
        await closing
        assert [isinstance(event.error, GpuinferError) for event in events] == [True, True]
        events = [event async for event in model.stream([asked("a"), asked("é" * 2)])]  # the thread is gone
        assert [type(event.error) in (Closed, BackendDied, BadPrompt) for event in events] == [True, True]
