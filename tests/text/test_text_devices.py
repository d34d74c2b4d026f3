"""A text model on several devices: the answers of one, whoever computes them, and whatever becomes of a device."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text.toy import LETTERS, OfText, alone, joined, toy_generator

from gpuinfer.api import Request
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.results import OnPart
from gpuinfer.errors import BackendDied, DeviceLost, UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.text.generator import Driver
from gpuinfer.text.model import TextModel
from gpuinfer.text.multi_device import PrefixAffinity, TextDevices

SECONDS = 60
LOST = "CUDA error: unspecified launch failure"
SLOTS = 4


class Devices(OfText):
    """A backend around toy generators, each a device; `good_for` says how many steps each is good for."""

    def __init__(self, *good_for: float, words: str = LOST) -> None:
        super().__init__()
        self.generators = [toy_generator(slots=SLOTS) for _ in good_for]
        for generator, steps in zip(self.generators, good_for, strict=True):
            if steps < float("inf"):
                fail_after(generator.decoder, int(steps), words)

    async def start(self, context):
        models = {
            f"cpu:{number}": TextModel(Driver(generator), context.stepped, lambda: {"name": "toy"})
            for number, generator in enumerate(self.generators)
        }
        self.text = TextDevices(models)
        self.limits = self.text.limits


def fail_after(decoder, steps, words):
    forward = decoder.forward

    def failing(step):
        if len(decoder.steps) >= steps:
            raise RuntimeError(words)
        return forward(step)

    decoder.forward = failing


@contextlib.asynccontextmanager
async def engine_of(*good_for, **options):
    backend = Devices(*good_for, **options)
    engine = Engine(backend, Dynamic())
    await engine.start()
    try:
        async with asyncio.timeout(SECONDS):
            yield engine
    finally:
        await engine.close()


def prompt(text="ab", samples=1, key="", **sampling):
    sampling = {"max_tokens": 12, "ignore_eos": True, **sampling}
    return Prompt(text=text, samples=samples, key=key, sampling=Sampling(**sampling))


FOREVER = float("inf")
PROMPTS = [prompt(f"{LETTERS[n % 26]}{LETTERS[n % 7]}", samples=1 + n % 3, key=str(n)) for n in range(24)]


async def all_of(engine, prompts):
    return await asyncio.gather(*(engine.submit(one, rows=one.samples) for one in prompts), return_exceptions=True)


@pytest.mark.parametrize(
    "good_for", [(FOREVER,) * 2, (FOREVER,) * 3, (FOREVER, 5), (3, FOREVER), (0, FOREVER, FOREVER)]
)
async def test_the_answers_are_those_of_one_device_whichever_fails(good_for):
    async with engine_of(*good_for) as engine:
        found = await all_of(engine, PROMPTS)
        told = engine.backend.text.device()
    for one, answer in zip(PROMPTS, found, strict=True):
        assert [done.tokens for done in answer.completions] == [done.tokens for done in alone(one)]
    failed = [bool(device["failed"]) for device in told["devices"].values()]
    assert failed == [steps < FOREVER for steps in good_for]


async def test_each_device_takes_part_and_the_counters_add_up():
    async with engine_of(FOREVER, FOREVER) as engine:
        await all_of(engine, PROMPTS)
        told, snapshot = engine.backend.text.device(), engine.snapshot()
    assert engine.limits.slots == 2 * SLOTS
    assert engine.limits.max_rows == SLOTS
    assert all(device["rows"] > 0 for device in told["devices"].values())
    assert told["tokens"]["output"] == 12 * sum(one.samples for one in PROMPTS)
    assert [lane["name"] for lane in snapshot.lanes] == ["forward cpu:0 0", "forward cpu:1 0", "prompts 0"]
    assert all("forward" in lane["visits"] for lane in snapshot.lanes[:2])


async def streamed(engine, one):
    parts = []
    on_part: OnPart = parts.append
    answer = await engine.submit(one, rows=one.samples, on_part=on_part)
    return parts, answer


@settings(max_examples=examples(15), deadline=None)
@given(steps=st.integers(0, 14), samples=st.integers(1, 3), count=st.integers(1, 6))
def test_parts_go_on_where_the_reader_is(steps, samples, count):
    prompts = [prompt(LETTERS[n], samples=samples, key=str(n)) for n in range(count)]

    async def run():
        async with engine_of(steps, FOREVER) as engine:
            return await asyncio.gather(*(streamed(engine, one) for one in prompts))

    for one, (parts, answer) in zip(prompts, asyncio.run(run()), strict=True):
        expected = alone(one)
        assert [done.tokens for done in joined(parts)] == [done.tokens for done in expected]
        assert [done.text for done in joined(parts)] == [done.text for done in expected]
        assert [done.text for done in answer.completions] == [done.text for done in expected]


async def test_a_prompt_is_with_two_devices_that_fail_and_no_third():
    async with engine_of(0, 0, FOREVER) as engine:
        [answer] = await all_of(engine, [prompt("a")])
        assert isinstance(answer, DeviceLost)
        assert not isinstance(answer, BackendDied)
        [answer] = await all_of(engine, [prompt("a")])
    assert answer.completions[0].tokens == alone(prompt("a"))[0].tokens


async def test_what_is_cancelled_frees_its_slots():
    async with engine_of(FOREVER, FOREVER) as engine:
        tasks = [asyncio.ensure_future(engine.submit(one)) for one in [prompt(max_tokens=60)] * 2 * SLOTS]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        found = await all_of(engine, PROMPTS)
        assert not any(isinstance(one, Exception) for one in found)
        text = engine.backend.text
    assert set(text._rows.values()) == {0}
    assert not text._asked
    assert not text._of


async def test_a_stream_that_nobody_follows_any_more_leaves_nothing():
    async with engine_of(FOREVER, FOREVER) as engine:
        text = engine.backend.text
        stream = text.stream([Request(prompt(max_tokens=60), 1) for _ in range(4)])
        following = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await stream.aclose()
        assert set(text._rows.values()) == {0}
        assert not text._asked


async def test_a_beginning_that_a_device_knows_goes_there_while_it_is_not_much_fuller():
    async with engine_of(FOREVER, FOREVER) as engine:
        text = engine.backend.text
        requests = [Request(prompt(letter * 8), 1) for letter in "ab"]
        went = [text._take(request) for request in requests]
        assert went == ["cpu:0", "cpu:1"]
        for label, request in zip(went, requests, strict=True):
            text._rows[label] -= request.rows
        assert text._take(requests[1]) == "cpu:1"  # which is no emptier than the other
        assert text._take(requests[1]) == "cpu:1"  # a row fuller is little
        assert text._take(requests[1]) == "cpu:0"  # two are not
        for label in text._rows:
            text._rows[label] = 0


async def test_weights_and_adapters_change_on_all():
    async with engine_of(FOREVER, FOREVER) as engine:
        text = engine.backend.text
        await text.load_adapter("one", "v1", "17")
        assert text.adapters == ["one", "one@v1"] or set(text.adapters) == {"one", "one@v1"}
        for generator in engine.backend.generators:
            assert list(generator.decoder.loaded.values()) == [17]
            generator.read_weights = int
        await text.update("v2", "5", drain=True)
        assert [generator.decoder.weights for generator in engine.backend.generators] == [5, 5]
        found = await all_of(engine, [prompt(letter) for letter in "abcd"])
        assert [one.versions for one in found] == [("v2",)] * 4
        await text.unload_adapter("one")
        assert list(text.adapters) == []
        with pytest.raises(UsageError):
            await text.unload_adapter("one")


async def test_a_device_that_dies_of_new_weights_is_given_up_and_the_others_have_them():
    async with engine_of(FOREVER, FOREVER) as engine:
        for generator in engine.backend.generators:
            generator.read_weights = int

        def broken(packed):
            raise RuntimeError(LOST)

        engine.backend.generators[0].decoder.swap = broken
        await engine.backend.text.update("v2", "5", drain=True)
        found = await all_of(engine, [prompt(letter) for letter in "abcd"])
        told = engine.backend.text.device()["devices"]
    assert [one.versions for one in found] == [("v2",)] * 4
    assert [bool(one["failed"]) for one in told.values()] == [True, False]


def test_beginnings_are_known_by_all_that_comes_before():
    seen = PrefixAffinity()
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    seen.note(Prompt(messages=tuple(talk)), "a")
    assert seen.find(Prompt(messages=(*talk, {"role": "user", "content": "more"}))) == "a"
    assert seen.find(Prompt(messages=tuple(talk[1:]))) is None
    assert seen.find(Prompt(messages=tuple(talk), adapter="other")) is None
    seen.note(Prompt(text="x" * 300), "a")
    seen.note(Prompt(text="x" * 256 + "y" * 256), "b")
    assert seen.find(Prompt(text="x" * 256 + "y" * 300)) == "b"
    seen.note(Prompt(tokens=tuple(range(64))), "c")
    assert seen.find(Prompt(tokens=tuple(range(100)))) == "c"
    seen.forget()
    assert seen.find(Prompt(tokens=tuple(range(100)))) is None
