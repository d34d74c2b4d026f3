"""Serve a model over HTTP, in OpenAI's words and in our own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic import Field

from gpuinfer.cli import flags, output
from gpuinfer.errors import UnknownName, UsageError, naming
from gpuinfer.host import children, machine, signals
from gpuinfer.host.files import write_whole
from gpuinfer.host.otlp import SIGNALS, Signal
from gpuinfer.host.terminal import show_status
from gpuinfer.serving.openai.model_options import models_in
from gpuinfer.serving.serve_options import ServeOptions, check_address, check_models_exist, chosen_models

if TYPE_CHECKING:
    from gpuinfer.config.options import GivenValue
    from gpuinfer.config.settings import Common, Settings
    from gpuinfer.config.setup_file import ServerSetup
    from gpuinfer.fleet.launchers.base import Launcher
    from gpuinfer.fleet.plan import FleetPlan
    from gpuinfer.fleet.supervisor import Fleet
    from gpuinfer.http.access import Access
    from gpuinfer.serving.replica import ListenOptions
    from gpuinfer.serving.telemetry.telemetry import Telemetry

fleet_log = logging.getLogger(__name__)

DONE, PARTIAL = 0, 3  # exit codes
LEFT_S = 5.0  # for what was cancelled to end
MAKE_A_FLEET = ("replicas", "gpus", "min_replicas", "max_replicas", "launcher")


class ServeFleetOptions(ServeOptions):
    """One server's flags, and those of several behind a router."""

    replicas: int | None = Field(None, ge=1, le=512, description="so many copies of the model, behind a router")
    gpus: str | None = Field(None, description="one replica on each of these devices: 0,2,4,6")
    launcher: str | None = Field(None, description="where replicas run: local, slurm or ray [local]")
    routing: str = Field(
        "least-loaded", description="who gets a request: least-loaded, round-robin, power-of-two, sticky"
    )
    router_processes: int = Field(1, ge=1, le=64, description="processes that relay requests")
    min_replicas: int | None = Field(None, ge=1, le=512, description="never fewer, whatever the load")
    max_replicas: int | None = Field(None, ge=1, le=512, description="never more, whatever the load")
    target_queue: float = Field(16.0, gt=0, le=1e6, description="requests per replica, above which more are started")
    scale_down_delay: float = Field(60.0, ge=0, le=1e6, description="seconds without need of a replica until it leaves")
    request_timeout: float = Field(
        300.0, gt=0, le=86_400, description="seconds that a request waits for a replica's answer"
    )
    start_timeout: float | None = Field(None, gt=0, le=86_400, description="seconds for a replica to come up [600]")
    log_dir: Path | None = Field(None, description="where replicas write their logs [a temporary folder]")


OF_A_FLEET = tuple(name for name in ServeFleetOptions.model_fields if name not in ServeOptions.model_fields)


def serve_flags_wanted(own: ServeFleetOptions, launcher_options: Mapping[str, Any]) -> bool:
    """Whether the flags ask for a fleet. Raises `UsageError` for those of a fleet's that would do nothing."""
    if any(getattr(own, name) is not None for name in MAKE_A_FLEET):
        return True
    idle = [f"--{name.replace('_', '-')}" for name in OF_A_FLEET if name in own.model_fields_set]
    if launcher_options:
        idle.append("-L")
    if idle:
        raise UsageError(f"{idle[0]} is said of a fleet, and this is one server. Add --replicas N, or leave it out.")
    return False


