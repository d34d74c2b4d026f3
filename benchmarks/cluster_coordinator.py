"""What a coordinator's process costs: real requests over sockets, from nodes that only pretend to compute.

    python benchmarks/cluster_coordinator.py --nodes 100,1000 --rate 100 --seconds 20

One process is the coordinator, with a division that makes up rows and writes records to a file; others are the nodes.
A figure is seconds of the coordinator's processor, by the kernel's count: what else the machine does matters little.
`--profile FILE` has the coordinator profiled by cProfile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import itertools
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from gpuinfer.api import Limits, Setup
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.cluster import messages
from gpuinfer.cluster.coordinator import Coordinator
from gpuinfer.cluster.messages import CoordinatorReply, Hello, Job, KeptReply, NodeMessage, Welcome
from gpuinfer.cluster.node_figures import ClusterFigures, NodeMachine, NodeReport, packed
from gpuinfer.cluster.node_processes import NodesPlan
from gpuinfer.config import registry
from gpuinfer.division import Division, Interval, WorkRange
from gpuinfer.host import event_loop
from gpuinfer.http.client import HttpClient
from gpuinfer.lab.simulate import Poisson, simulate
from gpuinfer.lab.simulate.simulated_node import SimulatedNode
from gpuinfer.launchers.base import Launcher
from gpuinfer.strategies.dynamic import Dynamic

NODES_A_PROCESS = 500
BEGIN_S = 8.0  # in which nodes join and find their rate, before anything is measured
EXCHANGE_S = messages.EXCHANGE_S
JOB = Job(
    workload="generate",
    options={},
    setup=Setup(),
    backend="inprocess",
    backend_options={},
    strategy="dynamic",
    strategy_options={},
)


class Load(NamedTuple):
    rate: float  # units a second of a node
    row_bytes: int
    record_bytes: int
    seconds: float
    snapshot: bytes  # that a node sends with each exchange


class NoLauncher(Launcher):
    """The nodes are started by this program."""

    name = "nowhere"

    async def launch(self, plan: Any) -> Any:
        await asyncio.sleep(3600)


class MadeUpRows(Division):
    """Rows of so many bytes without end; their records go to one file."""

    least = 8

    def __init__(self, row_bytes: int, out: Path) -> None:
        self._row, self._next, self._out = bytes(row_bytes), 0, out
        self.bytes = self.ranges = 0

    @property
    def total(self) -> int | None:
        return None

    def open(self) -> Sequence[Interval]:
        self._file = self._out.open("wb")
        return ()

    async def read(self, most: int) -> WorkRange | None:
        start, self._next = self._next, self._next + most
        return WorkRange(start, self._next, (self._row,) * most if self._row else ())

    async def keep(self, work: WorkRange, records: bytes | Path) -> None:
        assert isinstance(records, bytes)
        self._file.write(records)
        self._file.seek(0)
        self.bytes += len(records)
        self.ranges += 1

    async def close(self, complete: bool) -> None:
        self._file.close()


def coordinate(load: Load, nodes: int, wire: Connection, profile: str | None) -> None:
    """The coordinator's process: sends its address and key, then figures each time it is asked."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            division = MadeUpRows(load.row_bytes, Path(folder) / "records")
            plan = NodesPlan(NoLauncher(), nodes)
            coordinator = Coordinator(division, JOB, plan, ClusterFigures(time.monotonic()))
            async with coordinator:
                wire.send((coordinator.address, coordinator._processes.key))
                stopping = asyncio.Event()
                asyncio.get_running_loop().add_reader(wire.fileno(), figures, coordinator, division, stopping)
                async for _ in coordinator.follow(stopping):
                    coordinator.figures.snapshot(time.monotonic())  # as the run does with each look
                asyncio.get_running_loop().remove_reader(wire.fileno())

    def figures(coordinator: Coordinator, division: MadeUpRows, stopping: asyncio.Event) -> None:
        if wire.recv() == "stop":
            stopping.set()
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        counts = coordinator._core.counts
        wire.send(
            {
                "wall_s": time.monotonic(),
                "processor_s": used.ru_utime + used.ru_stime,
                "rss_mib": used.ru_maxrss / 1024,
                "ranges": division.ranges,
                "record_bytes": division.bytes,
                "units": counts.kept,
                "held": counts.leased + counts.pending + counts.keeping,
                "exchanges": exchanges[0],
            }
        )

    exchanges = [0]
    answer = Coordinator._answer_exchange

    async def counted(self: Coordinator, exchange: Any) -> bytes:
        exchanges[0] += 1
        return await answer(self, exchange)

    Coordinator._answer_exchange = counted  # type: ignore[method-assign]
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    event_loop.run(run())
    if profile:
        profiler.disable()
        profiler.dump_stats(profile)


