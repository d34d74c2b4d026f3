"""A workload's session: its way to answers, and the counters of all that it started, its own engine's and its workers'.
Before anything is measured, started or loaded, one bounded preflight question asks the backend whether it can serve
what is wanted.
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
from gpuinfer.api import Backend, Infer, Limits, ModelSpec, Priority, Result, Roofline, Strategy, Stream
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
    """Raise what its `check` raises. One that does not answer in time is named, and left to its start, which is
    watched.

    It is asked in a thread with an event loop of its own, so that one that blocks keeps nobody: neither the caller's
    loop nor the process.
    """
    if type(backend).check is Backend.check:  # which knows of nothing
        return
    answered: Future[None] = Future()
    answered.set_running_or_notify_cancel()  # whoever stops waiting leaves the thread to itself

    def ask() -> None:
        try:
            with blame.calling(backend, "check"):
                asyncio.run(backend.check())
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
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


class Session(Infer):
    """Binds one backend and one strategy to the workload, as an asynchronous context.

    The backend starts with the first request or at `ready`: a workload that asks nothing in this process, because its
    workers do, loads no model here. A remote one starts before the workers do, since they connect to what it starts;
    what its far side has measured is as fresh as the last `refresh`.

    A plugin that holds something for too long is given up: all requests fail, and `on_fault` is called with the error
    that names it, or `on_stuck`, from another thread, when it blocks the event loop. `name` says whose session it is.

    Sessions of other models (`beside`) are inside this one: watched, stopped, counted and closed with it.
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
    ) -> None:
        self.roofline = roofline
        self.stopping = asyncio.Event() if within is None else within.stopping
        self._name, self._within, self._beside = name, within, list[Session]()
        self.called = ""  # what the run's own model is told apart by from those beside it; "": by its path
        self._backend, self._strategy = backend, strategy
        self._recorder = _recorder(backend, strategy)
        patience = Patience.of(backend.setup)
        self._engine = Engine(
            backend, strategy, max_queue_rows=_bound(backend), recorder=self._recorder, patience_s=patience.close_s
        )
        self._on_fault = on_fault
        self.watchdog = Watchdog(patience, self._give_up, on_stuck, name)
        self.watchdog.watch(functools.partial(self._held, patience), backend, strategy)
        self._counting = SessionCounters(backend, self._engine, of_process=within is None)
        self._starting: asyncio.Task[None] | None = None
        self._pauses_short = False
        self._clients = itertools.count()

    @property
    def limits(self) -> Limits:  # type: ignore[override]  # read-only: the backend's own
        return self._backend.limits

    @property
    def has_model(self) -> bool:
        """Whether the backend has been given a model to serve, here or where it is connected to."""
        return self._backend.remote or self._backend.setup.model is not None

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
        for one in self._all():
            one._engine.give_up(error)
        self._on_fault(error)

    def _all(self) -> list[Session]:
        """This one and those beside it."""
        return [self, *self._beside]

    @property
    def alike(self) -> bool:
        """Whether all models here are the same network, whatever their weights: then a row costs the same in each."""
        models = [one._backend.setup.model for one in self._all()]
        return len({model and model.name for model in models}) == 1

    @property
    def asked(self) -> bool:
        """Whether a request is under way, or the backend itself."""
        return any(one._engine.busy or (one._starting is not None and not one._starting.done()) for one in self._all())

    @property
    def serving(self) -> bool:
        """Whether the backend has been given anything that it has not answered."""
        return any(one._started and one._engine.serving for one in self._all())

    @property
    def waiting_rows(self) -> int:
        """The rows that wait in this process."""
        return sum(one._engine.waiting_rows for one in self._all() if one._started)

    @property
    def moved(self) -> int:
        """A number that changes whenever something is cut, computed, answered or given up."""
        return sum(one._engine.moved for one in self._all() if one._started)

    @property
    def longest_s(self) -> float:
        """What the longest batch, or forward step, has taken until now."""
        return max(one._engine.longest_s for one in self._all())

    @property
    def own(self) -> OwnPulse:
        """Its own model's alone, without those beside it."""
        return OwnPulse(self._engine, self._counting)

    async def check(self) -> None:
        """Raises what the backend knows that it cannot serve (`Backend.check`), its own model alone. Starts nothing."""
        await preflight(self._backend)

    async def ready(self) -> Limits:
        if self._starting is None:
            self._starting = asyncio.create_task(self._engine.start(self.roofline))
        await asyncio.shield(self._starting)  # one impatient request does not stop it for the others
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
        """What `Prompt.adapter` may be now."""
        with blame.calling(self._backend, "adapters"):
            return tuple(self._backend.adapters) if self._started else ()

    async def unload(self, adapter: str) -> None:
        """See `Backend.unload`."""
        await self.ready()
        await self._engine.unload(adapter)

    def block(self, rows: int) -> Any:
        with blame.calling(self._backend, "block"):
            return self._backend.block(rows)

    def beside(self, spec: ModelSpec, share: float = 1.0) -> Session:
        known = next((one for one in self._beside if one._backend.setup.model == spec), None)
        return self.open_beside(spec, share=share) if known is None else known

    def open_beside(self, spec: ModelSpec, name: str | None = None, share: float = 1.0) -> Session:
        """`beside`, by this name, and always another one: the same model may be served twice."""
        with blame.calling(self._backend, "beside"):
            backend = self._backend.beside(spec, share)
        strategy = type(self._strategy)(backend.setup, **self._strategy.options.model_dump())
        if name is None and (model := self._backend.setup.model) is not None:
            own, name = distinct_names(model, spec)
            self.called = self.called or (own if own != model_name(model) else "")
        name = free_name(name or model_name(spec), (one._name for one in self._beside))
        one = Session(backend, strategy, name=name, within=self)  # what the report calls its model, and its lanes
        self.watchdog.watch(functools.partial(one._held, Patience.of(backend.setup)), backend, strategy)
        self._beside.append(one)
        one._counting.model = name
        self._counting.model = self._own_name()
        return one

    def _own_name(self) -> str:
        """By which the run's own model is told apart from those beside it."""
        model = self._backend.setup.model
        name = self.called or (model_name(model) if model is not None else type(self._backend).__name__.lower())
        return f"own {name}" if name in {one._name for one in self._beside} else name

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
        if self._backend.remote:
            await self.ready()
        with blame.calling(self._backend, "connect"):
            connectors = [self._backend.connect() for _ in arguments]
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
            )
            for index, given in enumerate(arguments)
        ]

    async def stop(self) -> None:
        """Ask the workload and all its workers to keep what is finished and return."""
        self.stopping.set()
        for workers in [workers for one in self._all() for workers in one._counting.workers]:
            await workers.stop()

    def hurry(self) -> None:
        """Wait for nobody any more: worker processes are killed, and the backend has only a moment to close."""
        for one in self._all():
            one._engine.hurry()
            for workers in one._counting.workers:
                workers.hurry()

    async def mark(self) -> None:
        """Count from here on, in every process and on the far side: what came before was preparation."""
        await self.refresh()
        for one in self._all():
            one._counting.mark_far()
        await self.count_anew()

    async def count_anew(self) -> None:
        """`mark` without a question to the far side, which several processes share: only one of them asks it."""
        for one in self._all():
            await one._counting.mark()

    async def refresh(self) -> None:
        """Ask a remote backend what its far side has measured. What was known stays when it takes over a second."""
        await session_counters.refresh(one._counting for one in self._all())

    def watch(self, kind: type) -> None:
        self.watchdog.watch(tuple, kind)

    async def counted(self) -> Mapping[str, Any]:
        await self.refresh()
        return self.snapshot().to_wire()

    def snapshot(self) -> Snapshot:
        """The counters since the mark: see `Counting.snapshot`."""
        return self._counting.snapshot((one._name, one.snapshot()) for one in self._beside)

    async def close(self) -> None:
        """Settle every request and let go of the backend, and of those beside it before."""
        try:
            for one in self._beside:
                await one.close()
        finally:
            await self._close()

    async def _close(self) -> None:
        self._counting.close()
        if self._starting is None:
            return
        self._starting.cancel()  # no effect once it has started
        await asyncio.wait({self._starting})
        if self._starting.cancelled() or self._starting.exception() is not None:
            return  # the engine has closed the backend already
        try:
            await self._engine.close(drain=False)
        finally:
            if self._pauses_short:
                self._pauses_short = False
                process.restore_collector()
            if self._recorder is not None:
                self._recorder.close()


class OwnPulse:
    """One engine of several: what `Session` tells of all of them together."""

    def __init__(self, engine: Engine, counting: SessionCounters) -> None:
        self._engine, self._counting = engine, counting

    @property
    def serving(self) -> bool:
        return self._counting.started and self._engine.serving

    @property
    def waiting_rows(self) -> int:
        return self._engine.waiting_rows if self._counting.started else 0

    @property
    def moved(self) -> int:
        return self._engine.moved if self._counting.started else 0

    @property
    def longest_s(self) -> float:
        return self._engine.longest_s

    @property
    def lost(self) -> bool:
        return self._counting.lost

    def snapshot(self) -> Snapshot:
        return self._counting.own()


def _recorder(backend: Backend, strategy: Strategy) -> Recorder | None:
    """None also where batches are formed on the far side, which records them."""
    return None if backend.remote else Recorder.of(backend.setup, None, type(strategy).__name__.lower())


def _bound(backend: Backend) -> int | None:
    """How many rows may wait here. Of a remote backend they wait over there."""
    return None if backend.remote else backend.setup.max_queue_rows
