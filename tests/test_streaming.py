"""Answers that are read as they grow: parts in order, errors, slow readers, readers that go away. A virtual clock."""

import asyncio
import contextlib
import functools
import gc

import pytest

from gpuinfer.api import Backend, Event, Limits
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.stream import PartStream, Unread
from gpuinfer.errors import BackendError, BadResult, Closed
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Part, Prompt
from gpuinfer.stats import summarise
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import run_virtual
from gpuinfer.testing.fakes import made_up, parts_of_answer


class Letters(Backend):
    """Says its prompt letter by letter, one each second; a `!` is an error, a `?` a part that is none. Parts only for
    those who read along.
    """

    serves = ("text",)

    def __init__(self, slots=8):
        super().__init__()
        self.limits = Limits(slots, in_flight=slots, slots=slots)
        self.cancelled = []

    async def infer(self, batch):
        raise NotImplementedError

    async def stream(self, batch):
        (request,) = batch
        for at, letter in enumerate(request.payload.text):
            await asyncio.sleep(1.0)
            if letter == "!":
                yield Event(request, error=BackendError("no such letter. Use others."))
                return
            if request.parts:
                yield Event(request, "half" if letter == "?" else part(letter, at), last=False)
        yield Event(request, whole(request.payload.text))

    def cancel(self, request):
        self.cancelled.append(request.payload.text)


def part(text, *tokens, **more):
    return Part(sample=0, text=text, tokens=tokens, **more)


def whole(text):
    answer = Completion(text=text, tokens=tuple(range(len(text))), finish_reason="stop")
    return Generation(completions=(answer,), prompt_tokens=1, first_token_s=1.0, seconds=float(len(text)))


class Opened:
    """Such a backend behind an engine, on the clock of the loop; it is asked as a workload asks."""

    def __init__(self, engine):
        self.engine, self.backend = engine, engine.backend

    def stream(self, text):
        return PartStream(lambda on_part: self.engine.submit(Prompt(text=text), on_part=on_part))


@contextlib.asynccontextmanager
async def opened(slots=8):
    engine = Engine(Letters(slots), Dynamic(), clock=asyncio.get_running_loop().time)
    await engine.start()
    try:
        yield Opened(engine)
    finally:
        await engine.close(drain=False)


def virtual(test):
    """Run a coroutine test, whose argument asks such a backend, on a loop that jumps from timer to timer."""

    async def within():
        async with opened() as infer:
            await test(infer)

    @functools.wraps(test)
    def run():
        run_virtual(within())

    del run.__wrapped__  # pytest would ask for a fixture
    return run


@virtual
async def test_parts_come_as_they_are_made_and_the_result_after_them(infer):
    stream, now = infer.stream("abc"), asyncio.get_running_loop().time
    with pytest.raises(RuntimeError, match="to its end"):
        _ = stream.result
    began = now()
    assert [(one.text, round(now() - began)) async for one in stream] == [("a", 1), ("b", 2), ("c", 3)]
    assert stream.result == whole("abc")
    assert [one async for one in stream] == []


@virtual
async def test_an_error_comes_after_the_parts_before_it(infer):
    stream = infer.stream("ab!c")
    await asyncio.sleep(10)
    assert (await anext(stream)).text == "ab"
    with pytest.raises(BackendError, match="no such letter"):
        await anext(stream)
    with pytest.raises(RuntimeError):
        _ = stream.result
    with pytest.raises(BadResult, match=r"a part of an answer is a str.*Part"):
        await anext(infer.stream("?"))


@virtual
async def test_what_waits_for_a_slow_reader_is_one_part(infer):
    stream = infer.stream("abcdef")
    assert (await anext(stream)).text == "a"
    await asyncio.sleep(3.5)
    assert await anext(stream) == part("bcd", 1, 2, 3)
    assert [one.text async for one in stream] == ["e", "f"]


def test_the_time_to_the_first_token_counts_from_the_asking_and_not_from_the_slot():
    async def asking():
        async with opened(slots=1) as infer:
            await asyncio.gather(*(infer.engine.submit(Prompt(text=text)) for text in ("abcde", "xyz", "")))
            return infer.engine.snapshot()

    snapshot = run_virtual(asking())
    first, between = summarise(snapshot.first_token), summarise(snapshot.between_tokens)
    assert (first["mean"], first["max"]) == (pytest.approx((1 + 6) / 2), pytest.approx(6))
    assert between["mean"] == between["max"] == pytest.approx(1.0)
    assert sum(snapshot.between_tokens["counts"].values()) == 2


async def closed(stream):
    async with stream:
        await anext(stream)


async def dropped(stream):
    async for _ in stream:
        break
    del stream
    gc.collect()
    await asyncio.sleep(0.1)


async def interrupted(stream):
    async def reading(stream):
        async for _ in stream:
            pass

    reader = asyncio.create_task(reading(stream))
    del stream
    await asyncio.sleep(1.5)
    reader.cancel()
    await asyncio.wait({reader})


@pytest.mark.parametrize("leave", [closed, dropped, interrupted])
def test_a_reader_that_goes_away_cancels_what_is_unfinished(leave):
    async def watched():
        async with opened() as infer:
            await leave(infer.stream("abc"))
            assert infer.backend.cancelled == ["abc"]
            assert infer.engine.snapshot().errors["cancelled"] == 1

    run_virtual(watched())


@virtual
async def test_a_stream_has_one_reader_and_nothing_after_it_is_closed_or_given_up(infer):
    stream = infer.stream("abc")
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one task"):
        await anext(stream)
    assert (await first).text == "a"
    await asyncio.sleep(1.5)
    await stream.aclose()
    assert [one async for one in stream] == []
    with pytest.raises(RuntimeError):
        _ = stream.result
    late = infer.stream("abc")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(late), 0.5)
    with pytest.raises(Closed):
        await anext(late)


def test_unread_parts_are_joined_sample_by_sample_in_order():
    generation = made_up(Prompt(text="x", key="k", samples=3))
    unread, found, one = Unread(), [], (Logprob(Candidate(1, -0.5, 1)),)
    assert not unread
    for each in parts_of_answer(generation):
        unread.add(each)
    while unread:
        found.append(unread.take())
    assert [(each.sample, each.text, each.tokens) for each in found] == [
        (sample, answer.text, answer.tokens) for sample, answer in enumerate(generation.completions)
    ]
    unread.add(part("a", 1, logprobs=one))
    unread.add(part("", 2, logprobs=one, finish_reason="stop", stop_reason=2))
    assert unread.take() == part("a", 1, 2, logprobs=one * 2, finish_reason="stop", stop_reason=2)


async def test_a_stream_outlives_neither_its_loop_nor_an_error_of_its_request():
    async def ask(on_part):
        on_part(part("a", 1))
        raise ValueError("odd")

    stream = PartStream(ask)
    assert (await anext(stream)).text == "a"
    for _ in range(2):
        with pytest.raises(ValueError, match="odd"):
            await anext(stream)
