"""The life of one replica: listen, load the models, serve, and drain when a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gpuinfer.api import Backend, Strategy
from gpuinfer.config.setup_file import AdditionalModel, ServerSetup
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import machine, signals
from gpuinfer.host.files import write_whole
from gpuinfer.http.access import LOOPBACK, Access, Keys, ReloadableFile, reload_changed_files
from gpuinfer.http.network import Certificate
from gpuinfer.http.parser import HttpLimits, limit_notice
from gpuinfer.http.route_table import RouteTable
from gpuinfer.http.server import HttpServer
from gpuinfer.runtime.session import Session
from gpuinfer.serving import health
from gpuinfer.serving.monitoring.metrics import Floor
from gpuinfer.serving.routes import replica_families, replica_routes
from gpuinfer.serving.serve_options import HERE
from gpuinfer.serving.service import ModelService, ServedModels
from gpuinfer.serving.telemetry.telemetry import NO_TELEMETRY, Telemetry

log = logging.getLogger(__name__)

DONE, FAILED, PARTIAL = 0, 1, 3  # exit codes
LAST_S = 5.0  # for the last bytes of responses to reach their clients
SWITCH_S = 5e-4
"""How long one thread of Python may keep others from running. The model's thread needs the GIL after each product, and
the loop's is always busy: with Python's own 5 ms a forward of 9 ms takes 74 to 230 beside a busy thread, with this
18 to 37."""
LOOK_S = 0.02  # between two checks whether all is answered, while draining


@dataclass(frozen=True)
class ListenOptions:
    """Where a replica listens and who may ask it."""

    host: str = "127.0.0.1"
    port: int = 0
    api: Keys | None = None
    admin: Keys | None = None
    hosts: frozenset[str] = frozenset()  # more names that clients may use
    origins: frozenset[str] = frozenset()  # whose pages may send requests, beside its own
    tls: Certificate | None = None
    behind_router: bool = False
    ready_file: Path | None = None
    drain_s: float = 30.0
    limits: HttpLimits = field(default_factory=HttpLimits)

    def access(self) -> Access:
        """On loopback only its own names are allowed; behind a router all, since the router checks them."""
        checked = (self.host in HERE or self.hosts) and not self.behind_router
        hosts = LOOPBACK | self.hosts | {self.host} if checked else None
        return Access(self.api, self.admin, hosts, self.origins)

    def files(self) -> list[ReloadableFile]:
        """Files that are read again when they change."""
        found: list[ReloadableFile] = [*self.access().files]
        return found if self.tls is None else [*found, self.tls]


OnReady = Callable[[str, int], None]
"""Told once the server is ready: its address and port."""


class ReplicaServer:
    """One model behind HTTP, or several. Made and run on one event loop."""

    def __init__(
        self,
        described: ServerSetup,
        backend: Backend,
        strategy: Strategy,
        place: ListenOptions,
        telemetry: Telemetry = NO_TELEMETRY,
    ) -> None:
        if described.setup.model is None:
            raise UsageError("a server without a model has nothing to serve. Give it one.")
        self._place, self._telemetry, self._described = place, telemetry, described
        self.session = Session(backend, strategy, on_fault=self._on_failure, on_stuck=self._on_stuck)
        if described.beside:
            self.session.called = described.name
        first = AdditionalModel(name=described.name, model=described.setup.model, unmasking=described.unmasking)
        sessions = [self.session]
        sessions += [self.session.open_beside(one.model, one.name, one.share) for one in described.beside]
        models = (first, *described.beside)
        self.served = ServedModels(
            [
                ModelService(
                    session,
                    health.ReplicaHealth(session.own, one.name, one.model.kind),
                    one.model,
                    unmasking=one.unmasking,
                    tool_format=described.tool_format,
                    reasoning=described.reasoning,
                    behind_router=place.behind_router,
                    spans=telemetry.spans,
                    aliases=described.aliases if one is first else (),
                )
                for one, session in zip(models, sessions, strict=True)
            ]
        )
        self._loop = asyncio.get_running_loop()
        self.stop = asyncio.Event()  # a signal has come
        self._at_once = asyncio.Event()  # a second one
        self._failure: WorkError | None = None

    async def run(self, on_ready: OnReady = lambda host, port: None) -> int:
        """Serve until a signal comes, or the model is gone. The exit code: 3 where something was broken off.

        Raises `UsageError` for an address that cannot be had and for a model that cannot be loaded, and `WorkError`
        once its backend was given up.
        """
        paths = RouteTable(replica_routes(self.served), self._place.access())
        limits = self._place.limits.within(machine.descriptors())
        if limits.connections < self._place.limits.connections:
            log.warning("%s", limit_notice(self._place.limits.connections, limits.connections))
        server = HttpServer(paths, limits, quick=paths.quick, behind_router=self._place.behind_router)
        self.served.http_counts = lambda: server.counts
        port = await server.listen(self._place.host, self._place.port, tls=self._place.tls)
        fresh = asyncio.create_task(reload_changed_files(self._place.files()))
        looking = asyncio.create_task(self._watch())
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            with signals.handled(self._on_signal, self._stop_now, self._kill):
                async with self.session:
                    try:
                        return await self._serve(server, port, on_ready)
                    finally:
                        await server.close()
                        await asyncio.to_thread(self._telemetry.close)
        finally:
            sys.setswitchinterval(before)
            for task in (looking, fresh):
                task.cancel()
            await asyncio.wait({looking, fresh})
            if self._place.ready_file is not None:
                self._place.ready_file.unlink(missing_ok=True)

    async def _serve(self, server: HttpServer, port: int, on_ready: OnReady) -> int:
        loading, stopped = asyncio.create_task(self._load()), asyncio.create_task(self.stop.wait())
        await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not loading.done():
            loading.cancel()
            await asyncio.wait({loading}, timeout=1.0)
            return DONE
        loading.result()
        self.served.become("ready")
        if self._place.ready_file is not None:
            told = {"host": self._place.host, "port": port, "pid": os.getpid()}
            write_whole(self._place.ready_file, msgspec.json.encode(told))
        on_ready(self._place.host, port)
        if self._telemetry.metrics is not None:
            floor: Floor = {}
            self._telemetry.metrics.start(lambda: replica_families(self.served, floor))
        await self.stop.wait()
        if self._failure is not None:
            raise self._failure
        return await self._drain(server)

    async def _load(self) -> None:
        """Check all models first; then load them one after the other, so that none finds memory free that another is
        about to take.
        """
        for one in self.served.services:
            with self._described.naming(one.name):
                await one.session.check()
        for one in self.served.services:
            with self._described.naming(one.name):
                await one.session.ready()
                await one.session.refresh()
                one.model = one.session.snapshot().device.get("model") or {}

    async def _drain(self, server: HttpServer) -> int:
        """Finish the requests under way. New ones are refused, and /health says so, until the end."""
        self.served.become("draining")
        for end in self.served.at_drain:
            end()
        until = time.monotonic() + self._place.drain_s
        while self.served.in_flight and time.monotonic() < until and not self._at_once.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._at_once.wait(), LOOK_S)
        left = self.served.in_flight
        if left:
            self.session.hurry()
            log.warning("%d %s broken off.", left, "request was" if left == 1 else "requests were")
        elif not self._at_once.is_set():
            await server.drain(LAST_S)
        return PARTIAL if left else DONE

    async def _watch(self) -> None:
        """Check the models' health four times a second, log a model's death once, and keep counters."""
        services, logged = self.served.services, set[str]()
        while True:
            for one in services:
                one.health.look_once()
            dead = {one.name for one in services if one.health.dead}
            for name in sorted(dead - logged) if self._failure is None else ():
                left = [one for one in self.served.names if one not in dead]
                others = f"{', '.join(left)} {'goes' if len(left) == 1 else 'go'} on. " if left else ""
                what = "the model %s is gone, and its requests are refused. %sStart the server again to have it back."
                log.error(what, name, others)
                logged.add(name)
            now = time.monotonic()
            if not self._starting and self.served.recent.due(now):
                self.served.recent.take(now, self.session.snapshot())
                for one in services:
                    one.recent.take(now, one.session.own.snapshot())
            await asyncio.sleep(health.LOOK_S)

    @property
    def _starting(self) -> bool:
        return self.served.services[0].health.phase == "starting"

    # Ends

    def _on_signal(self, number: int) -> None:
        """The first signal; called from another thread."""
        first = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._starting:
            log.warning("%s: stopping. The model was not loaded yet.", first)
        else:
            limit_s = self._place.drain_s
            log.warning("%s: finishing what is under way, for %g s at most. Once more ends at once.", first, limit_s)
        self._loop.call_soon_threadsafe(self.stop.set)

    def _stop_now(self) -> None:
        self.stop.set()
        self._at_once.set()
        self.session.hurry()

    def _kill(self) -> None:
        """A third signal; called from another thread."""
        if signals.owned():
            print("gpuinfer: stopped at once, as it did not end by itself.", file=sys.stderr, flush=True)
            signals.now(PARTIAL)

    def _on_failure(self, error: WorkError) -> None:
        """The backend has failed for good."""
        for one in self.served.services:
            one.health.dead = True
        self._failure = error
        self.stop.set()

    def _on_stuck(self, error: WorkError) -> None:
        """The backend blocks the event loop, and was given up; called from another thread."""
        log.error("%s", error)
        if signals.owned():
            signals.now(FAILED)
