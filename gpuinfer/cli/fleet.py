"""Look at a fleet that runs, or write one down for HAProxy, Kubernetes or systemd."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, Field

from gpuinfer.cli import fleet_kubernetes
from gpuinfer.cli.fleet_systemd import systemd
from gpuinfer.cli.output import Destination
from gpuinfer.config import options, settings
from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError

NAME = "fleet"
URL = "http://127.0.0.1:8000"
COLUMNS = ("worker", "state", "in flight", "waiting", "served", "errors", "restarts")
KEYS = "A file with the key that the server asks for."

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


class FleetStatusOptions(BaseModel):
    """The table `[fleet]` of the settings, and the flags of `haproxy-config`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(None, description="of a fleet that runs")
    worker: list[str] = Field([], max_length=1024, description="replicas, as HOST:PORT")
    bind: str = Field("127.0.0.1:8000", description="where HAProxy listens")
    routing: str = Field("least-loaded", description="how it chooses")
    key_file: Path | None = Field(None, description="the key that the replicas ask for")
    maxconn: int = Field(256, ge=1, le=100_000, description="requests that one replica gets at once")
    timeout: float = Field(300.0, gt=0, le=86_400, description="seconds without a byte of an answer")


fleet_kubernetes.add_to(app)
app.command("systemd")(systemd)


@app.command("status")
def status(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="The fleet's address.")] = URL,
    api_key_file: Annotated[Path | None, typer.Option(metavar="FILE", help=KEYS)] = None,
    report: Annotated[str | None, typer.Option("--json", metavar="FILE|-", help="Write what it tells there.")] = None,
) -> None:
    """The workers of a fleet, how each is and what it has done. Exits 1 when none takes requests."""
    destination = Destination(report)
    statistics = _stats(url, api_key_file)
    workers = statistics.get(
        "workers",
        [
            {
                "index": 0,
                "url": url,
                "healthy": bool(statistics.get("ready")),
                "state": statistics.get("status", "-"),
                "in_flight": statistics.get("in_flight", 0),
                "waiting_rows": statistics.get("waiting_rows", 0),
                "requests_served": statistics.get("requests", 0),
                "errors": sum(dict(statistics.get("errors", {})).values()),
            }
        ],
    )
    if not destination.stdout:
        from gpuinfer.cli.screen.display import comparison

        throughput = statistics.get("throughput", {})
        rates = [f"{throughput[name]:,.3g} {name.removesuffix('_per_s')}/s" for name in throughput if name != "over_s"]
        healthy = sum(bool(worker.get("healthy")) for worker in workers)
        title = f"{url} · {healthy} of {len(workers)} workers take requests"
        notes = [("just now", ", ".join(rates))] if rates else []
        queue = statistics.get("queue", {})
        if queue.get("kind") == "global":
            waited = f", after {queue['mean_wait_s']:.3g} s on average" if queue.get("taken") else ""
            notes.append(("queue", f"{queue['waiting']:,} wait in the router; {queue['taken']:,} were sent{waited}"))
        notes += [(f"worker {one['index']}", str(one["last_event"])) for one in workers if one.get("last_event")]
        comparison(title, COLUMNS, [_row(worker) for worker in workers], notes)
    destination.write(statistics)
    if not any(worker.get("healthy") for worker in workers):
        raise typer.Exit(1)


def _row(worker: Mapping[str, Any]) -> list[str]:
    counts = ("in_flight", "waiting_rows", "requests_served", "errors", "restarts")
    where = str(worker.get("url") or "no address yet").removeprefix("http://")
    state = worker.get("state", "-") if worker.get("breaker") != "open" else "breaker open"
    return [f"{worker.get('index', 0)}  {where}", str(state), *(f"{worker.get(name) or 0:,}" for name in counts)]


@app.command("haproxy-config")
def haproxy_config(
    url: Annotated[str | None, typer.Option(metavar="URL", help="A fleet that runs: its replicas are written.")] = None,
    worker: Annotated[list[str] | None, typer.Option(metavar="HOST:PORT", help="A replica; repeatable.")] = None,
    bind: Annotated[str | None, typer.Option(metavar="HOST:PORT", help=f"Where it listens [{URL[7:]}].")] = None,
    routing: Annotated[
        str | None, typer.Option(metavar="NAME", help="least-loaded, round-robin, power-of-two, random or sticky.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The key that the replicas ask for.")] = None,
    maxconn: Annotated[
        int | None, typer.Option(metavar="N", help="Requests that one replica gets at once [256].")
    ] = None,
    timeout: Annotated[float | None, typer.Option(metavar="S", help="Without a byte of an answer [300].")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"With --url: {KEYS[0].lower()}{KEYS[1:]}")
    ] = None,
) -> None:
    """A configuration of HAProxy for the same fleet, on standard output: haproxy -c -f FILE checks it."""
    flags = {"url": url, "worker": worker or None, "bind": bind, "routing": routing, "key_file": key_file}
    theirs = {**flags, "maxconn": maxconn, "timeout": timeout}
    table = settings.load().table(NAME)
    given = {
        name: GivenValue(value, f"--{name.replace('_', '-')}") for name, value in theirs.items() if value is not None
    }
    own = FleetStatusOptions(**options.check(FleetStatusOptions, {**table, **given}, NAME))
    from gpuinfer.fleet.haproxy import HaproxyPlan, HaproxyServer, render_haproxy

    found = _workers_of(own.url, api_key_file) if own.url and not own.worker else [*own.worker]
    targets = [HaproxyServer.of(one, own.maxconn) for one in found]
    front = HaproxyPlan(own.bind, own.routing, _key(own.key_file), own.timeout)
    print(render_haproxy(targets, front), end="")
    if own.key_file is not None:
        print("gpuinfer: the configuration holds the key: keep it as safe (chmod 600).", file=sys.stderr)


def _workers_of(url: str, api_key_file: Path | None) -> list[str]:
    statistics = _stats(url, api_key_file)
    if "workers" not in statistics:
        raise UsageError(f"{url} is a single server, no fleet. Name it by --worker {url.removeprefix('http://')}.")
    if any(worker.get("ours") for worker in statistics["workers"]):
        print(
            "gpuinfer: the replicas of this fleet ask for a key that only its router has, and move when they are "
            "started again.\nGive HAProxy replicas of their own, with --worker, or their key by --key-file.",
            file=sys.stderr,
        )
    return [worker["url"] for worker in statistics["workers"] if worker.get("url")]


def _key(path: Path | None) -> str | None:
    from gpuinfer.http.access import read_keys

    return None if path is None else read_keys(path)[0]


def _stats(url: str, api_key_file: Path | None) -> dict[str, Any]:
    """The answer to `GET /stats`. Raises `UsageError` where no server, or another program, answers."""
    from gpuinfer.fleet.replica_client import Endpoint, ReplicaClient
    from gpuinfer.http import network

    async def ask() -> dict[str, Any]:
        caller = ReplicaClient(Endpoint(url, _key(api_key_file)), 1)
        try:
            return await caller.stats()
        finally:
            await caller.close()

    return network.run_loop(ask())
