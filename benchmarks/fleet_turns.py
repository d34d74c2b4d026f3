"""Servers of the real command side by side, loaded in turns: what the scripts about fleets share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuinfer.http.client import HttpClient

START_S, END_S, ANSWER_S = 300.0, 30.0, 120.0


@contextlib.contextmanager
def served(*words: str) -> Iterator[str]:
    """`gpuinfer serve` with these flags, at a free port; its URL, once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        ready, log = Path(folder, "ready.json"), Path(folder, "log")
        command = [sys.executable, "-m", "gpuinfer", "serve", "--port", "0", "--ready-file", str(ready), *words]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            until = time.monotonic() + START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{' '.join(command)} did not come up:\n{log.read_text()}")
                time.sleep(0.05)
            told = json.loads(ready.read_text())
            yield f"http://{told['host']}:{told['port']}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.asynccontextmanager
async def clients_of(urls: Mapping[str, str]) -> AsyncIterator[dict[str, HttpClient]]:
    """A client for each server, by the same names."""
    made = {name: HttpClient(url, connections=256, timeout_s=ANSWER_S) for name, url in urls.items()}
    try:
        yield made
    finally:
        await asyncio.gather(*(client.close() for client in made.values()))


@dataclass
class Served:
    """What came of a load: seconds of each answer by class, and refusals."""

    seconds: float = 0.0
    latencies: dict[str, list[float]] = field(default_factory=dict)
    refused: int = 0

    @property
    def answers(self) -> int:
        return sum(map(len, self.latencies.values()))

    @property
    def per_s(self) -> float:
        return self.answers / self.seconds

    def quantile(self, share: float, name: str | None = None) -> float:
        """Of all answers, or of one class; NaN where there were none."""
        found = sorted(one for key, each in self.latencies.items() if name in (None, key) for one in each)
        return found[min(len(found) - 1, int(share * len(found)))] if found else float("nan")


Body = tuple[str, Mapping[str, Any]]  # class, and what is asked


async def _ask(client: HttpClient, path: str, body: Body, into: Served) -> None:
    name, asked = body
    begun = time.perf_counter()
    headers = [("X-Gpuinfer-Priority", name)]
    answer = await client.request("POST", path, json.dumps(asked).encode(), headers)
    if answer.status == 200:
        into.latencies.setdefault(name, []).append(time.perf_counter() - begun)
    else:
        into.refused += 1


async def closed_load(client: HttpClient, path: str, bodies: Sequence[Body], clients: int) -> Served:
    """All of these, by clients that ask again as soon as they are answered."""
    left, into, begun = iter(bodies), Served(), time.perf_counter()

    async def one() -> None:
        for body in left:
            await _ask(client, path, body, into)

    await asyncio.gather(*(one() for _ in range(clients)))
    into.seconds = time.perf_counter() - begun
    return into


async def open_load(client: HttpClient, path: str, bodies: Sequence[Body], per_s: float, seed: int) -> Served:
    """All of these, at random moments (Poisson), whatever happens."""
    dice, into, begun = random.Random(seed), Served(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for body in bodies:
            await asyncio.sleep(dice.expovariate(per_s))
            group.create_task(_ask(client, path, body, into))
    into.seconds = time.perf_counter() - begun
    return into
