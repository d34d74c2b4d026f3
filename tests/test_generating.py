"""A text model behind the engine: whatever becomes of one prompt, the others are answered, and steps are counted."""

import asyncio
import itertools
import threading
from contextlib import asynccontextmanager

import jsonschema
import pytest
from msgspec import structs
from text.tiny import tiny_checkpoint
from text.toy import Generating, alone, joined, toy_generator

from gpuinfer.api import ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.stream import PartStream, Unread
from gpuinfer.errors import BackendDied, BadPrompt, Closed, Expired, UsageError
from gpuinfer.generation import Constraint, Prompt, Sampling
from gpuinfer.report.report import schema
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import assert_ok, check_backend
from gpuinfer.text.model import FEW

WAIT_S = 60.0
SLOTS = 4


def prompt(text="abc", max_tokens=5, samples=1, **more):
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, **more)
    return Prompt(text=text, key=text, samples=samples, sampling=sampling)


PROMPTS = [prompt(text, 2 + number) for number, text in enumerate(("a", "bc", "def", "ghij", "klm", "no", "p"))]


class Gate:
    """Holds the generator before its next step, or the one after so many, until it is opened."""

    def __init__(self, generator, after=0):
        self.reached, self.open, self._free = threading.Event(), threading.Event(), iter(range(after))
        self._forward = generator.decoder.forward
        generator.decoder.forward = self._held

    def _held(self, step):
        if next(self._free, None) is not None:
            return self._forward(step)
        self.reached.set()
        assert self.open.wait(WAIT_S)
        return self._forward(step)

    async def closed_on_a_step(self):
        assert await asyncio.to_thread(self.reached.wait, WAIT_S)


@asynccontextmanager
async def serving(generator=None, **more):
    """An engine over a toy generator with four slots."""
    async with running(Generating(generator or toy_generator(SLOTS)), **more) as engine:
        yield engine


@asynccontextmanager
async def running(backend, **more):
    engine = Engine(backend, Dynamic(), **more)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close(drain=False)


def asked(engine, *prompts, **more):
    return [asyncio.ensure_future(engine.submit(one, rows=one.samples, **more)) for one in prompts]


async def outcomes(tasks):
    """A result's completions, or the type of an error."""
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
    return [type(one) if isinstance(one, BaseException) else one.completions for one in found]


def answers(prompts):
    return [alone(one) for one in prompts]


def run(main):
    """The test as a coroutine on a real loop, as the generator's thread needs one."""

    def test(*arguments, **more):
        asyncio.run(main(*arguments, **more))

    test.__name__, test.__doc__ = main.__name__, main.__doc__
    return test


@run
async def test_more_prompts_than_slots_get_the_answers_they_get_alone():
    async with serving() as engine:
        wanted = [*PROMPTS, prompt("xyz", samples=3)]
        assert await outcomes(asked(engine, *wanted)) == answers(wanted)


@run
async def test_a_prompt_that_cannot_be_served_fails_alone():
    async with serving() as engine:
        bad = prompt("what the alphabet lacks: ¿")
        found = await outcomes(asked(engine, PROMPTS[0], bad, PROMPTS[1]))
        assert found == [alone(PROMPTS[0]), BadPrompt, alone(PROMPTS[1])]
        assert engine.snapshot().errors["failed"] == 1


@run
async def test_the_steps_are_the_batches_and_the_slots_are_told():
    async with serving() as engine:
        await outcomes(asked(engine, *PROMPTS))
        snapshot, counters = engine.snapshot(), engine.backend.driver.counters()
        assert snapshot.slots == SLOTS
        assert sum(snapshot.batches.values()) == counters["steps"]
        assert sum(rows * count for rows, count in snapshot.batches.items()) == counters["rows"]
        assert {rows: count for rows, (count, _) in snapshot.batch_s.items()} == snapshot.batches
        assert max(snapshot.batches) <= SLOTS
        assert 1 <= sum(snapshot.reasons.values()) <= len(PROMPTS)


@run
async def test_a_cancelled_answer_frees_its_slots_for_others():
    generator = toy_generator(SLOTS)
    gate = Gate(generator)
    async with serving(generator) as engine:
        [endless] = asked(engine, prompt("a", 60, samples=SLOTS))
        await gate.closed_on_a_step()
        waiting = asked(engine, *PROMPTS)
        endless.cancel()
        await asyncio.wait({endless})
        gate.open.set()
        assert await outcomes(waiting) == answers(PROMPTS)
        assert engine.snapshot().errors["cancelled"] == 1
        assert engine.backend.driver.counters()["output_tokens"] <= SLOTS + sum(
            each.sampling.max_tokens for each in PROMPTS
        )


