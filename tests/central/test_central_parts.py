"""Answers that are read as they grow, from a model in the central server's process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from msgspec import structs
from servers import pid_of, until
from test_central_text import SECONDS, all_of, greeted
from text.toy import joined
from texts import SLOTS, asking, long, serving_text, short

from gpuinfer.central.protocol import RecordKind, WireRecord, generation_from_wire, part_from_wire, request_to_wire
from gpuinfer.engine.stream import PartStream
from gpuinfer.errors import BackendDied, BackendError
from gpuinfer.generation import Generation, Part, Prompt, Sampling
from gpuinfer.text.answer_frames import DeliveredAnswer

pytestmark = pytest.mark.usefixtures("children_forked")


@pytest.fixture(scope="module")
def server():
    with serving_text() as one:
        yield one


def reading(engine, prompt):
    return PartStream(lambda on_part: engine.submit(prompt, rows=prompt.samples, on_part=on_part))


async def read(stream):
    return [part async for part in stream]


async def test_parts_travel_and_are_the_answer(server):
    rich = Sampling(max_tokens=12, ignore_eos=True, logprobs=2, stop=("qu", "e"))
    prompts = [*(short(f"{number}", 20) for number in range(SLOTS)), Prompt(text="ab", samples=2, sampling=rich)]
    async with asking(server) as engine:
        streams = [reading(engine, prompt) for prompt in prompts]
        given = await asyncio.wait_for(asyncio.gather(*map(read, streams)), SECONDS)
        whole = await all_of(engine, prompts)
    for parts, stream, answer in zip(given, streams, whole, strict=True):
        assert joined(parts) == list(stream.result.completions) == list(answer.completions)


async def test_a_reader_that_leaves_takes_its_prompt_along(server):
    before = server.stats().errors["cancelled"]
    async with asking(server) as engine:
        streams = [reading(engine, long(f"{number}")) for number in range(SLOTS)]
        for stream in streams:
            await anext(stream)
            await stream.aclose()
        assert isinstance((await all_of(engine, [short("next")]))[0], Generation)
    await asyncio.to_thread(until, lambda: server.stats().errors["cancelled"] > before, "the end of one that was left")


async def test_a_client_that_reads_nothing_stalls_nobody_and_is_owed_one_part_a_sample(server):
    """Its answers are some times as long as what a line holds."""
    sampling = Sampling(max_tokens=400, ignore_eos=True, logprobs=20)
    body = request_to_wire(Prompt(text="much", samples=SLOTS - 1, sampling=sampling), None, parts=True)
    with greeted(server) as deaf:
        before = server.stats().requests
        deaf.send(WireRecord(RecordKind.PROMPT, rows=SLOTS - 1, number=1, left_s=float(SECONDS), body=body))
        async with asking(server) as engine:
            assert joined(await read(reading(engine, short("other", 100))))
        await asyncio.to_thread(until, lambda: server.stats().requests == before + 2, "both answers")
        given = []
        while (record := deaf.next()).kind == RecordKind.PART:
            given.append(part_from_wire(record.body))
    assert joined(given) == list(generation_from_wire(record.body).completions)
    assert max(len(part.tokens) for part in given) > 50, "joined while they waited"


@pytest.mark.thorough
async def test_a_reader_is_told_when_the_server_is_gone():
    with serving_text() as server:
        async with asking(server) as engine:
            stream = reading(engine, long("a"))
            await anext(stream)
            os.kill(pid_of(server), signal.SIGKILL)
            with pytest.raises(BackendDied):
                await asyncio.wait_for(read(stream), SECONDS)


@pytest.mark.thorough
async def test_a_server_that_comes_back_goes_on_where_the_one_before_stopped():
    with serving_text(restart=True) as server:
        async with asking(server) as engine:
            prompts = [short(f"{number}", 600) for number in range(2 * SLOTS)]
            streams = [reading(engine, prompt) for prompt in prompts]
            first = await anext(streams[0])
            os.kill(pid_of(server), signal.SIGKILL)
            given = await asyncio.wait_for(asyncio.gather(*map(read, streams)), SECONDS)
            again = await all_of(engine, prompts)
    given[0].insert(0, first)
    for parts, stream, answer in zip(given, streams, again, strict=True):
        assert joined(parts) == list(stream.result.completions) == list(answer.completions)


def part(sample, text, reason=None):
    return Part(sample=sample, text=text, tokens=tuple(map(ord, text)), finish_reason=reason)


def test_what_a_reader_has_had_is_what_its_answer_goes_on_after():
    prompt = Prompt(text="x", samples=3, begun=((), (7,), ()))
    had = DeliveredAnswer(prompt)
    assert had.rest() == prompt
    said = [part(0, "he"), part(1, "a"), part(0, "llo", "stop"), part(1, "b")]
    assert [had.fresh(one) for one in said] == said
    assert had.rest() == structs.replace(prompt, begun=(tuple(map(ord, "hello")), (7, 97, 98), ()))
    assert had.fresh(part(0, "", "stop")) is None, "it was whole"
    assert had.fresh(part(1, "", "stop")) is not None


def test_a_part_of_a_sample_that_nobody_asked_for_is_an_error():
    with pytest.raises(BackendError, match="nobody asked for"):
        DeliveredAnswer(Prompt(text="x", samples=2)).fresh(part(2, "a"))
