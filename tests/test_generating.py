"""A text model behind the engine: whatever becomes of one prompt, the others are answered, and steps are counted."""

import asyncio
import itertools
from contextlib import asynccontextmanager

import jsonschema
import pytest
from msgspec import structs
from text.tiny import tiny_checkpoint
from text.toy import WAIT_S, Gate, Generating, alone, joined, prompt, toy_generator

from gpuinfer.api import ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.stream import PartStream, Unread
from gpuinfer.errors import BackendDied, BadPrompt, Closed, Expired, UsageError
from gpuinfer.generation import Constraint
from gpuinfer.report.report import schema
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import assert_ok, check_backend

SLOTS = 4
PROMPTS = [prompt(text, 2 + number) for number, text in enumerate(("a", "bc", "def", "ghij", "klm", "no", "p"))]
ANSWERS = [alone(one) for one in PROMPTS]


@asynccontextmanager
async def serving(backend=None, **more):
    """An engine over a toy generator with four slots, or over this backend."""
    engine = Engine(backend or Generating(toy_generator(SLOTS)), Dynamic(), **more)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close(drain=False)


@asynccontextmanager
async def gated(**more):
    """An engine, and the gate before a step of its generator."""
    generator = toy_generator(SLOTS)
    gate = Gate(generator, more.pop("after", 0))
    async with serving(Generating(generator), **more) as engine:
        yield engine, gate


async def reached(gate):
    assert await asyncio.to_thread(gate.reached.wait, WAIT_S)


def asked(engine, *prompts, **more):
    return [asyncio.ensure_future(engine.submit(one, rows=one.samples, **more)) for one in prompts]


async def outcomes(tasks):
    """A result's completions, or the type of an error."""
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
    return [type(one) if isinstance(one, BaseException) else one.completions for one in found]


async def test_more_prompts_than_slots_are_answered_as_alone_a_bad_one_fails_alone_and_steps_are_counted():
    async with serving() as engine:
        samples, bad = prompt("xyz", samples=3), prompt("what the alphabet lacks: ¿")
        foreign = structs.replace(prompt("abc"), adapter="mine")
        found = await outcomes(asked(engine, *PROMPTS, samples, bad, foreign))
        assert found == [*ANSWERS, alone(samples), BadPrompt, BadPrompt]
        snapshot, counters = engine.snapshot(), engine.backend.driver.counters()
        assert snapshot.errors["failed"] == 2
        assert snapshot.slots == SLOTS >= max(snapshot.batches)
        assert sum(snapshot.batches.values()) == counters["steps"]
        assert sum(rows * count for rows, count in snapshot.batches.items()) == counters["rows"]
        assert {rows: count for rows, (count, _) in snapshot.batch_s.items()} == snapshot.batches
        assert 1 <= sum(snapshot.reasons.values()) <= len(PROMPTS) + 3
        with pytest.raises(BadPrompt, match="adapter 'mine'"):
            await engine.submit(foreign)


async def test_a_cancelled_answer_frees_its_slots_for_others():
    async with gated() as (engine, gate):
        [endless] = asked(engine, prompt("a", 60, samples=SLOTS))
        await reached(gate)
        waiting = asked(engine, *PROMPTS)
        endless.cancel()
        await asyncio.wait({endless})
        gate.open.set()
        assert await outcomes(waiting) == ANSWERS
        assert engine.snapshot().errors["cancelled"] == 1
        most = SLOTS + sum(each.sampling.max_tokens for each in PROMPTS)
        assert engine.backend.driver.counters()["output_tokens"] <= most


async def test_a_prompt_expires_while_others_have_the_slots():
    async with gated() as (engine, gate):
        first = asked(engine, *PROMPTS[:SLOTS])
        await reached(gate)
        assert await outcomes(asked(engine, prompt("abc"), timeout=0.01)) == [Expired]
        gate.open.set()
        assert await outcomes(first) == ANSWERS[:SLOTS]


async def test_a_generator_that_dies_fails_all_there_are_and_all_that_come():
    generator = toy_generator(SLOTS)

    def lost(step):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    generator.decoder.forward = lost
    async with serving(Generating(generator)) as engine:
        assert set(await outcomes(asked(engine, *PROMPTS))) == {BackendDied}
        assert await outcomes(asked(engine, prompt("abc"))) == [BackendDied]


async def test_the_stations_of_a_lane_sum_to_the_time_it_is_open_and_constraints_are_booked_as_such():
    ticks = itertools.count()
    async with serving(clock=lambda: float(next(ticks))) as engine:
        lane, prompts = engine.lanes
        before = sum(lane.stations().values()) - next(ticks)
        await outcomes(asked(engine, *PROMPTS))
        stations = lane.stations()
        # two looks at one clock: what passed between them is in the stations, all of it and nothing twice
        assert 0 <= next(ticks) - (sum(stations.values()) - before) <= 3
        # whether memory is touched for the first time is the system's
        assert stations.keys() - {"first touch"} == {"prefill", "forward", "sample", "reply", "idle"}
        assert prompts.stations().keys() == {"understand", "idle"}
        await outcomes(asked(engine, prompt("a", 4, constraint=Constraint(regex="[abc]{8}"))))
        assert all(lane.visits().get("constrain") for lane in engine.lanes)  # before the first step and after


