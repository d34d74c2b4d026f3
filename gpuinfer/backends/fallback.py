"""`--fallback`: a remote backend whose server is gone for good is replaced by a backend in this very process.

The wrapper passes requests on to the remote backend. The first that fails with `BackendDied` makes it open the other
backend, with the same model, weights and options: requests that have no answer are submitted there, to an engine with
the run's strategy, and so are all later ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpuinfer.api import (
    Backend,
    BackendContext,
    Connector,
    Event,
    ModelSpec,
    Request,
    Result,
    Setup,
    Strategy,
    TextRoofline,
)
from gpuinfer.central.protocol import WeightsChange, changes_to_replay
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendDied, Closed, GpuinferError, UsageError
from gpuinfer.generation import Part
from gpuinfer.host import error_text
from gpuinfer.stats import Snapshot
from gpuinfer.text.answer_frames import DeliveredAnswer

log = logging.getLogger(__name__)
MOST_WAITING = 1 << 20  # rows: the workload was promised no bound here, the server's queue had one
OF_A_SERVER = ("threads", "in_flight")  # options of the shared server, which a local backend does not take over


@dataclass(frozen=True)
class LocalPlan:
    """How the backend that goes on is made in any process of the run. Picklable."""

    name: str  # as --fallback names it
    kind: type[Backend]
    setup: Setup
    options: Mapping[str, Any]
    weights: str = ""  # `weights_identity` when the run began
    changes: tuple[WeightsChange, ...] = ()  # of the weights, until a worker process was started

    def make(self) -> Backend:
        """Raises `BackendDied` when the model's files are others than at the start."""
        if (spec := self.setup.model) is not None and weights_identity(spec) != self.weights:
            raise BackendDied(
                f"the weights of '{spec.name}' have changed since the run began, and answers of others must not be "
                "mixed with its own. Put the old ones back, or start another run."
            )
        return self.kind(self.setup, **self.options)


