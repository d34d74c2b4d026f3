"""Serve a model over HTTP, in OpenAI's words and in our own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpuinfer.cli import flags, output
from gpuinfer.cli.serve_fleet import ServeFleetOptions, plan_of, run, serve_flags_wanted
from gpuinfer.errors import UsageError, naming
from gpuinfer.host import children
from gpuinfer.host.extras import missing_extra
from gpuinfer.host.files import write_whole
from gpuinfer.host.otlp import SIGNALS, Signal
from gpuinfer.host.terminal import show_status
from gpuinfer.serving.openai.model_options import models_in
from gpuinfer.serving.serve_options import check_address, check_models_exist, chosen_models

if TYPE_CHECKING:
    from gpuinfer.config.options import GivenValue
    from gpuinfer.config.settings import Common, Settings
    from gpuinfer.config.setup_file import ServerSetup
    from gpuinfer.fleet.supervisor import Fleet
    from gpuinfer.serving.replica import ListenOptions
    from gpuinfer.serving.telemetry.telemetry import Telemetry

log = logging.getLogger("gpuinfer.serve")

NAME, ROUTING = "serve", "routing"
LAUNCHER = "local"  # by default
COMMON = (
    *("backend", "strategy", "backend_options", "strategy_options", "device", "dtype", "seed", "trace"),
    *("patience", "give_up", "max_queue_rows", "launcher", "quiet", "verbose", "config"),
)
TEXT = """Serve a model over HTTP, in OpenAI's words and in our own.

A model of text answers /v1/chat/completions, /v1/completions and /predict, a
network of rows /v1/evaluate. /health, /stats and /metrics say how it is.
Ctrl-C finishes what is under way; once more ends at once.

--replicas N starts N copies behind a router, on this machine or elsewhere
(--launcher), and starts those anew that die or hang.
"""
ROUTING_TEXT = "Option of the routing policy, such as margin=4 of sticky; repeatable."
LAUNCHER_TEXT = "Option of the launcher, such as account=… of slurm; repeatable."


def execute(values: Mapping[str, Any]) -> int:
    """Serve until a signal comes. The exit code: 3 when requests were broken off."""
    from gpuinfer.cli.building import launcher_options, merge
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.config import registry
    from gpuinfer.config.options import check
    from gpuinfer.http.http_exchange import JsonLogFormatter

    launcher_words = values.get("launcher_options") or []
    flags.option_pairs(launcher_words, "-L", "")  # a word that is no pair is refused, with or without a fleet
    policy_pairs = flags.option_pairs(values.get("routing_options") or [], "-R", ROUTING)
    merged = merge(NAME, {key: value for key, value in values.items() if key not in _more})
    own = ServeFleetOptions(**check(ServeFleetOptions, merged.table(NAME), NAME))
    if own.leave_with_parent:
        children.end_with_parent()
    check_address(own)
    config = [("--config", merged.file)] if merged.file is not None else []
    written = {"--ready-file": own.ready_file, "--trace": merged.common.trace}
    output.refuse_shared(written, [*output.named_places(own.model_copy(update={"ready_file": None})), *config])
    _refuse_options_of_one(own.model, values.get("backend_options") or [])
    described = described_by(own, merged)
    if merged.common.launcher in (None, LAUNCHER):  # elsewhere other files may be there
        finds = registry.load("backends", described.backend).finds_models
        for name, model in described.models:
            with described.naming(name):
                check_models_exist(model, finds)
    backend, strategy = described.plugins()
    as_json = own.log_format == "json"
    log_to_people(max(merged.common.verbose, as_json), JsonLogFormatter() if as_json else None)
    if (problem := missing_extra("serve", "the event loop for many small requests")) is not None:
        log.info("%s", problem)
    place = place_of(own)
    routing_options = {key.removeprefix(f"{ROUTING}."): one for key, one in policy_pairs.items()}
    if serve_flags_wanted(own, merged.common.launcher, launcher_words, routing_options):
        options = launcher_options(merged, merged.common.launcher or LAUNCHER, launcher_words)
        return _fleet(own, described, place, options, routing_options, merged.common)
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
    routing_options: Mapping[str, GivenValue],
    common: Common,
) -> int:
    """The same with several replicas, none of them in this process."""
    from gpuinfer.launchers import base
    from gpuinfer.serving.telemetry.telemetry import open_telemetry

    launcher = base.make_launcher(common.launcher or LAUNCHER, options)
    telemetry = open_telemetry(own.otlp_endpoint, {"gen_ai.request.model": described.name})
    plan = plan_of(own, described, launcher, place.access(), routing_options, verbose=bool(common.verbose))

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
        aliases=first.aliases,
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
    if described.aliases:
        names += f" (also called {', '.join(described.aliases)})"
    return f"{names} at {address}, {who}. Ctrl-C ends it.\ncurl {address}{path}{key} -d '{body}'"


_more = {
    "launcher_options": flags.words("launcher_options", "-L", "KEY=VALUE", LAUNCHER_TEXT, kind="launchers"),
    "routing_options": flags.words("routing_options", "-R", "KEY=VALUE", ROUTING_TEXT),
}
app = flags.command(NAME, {**flags.of(ServeFleetOptions, NAME), **_more}, COMMON, TEXT, execute)
