"""A workload's session: it answers requests, and adds up the counters of its engine and of its worker processes.

Before anything is measured, started or loaded, `preflight` asks the backend whether it can serve what is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from gpuinfer import stats
from gpuinfer.api import (
    Backend,
    Connector,
    Infer,
    Limits,
    ModelSpec,
    Priority,
    Result,
    Roofline,
    Setup,
    Strategy,
    Stream,
)
from gpuinfer.config import blame
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.results import OnPart
from gpuinfer.engine.stream import PartStream
from gpuinfer.engine.trace_recorder import Recorder
from gpuinfer.engine.watchdog import Held, Patience, Watchdog
from gpuinfer.errors import WorkError
from gpuinfer.host import process
from gpuinfer.runtime import session_counters
from gpuinfer.runtime.session_counters import SessionCounters, distinct_names, free_name, model_name
from gpuinfer.runtime.worker_pool import WorkerJob, WorkerPool
from gpuinfer.stats import Snapshot

log = logging.getLogger(__name__)

ANSWER_S = 60.0


async def preflight(backend: Backend) -> None:
    """Raise what the backend's `check` raises. When it does not answer within `ANSWER_S`, a warning names it, and the
    backend is started all the same, which the watchdog watches.

    `check` runs in a thread with an event loop of its own: one that blocks holds up neither this loop nor the process.
    """
    if type(backend).check is Backend.check:  # which refuses nothing
        return
    answered: Future[None] = Future()
    answered.set_running_or_notify_cancel()  # a caller that stops waiting leaves the thread running

    def ask() -> None:
        try:
            with blame.blaming(backend, "check"):
                asyncio.run(backend.check())
        except BaseException as error:  # noqa: BLE001 (raised by the waiting caller)
            answered.set_exception(error)
        else:
            answered.set_result(None)

    threading.Thread(target=ask, name="gpuinfer check", daemon=True).start()
    try:
        await asyncio.wait_for(asyncio.wrap_future(answered), ANSWER_S)
    except TimeoutError:  # ours: what a plugin raises is a `WorkError` that names it
        log.warning(
            "%s has not said within %g s whether it can serve this, and is started all the same.",
            blame.who(backend),
            ANSWER_S,
        )


class Pulse:
    """What the engines of some sessions are doing."""

    _sessions: list[Session]

    @property
    def serving(self) -> bool:
        """Whether a backend has requests that it has not answered."""
        return any(one._started and one._engine.serving for one in self._sessions)

    @property
    def waiting_rows(self) -> int:
        """The rows that wait in this process."""
        return sum(one._engine.waiting_rows for one in self._sessions if one._started)

    @property
    def room(self) -> int:
        """The rows that are computed at once: slots, or as many batches as there may be, each as large as it may be."""
        limits = [one._backend.limits for one in self._sessions if one._started]
        return sum(one.slots if one.slots is not None else one.max_rows * one.in_flight for one in limits)

    @property
    def moved(self) -> int:
        """A number that changes whenever a batch is cut or computed, or a request answered or given up."""
        return sum(one._engine.moved for one in self._sessions if one._started)

    @property
    def longest_s(self) -> float:
        """Seconds of the longest batch, or forward step, until now."""
        return max(one._engine.longest_s for one in self._sessions)


class OwnPulse(Pulse):
    """Of one session, without the others."""

    def __init__(self, session: Session) -> None:
        self._sessions = [session]

    @property
    def lost(self) -> bool:
        return self._sessions[0]._counting.lost

    def snapshot(self) -> Snapshot:
        return self._sessions[0]._counting.own()


class Session(Infer, Pulse):
    """Binds one backend and one strategy to the workload, as an asynchronous context.

    The backend starts with the first request or at `ready`: when only worker processes make requests, no model is
    loaded here. A remote backend starts before the workers, which connect to its server; the server's counters are as
    fresh as the last `refresh`.

    A plugin that holds a request for too long is given up: all requests fail, and `on_fault` is called with the error
    that names the plugin, or `on_stuck`, from another thread, when it blocks the event loop. `name` is the session's in
    errors and reports.

    Sessions of other models (`beside`) are watched, stopped, counted and closed with this one. `connectors`: in a
    worker process, those to the servers of other models.
    """

    def __init__(
        self,
        backend: Backend,
        strategy: Strategy,
        *,
        roofline: Roofline | None = None,
        on_fault: Callable[[WorkError], None] = lambda error: None,
        on_stuck: Callable[[WorkError], None] = lambda error: None,
        name: str = "",
        within: Session | None = None,
        connectors: Sequence[tuple[ModelSpec, Connector]] = (),
    ) -> None:
        self.roofline = roofline
        self.stopping = asyncio.Event() if within is None else within.stopping
        self._name, self._within, self._connectors = name, within, connectors
        self._sessions = [self]  # and those of other models
        self.called = ""  # what the run's own model is told apart by from the others; "": by its path
        self._backend, self._strategy = backend, strategy
        self._recorder = None  # of a remote backend: its server forms the batches, and records them
        if not backend.remote:
            self._recorder = Recorder.of(backend.setup, None, type(strategy).__name__.lower())
        patience = Patience.of(backend.setup)
        most = None if backend.remote else backend.setup.max_queue_rows  # the rows of a remote one wait in its server
        self._engine = Engine(
            backend, strategy, max_queue_rows=most, recorder=self._recorder, patience_s=patience.close_s
        )
        self._on_fault = on_fault
        self.watchdog = Watchdog(patience, self._give_up, on_stuck, name)
        self.watchdog.watch(functools.partial(self._held, patience), backend, strategy)
        self._counting = SessionCounters(backend, self._engine, of_process=within is None)
        self.own = OwnPulse(self)
        self._starting: asyncio.Task[None] | None = None
        self._pauses_short = False
        self._clients = itertools.count()

    @property
    def limits(self) -> Limits:  # type: ignore[override]  # read-only: the backend's own
        return self._backend.limits

    @property
    def remote(self) -> bool:
        """Whether batches are formed elsewhere."""
        return self._backend.remote

    @property
    def setup(self) -> Setup:
        """The setup of its backend."""
        return self._backend.setup

    @property
    def engine(self) -> Engine:
        """Its queue, for programs that wait for answers in other threads."""
        return self._engine

    @property
    def has_model(self) -> bool:
        """Whether the backend has been given a model to serve, here or where it is connected to."""
        return self._backend.remote or self._backend.setup.model is not None

    @property
    def arithmetic(self) -> str:
        return self._backend.arithmetic

    @property
    def _started(self) -> bool:
        return self._counting.started

    async def __aenter__(self) -> Session:
        self.watchdog.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.close()
        finally:
            self.watchdog.stop()

    def _held(self, patience: Patience) -> Sequence[Held]:
        held = list(self._engine.held(patience))
        return held if self._within is None else [replace(one, key=(self._name, one.key)) for one in held]

    def _give_up(self, error: WorkError) -> None:
        for one in self._sessions:
            one._engine.give_up(error)
        self._on_fault(error)

    @property
    def alike(self) -> bool:
        """Whether all models are the same network, with any weights: then a row costs the same in each."""
        models = [one._backend.setup.model for one in self._sessions]
        return len({model and model.name for model in models}) == 1

    @property
    def asked(self) -> bool:
        """Whether a request, or the start of a backend, is under way."""
        return any(
            one._engine.busy or (one._starting is not None and not one._starting.done()) for one in self._sessions
        )

    async def check(self) -> None:
        """`preflight` of its own model. Starts nothing."""
        await preflight(self._backend)

    async def ready(self) -> Limits:
        if self._starting is None:
            self._starting = asyncio.create_task(self._engine.start(self.roofline))
        await asyncio.shield(self._starting)  # one cancelled request does not stop the start for the others
        if not self._started:
            self._counting.started = self._pauses_short = True
            process.shorten_collections()
            if self._recorder is not None:
                self._recorder.limits = self.limits
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

    def stream(
        self,
        payload: Any,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        timeout: float = math.inf,
        group: Hashable = None,
        client: Hashable = None,
    ) -> Stream:
        async def ask(on_part: OnPart) -> Result:
            if not self._started:
                await self.ready()
            return await self._engine.submit(
                payload, rows=rows, priority=priority, timeout=timeout, group=group, client=client, on_part=on_part
            )

        return PartStream(ask)

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        await self.ready()
        await self._engine.update(version, weights, adapter=adapter, drain=drain)

    @property
    def adapters(self) -> Sequence[str]:
        """The names that `Prompt.adapter` may have now."""
        with blame.blaming(self._backend, "adapters"):
            return tuple(self._backend.adapters) if self._started else ()

    async def unload(self, adapter: str) -> None:
        await self.ready()
        await self._engine.unload(adapter)

    async def free_memory(self) -> Mapping[str, int]:
        """See `Backend.free_memory`."""
        await self.ready()
        found: Mapping[str, int] = await self._engine.free_memory()
        return found

    def block(self, rows: int) -> Any:
        with blame.blaming(self._backend, "block"):
            return self._backend.block(rows)

    def beside(self, spec: ModelSpec, share: float = 1.0, name: str | None = None) -> Session:
        known = next((one for one in self._sessions[1:] if one._backend.setup.model == spec), None)
        return self.open_beside(spec, name, share) if known is None else known

    def open_beside(self, spec: ModelSpec, name: str | None = None, share: float = 1.0) -> Session:
        """`beside`, by this name, and always a new session: the same model may be served twice."""
        connector = next((one for model, one in self._connectors if model == spec), None)
        with blame.blaming(self._backend, "beside"):
            backend = self._backend.beside(spec, share) if connector is None else connector.open()
        strategy = type(self._strategy)(backend.setup, **self._strategy.options.model_dump())
        if name is None and (model := self._backend.setup.model) is not None:
            own, name = distinct_names(model, spec)
            self.called = self.called or (own if own != model_name(model) else "")
        name = free_name(name or model_name(spec), (one._name for one in self._sessions[1:]))
        one = Session(backend, strategy, name=name, within=self)  # what the report calls its model, and its lanes
        self.watchdog.watch(functools.partial(one._held, Patience.of(backend.setup)), backend, strategy)
        self._sessions.append(one)
        one._counting.model = name
        model = self._backend.setup.model
        mine = self.called or (model_name(model) if model is not None else type(self._backend).__name__.lower())
        taken = mine in {one._name for one in self._sessions[1:]}
        self._counting.model = f"own {mine}" if taken else mine  # the run's own model beside the others
        return one

    @contextlib.contextmanager
    def client(self) -> Iterator[Hashable]:
        me = f"{os.getpid()}.{next(self._clients)}"  # text: it may travel
        self._engine.join(me)
        try:
            yield me
        finally:
            self._engine.leave(me)

    def lane(self, name: str) -> stats.Lane:
        return self._counting.lane(name)

    def workers(self, target: str, arguments: Sequence[Mapping[str, Any]]) -> WorkerPool:
        made = WorkerPool(functools.partial(self._jobs, target, arguments))
        self._counting.workers.append(made)
        return made

    async def _jobs(self, target: str, arguments: Sequence[Mapping[str, Any]]) -> list[WorkerJob]:
        servers = [one for one in self._sessions if one.remote]
        for one in servers:
            await one.ready()
        with blame.blaming(self._backend, "connect"):
            connectors = [self._backend.connect() for _ in arguments]
            others = [
                [(one.setup.model, one._backend.connect()) for one in servers if one is not self and one.setup.model]
                for _ in arguments
            ]
        return [
            WorkerJob(
                index=index,
                target=target,
                arguments=given,
                connector=connectors[index],
                strategy=type(self._strategy),
                setup=self._strategy.setup,
                options=self._strategy.options.model_dump(),
                roofline=self.roofline,
                other_models=others[index],
            )
            for index, given in enumerate(arguments)
        ]

    async def stop(self) -> None:
        """Ask the workload and all its workers to keep what is finished and return."""
        self.stopping.set()
        for workers in [workers for one in self._sessions for workers in one._counting.workers]:
            await workers.stop()

    def hurry(self) -> None:
        """Stop without waiting: worker processes are killed, and the backend has only a moment to close."""
        for one in self._sessions:
            one._engine.hurry()
            for workers in one._counting.workers:
                workers.hurry()

    async def mark(self) -> None:
        """Count from here on, in every process and in a remote backend's server: what came before was preparation."""
        await self.refresh()
        for one in self._sessions:
            one._counting.mark_far()
        await self.count_anew()

    async def count_anew(self) -> None:
        """`mark` without the remote server, which several processes share: only one of them asks it."""
        for one in self._sessions:
            await one._counting.mark()

    async def refresh(self) -> None:
        """Ask a remote backend for its server's counters. The known ones stay when that takes over a second."""
        await session_counters.refresh(one._counting for one in self._sessions)

    def watch(self, kind: type) -> None:
        self.watchdog.watch(tuple, kind)

    async def counted(self) -> Mapping[str, Any]:
        await self.refresh()
        return self.snapshot().to_wire()

    def snapshot(self) -> Snapshot:
        """The counters since the mark: see `SessionCounters.snapshot`."""
        return self._counting.snapshot((one._name, one.snapshot()) for one in self._sessions[1:])

    async def close(self) -> None:
        """Settle every request and close the backend, after those of the sessions beside it."""
        try:
            for one in self._sessions[1:]:
                await one.close()
        finally:
            self._counting.close()
            if self._starting is not None:
                self._starting.cancel()  # no effect once it has started
                await asyncio.wait({self._starting})
                # else the engine has closed the backend already
                if not self._starting.cancelled() and self._starting.exception() is None:
                    try:
                        await self._engine.close(drain=False)
                    finally:
                        if self._pauses_short:
                            self._pauses_short = False
                            process.restore_collector()
                        if self._recorder is not None:
                            self._recorder.close()
