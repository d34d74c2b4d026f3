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

import typer

from gpuinfer.cli import flags, output, serving_fleet
from gpuinfer.cli.serving_fleet import FleetOptions
from gpuinfer.errors import UsageError, naming
from gpuinfer.host import leaving
from gpuinfer.host.files import write_whole
from gpuinfer.host.terminal import show_status
from gpuinfer.openai.several import models_in
from gpuinfer.serving.options import check_address, models_of, refuse_absent

if TYPE_CHECKING:
    from gpuinfer.config.described import Described
    from gpuinfer.config.options import Given
    from gpuinfer.config.settings import Common, Settings
    from gpuinfer.fleet.supervisor import Fleet
    from gpuinfer.serving.replica import Place

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


def _app() -> typer.Typer:
    launcher = {"launcher_options": flags.words("launcher_options", "-L", "KEY=VALUE", LAUNCHER_TEXT)}
    return flags.command(NAME, {**flags.of(FleetOptions, NAME), **launcher}, COMMON, TEXT, execute)


def execute(values: Mapping[str, Any]) -> int:
    """Serve until a signal comes. The exit code: 3 when requests were broken off."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.config.options import check
    from gpuinfer.http.request_log import JsonLines

    pairs = flags.pairs(values.get("launcher_options") or [], "-L", LAUNCHER)
    merged = merge(NAME, {key: value for key, value in values.items() if key != "launcher_options"})
    own = FleetOptions(**check(FleetOptions, merged.table(NAME), NAME))
    if own.leave_with_parent:
        leaving.with_parent()
    check_address(own)
    config = [("--config", merged.file)] if merged.file is not None else []
    written = {"--ready-file": own.ready_file, "--trace": merged.common.trace}
    output.refuse_shared(written, [*output.places(own.model_copy(update={"ready_file": None})), *config])
    _refuse_options_of_one(own.model, values.get("backend_options") or [])
    described = described_by(own, merged)
    if own.launcher in (None, "local"):  # elsewhere other files may be there
        for name, model in described.models:
            with described.naming(name):
                refuse_absent(model)
    backend, strategy = described.plugins()
    as_json = own.log_format == "json"
    log_to_people(max(merged.common.verbose, as_json), JsonLines() if as_json else None)
    place = place_of(own)
    launcher_options = {key.removeprefix(f"{LAUNCHER}."): one for key, one in pairs.items()}
    if serving_fleet.wanted(own, launcher_options):
        return _fleet(own, described, place, launcher_options, merged.common)
    from gpuinfer.http import loop
    from gpuinfer.serving.otel import open_spans
    from gpuinfer.serving.replica import Replica

    spans = open_spans(own.otlp_endpoint, described.name)

    def say(host: str, port: int) -> None:
        show_status("")
        if not merged.common.quiet:
            tell_people(_welcome(described, own, host, port), own)

    async def serve() -> int:
        return await Replica(described, backend, strategy, place, spans).run(say)

    if not merged.common.quiet:
        show_status(f"loading {' and '.join(described.names)}")
    try:
        return loop.run(serve())
    finally:
        show_status("")


def _fleet(own: FleetOptions, described: Described, place: Place, options: Mapping[str, Given], common: Common) -> int:
    """The same with several replicas, none of them in this process."""
    launcher = serving_fleet.launcher_of(own, options)
    plan = serving_fleet.plan_of(own, described, launcher, place.access(), verbose=bool(common.verbose))

    def tell(news: str) -> None:
        if not common.quiet:
            with contextlib.suppress(OSError):  # nobody reads, and the fleet goes on
                tell_people(news, own)

    def say(fleet: Fleet) -> None:
        if own.ready_file is not None:
            told = {"host": own.host, "port": fleet.port, "pid": os.getpid()}
            write_whole(own.ready_file, json.dumps(told).encode())
        tell(_welcome(described, own, own.host, fleet.port))
        for notice in launcher.notices:
            tell(notice.replace("{port}", str(fleet.port)))

    return serving_fleet.run(plan, launcher, say, tell)


def tell_people(news: str, own: FleetOptions) -> None:
    """On standard error, in the form of the log."""
    if own.log_format == "json":
        log.info("%s", news)
    else:
        print(news, file=sys.stderr, flush=True)


def described_by(own: FleetOptions, merged: Settings) -> Described:
    """What is to be served, by a file or by flags. Raises `UsageError`."""
    from gpuinfer.cli.building import served_plainly, setup_of
    from gpuinfer.config import described

    if own.setup_file is not None:
        return described.read(own.setup_file)
    chosen = models_of(own)
    first, *others = chosen
    common = setup_of(merged.common)
    setups, plainly = [], []
    for one in chosen:
        setups.append(replace(common, model=one.spec, deterministic=own.deterministic, share=one.share))
        with naming(one.name if others else None):
            plainly.append(served_plainly(NAME, setups[-1], merged))
    backend_options, strategy_options = plainly[0]  # the same of all
    return described.Described(
        setup=setups[0],
        backend=merged.common.backend,
        backend_options=backend_options,
        strategy=merged.common.strategy,
        strategy_options=strategy_options,
        unmasking=first.unmasking,
        served_model_name=first.name,
        beside=tuple(
            described.Beside(name=str(one.name), model=one.spec, share=one.share, unmasking=one.unmasking)
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


def place_of(own: FleetOptions) -> Place:
    """Where it listens and who may ask. Raises `UsageError` for files of keys and certificates that are none."""
    from gpuinfer.http.access import Keys
    from gpuinfer.http.limits import HttpLimits
    from gpuinfer.http.tls import Certificate
    from gpuinfer.serving.replica import Place

    return Place(
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


def _welcome(described: Described, own: FleetOptions, host: str, port: int) -> str:
    """Where it listens, who may ask, and a line to try."""
    address = f"{'http' if own.tls_cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    who = "with a key" if own.api_key_file else "anybody who reaches it" if own.insecure else "from this machine alone"
    model = described.setup.model
    if described.kind == "text":
        named = {"model": described.name} if described.beside else {}
        path, body = "/v1/completions", json.dumps({**named, "prompt": "Hello", "max_tokens": 16})
    else:
        which = f'"model": "{described.name}", ' if described.beside else ""
        path, body = "/v1/evaluate", f'{{{which}"x": [{"0, " * min(2, model.inputs - 1 if model else 0)}…]}}'
    key = " -H 'Authorization: Bearer KEY'" if own.api_key_file else ""
    names = " and ".join(described.names)
    return f"{names} at {address}, {who}. Ctrl-C ends it.\ncurl {address}{path}{key} -d '{body}'"


app = _app()
