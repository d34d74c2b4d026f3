"""A stand-in for a model: it takes the time that a service model says, and answers with what it was sent."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Backend, BackendContext, Limits, Request, Result, Setup
from gpuinfer.errors import BackendDied, BackendError, UsageError
from gpuinfer.simulate.service import ServiceModel

ALPHA_S, BETA_S = 50e-6, 2e-3  # a row and a batch of a middling model on a middling card


class StandIn(Backend):
    """Takes the time of a model that you describe, and computes nothing: to try strategies and loads with.

    A batch of n rows takes alpha·n + beta, and a step for each full `step_rows` rows beyond the first. Batches in
    flight do not slow one another. The time counts from the call of `infer`, and ends by the event loop's own timer:
    an answer can be taken no sooner than the loop is free. On a loop of `gpuinfer.host.loop` that is true to about
    0.1 ms; plain asyncio rounds it up to whole milliseconds.
    """

    class Options(api.Options):
        alpha: float = Field(ALPHA_S, description="seconds a row takes")
        beta: float = Field(BETA_S, description="seconds a batch takes, however small")
        step_rows: int | None = Field(None, description="rows after each of which a batch takes a step longer")
        step: float = Field(0.0, description="seconds of that step")
        jitter: float = Field(0.0, description="standard deviation of a batch's time, as a share of it")
        failures: float = Field(0.0, description="share of the batches that fail")
        max_rows: int = Field(256, ge=1, description="rows in one batch")
        in_flight: int = Field(1, ge=1, le=1024, description="batches at once")
        slots: int | None = Field(None, ge=1, description="rows admitted and not yet answered, at most")
        drift: float = Field(1.0, gt=0, le=1e6, description="after drift_after all takes so many times as long")
        drift_after: float = Field(0.0, ge=0, description="seconds from the start to the drift")

    options: Options

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self.setup = replace(self.setup, model=None)  # whatever the workload names: nothing is to be loaded or measured
        own = self.options
        self.service = ServiceModel(own.alpha, own.beta, own.step_rows, own.step, own.jitter, own.failures)
        if own.step > 0 and own.step_rows is None:
            raise UsageError(
                f"a step of {own.step:g} s is never taken. Add -B step_rows=N, the rows after which it is."
            )
        if not math.isfinite(own.drift_after):
            raise UsageError("a drift after for ever never comes. Leave drift and drift_after out.")
        self.limits = Limits(own.max_rows, own.in_flight, own.slots)
        self._dice = random.Random(f"standin {self.setup.seed}")
        self._clock: Callable[[], float] | None = None
        self._started = 0.0

    async def start(self, context: BackendContext) -> None:
        self._clock = asyncio.get_running_loop().time
        self._started = self._clock()

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        """Each request's payload, after the batch's time. Raises `BackendError` for a batch that is to fail."""
        loop, rows = asyncio.get_running_loop(), sum(request.rows for request in batch)
        done = loop.create_future()
        timer = loop.call_at(self._end_of(rows), _finish, done)
        fails = self.service.fails(self._dice)
        try:
            await done
        finally:
            timer.cancel()
        if fails:
            raise BackendError("the stand-in failed this batch, as it was told to. Set -B failures=0 to have none.")
        return [request.payload for request in batch]

    def _end_of(self, rows: int) -> float:
        """When a batch that begins now is done, on the loop's clock."""
        if self._clock is None:
            raise BackendDied("the backend 'standin' is not running. Await start() before infer(), not after close().")
        now = self._clock()
        slower = self.options.drift if now - self._started >= self.options.drift_after else 1.0
        return now + slower * self.service.draw(rows, self._dice)

    async def close(self) -> None:
        self._clock = None


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)
