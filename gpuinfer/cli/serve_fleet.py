"""Several replicas behind a router at the command line: flags, the plan that they describe, and the fleet's life."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from pydantic import Field

from gpuinfer.errors import UsageError
from gpuinfer.host import machine, signals
from gpuinfer.serving.serve_options import ServeOptions

if TYPE_CHECKING:
    from gpuinfer.config.options import GivenValue
    from gpuinfer.config.setup_file import ServerSetup
    from gpuinfer.fleet.plan import FleetPlan, GpuSelection
    from gpuinfer.fleet.supervisor import Fleet
    from gpuinfer.http.access import Access
    from gpuinfer.launchers.base import Launcher
    from gpuinfer.serving.telemetry.telemetry import Telemetry

DONE, PARTIAL = 0, 3  # exit codes
LEFT_S = 5.0  # for what was cancelled to end
LOOK_S, LATE_S = 0.5, 3.0  # as `fleet.plan.HealthChecks` has them, which `gpuinfer --help` does not import
MAKE_A_FLEET = ("replicas", "gpus", "min_replicas", "max_replicas")


class ServeFleetOptions(ServeOptions):
    """One server's flags, and those of several behind a router."""

    replicas: int | None = Field(None, ge=1, le=512, description="so many copies of the model, behind a router")
    gpus: str | None = Field(
        None, description="one replica on each of so many devices, 4, of all, or of these: 0,2,4,6"
    )
    routing: str = Field(
        "least-loaded",
        description="who gets a request: least-loaded, round-robin, power-of-two, sticky, or a plugin's",
        json_schema_extra={"kind": "routing"},
    )
    router_processes: int = Field(1, ge=1, le=64, description="processes that relay requests")
    queue: Literal["replica", "global"] = Field(
        "replica", description="where requests wait: at the replica that was chosen, or in the router for the first one"
    )
    max_inputs: int | None = Field(
        None, ge=1, le=1 << 20, description="requests under way at one replica, at most [none; its slots with a queue]"
    )
    queue_limit: int = Field(
        4096,
        ge=1,
        le=1 << 20,
        description="requests that wait in the router, at most: with --queue global, or while no replica is up",
    )
    min_replicas: int | None = Field(None, ge=1, le=512, description="never fewer, whatever the load")
    max_replicas: int | None = Field(None, ge=1, le=512, description="never more, whatever the load")
    target_queue: float = Field(16.0, gt=0, le=1e6, description="requests per replica, above which more are started")
    scale_down_delay: float = Field(60.0, ge=0, le=1e6, description="seconds without need of a replica until it leaves")
    request_timeout: float = Field(
        300.0, gt=0, le=86_400, description="seconds that a request waits for a replica's answer"
    )
    start_timeout: float | None = Field(None, gt=0, le=86_400, description="seconds for a replica to come up [600]")
    worker_base_port: int | None = Field(
        None, ge=1, le=65_535, description="replica i listens on this port + i [any free one]"
    )
    worker_api_keys: Literal["none"] | Path | None = Field(
        None,
        description="who may ask a replica itself; none: anybody on this machine; or the keys in a file [the router]",
    )
    health_interval: float = Field(LOOK_S, gt=0, le=3600, description="seconds between two probes of a replica")
    health_timeout: float = Field(
        LATE_S, gt=0, le=86_400, description="seconds without an answer to a probe, after which a replica is replaced"
    )
    log_dir: Path | None = Field(None, description="where replicas write their logs [a temporary folder]")


OF_A_FLEET = tuple(name for name in ServeFleetOptions.model_fields if name not in ServeOptions.model_fields)


def serve_flags_wanted(
    own: ServeFleetOptions, launcher: str | None, launcher_options: Sequence[str], routing_options: Mapping[str, Any]
) -> bool:
    """Whether the flags ask for a fleet. Raises `UsageError` for those of a fleet's that would do nothing."""
    if launcher is not None or any(getattr(own, name) is not None for name in MAKE_A_FLEET):
        return True
    idle = [f"--{name.replace('_', '-')}" for name in OF_A_FLEET if name in own.model_fields_set]
    if launcher_options:
        idle.append("-L")
    if routing_options:
        idle.append("-R")
    if idle:
        raise UsageError(f"{idle[0]} is said of a fleet, and this is one server. Add --replicas N, or leave it out.")
    return False


