"""A fleet: supervised replicas, router processes in front, and one control application for all else.

clients → router processes → replicas         /v1/*, /predict, /tokenize …
                  ↓
          control application (here)          /health, /stats, /metrics, /workers, the page
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from gpuinfer.errors import BackendDied, UsageError, WorkError
from gpuinfer.fleet.control import ControlServer
from gpuinfer.fleet.fleet_counters import EVERY_S, FRESH_S, ReplicaCounters
from gpuinfer.fleet.folder import FleetFolder
from gpuinfer.fleet.membership import Membership, NoRoom
from gpuinfer.fleet.plan import LOOK_S, FleetPlan, Scaler, ScalingDecision, refuse_absent_gpus, refuse_taken_ports
from gpuinfer.fleet.router.processes import MemberCounters, Routers
from gpuinfer.fleet.router.protocol import RouterConfig
from gpuinfer.fleet.router.request_trace import TraceSampling
from gpuinfer.fleet.weight_updates import WeightUpdates
from gpuinfer.fleet.worker import Worker, bracketed
from gpuinfer.host import machine, otlp
from gpuinfer.http.access import ReloadableFile, reload_changed_files
from gpuinfer.http.client import HttpClient, HttpResponse
from gpuinfer.http.parser import fitting_connections, limit_notice
from gpuinfer.launchers.base import Launcher
from gpuinfer.serving.health import counter_stats
from gpuinfer.serving.monitoring.metrics import (
    Family,
    Floor,
    router_families,
    served_models_family,
    snapshot_families,
    worker_families,
)
from gpuinfer.serving.profile_endpoint import MOST_BYTES
from gpuinfer.serving.telemetry.otlp_logs import LoggedRecord
from gpuinfer.serving.telemetry.spans import FinishedSpan
from gpuinfer.serving.telemetry.telemetry import NO_TELEMETRY, Telemetry
from gpuinfer.stats import Snapshot

log = logging.getLogger(__name__)

KEPT_DECISIONS = 32
TOUCH_S = 10.0  # between two checks of the fleet's folder
PROFILED_S = 60.0  # for a profile to be written, beyond its seconds
END_S = 10.0  # for replicas to end, once no request is under way
NOTHING = MemberCounters()


def trace_sampling() -> TraceSampling:
    """As OpenTelemetry's variables say. One that is not understood is warned of, and all is traced."""
    try:
        return TraceSampling.named(otlp.variable("TRACES_SAMPLER"), otlp.variable("TRACES_SAMPLER_ARG"))
    except ValueError as error:
        log.warning("OTEL_TRACES_SAMPLER=%s is not known. Set it to parentbased_traceidratio or another.", error)
        return TraceSampling()