async def test_closing_answers_what_is_under_way_and_fails_what_waits():
    async with gated() as (engine, gate):
        tasks = asked(engine, *PROMPTS)
        await reached(gate)
        closing = asyncio.ensure_future(engine.close(drain=False))
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.wait_for(closing, WAIT_S)
        assert await outcomes(tasks) == [*ANSWERS[:SLOTS], *(Closed for _ in PROMPTS[SLOTS:])]
    assert engine.backend.generator.decoder.closed


async def test_a_stream_that_nobody_follows_gives_its_slots_back():
    async with gated(after=3) as (engine, gate):  # else the longer ones may have come to their ends too
        stream = engine.backend.text.stream([Request(prompt(text, most)) for text, most in zip("abc", (1, 60, 60))])  # noqa: B905
        assert (await anext(stream)).value.completions == alone(prompt("a", 1))
        await stream.aclose()
        gate.open.set()
        assert await outcomes(asked(engine, *PROMPTS)) == ANSWERS
        assert engine.backend.driver.counters()["finished"] == 1 + len(PROMPTS)


# Answers that are read while they grow


def reading(engine, one):
    return PartStream(lambda on_part: engine.submit(one, rows=one.samples, on_part=on_part))


async def test_what_is_read_as_it_grows_is_what_is_answered():
    async with serving() as engine:
        stopped, told = prompt("stopped", 40, stop=("e", "qu")), prompt("told", logprobs=1)
        wanted = [*PROMPTS, prompt("xyz", samples=3), stopped, told]
        streams = [reading(engine, one) for one in wanted]
        others = asked(engine, *PROMPTS)
        for one, stream in zip(wanted, streams, strict=True):
            assert joined([part async for part in stream]) == list(alone(one))
            assert stream.result.completions == alone(one)
        assert await outcomes(others) == ANSWERS


async def test_a_reader_that_leaves_frees_its_slots_at_the_next_step():
    async with gated() as (engine, gate):
        leaving, staying = reading(engine, prompt("ab", 9, samples=2)), reading(engine, prompt("c", 9, samples=2))
        await reached(gate)
        await leaving.aclose()
        gate.open.set()
        assert joined([part async for part in staying]) == list(alone(prompt("c", 9, samples=2)))
        assert {len(step.pages) for step in engine.backend.generator.decoder.steps[1:]} == {2}


async def test_a_reader_that_does_not_read_stalls_no_other_and_is_owed_one_part_a_sample():
    async with serving() as engine:
        unread, parts = Unread(), []
        late = asked(engine, prompt("late", 40, samples=2), on_part=unread.add)
        assert await outcomes(asked(engine, *PROMPTS)) == ANSWERS
        await outcomes(late)
        while unread:
            parts.append(unread.take())
        assert [part.sample for part in parts] == [0, 1]
        assert joined(parts) == list(alone(prompt("late", 40, samples=2)))


# The backend in this process


def text_backend(name, **options):
    return InProcess(
        Setup(devices=("cpu",), model=ModelSpec(name, kind="text")), context=64, **{"slots": SLOTS, **options}
    )


GREEDY = [prompt("The tide " * (1 + number), 8, temperature=0.0) for number in range(6)]


async def whole(tasks):
    return await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)


@pytest.mark.parametrize("files", [False, True])
def test_it_keeps_all_promises_also_with_files_whose_weights_can_be_exchanged(files):
    name = str(tiny_checkpoint("qwen2")) if files else "null"
    findings = check_backend(lambda: text_backend(name, slots=8))
    assert_ok(findings)
    assert "changes its weights" in {finding.name for finding in findings}


async def test_weights_are_exchanged_while_it_runs():
    """The second folder's answers are those of a backend that has started with it."""
    folders = [str(tiny_checkpoint("qwen2", seed=seed)) for seed in (0, 1)]
    wanted, texts = GREEDY[:3], {}
    for version, folder in zip(("", "v1"), folders, strict=True):
        async with serving(text_backend(folder)) as engine:
            texts[version] = [answer.completions[0].text for answer in await whole(asked(engine, *wanted))]
    async with serving(text_backend(folders[0])) as engine:
        under_way = asked(engine, *wanted)
        await asyncio.sleep(0)
        await engine.backend.update("v1", folders[1])
        after = await whole(asked(engine, *wanted))
        assert [answer.completions[0].text for answer in after] == texts["v1"] != texts[""]
        assert {answer.versions for answer in after} == {("v1",)}
        for number, answer in enumerate(await whole(under_way)):
            assert answer.completions[0].text == texts[answer.version][number]
        for place, adapter, said in (("nowhere", None, "no weights at"), (folders[0], "mine", "adapter_config")):
            with pytest.raises(UsageError, match=said):
                await engine.backend.update("v2", place, adapter=adapter)
        assert {answer.version for answer in await whole(asked(engine, *wanted))} == {"v1"}


async def test_a_real_model_answers_in_company_as_alone_and_tells_what_it_takes():
    async with serving(text_backend("tiny")) as engine:
        together = await outcomes(asked(engine, *GREEDY))
        assert together == [(await outcomes(asked(engine, one)))[0] for one in GREEDY]
        device = engine.backend.device()
        jsonschema.validate(device["model"], schema()["properties"]["model"])
        assert (device["model"]["slots"], device["model"]["context"]) == (SLOTS, 64)
        assert device["model"]["estimated_bytes"] > device["model"]["cache_bytes"] > 0
        assert device["tokens"]["output"] == 2 * sum(len(found[0].tokens) for found in together)
    with pytest.raises(Closed):
        await engine.submit(GREEDY[0])