def plan_of(
    own: ServeFleetOptions,
    described: ServerSetup,
    launcher: Launcher,
    access: Access,
    policy_options: Mapping[str, GivenValue] = MappingProxyType({}),
    *,
    verbose: bool = False,
) -> FleetPlan:
    """Raises `UsageError` for flags that do not go together, and for key files that are none."""
    from gpuinfer.fleet.plan import FleetPlan, HealthChecks, Scaling, gpus_of
    from gpuinfer.fleet.routing_policies import check_policy_options
    from gpuinfer.http.access import read_key_lines

    if described.setup.trace is not None:
        raise UsageError("--trace records one server, and this is a fleet. Leave it out, or serve without --replicas.")
    wanted = None if own.gpus is None else gpus_of(own.gpus)
    if own.min_replicas is None and own.max_replicas is None:
        scaling = None
    else:
        least = own.min_replicas or 1
        most_replicas = own.max_replicas or max(least, own.replicas or (wanted.count if wanted else 1))
        scaling = Scaling(least, most_replicas, own.target_queue, own.scale_down_delay)
    replicas = own.replicas or (scaling.least if scaling else wanted.count if wanted else 1)
    most = scaling.most if scaling else replicas
    devices = _devices(own, wanted, described, launcher, most)
    setup = replace(described.setup, processes=most) if launcher.here else described.setup
    if wanted is not None:
        setup = replace(setup, devices=("cuda",))  # a replica that cannot use its own does not fall back on the CPU
    routing_options = check_policy_options(own.routing, policy_options)
    words = ["--quiet", "--drain-timeout", f"{own.drain_timeout:g}", "--max-body", str(own.max_body)]
    if own.otlp_endpoint:
        words += ["--otlp-endpoint", own.otlp_endpoint]
    open_workers = own.worker_api_keys == "none"
    plan = FleetPlan(
        setup=msgspec.json.encode(msgspec.structs.replace(described, setup=setup)),
        replicas=replicas,
        scaling=scaling,
        devices=devices,
        devices_named=wanted is not None and bool(devices),
        understood="" if wanted is None else wanted.understood,
        host=own.host,
        port=own.port,
        worker_port=own.worker_base_port,
        open_workers=open_workers,
        worker_keys=tuple(read_key_lines(own.worker_api_keys)) if isinstance(own.worker_api_keys, Path) else (),
        health=HealthChecks(own.health_interval, own.health_timeout),
        queue=own.queue,
        max_inputs=own.max_inputs,
        queue_limit=own.queue_limit,
        router_processes=own.router_processes,
        routing=own.routing,
        routing_options=routing_options,
        api_keys=() if own.api_key_file is None else tuple(read_key_lines(own.api_key_file)),
        access=access,
        tls=None if own.tls_cert is None else (str(own.tls_cert), str(own.tls_key)),
        log="json" if own.log_format == "json" else "plain" if verbose else None,
        request_timeout_s=own.request_timeout,
        start_s=own.start_timeout,
        drain_s=own.drain_timeout,
        logs=own.log_dir,
        body_bytes=own.max_body,
        connections=own.max_connections,
        arguments=tuple(words),
    )
    plan.check(launcher)
    return plan


def _devices(
    own: ServeFleetOptions, wanted: GpuSelection | None, described: ServerSetup, launcher: Launcher, most: int
) -> tuple[str, ...]:
    """What replicas see one each of; empty: all that is there, or what the launcher gives them."""
    from gpuinfer.fleet.plan import devices_for, gpus_here

    if wanted is None:
        return gpus_here() if launcher.here and machine.wants_cuda(described.setup.devices) else ()
    if any(device == "cpu" or ":" in device for device in described.setup.devices):
        raise UsageError("--gpus says which device each replica sees, so --device has nothing to choose. Leave it out.")
    return devices_for(wanted, launcher, most)


def run(
    plan: FleetPlan,
    launcher: Launcher,
    say: Callable[[Fleet], None],
    tell: Callable[[str], None],
    telemetry: Telemetry | None = None,
) -> int:
    """Serve until a signal comes. `say` is called once the fleet serves. The exit code: 3 where requests broke off.

    Raises what `Fleet.start` raises.
    """
    from gpuinfer.http import network

    return network.run_loop(_Life(plan.drain_s, tell).live(plan, launcher, say, telemetry))


class _Life:
    """Of a fleet at the command line: it ends by a signal; by a second one at once."""

    def __init__(self, drain_s: float, tell: Callable[[str], None]) -> None:
        self._drain_s, self._tell = drain_s, tell
        self._stop, self._at_once = asyncio.Event(), asyncio.Event()

    async def live(
        self, plan: FleetPlan, launcher: Launcher, say: Callable[[Fleet], None], telemetry: Telemetry | None
    ) -> int:
        from gpuinfer.fleet.supervisor import Fleet
        from gpuinfer.serving.telemetry.telemetry import NO_TELEMETRY

        self._loop = asyncio.get_running_loop()
        fleet = Fleet(plan, launcher, self._tell, telemetry or NO_TELEMETRY)
        with signals.handled(self._on_first_signal, self._insist, self._force):
            try:
                if not await self._unless(self._stop, fleet.start()):
                    return DONE
                say(fleet)
                await self._stop.wait()
                whole = await self._unless(self._at_once, fleet.drain())
                return DONE if whole else PARTIAL
            finally:
                await fleet.close()

    async def _unless(self, event: asyncio.Event, work: Coroutine[Any, Any, Any]) -> Any:
        """What the work comes to; None when the event came first, and the work was left."""
        working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if working.done():
            return working.result()
        working.cancel()
        await asyncio.wait((working,), timeout=LEFT_S)
        return None

    def _on_first_signal(self, number: int) -> None:
        """The first signal, from another thread."""
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self._tell(f"{name}: finishing what is under way, for {self._drain_s:g} s at most. Once more ends at once.")
        self._loop.call_soon_threadsafe(self._stop.set)

    def _insist(self) -> None:
        self._stop.set()
        self._at_once.set()

    def _force(self) -> None:
        """Not even that has ended it. From another thread."""
        if signals.owned():
            print("gpuinfer: stopped at once, as it did not end by itself.", file=sys.stderr, flush=True)
            signals.now(PARTIAL)