class Fleet:
    """Call `start` once, then `close` whatever happened, all on one event loop.

    `tell` is called with news for people, a sentence at a time.
    """

    def __init__(
        self,
        plan: FleetPlan,
        launcher: Launcher,
        tell: Callable[[str], None] = log.info,
        telemetry: Telemetry = NO_TELEMETRY,
    ) -> None:
        plan.check(launcher)
        if plan.devices_named and launcher.here:
            refuse_absent_gpus(plan.devices, plan.understood)
        if launcher.here:
            refuse_taken_ports(plan)
        self.plan, self.launcher = plan, launcher
        self.url, self.port = "", 0
        self.decisions: deque[ScalingDecision] = deque(maxlen=KEPT_DECISIONS)
        self._tell, self._telemetry = tell, telemetry
        self._began = time.monotonic()
        self._scaler = Scaler(plan.limits)
        self._counting = ReplicaCounters()
        self._draining = False
        self._policy_faults: set[str] = set()  # that have been reported
        self._tasks: list[asyncio.Task[None]] = []
        self._folder = FleetFolder(launcher.shared, plan.logs, plan.worker_keys)
        key, socket = secrets.token_urlsafe(32), str(self._folder.socket())
        self._control = ControlServer(self, plan.access, key, socket)
        fitting = fitting_connections(plan.connections, machine.descriptors(), 2)  # each has one to a replica too
        connections, refusals = fitting
        config = RouterConfig(
            host=plan.host,
            port=plan.port,
            control=socket,
            control_key=key,
            processes=plan.router_processes,
            policy=plan.routing,
            policy_options=dict(plan.routing_options),
            api_keys=plan.api_keys,
            hosts=tuple(sorted(plan.access.hosts or ())),
            origins=tuple(sorted(plan.access.origins)),
            tls=plan.tls,
            log=plan.log,
            queue=plan.queue,
            max_inputs=plan.max_inputs,
            queue_limit=plan.queue_limit,
            timeout_s=plan.request_timeout_s,
            body_bytes=plan.body_bytes,
            connections=connections,
            refusals=refusals,
            tracing=trace_sampling() if telemetry.spans.wanted else None,
            hands_over_log=telemetry.logs is not None,
        )
        if config.connections < plan.connections:
            tell(f"Each router process takes {limit_notice(plan.connections, config.connections)}")
        self._routers = Routers(config, self._on_router_event, self._on_router_telemetry)
        self._members = Membership(
            plan, launcher, self._folder, self._routers.update, lambda id: self._counted(id).in_flight, tell
        )

    async def start(self) -> str:
        """Start all, and wait until each replica is up or has failed its first attempt; returns the fleet's URL.

        The fleet serves from the first replica on. Raises `UsageError` when the port is in use, `WorkError` with the
        first replica's last words when none came up.
        """
        await self._control.start()
        self.port = await self._routers.start()
        self.url = f"{'http' if self.plan.tls is None else 'https'}://{bracketed(self.plan.host)}:{self.port}"
        count = self.plan.replicas
        understood = f"{self.plan.understood}. " if self.plan.understood else ""
        devices = f", on {', '.join(self.plan.devices[:count])}" if self.plan.devices_named else ""
        self._tell(
            f"{understood}Starting {count} replica{'s' if count > 1 else ''}{devices}; the logs are in {self.logs}."
        )
        replicas = [self._members.start() for _ in range(self.plan.replicas)]
        for replica in replicas:
            replica.founding = True
        failures = [error for error in await asyncio.gather(*(one.first for one in replicas)) if error is not None]
        if failures and len(failures) == len(replicas):
            raise WorkError(
                f"none of {len(replicas)} replicas came up. {failures[0]}" if replicas[1:] else str(failures[0])
            )
        for error in failures:
            self._tell(str(error))
        fresh = reload_changed_files(self.plan.access.files, self._exchange_keys)
        self._tasks = [asyncio.create_task(one) for one in (self._scale(), self._count(), self._keep_folder(), fresh)]
        if self._telemetry.metrics is not None:
            floor: Floor = {}
            self._telemetry.metrics.start(lambda: self.families(floor))
        return self.url

    async def add(self, url: str | None = None, key: str | None = None) -> Worker:
        """One more worker: a server at a URL, or else a replica of ours. Raises `UsageError` or `NoRoom`."""
        return self._members.start() if url is None else self._members.visit(url, key)

    async def remove(self, id: int) -> Worker | None:
        """Let a worker drain and leave, without waiting for it. None: no worker has this id."""
        return self._members.remove(id, self.plan.drain_s)

    @property
    def changes(self) -> WeightUpdates:
        return self._members.changes

    async def update(self, body: Mapping[str, Any]) -> None:
        """Have all replicas load other weights, or an adapter; `body`: `serving.openai.schema.UpdateBody`. Replicas
        that come up later do so before their first request. Raises `UsageError` and `BackendDied`.
        """
        await self.changes.update(self._members.all.values(), body)

    async def unload(self, adapter: str, model: str | None = None) -> None:
        """Have all replicas unload an adapter."""
        await self.changes.unload(self._members.all.values(), adapter, model)

    async def free_memory(self, body: Mapping[str, Any]) -> dict[str, int]:
        """Have all replicas that are up give memory back; what that came to. `body`:
        `serving.openai.schema.FreeBody`. Raises `UsageError` and `BackendDied`.
        """
        return await self.changes.free_memory(self._members.all.values(), body)

    @property
    def status(self) -> str:
        """ready when a worker takes requests, else starting; draining in the end."""
        if self._draining:
            return "draining"
        return "ready" if any(worker.healthy for worker in self._members.all.values()) else "starting"

    def about(self) -> dict[str, Any]:
        """Plain facts, for the page."""
        limits = self.plan.limits
        return {
            "model": next((one.health.model for one in self._members.all.values() if one.health), ""),
            "url": self.url,
            "policy": self.plan.routing,
            "replicas": f"{limits.least}" if limits.fixed else f"{limits.least} to {limits.most}",
            **({"queued": self._routers.totals().queued} if self.plan.queue == "global" else {}),
        }

    def workers(self) -> list[dict[str, Any]]:
        """All workers, each with the router's counters of it."""
        found = []
        for worker in self._members.all.values():
            counted = asdict(self._counted(worker.id))
            found.append({**worker.told(), "requests_served": counted.pop("requests"), **counted})
        return found

    def totals(self) -> dict[str, int]:
        """The router's counters."""
        return asdict(self._routers.totals())

    def queue(self) -> dict[str, Any]:
        """The requests that wait in the router: how many, of how many at most, and what has become of others."""
        totals = self._routers.totals()
        return {
            "kind": self.plan.queue,
            "limit": self.plan.queue_limit,
            "max_inputs": self.plan.max_inputs,
            "waiting": totals.queued,
            "taken": totals.queue_taken,
            "refused": totals.queue_full,
            "expired": totals.queue_expired,
            "mean_wait_s": totals.queue_wait_us / 1e6 / totals.queue_taken if totals.queue_taken else None,
        }

    async def snapshot(self, fresh_s: float = FRESH_S) -> Snapshot:
        """The counters of our own replicas, also of those that are gone; no older than `fresh_s`."""
        return await self._counting.fetch(self._members.all.values(), fresh_s)

    async def families(self, floor: Floor) -> list[Family]:
        """All metrics of the fleet, as they are now. `floor`: as `snapshot_families` has it."""
        more = [*worker_families(self.workers()), *router_families(self.totals())]
        if model := self.about().get("model"):
            more.append(served_models_family(model.split(", ")))
        return [*await asyncio.to_thread(snapshot_families, await self.snapshot(), floor), *more]

    async def stats(self) -> dict[str, Any]:
        """What `/stats` answers."""
        snapshot = await self.snapshot()
        workers, totals = self.workers(), self.totals()
        limits = self.plan.limits
        return {
            "server": "gpuinfer",
            "url": self.url,
            "uptime_s": time.monotonic() - self._began,
            "total_workers": len(workers),
            "healthy_workers": sum(worker["healthy"] for worker in workers),
            "total_requests": totals["requests"],
            "workers": workers,
            "router": {"policy": self.plan.routing, "processes": self.plan.router_processes, **totals},
            "queue": self.queue(),
            "scaling": {
                **asdict(limits),
                "replicas": len(self._members.own),
                "decisions": [decision.told(time.monotonic()) for decision in self.decisions],
            },
            **counter_stats(snapshot, *self._counting.recent.window(), 0.0),
        }

    async def ask_replica(self, path: str) -> bytes | None:
        """The answer of one replica that is up; None without one."""
        return await self._counting.ask(self._members.all.values(), path)

    async def profile(self, seconds: float, id: int | None) -> HttpResponse:
        """What a replica of ours answers to `POST /profile`: the one of this number, or the first that is up. Raises
        `UsageError` for an unknown number, and `BackendDied` where it is not up, or does not answer.
        """
        up = [one for one in self._members.own if one.state == "up"]
        if id is not None and id not in {one.id for one in self._members.own}:
            raise UsageError(f"there is no replica {id} of this fleet's own. GET /workers lists them.")
        found = next((one for one in up if id in (None, one.id)), None)
        if found is None:
            raise BackendDied("the replica is not up. Ask again when it is.")
        headers = self.changes.headers
        client = HttpClient(
            found.url, connections=1, timeout_s=seconds + PROFILED_S, headers=headers, body_bytes=MOST_BYTES
        )
        try:
            body = msgspec.json.encode({"seconds": seconds})
            return await client.request("POST", "/profile", body)
        finally:
            await client.close()

    async def drain(self, within_s: float | None = None) -> bool:
        """Take no new requests, finish those under way, then end the replicas. Whether all requests were finished."""
        within_s = self.plan.drain_s if within_s is None else within_s
        self._draining = True
        self._end_tasks()
        self._control.end_streams()
        whole = await self._routers.drain(within_s)
        await self._members.end(END_S)
        return whole

    async def close(self) -> None:
        """End everything now. Logs in the fleet's own folder are kept when something went wrong."""
        self._end_tasks()
        failed = any(worker.failure for worker in self._members.all.values())
        await asyncio.to_thread(self._telemetry.close)
        await asyncio.gather(self._routers.close(), self._members.end(0.0), return_exceptions=True)
        await asyncio.gather(self._control.close(), self._counting.close(), self.launcher.close())
        if self._folder.remove(keep_logs=failed and self.plan.logs is None):
            self._tell(f"The logs are kept in {self._folder.path}.")

    @property
    def logs(self) -> str:
        """The folder of the replicas' logs."""
        return str(self._folder.logs)

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _on_router_event(self, event: Mapping[str, Any]) -> None:
        """A request has failed at a member: probe that now. Or the routing policy has failed: say so once."""
        if isinstance(id := event.get("member"), int):
            self._members.nudge(id)
        if (fault := event.get("fault")) is not None and fault not in self._policy_faults:
            self._policy_faults.add(str(fault))
            self._tell(str(fault))

    def _on_router_telemetry(self, spans: Sequence[FinishedSpan], records: Sequence[LoggedRecord]) -> None:
        """What a router process has recorded of its requests."""
        self._telemetry.spans.add(spans)
        if (logs := self._telemetry.logs) is not None:
            for record in records:
                logs.export(record)

    def _exchange_keys(self, file: ReloadableFile, lines: list[str]) -> None:
        if file is self.plan.access.api:
            self._routers.exchange_keys(lines)

    def _counted(self, id: int) -> MemberCounters:
        return self._routers.counters().get(id, NOTHING)

    async def _count(self) -> None:
        """Fetch the replicas' counters regularly, so that those of one that dies are not lost."""
        while True:
            await self.snapshot()
            await asyncio.sleep(EVERY_S)

    async def _keep_folder(self) -> None:
        """Keep the folder's files fresh; if the folder is removed, say so once."""
        there = True
        while there:
            await asyncio.sleep(TOUCH_S)
            there = await asyncio.to_thread(self._folder.touch)
        self._tell(
            f"Files of the fleet in {self._folder.path} were removed: no replica can be started any more, and /health, "
            "/stats and /workers may not answer. Start the fleet anew; TMPDIR=DIR puts them where nothing cleans up."
        )

    async def _scale(self) -> None:
        while not self.plan.limits.fixed:
            await asyncio.sleep(LOOK_S)
            own = self._members.own
            load = float(sum(self._counted(one.id).in_flight for one in own) + self._routers.totals().queued)
            if (decision := self._scaler.look(time.monotonic(), load, len(own))) is not None:
                self.decisions.append(decision)
                self._tell(f"{decision.before} → {decision.after} replicas: {decision.reason}.")
                try:
                    for _ in range(decision.before, decision.after):
                        self._members.start()
                except NoRoom as error:
                    self._tell(str(error))
                for _ in range(decision.after, decision.before):
                    idlest = min(self._members.own, key=lambda one: (self._counted(one.id).in_flight, -one.id))
                    self._members.remove(idlest.id, self.plan.drain_s)
