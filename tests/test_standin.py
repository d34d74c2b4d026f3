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


def seconds_of(backend, *rows):
    """What batches of so many rows take, one after the other."""

    async def timed():
        await backend.start(BackendContext())
        loop, taken = asyncio.get_running_loop(), []
        for each in rows:
            began = loop.time()
            await backend.infer([Request("payload", rows=each)])
            taken.append(loop.time() - began)
        await backend.close()
        return taken

    return run_virtual(timed())


@pytest.mark.parametrize(
    ("options", "rows", "seconds"),
    [
        pytest.param({"alpha": 0.001, "beta": 0.01}, 5, 0.015, id="alpha and beta"),
        pytest.param({"alpha": 0.0, "beta": 0.5}, 200, 0.5, id="beta alone"),
        pytest.param({"alpha": 0.0, "beta": 1.0, "step_rows": 64, "step": 0.5}, 64, 1.0, id="the first step is free"),
        pytest.param({"alpha": 0.0, "beta": 1.0, "step_rows": 64, "step": 0.5}, 129, 2.0, id="two steps further"),
    ],
)
def test_a_batch_takes_its_time(options, rows, seconds):
    assert seconds_of(StandIn(**options), rows) == [pytest.approx(seconds)]


def test_all_takes_longer_after_the_drift():
    backend = StandIn(alpha=0.0, beta=1.0, drift=2.0, drift_after=1.5)
    assert seconds_of(backend, 1, 1, 1, 1) == pytest.approx([1.0, 1.0, 2.0, 2.0])


def test_the_same_seed_draws_the_same_times():
    jittery = {"alpha": 0.0, "beta": 1.0, "jitter": 0.2}
    drawn = [seconds_of(StandIn(Setup(seed=seed), **jittery), *[1] * 20) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 20


def test_batches_in_flight_do_not_slow_one_another():
    async def two():
        backend = StandIn(alpha=0.0, beta=1.0, in_flight=2)
        await backend.start(BackendContext())
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(backend.infer([Request(None)]) for _ in range(2)))
        return asyncio.get_running_loop().time() - began

    assert run_virtual(two()) == pytest.approx(1.0)


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


def test_it_serves_behind_an_engine():
    async def answered():
        engine = Engine(StandIn(), Dynamic(), clock=asyncio.get_running_loop().time)
        await engine.start()
        answers = await asyncio.gather(*(engine.submit(number) for number in range(600)))
        await engine.close()
        return answers, engine.snapshot()

    answers, snapshot = run_virtual(answered())
    assert answers == list(range(600))
    assert max(snapshot.batches) == 256


def test_a_model_is_neither_loaded_nor_measured_nor_compared():
    backend = StandIn(Setup(model=ModelSpec("blobnet", inputs=8)))
    plan = RunPlan(Load(rate=10), backend, Dynamic(), {})
    assert backend.setup.model is None
    assert not parity.applies(plan)
    assert not Rooflines().missing(plan)


def test_it_keeps_what_the_kit_promises():
    assert_ok(check_backend(lambda: StandIn(alpha=0.0, beta=1e-4)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"alpha": -1e-6}, "alpha", id="a row that gives time back"),
        pytest.param({"alpha": 0, "beta": 0}, "no time", id="a batch that takes no time"),
        pytest.param({"failures": 1.5}, "failures|share|batches", id="more than all fail"),
        pytest.param({"jitter": float("nan")}, "jitter", id="a jitter that is no number"),
        pytest.param({"step": 0.1}, "step_rows", id="a step that is never taken"),
        pytest.param({"step_rows": 0, "step": 0.1}, "step", id="a step at every 0 rows"),
        pytest.param({"drift_after": float("inf"), "drift": 2}, "never comes", id="a drift after for ever"),
    ],
)
def test_a_model_that_cannot_be_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        StandIn(**options)


async def test_before_its_start_it_answers_nothing():
    with pytest.raises(BackendDied, match="Await start"):
        await StandIn().infer([Request(None)])


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
        return rows / seconds, told

    return run_virtual(run())


def test_two_devices_do_twice_the_work_and_a_slow_one_as_much_as_it_can():
    one, _ = rows_per_s()
    two, told = rows_per_s(devices=2)
    uneven, shared = rows_per_s(devices=2, slow=3.0)
    assert two >= 1.97 * one
    assert uneven >= 0.97 * (one + one / 3)
    assert {name: device["batches"] for name, device in told["devices"].items()}.keys() == {"device:0", "device:1"}
    quick, slow = (device["rows"] for device in shared["devices"].values())
    assert quick / slow == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("options", [{"slow": 2.0}, {"devices": 2, "slots": 8}])
def test_devices_that_cannot_be_imitated_are_refused(options):
    with pytest.raises(UsageError, match="-B devices"):
        StandIn(**options)