@run
async def test_what_is_cancelled_while_its_prompt_is_understood_never_takes_a_slot():
    generator = toy_generator(16)
    begun, go_on, prepare = threading.Event(), threading.Event(), generator.prepare

    def slowly(prompts, enter):
        begun.set()
        assert go_on.wait(WAIT_S)
        return prepare(prompts)

    generator.prepare = slowly
    async with serving(generator) as engine:
        tasks = asked(engine, *(prompt("abc", 3) for _ in range(FEW + 1)))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        tasks[0].cancel()
        await asyncio.wait({tasks[0]})
        go_on.set()
        assert await outcomes(tasks[1:]) == FEW * [alone(prompt("abc", 3))]
        assert engine.backend.driver.counters()["output_tokens"] == 3 * FEW


@run
async def test_a_prompt_expires_while_others_have_the_slots():
    generator = toy_generator(SLOTS)
    gate = Gate(generator)
    async with serving(generator) as engine:
        first = asked(engine, *PROMPTS[:SLOTS])
        await gate.closed_on_a_step()
        assert await outcomes(asked(engine, prompt(), timeout=0.01)) == [Expired]
        gate.open.set()
        assert await outcomes(first) == answers(PROMPTS[:SLOTS])


@run
async def test_a_generator_that_dies_fails_all_there_are_and_all_that_come():
    generator = toy_generator(SLOTS)

    def lost(step):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    generator.decoder.forward = lost
    async with serving(generator) as engine:
        assert set(await outcomes(asked(engine, *PROMPTS))) == {BackendDied}
        assert await outcomes(asked(engine, prompt())) == [BackendDied]


@run
async def test_the_stations_of_a_lane_sum_to_the_time_it_is_open():
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


@run
async def test_what_a_constraint_costs_is_booked_as_such_before_the_first_step_and_after():
    async with serving() as engine:
        await outcomes(asked(engine, prompt("a", 4, constraint=Constraint(regex="[abc]{8}"))))
        assert all(lane.visits().get("constrain") for lane in engine.lanes)


@run
async def test_closing_answers_what_is_under_way_and_fails_what_waits():
    generator = toy_generator(SLOTS)
    gate = Gate(generator)
    async with serving(generator) as engine:
        tasks = asked(engine, *PROMPTS)
        await gate.closed_on_a_step()
        closing = asyncio.ensure_future(engine.close(drain=False))
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.wait_for(closing, WAIT_S)
        found = await outcomes(tasks)
        assert found == [*answers(PROMPTS[:SLOTS]), *(Closed for _ in PROMPTS[SLOTS:])]
    assert generator.decoder.closed


@run
async def test_closing_waits_only_so_long_for_a_step():
    generator = toy_generator(SLOTS)
    gate = Gate(generator)
    async with serving(generator, patience_s=0.05) as engine:
        tasks = asked(engine, *PROMPTS)
        await gate.closed_on_a_step()
        await engine.close(drain=False)
        assert await outcomes(tasks) == [Closed for _ in PROMPTS]
        gate.open.set()


@run
async def test_a_stream_that_nobody_follows_gives_its_slots_back():
    generator = toy_generator(SLOTS)
    gate = Gate(generator, after=3)  # else the longer ones may have come to their ends too
    async with serving(generator) as engine:
        text = engine.backend.text
        stream = text.stream([Request(prompt("a", 1)), Request(prompt("b", 60)), Request(prompt("c", 60))])
        assert (await anext(stream)).value.completions == alone(prompt("a", 1))
        await stream.aclose()
        gate.open.set()
        assert await outcomes(asked(engine, *PROMPTS)) == answers(PROMPTS)
        assert engine.backend.driver.counters()["finished"] == 1 + len(PROMPTS)


def reading(engine, one):
    return PartStream(lambda on_part: engine.submit(one, rows=one.samples, on_part=on_part))


@run
async def test_what_is_read_as_it_grows_is_what_is_answered():
    async with serving() as engine:
        wanted = [
            *PROMPTS,
            prompt("xyz", samples=3),
            prompt("stopped", 40, stop=("e", "qu")),
            prompt("told", logprobs=1),
        ]
        streams = [reading(engine, one) for one in wanted]
        others = asked(engine, *PROMPTS)
        for one, stream in zip(wanted, streams, strict=True):
            assert joined([part async for part in stream]) == list(alone(one))
            assert stream.result.completions == alone(one)
        assert await outcomes(others) == answers(PROMPTS)


