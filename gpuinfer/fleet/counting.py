"""What the replicas have counted, together: fetched from each now and then, kept when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable

import msgpack

from gpuinfer.errors import GpuinferError
from gpuinfer.fleet.worker import Worker
from gpuinfer.http.client import Client
from gpuinfer.monitoring.lives import Lives
from gpuinfer.stats import Snapshot, since

EVERY_S = 1.0
ANSWER_S = 1.5
FRESH_S = 0.5  # no use in asking again
KEPT = 11  # looks: rates are of the last ten seconds
PATH = "/stats?form=wire"
Life = tuple[int, int]  # id and number of start: a replica that was started again counts from nothing


class Counting:
    """Of our own replicas: what others count is not ours to add up."""

    def __init__(self) -> None:
        self._lives = Lives()
        self._clients: dict[Life, Client] = {}
        self._looks: deque[tuple[float, Snapshot]] = deque(maxlen=KEPT)
        self._fetched_at, self._total = -FRESH_S, Snapshot()

    async def fetch(self, workers: Iterable[Worker], fresh_s: float = FRESH_S) -> Snapshot:
        """Ask those that are up, each on a connection of its own. One that gives no answer keeps its last.

        What is no older than `fresh_s` is not asked for again.
        """
        now = time.monotonic()
        if now - self._fetched_at < fresh_s:
            return self._total
        there = {(one.id, one.attempts): one for one in workers if one.ours}
        await self._only(set(there))
        await asyncio.gather(*(self._ask(life, one) for life, one in there.items() if one.healthy or one.leaving))
        total = self._lives.total()
        self._fetched_at, self._total = now, total
        if not self._looks or now - self._looks[-1][0] >= FRESH_S:
            self._looks.append((now, total))
        return total

    def recent(self) -> tuple[float, Snapshot]:
        """For so many seconds, what was counted in them; both empty before there are two looks."""
        if len(self._looks) < 2:
            return 0.0, Snapshot()
        (first, before), (last, now) = self._looks[0], self._looks[-1]
        return last - first, since(now, before)

    async def ask(self, workers: Iterable[Worker], path: str) -> bytes | None:
        """What the first replica that is up answers there; None without one."""
        for one in workers:
            if one.ours and one.state == "up":
                with contextlib.suppress(GpuinferError):
                    response = await self._client((one.id, one.attempts), one).request("GET", path)
                    if response.status == 200:
                        return response.body
        return None

    async def close(self) -> None:
        await self._only(set())

    async def _only(self, lives: set[Life]) -> None:
        self._lives.only(set(lives))
        for life in self._clients.keys() - lives:
            await self._clients.pop(life).close()

    async def _ask(self, life: Life, worker: Worker) -> None:
        try:
            response = await self._client(life, worker).request("GET", PATH)
            if response.status == 200:
                self._lives.saw(life, read(response.body))
        except (GpuinferError, ValueError, TypeError, KeyError):  # gone, or of another version
            return

    def _client(self, life: Life, worker: Worker) -> Client:
        if life not in self._clients:
            bearer = [("Authorization", f"Bearer {worker.key}")]
            self._clients[life] = Client(worker.url, connections=1, timeout_s=ANSWER_S, headers=bearer)
        return self._clients[life]


def read(body: bytes) -> Snapshot:
    """Raises `ValueError`, `TypeError` or `KeyError` for what is no snapshot."""
    return Snapshot.from_wire(msgpack.unpackb(body, strict_map_key=False))
