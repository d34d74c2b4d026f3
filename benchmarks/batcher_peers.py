"""`gpuinfer.Batcher` beside the handles of Ray Serve and beside LitServe: rows a second of many callers in one program.

    python benchmarks/batcher_peers.py [--clients N] [--repeats N]

Needs `ray[serve]`, litserve and aiohttp beside gpuinfer. The model is the 4.9 M network in float32, a row is 480
features. Ray Serve: a deployment of one replica with `@serve.batch`, asked through its handle by coroutines of this
program. LitServe has no handle: it is asked over HTTP on loopback, in JSON, with as many connections. Both gather up to
as many rows as there are clients, for 5 ms. They are run in turn; medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from batcher import asked_by_coroutines, coroutines, network, run_loop
from batcher_litserve import answers

WAIT_S = 0.005
OPEN_S = 120.0  # for a server to answer


def by_ray(clients: int, count: int) -> float:
    import ray
    from ray import serve

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")

    @serve.deployment(max_ongoing_requests=4 * clients, ray_actor_options={"num_cpus": 1})
    class Network:
        def __init__(self) -> None:
            self.net = network()[0].eval()

        @serve.batch(max_batch_size=clients, batch_wait_timeout_s=WAIT_S)  # type: ignore[untyped-decorator]
        async def ask(self, rows: list[torch.Tensor]) -> list[Any]:
            return answers(self.net, rows)

        async def __call__(self, row: torch.Tensor) -> Any:
            return await self.ask(row)

    try:
        handle, row = serve.run(Network.bind()), network()[1]

        async def main() -> float:
            async def ask(row: Any) -> Any:
                return await handle.remote(row)

            return await asked_by_coroutines(ask, row, clients, count)

        return asyncio.run(main())
    finally:
        serve.shutdown()
        ray.shutdown()


def by_litserve(clients: int, count: int) -> float:
    import aiohttp

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("batcher_litserve.py"), str(port), str(clients)]
    )
    try:
        until = time.monotonic() + OPEN_S
        while not _answers(port):
            if time.monotonic() > until or server.poll() is not None:
                raise RuntimeError("LitServe did not start")
            time.sleep(0.2)

        async def main() -> float:
            connector = aiohttp.TCPConnector(limit=clients)
            async with aiohttp.ClientSession(connector=connector) as session:

                async def ask(row: list[float]) -> None:
                    async with session.post(f"http://127.0.0.1:{port}/predict", json={"row": row}) as response:
                        response.raise_for_status()
                        await response.read()

                return await asked_by_coroutines(ask, network()[1].tolist(), clients, count)

        return asyncio.run(main())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # it leaves its worker processes behind otherwise
        server.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    clients, (net, row) = given.clients, network()
    cases: dict[str, Callable[[], float]] = {
        "gpuinfer.Batcher": lambda: run_loop(coroutines(net, row, clients, clients * 100)),
        "Ray Serve's handle": lambda: by_ray(clients, clients * 20),
        "LitServe, HTTP": lambda: by_litserve(clients, clients * 20),
    }
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(given.repeats):
        for name, case in cases.items():
            rates[name].append(case())
            print(f"{name:<24} {rates[name][-1]:>10,.0f} rows/s", flush=True)
    ours = statistics.median(rates["gpuinfer.Batcher"])
    for name, found in rates.items():
        print(
            f"{name:<24} {statistics.median(found):>10,.0f} rows/s, ours is {ours / statistics.median(found):.1f} times"
        )


if __name__ == "__main__":
    main()
