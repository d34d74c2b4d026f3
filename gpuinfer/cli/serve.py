"""Serve a model over HTTP, in OpenAI's words and in our own."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from gpuinfer.cli import flags
from gpuinfer.serving.options import ServeOptions, check_address, spec_of

if TYPE_CHECKING:
    from gpuinfer.config.described import Described
    from gpuinfer.config.settings import Settings
    from gpuinfer.serving.replica import Place

NAME = "serve"
COMMON = (
    *("backend", "strategy", "backend_options", "strategy_options", "device", "dtype", "seed", "trace"),
    *("patience", "give_up", "max_queue_rows", "quiet", "verbose", "config"),
)
TEXT = """Serve a model over HTTP, in OpenAI's words and in our own.

A model of text answers /v1/chat/completions, /v1/completions and /predict, a
network of rows /v1/evaluate. /health, /stats and /metrics say how it is.
Ctrl-C finishes what is under way; once more ends at once.
"""


def _app() -> typer.Typer:
    common = {name: one for name, one in flags.common().items() if name in COMMON}

    def call(**values: Any) -> None:
        raise typer.Exit(execute(values))

    return flags.app(NAME, {**flags.of(ServeOptions, NAME), **common}, TEXT, call)


app = _app()


def execute(values: Mapping[str, Any]) -> int:
    """Serve until a signal comes. The exit code: 3 when requests were broken off."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.config.options import check

    merged = merge(NAME, values)
    own = ServeOptions(**check(ServeOptions, merged.table(NAME), NAME))
    check_address(own)
    described = described_by(own, merged)
    backend, strategy = described.plugins()
    log_to_people(merged.common.verbose)
    place = place_of(own)
    from gpuinfer.http import loop
    from gpuinfer.serving.replica import Replica

    def say(host: str, port: int) -> None:
        if not merged.common.quiet:
            print(_welcome(described, own, host, port), file=sys.stderr, flush=True)

    async def serve() -> int:
        return await Replica(described, backend, strategy, place).run(say)

    return loop.run(serve())


def described_by(own: ServeOptions, merged: Settings) -> Described:
    """What is to be served, by a file or by flags. Raises `UsageError`."""
    from gpuinfer.cli.building import served_plainly, setup_of
    from gpuinfer.config import described

    if own.setup_file is not None:
        return described.read(own.setup_file)
    setup = replace(setup_of(merged.common), model=spec_of(own), deterministic=own.deterministic)
    backend_options, strategy_options = served_plainly(NAME, setup, merged)
    return described.Described(
        setup=setup,
        backend=merged.common.backend,
        backend_options=backend_options,
        strategy=merged.common.strategy,
        strategy_options=strategy_options,
        served_model_name=own.served_model_name,
    )


def place_of(own: ServeOptions) -> Place:
    """Where it listens and who may ask. Raises `UsageError` for key files that are none."""
    from gpuinfer.http.access import Keys
    from gpuinfer.http.limits import HttpLimits
    from gpuinfer.serving.replica import Place

    return Place(
        host=own.host,
        port=own.port,
        api=None if own.api_key_file is None else Keys.read(own.api_key_file),
        admin=None if own.admin_key_file is None else Keys.read(own.admin_key_file),
        hosts=frozenset(name.lower() for name in own.allowed_hosts),
        behind_router=own.behind_router,
        ready_file=own.ready_file,
        drain_s=own.drain_timeout,
        limits=HttpLimits(body_bytes=own.max_body, connections=own.max_connections),
    )


def _welcome(described: Described, own: ServeOptions, host: str, port: int) -> str:
    """Where it listens, who may ask, and a line to try."""
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    who = "with a key" if own.api_key_file else "anybody who reaches it" if own.insecure else "from this machine alone"
    model = described.setup.model
    if described.kind == "text":
        path, body = "/v1/completions", json.dumps({"prompt": "Hello", "max_tokens": 16})
    else:
        path, body = "/v1/evaluate", f'{{"x": [{"0, " * min(2, model.inputs - 1 if model else 0)}…]}}'
    key = " -H 'Authorization: Bearer KEY'" if own.api_key_file else ""
    return f"{described.name} at {address}, {who}. Ctrl-C ends it.\ncurl {address}{path}{key} -d '{body}'"
