"""What coordinator and nodes send one another, as msgpack over HTTP.

POST /cluster/join      Hello → Welcome, with the job
POST /cluster/exchange  NodeMessage → CoordinatorReply, every `EXCHANGE_S` and whenever a node runs low
GET  /cluster/weights   the file of a version, which is in the query
POST /cluster/records   the bytes of a range → KeptReply; the range, and a file that has them instead, in the query
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.api import Setup
from gpuinfer.cluster.node_report import NodeMachine, NodeReport
from gpuinfer.division import Interval, WorkRange
from gpuinfer.errors import UsageError

JOIN, EXCHANGE, RECORDS, WEIGHTS = "/cluster/join", "/cluster/exchange", "/cluster/records", "/cluster/weights"
MSGPACK, FILE = "application/msgpack", "application/octet-stream"
EXCHANGE_S = 1.0  # between two exchanges of a node that has enough
RANGES_FOLDER = ".ranges"  # in the output's folder: files of nodes that see it
RECORDS_BYTES = 256 << 20  # of one range: ranges are sized so that they have an eighth of it


class Hello(Struct, frozen=True, kw_only=True):
    """What a node says when it joins. `index`: the number that its launcher knows it by; None: started by hand."""

    gpuinfer: str  # its version
    host: str
    pid: int
    machine: NodeMachine
    index: int | None = None
    attempt: int = 0


class Job(Struct, frozen=True, kw_only=True):
    """What every node runs."""

    workload: str
    options: Mapping[str, Any]
    setup: Setup  # without a model: the workload says it
    backend: str
    backend_options: Mapping[str, Any]
    strategy: str
    strategy_options: Mapping[str, Any]
    settings: Mapping[str, Any] = {}  # `Division.settings`
    total: int | None = None
    folder: str | None = None  # `Division.folder`, for nodes that see it
    roofline: bool = True
    disabled_plugins: tuple[str, ...] = ()


class Welcome(Struct, frozen=True, kw_only=True):
    """`node`: its number in this run, another one each time that it joins. `run`: names the run; a file of this name in
    `RANGES_FOLDER` shows that the folder is the same.
    """

    node: int
    run: str
    clock: float  # the coordinator's, in seconds since the epoch
    job: Job


class NodeMessage(Struct, kw_only=True):
    """How a node is. `done`: its units so far; `on_hand`: units that it holds and has not begun."""

    node: int
    run: str
    done: int
    on_hand: int
    parallel: int = 1  # units that it works on at once
    sequence: int = (
        0  # counts the node's exchanges from 1: one that is repeated, as no reply came, has its number again
    )
    released: tuple[Interval, ...] = ()  # units that it had and gives back
    sees_folder: bool = False
    leaving: bool = False
    failure: str = ""  # why it leaves, where it cannot go on
    refuses: bool = False  # it could not either if it was started again
    report: NodeReport | None = None


class CoordinatorReply(Struct, kw_only=True):
    """`release`: units that the node should give back, of those that it has not begun. `over`: there is nothing more to
    do. `stop`: the run is to stop; what can be finished within seconds still counts.
    """

    ranges: tuple[WorkRange, ...] = ()
    release: int = 0
    total: int | None = None
    over: bool = False
    stop: bool = False
    use_folder: bool = False  # records go to files in the folder, and their names over the wire


class KeptReply(Struct, kw_only=True):
    """Whether the records count. Not `kept`: there are records of some of these units already, and those of `missing`
    may be sent alone. Not `seen`: there is no such file here, and the bytes are to be sent.
    """

    kept: bool
    seen: bool = True
    missing: tuple[Interval, ...] = ()


def as_json(settings: Mapping[str, Any]) -> Any:
    """The settings as JSON has them, so that those of two machines can be compared."""
    return json.loads(json.dumps(dict(settings)))


def encode_message(message: Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_message(body: bytes, kind: type[Struct]) -> Any:
    """Raises `UsageError` for anything else."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"this is no {kind.__name__}: {error}. Let both ends run one version of gpuinfer.") from None