class PretendedNode:
    """Exchanges as a node does, and sends records as long as the simulated node would have computed."""

    def __init__(self, address: str, key: str, load: Load) -> None:
        headers = [("Authorization", f"Bearer {key}"), ("Content-Type", messages.MSGPACK)]
        self._client = HttpClient(f"http://{address}", connections=3, timeout_s=120, headers=headers)
        self._load = load
        self._node = SimulatedNode(0, load.rate, max(1, round(load.rate)), time.monotonic())
        self._released: list[Interval] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def _post(self, path: str, body: bytes, kind: Any) -> Any:
        response = await self._client.request("POST", path, body, timeout_s=120)
        if response.status != 200:
            raise SystemExit(f"{path}: {response.status} {response.body[:200]!r}")
        return messages.decode_message(response.body, kind)

    async def run(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        hello = Hello(
            gpuinfer=registry.own_version(),
            host="here",
            pid=os.getpid(),
            machine=NodeMachine(host="here", cores=1),
        )
        welcome = await self._post(messages.JOIN, messages.encode_message(hello), Welcome)
        sequence = itertools.count(1)
        node, sender = self._node, asyncio.create_task(self._send_on(welcome))
        try:
            while True:
                now = time.monotonic()
                state = NodeMessage(
                    node=welcome.node,
                    run=welcome.run,
                    sequence=next(sequence),
                    done=node.done(now),
                    on_hand=node.on_hand(now),
                    parallel=node.parallel,
                    released=tuple(self._released),
                    report=NodeReport(snapshot=self._load.snapshot, setup=False, elapsed_s=now - node.joined),
                )
                self._released = []
                reply = await self._post(messages.EXCHANGE, messages.encode_message(state), CoordinatorReply)
                if reply.over or reply.stop:
                    await self._post(
                        messages.EXCHANGE,
                        messages.encode_message(
                            NodeMessage(node=welcome.node, run=welcome.run, done=0, on_hand=0, leaving=True)
                        ),
                        CoordinatorReply,
                    )
                    return
                now = time.monotonic()
                for work in reply.ranges:
                    node.add(work, now)
                self._released += node.release(reply.release, now)
                await asyncio.sleep(min(EXCHANGE_S, max(0.05, node.dry_in(now))))
        finally:
            for task in (sender, *self._sending):
                task.cancel()
            await asyncio.wait([sender, *self._sending])
            await self._client.close()

    async def _send_on(self, welcome: Welcome) -> None:
        while True:
            for start, stop in self._node.finish(time.monotonic()):
                path = f"{messages.RECORDS}?node={welcome.node}&run={welcome.run}&start={start}&stop={stop}"
                records = bytes((stop - start) * self._load.record_bytes)
                self._sending.add(task := asyncio.create_task(self._post(path, records, KeptReply)))
                task.add_done_callback(self._sending.discard)
            await asyncio.sleep(0.1)


def pretend(address: str, key: str, load: Load, nodes: int) -> None:
    async def run() -> None:
        await asyncio.gather(
            *[PretendedNode(address, key, load).run(BEGIN_S / 2 * one / nodes) for one in range(nodes)]
        )

    event_loop.run(run())


def measure(nodes: int, load: Load, profile: str | None) -> dict[str, Any]:
    """Seconds of the coordinator's processor while so many nodes work."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    coordinator = context.Process(target=coordinate, args=(load, nodes, theirs, profile))
    coordinator.start()
    theirs.close()
    address, key = ours.recv()
    shares = [NODES_A_PROCESS] * (nodes // NODES_A_PROCESS) + [nodes % NODES_A_PROCESS]
    crew = [context.Process(target=pretend, args=(address, key, load, share)) for share in shares if share]
    for one in crew:
        one.start()
    time.sleep(BEGIN_S)
    first = asked(ours)
    time.sleep(load.seconds)
    last = asked(ours)
    with contextlib.suppress(BrokenPipeError):
        ours.send("stop")
    for one in (*crew, coordinator):
        one.join(60)
        if one.is_alive():
            one.terminate()
    wall_s, spent_s, exchanges, ranges, sent, units = (
        last[name] - first[name] for name in ("wall_s", "processor_s", "exchanges", "ranges", "record_bytes", "units")
    )
    return {
        "nodes": nodes,
        "rate": load.rate,
        "wall_s": wall_s,
        "processor_share": spent_s / wall_s,
        "exchanges_per_s": exchanges / wall_s,
        "ranges_per_s": ranges / wall_s,
        "records_mb_per_s": sent / wall_s / 1e6,
        "units_per_s": units / wall_s,
        "of_what_nodes_can": units / wall_s / (nodes * load.rate),
        "processor_us_an_exchange": spent_s / exchanges * 1e6 if exchanges else None,
        "rows_with_nodes": last["held"],
        "rss_mib": last["rss_mib"],
    }


def asked(wire: Connection) -> dict[str, Any]:
    wire.send("figures")
    found: dict[str, Any] = wire.recv()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", default="100")
    parser.add_argument("--rate", type=float, default=100.0)
    parser.add_argument("--row-bytes", type=int, default=500)
    parser.add_argument("--record-bytes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--no-snapshot", action="store_true", help="exchanges without the engine's counters")
    parser.add_argument("--profile")
    given = parser.parse_args()
    snapshot = b""
    if not given.no_snapshot:
        model = ServiceModel(alpha=50e-6, beta=2e-3)
        snapshot = packed(simulate(Poisson(2000), model, Dynamic, Limits(64), requests=20_000).snapshot)
    print(f"a node's snapshot has {len(snapshot):,} bytes", file=sys.stderr)
    load = Load(given.rate, given.row_bytes, given.record_bytes, given.seconds, snapshot)
    for nodes in map(int, given.nodes.split(",")):
        print(json.dumps(measure(nodes, load, given.profile)), flush=True)


if __name__ == "__main__":
    main()