def plan_of(
    own: ServeFleetOptions, described: ServerSetup, launcher: Launcher, access: Access, *, verbose: bool = False
) -> FleetPlan:
    """Raises `UsageError` for flags that do not go together, and for key files that are none."""
    from gpuinfer.fleet.plan import FleetPlan, gpus_here, gpus_of
    from gpuinfer.fleet.routing_policies import POLICIES
    from gpuinfer.http.access import read_key_lines

    if described.setup.trace is not None:
        raise UsageError("--trace records one server, and this is a fleet. Leave it out, or serve without --replicas.")
    if own.min_replicas is None and own.max_replicas is None:
        scaling = None
    else:
        from gpuinfer.fleet.plan import Scaling

        least = own.min_replicas or 1
        most_replicas = own.max_replicas or max(least, own.replicas or len(own.gpus.split(",") if own.gpus else ""))
        scaling = Scaling(least, most_replicas, own.target_queue, own.scale_down_delay)
    replicas = own.replicas or (scaling.least if scaling else len((own.gpus or "0").split(",")))
    if own.gpus is not None:
        if any(device == "cpu" or ":" in device for device in described.setup.devices):
            raise UsageError(
                "--gpus says which device each replica sees, so --device has nothing to choose. Leave it out."
            )
        devices = gpus_of(own.gpus)
    else:
        devices = gpus_here() if launcher.here and machine.wants_cuda(described.setup.devices) else ()
    most = scaling.most if scaling else replicas
    setup = replace(described.setup, processes=most) if launcher.here else described.setup
    if own.gpus is not None:
        setup = replace(setup, devices=("cuda",))  # a replica that cannot use its own does not fall back on the CPU
    if own.routing not in POLICIES:
        raise UnknownName("routing policy", own.routing, POLICIES, label="Policies")
    words = ["--quiet", "--drain-timeout", f"{own.drain_timeout:g}", "--max-body", str(own.max_body)]
    if own.otlp_endpoint:
        words += ["--otlp-endpoint", own.otlp_endpoint]
    plan = FleetPlan(
        setup=msgspec.json.encode(msgspec.structs.replace(described, setup=setup)),
        replicas=replicas,
        scaling=scaling,
        devices=devices,
        devices_named=own.gpus is not None,
        host=own.host,
        port=own.port,
        router_processes=own.router_processes,
        routing=own.routing,
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
    plan.check()
    return plan


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
        with signals.handled(self._asked, self._insist, self._force):
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

    def _asked(self, number: int) -> None:
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


log = logging.getLogger("gpuinfer.serve")

NAME, LAUNCHER = "serve", "launcher"
COMMON = (
    *("backend", "strategy", "backend_options", "strategy_options", "device", "dtype", "seed", "trace"),
    *("patience", "give_up", "max_queue_rows", "quiet", "verbose", "config"),
)
TEXT = """Serve a model over HTTP, in OpenAI's words and in our own.

A model of text answers /v1/chat/completions, /v1/completions and /predict, a
network of rows /v1/evaluate. /health, /stats and /metrics say how it is.
Ctrl-C finishes what is under way; once more ends at once.

--replicas N starts N copies behind a router, on this machine or elsewhere
(--launcher), and starts those anew that die or hang.
"""
LAUNCHER_TEXT = "Option of the launcher, such as account=… of slurm; repeatable."


def execute(values: Mapping[str, Any]) -> int:
    """Serve until a signal comes. The exit code: 3 when requests were broken off."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.config import registry
    from gpuinfer.config.options import check
    from gpuinfer.http.http_exchange import JsonLogFormatter

    pairs = flags.option_pairs(values.get("launcher_options") or [], "-L", LAUNCHER)
    merged = merge(NAME, {key: value for key, value in values.items() if key != "launcher_options"})
    own = ServeFleetOptions(**check(ServeFleetOptions, merged.table(NAME), NAME))
    if own.leave_with_parent:
        children.end_with_parent()
    check_address(own)
    config = [("--config", merged.file)] if merged.file is not None else []
    written = {"--ready-file": own.ready_file, "--trace": merged.common.trace}
    output.refuse_shared(written, [*output.named_places(own.model_copy(update={"ready_file": None})), *config])
    _refuse_options_of_one(own.model, values.get("backend_options") or [])
    described = described_by(own, merged)
    if own.launcher in (None, "local"):  # elsewhere other files may be there
        finds = registry.load("backends", described.backend).finds_models
        for name, model in described.models:
            with described.naming(name):
                check_models_exist(model, finds)
    backend, strategy = described.plugins()
    as_json = own.log_format == "json"
    log_to_people(max(merged.common.verbose, as_json), JsonLogFormatter() if as_json else None)
    place = place_of(own)
    launcher_options = {key.removeprefix(f"{LAUNCHER}."): one for key, one in pairs.items()}
    if serve_flags_wanted(own, launcher_options):
        return _fleet(own, described, place, launcher_options, merged.common)
    from gpuinfer.http import network
    from gpuinfer.serving.replica import ReplicaServer
    from gpuinfer.serving.telemetry.telemetry import open_telemetry

    signals: tuple[Signal, ...] = ("traces", "logs") if own.behind_router else SIGNALS  # a router has all metrics
    telemetry = open_telemetry(own.otlp_endpoint, {"gen_ai.request.model": described.name}, signals)

    def say(host: str, port: int) -> None:
        show_status("")
        if not merged.common.quiet:
            tell_people(_welcome(described, own, host, port), own, telemetry)

    async def serve() -> int:
        return await ReplicaServer(described, backend, strategy, place, telemetry).run(say)

    if not merged.common.quiet:
        show_status(f"loading {' and '.join(described.names)}")
    try:
        return network.run_loop(serve())
    finally:
        show_status("")


def _fleet(
    own: ServeFleetOptions,
    described: ServerSetup,
    place: ListenOptions,
    options: Mapping[str, GivenValue],
    common: Common,
) -> int:
    """The same with several replicas, none of them in this process."""
    from gpuinfer.fleet.launchers import base
    from gpuinfer.serving.telemetry.telemetry import open_telemetry

    launcher = base.make_launcher(own.launcher or "local", options)
    telemetry = open_telemetry(own.otlp_endpoint, {"gen_ai.request.model": described.name})
    plan = plan_of(own, described, launcher, place.access(), verbose=bool(common.verbose))

    def tell(news: str) -> None:
        if not common.quiet:
            with contextlib.suppress(OSError):  # standard output is closed, and the fleet goes on
                tell_people(news, own, telemetry)

    def say(fleet: Fleet) -> None:
        if own.ready_file is not None:
            told = {"host": own.host, "port": fleet.port, "pid": os.getpid()}
            write_whole(own.ready_file, json.dumps(told).encode())
        tell(_welcome(described, own, own.host, fleet.port))
        for notice in launcher.notices:
            tell(notice.replace("{port}", str(fleet.port)))

    return run(plan, launcher, say, tell, telemetry)


def tell_people(news: str, own: ServeFleetOptions, telemetry: Telemetry) -> None:
    """On standard error, in the form of the log, and over OTLP where logs are exported."""
    if own.log_format == "json":
        log.info("%s", news)
    else:
        print(news, file=sys.stderr, flush=True)
        telemetry.report(news)


def described_by(own: ServeFleetOptions, merged: Settings) -> ServerSetup:
    """What is to be served, by a file or by flags. Raises `UsageError`."""
    from gpuinfer.cli.building import served_plainly, setup_of
    from gpuinfer.config import setup_file

    if own.setup_file is not None:
        return setup_file.read_setup_file(own.setup_file)
    chosen = chosen_models(own)
    first, *others = chosen
    common = setup_of(merged.common)
    setups, plainly = [], []
    for one in chosen:
        setups.append(replace(common, model=one.spec, deterministic=own.deterministic, share=one.share))
        with naming(one.name if others else None):
            plainly.append(served_plainly(NAME, setups[-1], merged))
    backend_options, strategy_options = plainly[0]  # the same of all
    return setup_file.ServerSetup(
        setup=setups[0],
        backend=merged.common.backend,
        backend_options=backend_options,
        strategy=merged.common.strategy,
        strategy_options=strategy_options,
        unmasking=first.unmasking,
        tool_format=own.tool_format,
        reasoning=own.reasoning,
        served_model_name=first.name,
        beside=tuple(
            setup_file.AdditionalModel(name=str(one.name), model=one.spec, share=one.share, unmasking=one.unmasking)
            for one in others
        ),
    )


def _refuse_options_of_one(models: str | None, words: Sequence[str]) -> None:
    """Raises `UsageError` for `-B chat.slots=4`, whether there is a `chat` or not."""
    named = None if models is None else models_in(models)
    for word in words:
        key, equals, value = word.partition("=")
        name, dot, option = key.partition(".")
        if named is not None and dot:
            unknown = "" if name in named else f" (none is called '{name}')"
            raise UsageError(
                f"-B {word}: options of the backend hold for all models of a server, {' and '.join(named)}{unknown}. "
                f"Write -B {option}{equals}{value}, or serve each by itself."
            )


def place_of(own: ServeFleetOptions) -> ListenOptions:
    """Where it listens and who may ask. Raises `UsageError` for files of keys and certificates that are none."""
    from gpuinfer.http.access import Keys
    from gpuinfer.http.network import Certificate
    from gpuinfer.http.parser import HttpLimits
    from gpuinfer.serving.replica import ListenOptions

    return ListenOptions(
        host=own.host,
        port=own.port,
        api=None if own.api_key_file is None else Keys.read(own.api_key_file),
        admin=None if own.admin_key_file is None else Keys.read(own.admin_key_file),
        hosts=frozenset(name.lower() for name in own.allowed_hosts),
        origins=frozenset(origin.lower() for origin in own.allowed_origins),
        tls=None if own.tls_cert is None or own.tls_key is None else Certificate(own.tls_cert, own.tls_key),
        behind_router=own.behind_router,
        ready_file=own.ready_file,
        drain_s=own.drain_timeout,
        limits=HttpLimits(body_bytes=own.max_body, connections=own.max_connections),
    )


def _welcome(described: ServerSetup, own: ServeFleetOptions, host: str, port: int) -> str:
    """Where it listens, who may ask, and a line to try."""
    address = f"{'http' if own.tls_cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    who = "with a key" if own.api_key_file else "anybody who reaches it" if own.insecure else "from this machine alone"
    model = described.setup.model
    if described.kind == "text":
        named = {"model": described.name} if described.beside else {}
        path, body = "/v1/completions", json.dumps({**named, "prompt": "Hello", "max_tokens": 16})
    else:
        which = f'"model": "{described.name}", ' if described.beside else ""
        numbers = "0, " * min(2, model.inputs - 1 if model else 0)
        row = f"[{numbers}…]"
        if model is not None and model.layout is not None:
            depth = len(model.layout.leaves[0].shape)
            row = f"{'[' * depth}…{']' * depth}"
        path, body = "/v1/evaluate", f'{{{which}"x": {row}}}'
    key = " -H 'Authorization: Bearer KEY'" if own.api_key_file else ""
    names = " and ".join(described.names)
    return f"{names} at {address}, {who}. Ctrl-C ends it.\ncurl {address}{path}{key} -d '{body}'"


_launcher = {"launcher_options": flags.words("launcher_options", "-L", "KEY=VALUE", LAUNCHER_TEXT)}
app = flags.command(NAME, {**flags.of(ServeFleetOptions, NAME), **_launcher}, COMMON, TEXT, execute)
