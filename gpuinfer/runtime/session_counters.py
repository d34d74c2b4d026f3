"""The counters of a session since a mark: of this process, its workers, and the server of a remote backend.

Models of one run get distinct names here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from gpuinfer import stats
from gpuinfer.api import Backend, ModelSpec
from gpuinfer.config import blame
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import GpuinferError
from gpuinfer.host import machine
from gpuinfer.runtime.worker_pool import WorkerPool
from gpuinfer.stats import Snapshot, merge_snapshots, since

NO_FILE = "no weights file"


def model_name(spec: ModelSpec) -> str:
    """The last part of its path."""
    return PurePath(spec.name).name or spec.name


def distinct_names(own: ModelSpec, other: ModelSpec) -> tuple[str, str]:
    """The run's own model and another: by name, or of one name by the files of their weights.

    `blobnet` and `blobnet-small`; `a/chat` and `b/chat`; `blobnet (new.pt)` and `blobnet (old.pt)`.
    """
    if own.name != other.name:
        return _tails(own.name, other.name)
    name = model_name(own)
    if own.weights == other.weights:
        return f"own {name}", name
    if own.weights is None or other.weights is None:
        files = tuple(PurePath(one).name if one else NO_FILE for one in (own.weights, other.weights))
    else:
        files = _tails(own.weights, other.weights)
    return f"{name} ({files[0]})", f"{name} ({files[1]})"


def _tails(one: str, other: str) -> tuple[str, str]:
    """As few of the last parts of two paths as tell them apart."""
    parts = PurePath(one).parts, PurePath(other).parts
    for count in range(1, max(map(len, parts)) + 1):
        found = tuple(str(PurePath(*part[-count:])) for part in parts)
        if found[0] != found[1]:
            return found[0], found[1]
    return one, other


def free_name(name: str, taken: Iterable[str]) -> str:
    """This one, or else the first of `name 2`, `name 3`, … that is not taken."""
    known = set(taken)
    names = itertools.chain([name], (f"{name} {number}" for number in itertools.count(2)))
    return next(free for free in names if free not in known)


log = logging.getLogger(__name__)

FAR_S = 1.0  # for the server of a remote backend to send its counters


class SessionCounters:
    """The counters of one session. `of_process`: CPU time and memory of this process are counted here, and in no other
    session of the process.

    The counters of a remote backend's server are as fresh as the last `refresh`.
    """

    def __init__(self, backend: Backend, engine: Engine, *, of_process: bool) -> None:
        self.lanes: list[stats.Lane] = []
        self.workers: list[WorkerPool] = []
        self.started = False  # the backend
        self.model = ""  # its name among several of the run; "": it is the only one
        self._backend, self._engine, self._of_process = backend, engine, of_process
        self._warned: set[str] = set()  # of the backend's methods
        self._mark = Snapshot()
        self._far, self._far_mark = Snapshot(), Snapshot()
        self._asking: asyncio.Task[None] | None = None  # the far side

    def lane(self, name: str) -> stats.Lane:
        """A new lane of this name, or of the first free one like it."""
        self.lanes.append(stats.Lane(free_name(name, (lane.name for lane in self.lanes))))
        return self.lanes[-1]

    async def mark(self) -> None:
        """Count from here on, the workers too. The remote server counts from its last `mark_far` on."""
        self._mark = self._counted()
        for workers in self.workers:
            await workers.mark()

    def mark_far(self) -> None:
        self._far_mark = self._far

    def ask(self) -> asyncio.Task[None] | None:
        """Ask the remote server, unless it is being asked already. None where there is none that can be asked."""
        if not (self._backend.remote and self.started):
            return None

        async def ask_far() -> None:
            try:
                wire = await self._backend.stats()
                self._far = self._far if wire is None else Snapshot.from_wire(wire)
            except GpuinferError as error:  # a server that is gone: its requests say so
                log.info("the counters of the remote server are those of before: %s", error)
            except Exception as error:  # noqa: BLE001 (a plugin may raise anything)
                self._warn("stats", error)

        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(ask_far())
        return self._asking

    def snapshot(self, beside: Iterable[tuple[str, Snapshot]]) -> Snapshot:
        """The counters since the mark, of this process and the latest of every worker, lanes of ended ones included.

        With a remote backend: requests, rows, latency and errors as counted here, the rest as counted in its server.
        `beside`: names of other models in the same run, and their counters.
        """
        parts = [own := since(self._counted(), self._mark)]
        for workers in self.workers:
            found = sorted(workers.snapshots.items())
            parts += [_named(f"worker {worker}", part) for worker, part in found]
        parts.append(far := self._far_side())
        if self.model:
            setup = self._backend.setup
            kind = "rows" if setup.model is None else setup.model.kind
            line = stats.of_model(merge_snapshots([own, far]), kind, setup.share)
            parts.append(Snapshot(models={self.model: line}))
        for name, part in beside:  # named as such, its use of the device being counted already
            device = {kept: part.device[kept] for kept in stats.DONE_BY_A_DEVICE if kept in part.device}
            if part.device:
                device["beside"] = {name: part.device.get("model", {})}
            parts.append(replace(_named(f"beside {name}", part), device=device))
        return merge_snapshots(parts)

    def own(self) -> Snapshot:
        """The counters of this model alone, without workers."""
        return merge_snapshots([since(self._counted(), self._mark), self._far_side()])

    def _far_side(self) -> Snapshot:
        far = since(self._far, self._far_mark)
        return far if self._backend.counts_requests else _served(far)

    def _counted(self) -> Snapshot:
        """The counters of this process, since its start."""
        own = Snapshot(lanes=tuple(lane.to_wire() for lane in self.lanes))
        if self._of_process:
            ran, waited = machine.cpu_times()
            own = replace(own, cpu_s=ran, cpu_wait_s=waited, rss_peak_mb=machine.rss_peak_mb())
        if not self.started:
            return own
        served = self._engine.snapshot()
        if self._backend.remote:
            served = merge_snapshots([_asked(served), *self._answered_here()])
        else:
            try:
                served = replace(served, device=dict(self._backend.device()))
            except Exception as error:  # noqa: BLE001 (a plugin may raise anything)
                self._warn("device", error)
        return merge_snapshots([served, own])

    def _answered_here(self) -> list[Snapshot]:
        """What a backend has answered in this process in the place of its far side."""
        try:
            wire = self._backend.counted_here()
            return [] if wire is None else [_served(Snapshot.from_wire(wire))]
        except Exception as error:  # noqa: BLE001 (a plugin may raise anything)
            self._warn("counted_here", error)
            return []

    @property
    def lost(self) -> bool:
        """Whether the backend has died for good."""
        try:
            return self.started and self._backend.lost is not None
        except Exception as error:  # noqa: BLE001 (a plugin may raise anything)
            self._warn("lost", error)
            return False

    def _warn(self, method: str, error: Exception) -> None:
        """Warn once: the error would be the same each time."""
        if method not in self._warned:
            self._warned.add(method)
            blame.warn(self._backend, method, error)

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()


async def refresh(all_of_them: Iterable[SessionCounters]) -> None:
    """Ask the servers of remote backends for their counters. The known ones stay where that takes over a second."""
    if asking := set(filter(None, (one.ask() for one in all_of_them))):
        await asyncio.wait(asking, timeout=FAR_S)


def _named(whose: str, part: Snapshot) -> Snapshot:
    lanes = ({**lane, "name": f"{whose}: {lane['name']}"} for lane in part.lanes)
    return replace(part, lanes=tuple(lanes))


def _asked(engine: Snapshot) -> Snapshot:
    """The counters of an engine that passes requests on, and forms no batches."""
    return Snapshot(
        requests=engine.requests,
        rows=engine.rows,
        latency=engine.latency,
        first_token=engine.first_token,
        between_tokens=engine.between_tokens,
        errors=engine.errors,
        failure=engine.failure,
        classes={name: {**count, "queue_wait": Snapshot().queue_wait} for name, count in engine.classes.items()},
        waiting=engine.waiting,
    )


def _served(far: Snapshot) -> Snapshot:
    """The counters of a server but for those of `_asked`: how many requests it ran again among them."""
    retried = {kind: count for kind, count in far.errors.items() if kind == "retried"}
    none = Snapshot()
    seen: dict[str, Any] = {name: getattr(none, name) for name in ("requests", "rows", "latency")}
    classes = {name: {**count, **seen, "errors": {}} for name, count in far.classes.items()}
    tokens: dict[str, Any] = {name: getattr(none, name) for name in ("first_token", "between_tokens")}
    return replace(far, **seen, **tokens, errors=retried, failure="", classes=classes)
