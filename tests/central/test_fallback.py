"""A backend of this process that goes on for a lost server (`--fallback`): every request ends, whatever goes wrong."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from gpuinfer.api import Backend, Limits, ModelSpec, Setup
from gpuinfer.backends.fallback import with_fallback
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendDied
from gpuinfer.strategies.dynamic import Dynamic

LIMIT_S = 60


class Gone(Backend):
    """A way to a server that is gone."""

    remote = True
    limits = Limits(max_rows=1, in_flight=1)

    async def infer(self, batch):
        raise BackendDied("the server is gone.")

    async def update(self, version, weights, *, adapter=None, drain=True):
        pass


class Local(Backend):
    """Answers a payload with itself, once `go` is set."""

    limits = Limits(max_rows=1, in_flight=1)
    made = ()
    asked = asyncio.Event()

    def __init__(self, setup=None, /, **options):
        super().__init__(setup, **options)
        self.go, self.closed = asyncio.Event(), False
        Local.made = (*Local.made, self)

    async def infer(self, batch):
        Local.asked.set()
        await self.go.wait()
        return [request.payload for request in batch]

    async def close(self):
        self.closed = True


class Unstartable(Local):
    async def start(self, context):
        raise RuntimeError("CUDA error: out of memory")


class Unmade(Local):
    def __init__(self, setup=None, /, **options):
        if Local.made:
            raise OSError("no such file")
        super().__init__(setup, **options)


class Updated(Local):
    async def update(self, version, weights, *, adapter=None, drain=True):
        raise ValueError("other shapes")


@asynccontextmanager
async def engine_over(kind):
    Local.made, Local.asked = (), asyncio.Event()
    setup = Setup(ModelSpec("rows", inputs=1))
    backend = with_fallback(Gone(setup), "gone", "local", kind, {})
    engine = Engine(backend, Dynamic(setup))
    await engine.start()
    try:
        yield engine
    finally:
        async with asyncio.timeout(LIMIT_S):
            await engine.close(drain=False)


async def test_a_request_that_is_cancelled_here_gives_its_place_back():
    async with engine_over(Local) as engine:
        first = asyncio.create_task(engine.submit("first"))
        await asyncio.wait_for(Local.asked.wait(), LIMIT_S)
        _, backend = Local.made  # the first was made to see that it can be
        first.cancel()
        second = asyncio.create_task(engine.submit("second"))
        backend.go.set()
        assert await asyncio.wait_for(second, LIMIT_S) == "second"
        assert not engine.busy
    assert backend.closed


@pytest.mark.parametrize("kind", [Unstartable, Unmade])
async def test_a_fallback_that_fails_in_any_way_fails_all_requests_with_both_causes(kind):
    async with engine_over(kind) as engine:
        for _ in range(2):
            with pytest.raises(BackendDied, match="the server is gone") as found:
                await asyncio.wait_for(engine.submit("first"), LIMIT_S)
            assert "--fallback local cannot take its place" in str(found.value)


async def test_a_fallback_that_cannot_have_the_weights_of_now_is_closed_again():
    async with engine_over(Updated) as engine:
        await asyncio.wait_for(engine.update("2", "weights"), LIMIT_S)
        with pytest.raises(BackendDied, match="other shapes"):
            await asyncio.wait_for(engine.submit("first"), LIMIT_S)
    assert Local.made[1].closed
