"""A text model on several devices: the answers of one, whoever computes them, and whatever becomes of a device."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from text.toy import LETTERS, WAIT_S, OfText, alone, joined, toy_generator

from gpuinfer.api import Request
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendDied, DeviceLost, UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.text.generator import Driver
from gpuinfer.text.model import TextModel
from gpuinfer.text.multi_device import PrefixAffinity, TextDevices

SLOTS, FOREVER = 4, float("inf")


def lost(*given):
    raise RuntimeError("CUDA error: unspecified launch failure")


class Devices(OfText):
    """A backend around toy generators, each a device; `good_for` says how many steps each is good for."""

    def __init__(self, *good_for: float) -> None:
        super().__init__()
        self.generators = [toy_generator(slots=SLOTS) for _ in good_for]
        for generator, steps in zip(self.generators, good_for, strict=True):
            fail_after(generator.decoder, steps)

    async def start(self, context):
        self.text = TextDevices(
            {
                f"cpu:{number}": TextModel(Driver(generator), context.stepped, lambda: {"name": "toy"})
                for number, generator in enumerate(self.generators)
            }
        )
        self.limits = self.text.limits


def fail_after(decoder, steps):
    forward = decoder.forward
    decoder.forward = lambda step: lost() if len(decoder.steps) >= steps else forward(step)


@contextlib.asynccontextmanager
async def engine_of(*good_for):
    engine = Engine(Devices(*good_for), Dynamic())
    await engine.start()
    try:
        async with asyncio.timeout(WAIT_S):
            yield engine
    finally:
        await engine.close()


def prompt(text="ab", samples=1, key="", **sampling):
    sampling = {"max_tokens": 12, "ignore_eos": True, **sampling}
    return Prompt(text=text, samples=samples, key=key, sampling=Sampling(**sampling))


PROMPTS = [prompt(f"{LETTERS[n % 26]}{LETTERS[n % 7]}", samples=1 + n % 3, key=str(n)) for n in range(24)]
FOUR = [prompt(letter) for letter in "abcd"]


async def all_of(engine, prompts):
    return await asyncio.gather(*(engine.submit(one, rows=one.samples) for one in prompts), return_exceptions=True)


@pytest.mark.parametrize(
    "good_for", [(FOREVER,) * 2, (FOREVER,) * 3, (FOREVER, 5), (3, FOREVER), (0, FOREVER, FOREVER)]
)
async def test_the_answers_are_those_of_one_device_whichever_fails_and_the_counters_add_up(good_for):
    async with engine_of(*good_for) as engine:
        found = await all_of(engine, PROMPTS)
        told, snapshot, limits = engine.backend.text.device(), engine.snapshot(), engine.limits
    for one, answer in zip(PROMPTS, found, strict=True):
        assert [done.tokens for done in answer.completions] == [done.tokens for done in alone(one)]
    devices = told["devices"].values()
    assert [bool(device["failed"]) for device in devices] == [steps < FOREVER for steps in good_for]
    if set(good_for) == {FOREVER}:
        assert (limits.slots, limits.max_rows) == (len(good_for) * SLOTS, SLOTS)
        assert all(device["rows"] > 0 for device in devices)
        assert told["tokens"]["output"] == 12 * sum(one.samples for one in PROMPTS)
        names = [*(f"forward cpu:{number} 0" for number in range(len(good_for))), "prompts 0"]
        assert [lane["name"] for lane in snapshot.lanes] == names
        assert all("forward" in lane["visits"] for lane in snapshot.lanes[:-1])


@settings(max_examples=examples(15), deadline=None)
@given(steps=st.integers(0, 14), samples=st.integers(1, 3), count=st.integers(1, 6))
def test_parts_go_on_where_the_reader_is(steps, samples, count):
    prompts = [prompt(LETTERS[n], samples=samples, key=str(n)) for n in range(count)]
    parts = [[] for _ in prompts]

    async def run():
        async with engine_of(steps, FOREVER) as engine:
            reading = zip(prompts, parts, strict=True)
            asked = (engine.submit(one, rows=one.samples, on_part=own.append) for one, own in reading)
            return await asyncio.gather(*asked)

    for one, own, answer in zip(prompts, parts, asyncio.run(run()), strict=True):
        expected = [(done.tokens, done.text) for done in alone(one)]
        assert [(done.tokens, done.text) for done in joined(own)] == expected
        assert [(done.tokens, done.text) for done in answer.completions] == expected


async def test_a_prompt_is_with_two_devices_that_fail_and_no_third():
    async with engine_of(0, 0, FOREVER) as engine:
        [answer] = await all_of(engine, [prompt("a")])
        assert isinstance(answer, DeviceLost)
        assert not isinstance(answer, BackendDied)
        [answer] = await all_of(engine, [prompt("a")])
    assert answer.completions[0].tokens == alone(prompt("a"))[0].tokens


async def test_what_is_cancelled_or_not_followed_any_more_leaves_nothing():
    async with engine_of(FOREVER, FOREVER) as engine:
        text = engine.backend.text
        tasks = [asyncio.ensure_future(engine.submit(one)) for one in [prompt(max_tokens=60)] * 2 * SLOTS]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(isinstance(one, Exception) for one in await all_of(engine, PROMPTS))
        stream = text.stream([Request(prompt(max_tokens=60), 1) for _ in range(4)])
        following = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await stream.aclose()
    assert set(text._rows.values()) == {0}
    assert not text._asked
    assert not text._of


async def test_a_beginning_that_a_device_knows_goes_there_while_it_is_not_much_fuller():
    async with engine_of(FOREVER, FOREVER) as engine:
        text = engine.backend.text
        one, other = (Request(prompt(letter * 8), 1) for letter in "ab")
        assert [text._take(request) for request in (one, other)] == ["cpu:0", "cpu:1"]
        text._rows.update({"cpu:0": 0, "cpu:1": 0})
        # No emptier than the other; a row fuller, which is little; two rows fuller, which are not.
        assert [text._take(other) for _ in range(3)] == ["cpu:1", "cpu:1", "cpu:0"]
        text._rows.update({"cpu:0": 0, "cpu:1": 0})


@pytest.mark.parametrize("dies", [False, True])
async def test_weights_and_adapters_change_on_all_and_a_device_that_dies_of_them_is_given_up(dies):
    async with engine_of(FOREVER, FOREVER) as engine:
        text, generators = engine.backend.text, engine.backend.generators
        await text.load_adapter("one", "v1", "17")
        assert set(text.adapters) == {"one", "one@v1"}
        for generator in generators:
            assert list(generator.decoder.loaded.values()) == [17]
            generator.read_weights = int
        if dies:
            generators[0].decoder.swap = lost
        await text.update("v2", "5", drain=True)
        assert [generator.decoder.weights for generator in generators] == [0 if dies else 5, 5]
        assert [one.versions for one in await all_of(engine, FOUR)] == [("v2",)] * 4
        assert [bool(one["failed"]) for one in text.device()["devices"].values()] == [dies, False]
        await text.unload_adapter("one")
        assert list(text.adapters) == []
        with pytest.raises(UsageError):
            await text.unload_adapter("one")


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