@run
async def test_a_reader_that_leaves_frees_its_slots_at_the_next_step():
    generator = toy_generator(SLOTS)
    gate = Gate(generator)
    async with serving(generator) as engine:
        leaving, staying = reading(engine, prompt("ab", 9, samples=2)), reading(engine, prompt("c", 9, samples=2))
        await gate.closed_on_a_step()
        await leaving.aclose()
        gate.open.set()
        assert joined([part async for part in staying]) == list(alone(prompt("c", 9, samples=2)))
        assert {len(step.pages) for step in generator.decoder.steps[1:]} == {2}


@run
async def test_a_reader_that_does_not_read_stalls_no_other_and_is_owed_one_part_a_sample():
    async with serving() as engine:
        unread = Unread()
        late = asked(engine, prompt("late", 40, samples=2), on_part=unread.add)
        assert await outcomes(asked(engine, *PROMPTS)) == answers(PROMPTS)
        await outcomes(late)
        parts = []
        while unread:
            parts.append(unread.take())
        assert [part.sample for part in parts] == [0, 1]
        assert joined(parts) == list(alone(prompt("late", 40, samples=2)))


def text_backend(name, **options):
    return InProcess(Setup(devices=("cpu",), model=ModelSpec(name, kind="text")), context=64, **options)


def test_the_backend_in_this_process_keeps_all_promises_of_one_with_slots():
    assert_ok(check_backend(lambda: text_backend("null", slots=8)))


@run
async def test_weights_are_exchanged_while_it_runs():
    """The second folder's answers are those of a backend that has started with it."""
    folders = [str(tiny_checkpoint("qwen2", seed=seed)) for seed in (0, 1)]
    wanted, texts = [greedy_prompt(number) for number in range(3)], {}

    async def whole(tasks):
        return await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)

    for version, folder in zip(("", "v1"), folders, strict=True):
        async with running(text_backend(folder, slots=SLOTS)) as engine:
            texts[version] = [answer.completions[0].text for answer in await whole(asked(engine, *wanted))]
    async with running(text_backend(folders[0], slots=SLOTS)) as engine:
        under_way = asked(engine, *wanted)
        await asyncio.sleep(0)
        await engine.backend.update("v1", folders[1])
        after = await whole(asked(engine, *wanted))
        assert [answer.completions[0].text for answer in after] == texts["v1"] != texts[""]
        assert {answer.versions for answer in after} == {("v1",)}
        for number, answer in enumerate(await whole(under_way)):
            assert answer.completions[0].text == texts[answer.version][number]
        with pytest.raises(UsageError, match="no weights at"):
            await engine.backend.update("v2", "nowhere")
        with pytest.raises(UsageError, match="adapter_config"):
            await engine.backend.update("v2", folders[0], adapter="mine")
        assert {answer.version for answer in await whole(asked(engine, *wanted))} == {"v1"}


@run
async def test_a_prompt_for_an_adapter_is_refused_and_its_neighbours_are_answered():
    async with serving() as engine:
        refused, answered = await asyncio.gather(
            *asked(engine, structs.replace(prompt(), adapter="mine"), prompt()), return_exceptions=True
        )
    assert isinstance(refused, BadPrompt)
    assert "adapter 'mine'" in str(refused)
    assert answered.completions == alone(prompt())


def test_the_backend_keeps_all_promises_with_files_whose_weights_can_be_exchanged():
    findings = check_backend(lambda: text_backend(str(tiny_checkpoint("qwen2")), slots=8))
    assert_ok(findings)
    assert "changes its weights" in {finding.name for finding in findings}


@run
async def test_a_real_model_answers_in_company_as_alone_and_tells_what_it_takes():
    greedy = [greedy_prompt(number) for number in range(6)]
    engine = Engine(text_backend("tiny", slots=SLOTS), Dynamic())
    await engine.start()
    try:
        together = await outcomes(asked(engine, *greedy))
        assert together == [(await outcomes(asked(engine, one)))[0] for one in greedy]
        device = engine.backend.device()
        jsonschema.validate(device["model"], schema()["properties"]["model"])
        assert (device["model"]["slots"], device["model"]["context"]) == (SLOTS, 64)
        assert device["model"]["estimated_bytes"] > device["model"]["cache_bytes"] > 0
        assert device["tokens"]["output"] == 2 * sum(len(found[0].tokens) for found in together)
    finally:
        await engine.close()
    with pytest.raises(Closed):
        await engine.submit(greedy[0])


def greedy_prompt(number):
    return prompt("The tide " * (1 + number), 8, temperature=0.0)
