"""Answers that are read as they grow, from a model in the central server's process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import pid_of, until
from test_central_text import SECONDS, all_of, greeted
from text.toy import joined
from texts import SLOTS, asking, long, serving_text, short

from gpuinfer.central.wire import Kind, Record, asked_to_wire, generation_from_wire, part_from_wire
from gpuinfer.engine.streaming import PartStream
from gpuinfer.errors import BackendDied, BackendError
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Part, Prompt, Sampling
from gpuinfer.text.resuming import Had


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
    await asyncio.to_thread(until, lambda: server.stats().errors["cancelled"] == before + SLOTS, "their end")


async def test_a_client_that_reads_nothing_stalls_nobody_and_is_owed_one_part_a_sample(server):
    """Its answers are some times as long as what a line holds."""
    sampling = Sampling(max_tokens=400, ignore_eos=True, logprobs=20)
    body = asked_to_wire(Prompt(text="much", samples=SLOTS - 1, sampling=sampling), None, parts=True)
    with greeted(server) as deaf:
        before = server.stats().requests
        deaf.send(Record(Kind.PROMPT, rows=SLOTS - 1, number=1, left_s=float(SECONDS), body=body))
        async with asking(server) as engine:
            assert joined(await read(reading(engine, short("other", 100))))
        await asyncio.to_thread(until, lambda: server.stats().requests == before + 2, "both answers")
        given = []
        while (record := deaf.next()).kind == Kind.PART:
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


def split(answer: Completion, cuts: list[int]) -> list[Part]:
    """The answer, each token of which is a letter, in parts that end at these places; the last has the rest."""
    ends = [*sorted({cut for cut in cuts if cut < len(answer.tokens)}), len(answer.tokens)]
    return [
        Part(
            sample=0,
            text=answer.text[start:end],
            tokens=answer.tokens[start:end],
            logprobs=answer.logprobs[start:end],
            finish_reason="stop" if end == ends[-1] else None,
        )
        for start, end in zip([0, *ends], ends, strict=False)
    ]


def spelt(text: str) -> Completion:
    chosen = tuple(Logprob(Candidate(ord(letter), -1.0, 1)) for letter in text)
    return Completion(text=text, tokens=tuple(map(ord, text)), finish_reason="stop", logprobs=chosen)


def passed_on(had: Had, parts: list[Part]) -> list[Part]:
    return [fresh for part in parts if (fresh := had.fresh(part)) is not None]


cuts = st.lists(st.integers(1, 12), max_size=6)


@settings(max_examples=examples(200), deadline=None)
@given(st.text("ab", max_size=12), st.lists(st.tuples(cuts, st.integers(0, 7)), max_size=3), cuts)
def test_what_is_said_again_is_left_out_wherever_its_parts_end(text, deaths, last):
    had, given = Had(), []
    for cut, count in deaths:
        given += passed_on(had, split(spelt(text), cut)[:count])
        had.begin_anew()
    given += passed_on(had, split(spelt(text), last))
    assert joined(given) == [spelt(text)]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param("hexlo there", id="one that differs in what was said"),
        pytest.param("hel", id="one that ends before"),
        pytest.param("", id="an empty one"),
    ],
)
@pytest.mark.parametrize("cuts", [[], [2], [1, 2, 3, 4, 5]])
def test_an_answer_that_goes_on_otherwise_is_an_error(other, cuts):
    had = Had()
    passed_on(had, split(spelt("hello there"), [5])[:1])
    had.begin_anew()
    with pytest.raises(BackendError, match="gives another"):
        passed_on(had, split(spelt(other), cuts))


def test_an_answer_that_was_whole_does_not_grow():
    had = Had()
    passed_on(had, split(spelt("hello"), []))
    had.begin_anew()
    with pytest.raises(BackendError, match="gives another"):
        passed_on(had, split(spelt("hello there"), [3]))
