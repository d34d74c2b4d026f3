"""A workload's way to answers, and the counters of all that it set going: its own engine's and its workers'."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuinfer import machine, stats
from gpuinfer.api import Backend, Infer, Limits, Priority, Result, Roofline, Strategy
from gpuinfer.engine import Engine
from gpuinfer.runtime.processes import Job, Workers
from gpuinfer.stats import Snapshot, merge, since


class Session(Infer):
    """Binds one backend and one strategy to the workload, as an asynchronous context.

    The backend starts with the first request or at `ready`: a workload that asks nothing in this process, because its
    workers do, loads no model here.
    """

    def __init__(self, backend: Backend, strategy: Strategy, *, roofline: Roofline | None = None) -> None:
        self.roofline = roofline
        self.stopping = asyncio.Event()
        self._backend, self._strategy = backend, strategy
        self._engine = Engine(backend, strategy)
        self._starting: asyncio.Task[None] | None = None
        self._started = False
        self._lanes: list[stats.Lane] = []
        self._workers: list[Workers] = []
        self._clients = itertools.count()
        self._mark = Snapshot()

    @property
    def limits(self) -> Limits:  # type: ignore[override]  # read-only: the backend's own
        return self._backend.limits

    @property
    def has_model(self) -> bool:
        """Whether the backend has been given a model to serve."""
        return self._backend.setup.model is not None

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ready(self) -> Limits:
        if self._starting is None:
            self._starting = asyncio.create_task(self._engine.start())
        await asyncio.shield(self._starting)  # one impatient request does not stop it for the others
        self._started = True
        return self.limits

    async def __call__(
        self,
        payload: Any,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        timeout: float = math.inf,
        group: Hashable = None,
        client: Hashable = None,
    ) -> Result:
        if not self._started:
            await self.ready()
        return await self._engine.submit(
            payload, rows=rows, priority=priority, timeout=timeout, group=group, client=client
        )

    @contextlib.contextmanager
    def client(self) -> Iterator[Hashable]:
        me = f"{os.getpid()}.{next(self._clients)}"  # text: it may travel
        self._engine.join(me)
        try:
            yield me
        finally:
            self._engine.leave(me)

    def lane(self, name: str) -> stats.Lane:
        taken = {lane.name for lane in self._lanes}
        names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
        self._lanes.append(stats.Lane(next(free for free in names if free not in taken)))
        return self._lanes[-1]

    def workers(self, target: str, arguments: Sequence[Mapping[str, Any]]) -> Workers:
        jobs = [
            Job(
                index=index,
                target=target,
                arguments=given,
                connector=self._backend.connect(),
                strategy=type(self._strategy),
                setup=self._strategy.setup,
                options=self._strategy.options.model_dump(),
                roofline=self.roofline,
            )
            for index, given in enumerate(arguments)
        ]
        self._workers.append(Workers(jobs))
        return self._workers[-1]

    async def stop(self) -> None:
        """Ask the workload and all its workers to keep what is finished and return."""
        self.stopping.set()
        for workers in self._workers:
            await workers.stop()

    async def mark(self) -> None:
        """Count from here on, in every process: what came before was preparation."""
        self._mark = self._counted()
        for workers in self._workers:
            await workers.mark()

    def snapshot(self) -> Snapshot:
        """The counters since the mark, of this process and the latest of every worker, lanes of the dead included."""
        parts = [since(self._counted(), self._mark)]
        for workers in self._workers:
            parts += [_named(worker, part) for worker, part in sorted(workers.snapshots.items())]
        return merge(parts)

    def _counted(self) -> Snapshot:
        """This process alone, since its start."""
        own = tuple({"name": lane.name, "stations": lane.stations()} for lane in self._lanes)
        if not self._started:
            return Snapshot(lanes=own, rss_peak_mb=machine.rss_peak_mb())
        engine = self._engine.snapshot()
        return replace(
            engine, lanes=(*engine.lanes, *own), rss_peak_mb=machine.rss_peak_mb(), device=self._backend.device()
        )

    async def close(self) -> None:
        """Settle every request and let go of the backend."""
        if self._starting is None:
            return
        await asyncio.wait({self._starting})
        if self._starting.cancelled() or self._starting.exception() is not None:
            return  # the engine has closed the backend already
        await self._engine.close(drain=False)


def _named(worker: int, part: Snapshot) -> Snapshot:
    lanes = ({**lane, "name": f"worker {worker}: {lane['name']}"} for lane in part.lanes)
    return replace(part, lanes=tuple(lanes))
