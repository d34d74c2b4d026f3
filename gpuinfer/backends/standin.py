"""A stand-in for a model: batches take the time of a service model, and requests are answered with their payload."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Backend, BackendContext, Limits, Request, Result, Setup, lane_device
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.errors import BackendDied, BackendError, UsageError
from gpuinfer.stats import DeviceCount

ALPHA_S, BETA_S = 50e-6, 2e-3  # a row and a batch of a middling model on a middling card


class StandIn(Backend):
    """Takes the time of a model that you describe, and computes nothing: for trying strategies and loads.

    A batch of n rows takes alpha·n + beta, and a step for each full `step_rows` rows beyond the first. Batches in
    flight do not slow one another. The time counts from the call of `infer`, and ends by the event loop's own timer: an
    answer can be taken no sooner than the loop is free. On a loop of `host.event_loop` that is true to about 0.1 ms;
    plain asyncio rounds it up to whole milliseconds.
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
        devices: int = Field(1, ge=1, le=64, description="devices at work, each with in_flight batches")
        slow: float = Field(1.0, gt=0, le=1e6, description="with several: the last takes so many times as long")
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
        if own.devices > 1 and own.slots is not None:
            raise UsageError("several devices with slots are not imitated here. Leave -B slots or -B devices out.")
        if own.devices == 1 and own.slow != 1.0:
            raise UsageError("-B slow is of the last of several devices. Add -B devices=2, or leave it out.")
        self.devices = {f"device:{number}": DeviceCount() for number in range(own.devices if own.devices > 1 else 0)}
        lanes = tuple(self.devices) * own.in_flight
        self.limits = Limits(own.max_rows, len(lanes) or own.in_flight, own.slots, devices=lanes)
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
        device = lane_device()

        def finish() -> None:
            if not done.done():
                done.set_result(None)

        if self._clock is None:
            raise BackendDied("the backend 'standin' is not running. Await start() before infer(), not after close().")
        now = self._clock()
        slower = self.options.drift if now - self._started >= self.options.drift_after else 1.0
        if device and device == next(reversed(self.devices)):
            slower *= self.options.slow
        timer = loop.call_at(now + slower * self.service.draw(rows, self._dice), finish)
        fails = self.service.fails(self._dice)
        count = self.devices.get(device)
        if count is not None:
            count.begin()
        try:
            await done
        finally:
            timer.cancel()
            if count is not None:
                count.end(rows if done.done() and not fails else 0)
        if fails:
            raise BackendError("the stand-in failed this batch, as it was told to. Set -B failures=0 to have none.")
        return [request.payload for request in batch]

    def device(self) -> Mapping[str, Any]:
        """The counters of each of several devices."""
        if not self.devices:
            return {}
        devices = {name: {"name": "stand-in", **count.told()} for name, count in self.devices.items()}
        return {"name": f"{len(devices)} x stand-in", "devices": devices}

    async def close(self) -> None:
        self._clock = None
