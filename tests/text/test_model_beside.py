"""What takes long to understand keeps neither the event loop nor other prompts waiting."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from text.toy import LETTERS, toy_generator

from gpuinfer.api import Request
from gpuinfer.errors import BackendDied, BackendError, BadPrompt, Closed, GpuinferError
from gpuinfer.generation import Constraint, Generation, Prompt, Sampling
from gpuinfer.text.generator import Driver
from gpuinfer.text.model import FEW, LONG, SHORT, TextModel

SECONDS = 60
FREE = Sampling(max_tokens=4)


class Slow:
    """Prepares prompts that hold a "?" no sooner than it is told to; notes the thread of each."""

    def __init__(self) -> None:
        self.generator = toy_generator(slots=16)
        self.go = threading.Event()
        self.threads: dict[str, int] = {}
        self._prepare = self.generator.prepare
        self.generator.prepare = self.prepare

    def prepare(self, prompts, enter=lambda station: None):
        for prompt in prompts:
            self.threads[prompt.text or ""] = threading.get_ident()
        if any("?" in prompt.text for prompt in prompts):
            assert self.go.wait(SECONDS)
        return self._prepare(prompts, enter)


@contextlib.asynccontextmanager
async def model(slow: Slow):
    opened = TextModel(Driver(slow.generator), lambda rows, seconds: None)
    try:
        yield opened
    finally:
        slow.go.set()
        await opened.close()


def asked(text: str, **sampling) -> Request:
    return Request(Prompt(text=text, sampling=Sampling(max_tokens=4, **sampling)))


HARD = Constraint(regex="[a-c]+")


@pytest.mark.parametrize(
    "slow", [{"text": "a?", "constraint": HARD}, {"text": "a?" * LONG}], ids=["constraint", "text"]
)
async def test_a_prompt_that_takes_long_keeps_no_other_of_its_batch_waiting(slow):
    held = Slow()
    async with model(held) as opened, asyncio.timeout(SECONDS):
        batch = [asked(**slow), *(asked(letter) for letter in "bcd")]
        stream = opened.stream(batch)
        others = [await anext(stream) for _ in range(3)]
        assert {event.request for event in others} == set(batch[1:])
        assert all(isinstance(event.value, Generation) for event in others)
        held.go.set()
        last = [event async for event in stream]
        assert [event.request for event in last] == batch[:1]


@pytest.mark.parametrize(
    ("batch", "beside"),
    [
        pytest.param([asked("a")], False, id="a short text"),
        pytest.param([asked("b" * SHORT * 2)], True, id="a longer text"),
        pytest.param([asked("c", constraint=HARD)], True, id="a constraint"),
        pytest.param([Request(Prompt(text="d", begun=((1,),), sampling=FREE))], True, id="an answer that has begun"),
        pytest.param([asked(letter) for letter in LETTERS[: FEW + 1]], True, id="many"),
    ],
)
async def test_what_takes_time_is_understood_in_another_thread(batch, beside):
    held = Slow()
    async with model(held) as opened, asyncio.timeout(SECONDS):
        assert len([event async for event in opened.stream(batch)]) == len(batch)
    assert {thread != threading.get_ident() for thread in held.threads.values()} == {beside}


async def test_a_request_that_is_cancelled_while_it_is_understood_is_told_so():
    held = Slow()
    async with model(held) as opened, asyncio.timeout(SECONDS):
        request = asked("a?", constraint=HARD)
        stream = opened.stream([request])
        first = asyncio.ensure_future(anext(stream))
        while "a?" not in held.threads:  # noqa: ASYNC110  another thread's
            await asyncio.sleep(0)
        opened.cancel(request)
        held.go.set()
        assert isinstance((await first).error, BackendError)
        assert [event async for event in stream] == []


async def test_what_is_being_understood_when_the_model_is_closed_is_told():
    held = Slow()
    async with asyncio.timeout(SECONDS):
        opened = TextModel(Driver(held.generator), lambda rows, seconds: None)
        stream = opened.stream([asked("a?", constraint=HARD), asked("b?" * SHORT)])
        first = asyncio.ensure_future(anext(stream))
        while len(held.threads) < 2:  # noqa: ASYNC110  other threads'
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(opened.close())
        held.go.set()
        events = [await first, *[event async for event in stream]]
        await closing
        assert len(events) == 2
        assert all(isinstance(event.error, GpuinferError) for event in events)


async def test_a_thread_that_is_gone_is_told_to_each():
    held = Slow()
    async with asyncio.timeout(SECONDS):
        opened = TextModel(Driver(held.generator), lambda rows, seconds: None)
        await opened.close()
        batch = [asked("a"), asked("é" * 2)]
        events = [event async for event in opened.stream(batch)]
        assert [type(event.error) in (Closed, BackendDied, BadPrompt) for event in events] == [True, True]
