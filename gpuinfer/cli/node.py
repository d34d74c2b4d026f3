"""Take part in a run that is divided over machines, as a node of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from gpuinfer.errors import UsageError

NAME = "node"
KEY = "A file with the run's key, which the coordinator has written."
PATIENCE = "Seconds without an answer of the coordinator, after which it gives up."
CPUS = "Cores to use, by the system's numbers, such as 0,2-3."
INDEX, ATTEMPT = "Its number, where a launcher starts it.", "How often that number was started before."

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(NAME, context_settings={"help_option_names": ["-h", "--help"]})
def node(
    coordinator: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the coordinator listens.")],
    key_file: Annotated[Path | None, typer.Option(metavar="FILE", help=KEY)] = None,
    patience: Annotated[float, typer.Option(metavar="S", min=1.0, max=86_400.0, help=PATIENCE)] = 60.0,
    cpus: Annotated[str, typer.Option(metavar="LIST", help=CPUS)] = "",
    index: Annotated[int | None, typer.Option(min=0, hidden=True, help=INDEX)] = None,
    attempt: Annotated[int, typer.Option(min=0, hidden=True, help=ATTEMPT)] = 0,
    leave_with_parent: Annotated[bool, typer.Option("--leave-with-parent", hidden=True)] = False,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="Say more; -vv shows tracebacks.")] = 0,
) -> None:
    """Take part in a run that is divided over machines, as a node of it.

    A run with --launcher starts its nodes itself. This starts one more, on any machine that reaches the coordinator:
    the work and its options come from there. It leaves when there is nothing more to do; Ctrl-C has it finish what it
    can within seconds, and leave.
    """
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.host import children

    if leave_with_parent:
        children.end_with_parent()
    if cpus:
        os.sched_setaffinity(0, parse_cores(cpus))
    log_to_people(verbose)
    from gpuinfer.cluster.node import run_node
    from gpuinfer.http.access import read_keys

    if key_file is None:
        raise UsageError(
            "a node has to show the run's key. Give --key-file FILE: the coordinator says where it has written it."
        )
    url = url_of(coordinator)
    print(f"node · joining the run at {coordinator} …", file=sys.stderr, flush=True)
    left = run_node(url, read_keys(key_file)[0], patience, index, attempt)
    print(f"node · {left}", file=sys.stderr)


def parse_cores(text: str) -> set[int]:
    """`0,2-3` as numbers. Raises `UsageError`, also for cores that this process may not use."""
    found = set[int]()
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found |= set(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        raise UsageError(f"--cpus {text}: not of the form 0,2-3. Write numbers of cores.") from None
    allowed = os.sched_getaffinity(0)
    if not found <= allowed:
        there = ",".join(map(str, sorted(allowed)))
        raise UsageError(f"--cpus {text}: this process may use the cores {there}. Give some of them.")
    return found


def url_of(address: str) -> str:
    """Of HOST:PORT. Raises `UsageError` for anything else."""
    try:
        parts = urlsplit(f"//{address.removeprefix('http://')}")
        whole = bool(parts.hostname and parts.port)
    except ValueError:
        whole = False
    if not whole:
        raise UsageError(
            f"'{address}' is no address of a coordinator. Write HOST:PORT, as the coordinator says it, such as "
            "10.0.0.5:7411."
        )
    return f"http://{parts.netloc}"