def weights_identity(spec: ModelSpec) -> str:
    """What tells one version of a model's weights from another: SHA-256 of a file of weights, of a folder that of its
    files' names, sizes and times. "" of a model without files.
    """
    digest, found = hashlib.sha256(), False
    for path in (Path(name) for name in (spec.weights, spec.name) if name is not None):
        if path.is_file():
            found = True
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        elif path.is_dir():
            for one in sorted(path.iterdir()):
                if one.is_file():
                    found, state = True, one.stat()
                    digest.update(f"{one.name}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest() if found else ""


def with_fallback(primary: Backend, called: str, name: str, kind: type[Backend], options: Mapping[str, Any]) -> Backend:
    """`primary`, and a backend of `kind` that takes its place when its server is lost. `called` and `name` are the
    names of the two, `options` those that the settings hold for `kind`. Raises `UsageError` for a pair that cannot be.
    """
    spec = primary.setup.model
    if not primary.remote:
        raise UsageError(
            f"--fallback {name}: the backend '{called}' computes in the run's own processes, so there is no server to "
            "lose. Leave --fallback out, or choose --backend central."
        )
    if kind.remote:
        raise UsageError(
            f"--fallback {name}: this backend is a way to a server too, which may be gone as well. "
            "Name one that computes here: --fallback inprocess."
        )
    if spec is None:
        raise UsageError(f"--fallback {name}: this workload has no model to go on with. Leave it out.")
    if spec.kind not in kind.serves:
        raise UsageError(
            f"--fallback {name}: it serves models of {' and '.join(kind.serves)}, and this one is of {spec.kind}. "
            "Use --fallback inprocess."
        )
    shared = {
        option: getattr(primary.options, option)
        for option in primary.options.model_fields_set
        if option in kind.Options.model_fields and option not in OF_A_SERVER
    }
    plan = LocalPlan(name, kind, primary.setup, {**options, **shared})
    kind(plan.setup, **plan.options)  # refuses now what it would refuse then
    return FallbackBackend(primary, plan)


class FallbackBackend(Backend):
    """A remote backend, and one in this process once that is lost."""

    remote = True

    def __init__(self, primary: Backend, plan: LocalPlan, *, connected: bool = False) -> None:
        """`connected`: in a worker process. A server that is gone before such a one has connected is replaced too; one
        that has never served is not.
        """
        self.setup, self.options = primary.setup, primary.options
        self.serves, self.several_devices = type(primary).serves, type(primary).several_devices  # type: ignore[misc]
        self.limits = primary.limits
        self._primary, self._plan, self._connected = primary, plan, connected
        self._context = BackendContext()
        self._cause: BackendDied | None = None  # why the far side is gone
        self._failed: BackendDied | None = None  # why there is no other either
        self._opening: asyncio.Task[Engine] | None = None
        self._engine: Engine | None = None  # over the backend of this process, once it serves
        self._changes: list[WeightsChange] = list(plan.changes)
        self._at_start: tuple[str, ...] = ()
        self._clients: set[Hashable] = set()
        self._under_way: dict[Request, asyncio.Task[Event]] = {}  # submitted in this process
        self._resubmitted = 0  # requests that the server had been sent and never answered

    @property
    def acts_for(self) -> type[Backend]:
        """The backend that answers now, which messages name."""
        return type(self._primary) if self._cause is None else self._plan.kind

    # The remote backend, as long as it serves

    @property
    def notices(self) -> Sequence[str]:  # type: ignore[override]
        return self._primary.notices

    @property
    def compute(self) -> str:
        return self._primary.compute

    @property
    def arithmetic(self) -> str:
        return self._primary.arithmetic

    async def check(self) -> None:
        await self._primary.check()

    async def start(self, context: BackendContext) -> None:
        self._context = context
        if not self._connected:
            plan, spec = self._plan, self.setup.model
            identity = "" if spec is None else await asyncio.to_thread(weights_identity, spec)
            self._plan = replace(plan, weights=identity)
        try:
            await self._primary.start(context)
        except BackendDied as error:
            if not self._connected:
                raise
            self.limits = (await self._local(error)).limits
            return
        self.limits = self._primary.limits
        self._at_start = tuple(self._primary.adapters)

    def connect(self) -> Connector:
        return FallbackConnector(self._primary.connect(), replace(self._plan, changes=tuple(self._changes)))

    def beside(self, spec: ModelSpec, share: float = 1.0) -> Backend:
        plan = self._plan
        options = {name: value for name, value in plan.options.items() if name != "adapters"}
        other = replace(plan, setup=replace(plan.setup, model=spec, share=share), options=options, changes=())
        return FallbackBackend(self._primary.beside(spec, share), other)

    def block(self, rows: int) -> Any:
        return None if self._cause is not None else self._primary.block(rows)

    async def stats(self) -> Mapping[str, Any] | None:
        return await self._primary.stats()

    def device(self) -> Mapping[str, Any]:
        return self._primary.device()

    async def measure(self, rows: int, seconds: float) -> TextRoofline | None:
        return await self._primary.measure(rows, seconds)

    def waits_for(self) -> str:
        if self._cause is None:
            return self._primary.waits_for()
        return "its own start in this process, as the server is gone" if self._engine is None else ""

    # Requests

    @property
    def streams(self) -> bool:
        return True

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        answers = {event.request: event.error or event.value async for event in self.stream(batch) if event.last}
        return [answers[request] for request in batch]

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Each answer as it comes, from the far side or from here."""
        delivered = {request: DeliveredAnswer(request.payload) for request in batch if request.parts}
        left = dict.fromkeys(batch)
        if self._cause is None:
            try:
                async with aclosing(self._primary.stream(batch)) as events:  # type: ignore[type-var]
                    async for event in events:
                        if isinstance(event.error, BackendDied):
                            self._lose(event.error)
                            continue
                        if event.last:
                            left.pop(event.request, None)
                        elif isinstance(event.value, Part) and event.request in delivered:
                            delivered[event.request].fresh(event.value)
                        yield event
            except BackendDied as error:
                self._lose(error)
            self._resubmitted += len(left)
        if left:
            async for event in self._stream_here(tuple(left), delivered):
                yield event

    def cancel(self, request: Request) -> None:
        if (task := self._under_way.get(request)) is not None:
            task.cancel()
        self._primary.cancel(request)

    async def _stream_here(
        self, batch: Sequence[Request], delivered: Mapping[Request, DeliveredAnswer]
    ) -> AsyncIterator[Event]:
        events: asyncio.Queue[Event] = asyncio.Queue()

        def ended(request: Request, task: asyncio.Task[Event]) -> None:
            events.put_nowait(Event(request, error=_cancelled()) if task.cancelled() else task.result())

        tasks = {
            request: asyncio.ensure_future(self._submit_here(request, delivered.get(request), events))
            for request in batch
        }
        for request, task in tasks.items():
            task.add_done_callback(partial(ended, request))
        self._under_way |= tasks
        try:
            left = len(batch)
            while left:
                event = await events.get()
                left -= event.last
                yield event
        finally:
            for request, task in tasks.items():
                task.cancel()
                self._under_way.pop(request, None)

    async def _submit_here(self, request: Request, had: DeliveredAnswer | None, events: asyncio.Queue[Event]) -> Event:
        """One request from here to its last event, which is returned; cancelling the task cancels the request."""

        def passed_on(part: Part) -> None:
            if had is None or had.fresh(part) is not None:
                events.put_nowait(Event(request, part, last=False))

        try:
            engine = await self._local(self._cause)
            if (client := request.client) is not None and client not in self._clients:
                self._clients.add(client)
                engine.join(client)
            value = await engine.submit(
                request.payload if had is None else had.rest(),
                rows=request.rows,
                priority=request.priority,
                timeout=request.deadline - time.monotonic(),
                group=request.group,
                client=client,
                on_part=passed_on if request.parts else None,
            )
        except Exception as error:  # noqa: BLE001 (whatever it is, no request may wait for ever)
            return Event(request, error=error)
        return Event(request, value)

    # The backend of this process

    def _lose(self, cause: BackendDied) -> None:
        if self._cause is None:
            self._cause = cause
            log.info("%s", self._notice())  # the run itself warns once, for all its processes: `Snapshot.fallback`

    def _notice(self) -> str:
        return (
            f"the server is gone ({str(self._cause).partition('. ')[0].rstrip('.')}): the run goes on in its own "
            f"processes with the backend '{self._plan.name}', as --fallback says, with the same model and weights."
        )

    async def _local(self, cause: BackendDied | None) -> Engine:
        """The engine over the backend of this process, opened when first needed. Raises `BackendDied`."""
        if self._cause is None and cause is not None:
            self._lose(cause)
        if self._failed is not None:
            raise self._failed
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Engine:
        engine: Engine | None = None
        try:
            backend = await asyncio.to_thread(self._plan.make)
            engine = Engine(backend, self._strategy(), max_queue_rows=MOST_WAITING)
            await engine.start(self._context.roofline)
            for change in self._changes:
                await _apply(engine, change)
        except BaseException as error:
            if engine is not None:
                await engine.close(drain=False)
            if not isinstance(error, Exception):
                raise
            why = str(error) if isinstance(error, GpuinferError) else error_text.short_message(error)
            self._failed = BackendDied(f"{self._cause}\n--fallback {self._plan.name} cannot take its place: {why}")
            raise self._failed from error
        self._engine = engine
        return engine

    def _strategy(self) -> Strategy:
        if (strategy := self._context.strategy) is None:
            raise UsageError("a fallback forms batches itself. Give start() a context with a strategy.")
        return type(strategy)(strategy.setup, **strategy.options.model_dump())

    def counted_here(self) -> Mapping[str, Any] | None:
        if self._cause is None:
            return None
        counted = Snapshot() if self._engine is None else self._engine.snapshot()
        line = {
            "why": str(self._cause),
            "said": self._notice(),
            "processes": 1,
            "requests": counted.requests,
            "rows": counted.rows,
            "batches": sum(counted.batches.values()),
        }
        device = {} if self._engine is None else dict(self._engine.backend.device())
        errors = {"retried": self._resubmitted}
        return replace(counted, fallback={self._plan.name: line}, errors=errors, device=device).to_wire()

    @property
    def lost(self) -> BackendDied | None:
        if self._cause is None:
            return None
        return self._failed or (None if self._engine is None else self._engine.backend.lost)

    # Weights

    @property
    def updates(self) -> bool:
        return self._primary.updates

    @property
    def adapters(self) -> Sequence[str]:
        return self._primary.adapters if self._engine is None else self._engine.backend.adapters

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        await self._change(WeightsChange(version=version, weights=weights, adapter=adapter, drain=drain))

    async def unload(self, adapter: str) -> None:
        await self._change(WeightsChange(adapter=adapter))

    async def _change(self, change: WeightsChange) -> None:
        if self._cause is None:
            try:
                await _apply(self._primary, change)
            except BackendDied as error:
                self._lose(error)
        if self._cause is not None:
            await _apply(await self._local(self._cause), change)
        self._changes = changes_to_replay(self._changes, change, self._at_start)

    async def close(self) -> None:
        if (opening := self._opening) is not None:
            if not opening.done():
                opening.cancel()
                await asyncio.wait({opening})
            if not opening.cancelled() and opening.exception() is None:
                await opening.result().close(drain=False)
        await self._primary.close()


def _cancelled() -> Closed:
    return Closed("this request was cancelled.")


async def _apply(serving: Backend | Engine, change: WeightsChange) -> None:
    if change.weights is None:
        await serving.unload(change.adapter or "")
    else:
        await serving.update(change.version, change.weights, adapter=change.adapter, drain=change.drain)


@dataclass(frozen=True)
class FallbackConnector:
    """A worker process's way in: to the server, and from it."""

    primary: Connector
    plan: LocalPlan

    def open(self) -> Backend:
        return FallbackBackend(self.primary.open(), self.plan, connected=True)
