"""What a server costs that nobody asks, and how soon a worker process is at work."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from crew import SPAWN, START_S
from queue_server import BLOBNET, some_rows

import gpuinfer
from gpuinfer.api import Setup
from gpuinfer.config.registry import load
from gpuinfer.runtime.session import Session

CLIENTS = 8
SERVER = "gpuinfer server"  # the process's name
PLAYER = "gpuinfer.workloads.selfplay.player:play"


def answered_once(client: Any, line: Any) -> None:
    """A client process: asks for one row, says so, and stays connected as long as its line."""
    with client:
        client.evaluate(some_rows(1, BLOBNET.inputs))
        line.send_bytes(b"answered")
        line.poll(None)


class Idlers:
    """Client processes that have been answered once. Use it in a `with` block."""

    def __init__(self, server: gpuinfer.CentralServer, count: int) -> None:
        self._lines, theirs = zip(*[SPAWN.Pipe() for _ in range(count)], strict=True)
        self.processes = [
            SPAWN.Process(target=answered_once, args=(server.client(), end), daemon=True) for end in theirs
        ]

    def __enter__(self) -> Idlers:
        for process in self.processes:
            process.start()
        for line in self._lines:
            if not line.poll(START_S):
                raise TimeoutError("a client was not answered")
            line.recv_bytes()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def idle(seconds: float) -> dict[str, float]:
    """CPU of the server, of its clients and of this process, which watches over it: shares of one core."""
    with gpuinfer.CentralServer(BLOBNET) as server, Idlers(server, CLIENTS) as idlers:
        own = [process.pid for process in multiprocessing.active_children() if process.name == SERVER]
        time.sleep(1.0)
        before, started = [cpu_s(own), cpu_s(p.pid for p in idlers.processes), time.process_time()], time.monotonic()
        time.sleep(seconds)
        after = [cpu_s(own), cpu_s(p.pid for p in idlers.processes), time.process_time()]
        taken = time.monotonic() - started
        server.close(quiet=True)
    shares = [(late - early) / taken for early, late in zip(before, after, strict=True)]
    return {"idle": sum(shares), "idle server": shares[0], "idle clients": shares[1], "idle owner": shares[2]}


def cpu_s(processes: Iterable[int | None]) -> float:
    """Seconds that all their threads have run until now."""
    tasks = [task for number in processes for task in Path(f"/proc/{number}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def start(_: float) -> dict[str, float]:
    """From the start of a process to its first answer, and to a self-play worker that is ready to play."""
    with gpuinfer.CentralServer(BLOBNET) as server:
        started = time.perf_counter()
        with Idlers(server, 1) as idlers:
            client_s = time.perf_counter() - started
            torch = has_torch(idlers.processes[0].pid)
        server.close(quiet=True)
    worker_s, torch_too = asyncio.run(worker_start())
    return {"client start s": client_s, "worker start s": worker_s, "with torch": float(torch or torch_too)}


async def worker_start() -> tuple[float, bool]:
    """Seconds until a self-play worker has its kernels and its way to the server; whether it has loaded torch."""
    workload = load("workloads", "selfplay")(Setup(), workers=1, model="blobnet")
    setup = Setup(workload.model())
    async with Session(load("backends", "central")(setup), load("strategies", "dynamic")(setup)) as session:
        await session.ready()
        started = time.perf_counter()
        async with session.workers(PLAYER, workload.arguments(session, 0)) as workers:
            async for _, message in workers:
                if message is None:
                    raise ChildProcessError("the worker ended before it was ready")
                if "ready" in message:
                    break
            taken = time.perf_counter() - started
            names = {process.name: process.pid for process in multiprocessing.active_children()}
            return taken, has_torch(names["gpuinfer worker 0"])


def has_torch(process: int | None) -> bool:
    return "libtorch" in Path(f"/proc/{process}/maps").read_text()


if __name__ == "__main__":
    for name, figure in {**idle(10.0), **start(0.0)}.items():
        print(f"{name}: {figure:.4f}")
