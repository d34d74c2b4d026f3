"""The stand-in backend: the time that its service model says, no answers of its own. On a virtual clock."""

import asyncio

import pytest

from gpuinfer.api import BackendContext, ModelSpec, Request, Setup
from gpuinfer.backends.standin import StandIn
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendDied, BackendError, UsageError
from gpuinfer.lab.bench import parity
from gpuinfer.lab.bench.measurement import Rooflines
from gpuinfer.runtime.run import RunPlan
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import assert_ok, check_backend, run_virtual
from gpuinfer.workloads.load import Load

STEPS = {"alpha": 0.0, "beta": 1.0, "step_rows": 64, "step": 0.5}


def seconds_of(backend, *rows, at_once=1):
    """What batches of so many rows take, one after the other; each of them so many times at once."""

    async def timed():
        await backend.start(BackendContext())
        loop, taken = asyncio.get_running_loop(), []
        for each in rows:
            began = loop.time()
            await asyncio.gather(*(backend.infer([Request("payload", rows=each)]) for _ in range(at_once)))
            taken.append(loop.time() - began)
        await backend.close()
        return taken

    return run_virtual(timed())


@pytest.mark.parametrize(
    ("options", "rows", "seconds"),
    [
        ({"alpha": 0.001, "beta": 0.01}, [5], [0.015]),
        ({"alpha": 0.0, "beta": 0.5}, [200], [0.5]),
        (STEPS, [64, 129], [1.0, 2.0]),  # the first step is free
        ({"alpha": 0.0, "beta": 1.0, "drift": 2.0, "drift_after": 1.5}, [1, 1, 1, 1], [1.0, 1.0, 2.0, 2.0]),
    ],
)
def test_a_batch_takes_its_time(options, rows, seconds):
    assert seconds_of(StandIn(**options), *rows) == pytest.approx(seconds)


def test_the_same_seed_draws_the_same_times_and_batches_in_flight_do_not_slow_one_another():
    jittery = {"alpha": 0.0, "beta": 1.0, "jitter": 0.2}
    drawn = [seconds_of(StandIn(Setup(seed=seed), **jittery), *[1] * 20) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 20
    assert seconds_of(StandIn(alpha=0.0, beta=1.0, in_flight=2), 1, at_once=2) == pytest.approx([1.0])


def test_a_share_of_the_batches_fails():
    async def failed():
        backend, count = StandIn(failures=0.5), 0
        await backend.start(BackendContext())
        for _ in range(100):
            try:
                assert await backend.infer([Request("payload")]) == ["payload"]
            except BackendError:
                count += 1
        return count

    assert 30 < run_virtual(failed()) < 70


def test_it_serves_behind_an_engine_and_keeps_what_the_kit_promises():
    async def answered():
        engine = Engine(StandIn(), Dynamic(), clock=asyncio.get_running_loop().time)
        await engine.start()
        answers = await asyncio.gather(*(engine.submit(number) for number in range(600)))
        await engine.close()
        return answers, engine.snapshot()

    answers, snapshot = run_virtual(answered())
    assert (answers, max(snapshot.batches)) == (list(range(600)), 256)
    assert_ok(check_backend(lambda: StandIn(alpha=0.0, beta=1e-4)))
    with pytest.raises(BackendDied, match="Await start"):
        asyncio.run(StandIn().infer([Request(None)]))


def test_a_model_is_neither_loaded_nor_measured_nor_compared():
    backend = StandIn(Setup(model=ModelSpec("blobnet", inputs=8)))
    plan = RunPlan(Load(rate=10), backend, Dynamic(), {})
    assert backend.setup.model is None
    assert not parity.applies(plan)
    assert not Rooflines().missing(plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": -1e-6}, "alpha"),
        ({"alpha": 0, "beta": 0}, "no time"),
        ({"failures": 1.5}, "cannot fail"),
        ({"jitter": float("nan")}, "jitter"),
        ({"step": 0.1}, "step_rows"),
        ({"step_rows": 0, "step": 0.1}, "step"),
        ({"drift_after": float("inf"), "drift": 2}, "never comes"),
        ({"slow": 2.0}, "-B devices"),
        ({"devices": 2, "slots": 8}, "-B devices"),
    ],
)
def test_a_model_that_cannot_be_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        StandIn(**options)


def rows_per_s(seconds=20.0, clients=600, **options):
    """What callers that always ask again get of a stand-in whose batches of 64 take 20 ms; and its devices' counts."""

    async def run():
        engine = Engine(backend := StandIn(alpha=0.0, beta=0.02, max_rows=64, **options), Dynamic())
        await engine.start()
        loop, rows = asyncio.get_running_loop(), 0
        until = loop.time() + seconds

        async def client():
            nonlocal rows
            with_engine = object()
            engine.join(with_engine)
            while loop.time() < until:
                await engine.submit("payload", client=with_engine)
                rows += 1

        await asyncio.gather(*(client() for _ in range(clients)))
        told = backend.device()
        await engine.close()
        return rows / seconds, told.get("devices")

    return run_virtual(run())


@pytest.mark.thorough
def test_two_devices_do_twice_the_work_and_a_slow_one_as_much_as_it_can():
    (one, _), (two, told), (uneven, shared) = rows_per_s(), rows_per_s(devices=2), rows_per_s(devices=2, slow=3.0)
    assert two >= 1.97 * one
    assert uneven >= 0.97 * (one + one / 3)
    assert told.keys() == {"device:0", "device:1"}
    quick, slow = (device["rows"] for device in shared.values())
    assert quick / slow == pytest.approx(3.0, rel=0.1)
