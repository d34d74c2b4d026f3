"""Answers that are read as they grow: parts in order, errors, slow readers, readers that go away. A virtual clock."""

import asyncio
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
    """Says its prompt letter by letter, one each second; a `!` is an error. Parts only for those who read along."""

    serves = ("text",)

    def __init__(self, slots=8):
        super().__init__()
        self.limits = Limits(slots, in_flight=slots, slots=slots)
        self.cancelled, self.made = [], 0

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
                self.made += 1
                yield Event(request, part(letter, at), last=False)
        yield Event(request, whole(request.payload.text))

    def cancel(self, request):
        self.cancelled.append(request.payload.text)


class Odd(Letters):
    """Its parts are none."""

    async def stream(self, batch):
        yield Event(batch[0], "half", last=False)
        yield Event(batch[0], whole("half"))


def part(text, *tokens, sample=0, **more):
    return Part(sample=sample, text=text, tokens=tokens, **more)


def whole(text):
    answer = Completion(text=text, tokens=tuple(range(len(text))), finish_reason="stop")
    return Generation(completions=(answer,), prompt_tokens=1, first_token_s=1.0, seconds=float(len(text)))


def virtual(test):
    """Run a coroutine test, whose argument is a session, on a loop that jumps from timer to timer."""

    @functools.wraps(test)
    def run():
        run_virtual(test())

    return run


class Opened:
    """One such backend behind an engine, on the clock of the loop; it is asked as a workload asks."""

    def __init__(self, backend=None):
        self.backend = backend or Letters()
        self.engine = Engine(self.backend, Dynamic(), clock=asyncio.get_running_loop().time)

    async def __aenter__(self):
        await self.engine.start()
        return self

    async def __aexit__(self, *_):
        await self.engine.close(drain=False)

    def stream(self, prompt):
        return PartStream(lambda on_part: self.engine.submit(prompt, on_part=on_part))


@virtual
async def test_parts_come_as_they_are_made_and_the_result_after_them():
    async with Opened() as infer:
        stream = infer.stream(Prompt(text="abc"))
        with pytest.raises(RuntimeError, match="to its end"):
            _ = stream.result
        now = asyncio.get_running_loop().time
        began, found = now(), []
        async for one in stream:
            found.append((one.text, round(now() - began)))
        assert found == [("a", 1), ("b", 2), ("c", 3)]
        assert stream.result == whole("abc")
        assert [one async for one in stream] == []


@virtual
async def test_an_error_comes_after_the_parts_before_it():
    async with Opened() as infer:
        stream = infer.stream(Prompt(text="ab!c"))
        await asyncio.sleep(10)
        assert (await anext(stream)).text == "ab"
        with pytest.raises(BackendError, match="no such letter"):
            await anext(stream)
        with pytest.raises(RuntimeError):
            _ = stream.result


@virtual
async def test_what_waits_for_a_slow_reader_is_one_part():
    async with Opened() as infer:
        stream = infer.stream(Prompt(text="abcdef"))
        assert (await anext(stream)).text == "a"
        await asyncio.sleep(3.5)
        assert await anext(stream) == part("bcd", 1, 2, 3)
        assert [one.text async for one in stream] == ["e", "f"]


@virtual
async def test_a_part_that_is_none_fails_its_request():
    async with Opened(Odd()) as infer:
        with pytest.raises(BadResult, match=r"a part of an answer is a str.*Part"):
            await anext(infer.stream(Prompt(text="x")))


@virtual
async def test_the_time_to_the_first_token_counts_from_the_asking_and_not_from_the_slot():
    async with Opened(Letters(slots=1)) as infer:
        await asyncio.gather(*(infer.engine.submit(Prompt(text=text)) for text in ("abcde", "xyz", "")))
        snapshot = infer.engine.snapshot()
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
    reader = asyncio.create_task(reading(stream))
    del stream
    await asyncio.sleep(1.5)
    reader.cancel()
    await asyncio.wait({reader})


async def reading(stream):
    async for _ in stream:
        pass


@pytest.mark.parametrize("leave", [closed, dropped, interrupted])
def test_a_reader_that_goes_away_cancels_what_is_unfinished(leave):
    async def watched():
        async with Opened() as infer:
            await leave(infer.stream(Prompt(text="abc")))
            assert infer.backend.cancelled == ["abc"]
            assert infer.engine.snapshot().errors["cancelled"] == 1

    run_virtual(watched())


@virtual
async def test_after_it_is_closed_a_stream_has_neither_parts_nor_result():
    async with Opened() as infer:
        stream = infer.stream(Prompt(text="abc"))
        await asyncio.sleep(2.5)
        await stream.aclose()
        assert [one async for one in stream] == []
        with pytest.raises(RuntimeError):
            _ = stream.result


@virtual
async def test_a_second_reader_is_refused():
    async with Opened() as infer:
        stream = infer.stream(Prompt(text="abc"))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one task"):
            await anext(stream)
        assert (await first).text == "a"


@virtual
async def test_a_reader_that_gave_up_does_not_hang_when_it_comes_back():
    async with Opened() as infer:
        stream = infer.stream(Prompt(text="abc"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.5)
        with pytest.raises(Closed):
            await anext(stream)


def test_unread_parts_are_joined_sample_by_sample_in_order():
    generation = made_up(Prompt(text="x", key="k", samples=3))
    one = Logprob(Candidate(1, -0.5, 1))
    unread = Unread()
    assert not unread
    for each in parts_of_answer(generation):
        unread.add(each)
    found = []
    while unread:
        found.append(unread.take())
    assert [(each.sample, each.text, each.tokens) for each in found] == [
        (sample, answer.text, answer.tokens) for sample, answer in enumerate(generation.completions)
    ]
    unread.add(part("a", 1, logprobs=(one,)))
    unread.add(part("", 2, logprobs=(one,), finish_reason="stop", stop_reason=2))
    assert unread.take() == part("a", 1, 2, logprobs=(one, one), finish_reason="stop", stop_reason=2)


async def test_a_stream_outlives_neither_its_loop_nor_an_error_of_its_request():
    async def ask(on_part):
        on_part(part("a", 1))
        raise ValueError("odd")

    stream = PartStream(ask)
    assert (await anext(stream)).text == "a"
    for _ in range(2):
        with pytest.raises(ValueError, match="odd"):
            await anext(stream)
