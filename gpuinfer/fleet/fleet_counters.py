"""What the replicas have counted together: fetched from each now and then, kept when one dies so that no counter falls,
and as the JSON of `GET /stats`. Times are in seconds, sizes in rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Hashable, Iterable
from dataclasses import replace

import msgspec

from gpuinfer.errors import GpuinferError
from gpuinfer.fleet.worker import Worker
from gpuinfer.http.client import HttpClient
from gpuinfer.serving.health import RecentCounters
from gpuinfer.stats import DONE_BY_A_DEVICE, LANES, Snapshot, merge_snapshots


class MonotonicCounters:
    """What the replicas of a fleet have counted together, those included that have died or were removed.

    A replica counts from nothing again when it is started anew; each such life has a name of its own, such as its id
    and process id. The latest snapshot of a life stands for it. A life that has ended keeps its counts, and loses its
    levels: rows that wait, slots, memory. Lanes of one name are one lane.
    """

    def __init__(self) -> None:
        self._now: dict[Hashable, Snapshot] = {}
        self._past = Snapshot()

    def saw(self, life: Hashable, snapshot: Snapshot) -> None:
        """The latest that is known of a life."""
        self._now[life] = snapshot

    def ended(self, life: Hashable) -> None:
        """It will count no more. One that was never seen has nothing to leave."""
        if (last := self._now.pop(life, None)) is not None:
            device = {what: last.device[what] for what in DONE_BY_A_DEVICE if what in last.device}
            models = {name: {**line, "waiting": 0} for name, line in last.models.items()}
            left = replace(last, waiting=0, slots=0, rss_peak_mb=0.0, device=device, models=models)
            self._past = _together([self._past, left])

    def only(self, lives: set[Hashable]) -> None:
        """All lives but these have ended."""
        for life in self._now.keys() - lives:
            self.ended(life)

    def total(self) -> Snapshot:
        """All of them as one."""
        return _together([*self._now.values(), self._past])


def _together(parts: list[Snapshot]) -> Snapshot:
    lanes = LANES.in_turn([part.lanes for part in parts]) if LANES.in_turn is not None else ()
    return replace(merge_snapshots(parts), lanes=lanes)


EVERY_S = 1.0
ANSWER_S = 1.5
FRESH_S = 0.5  # no use in asking again
PATH = "/stats?form=wire"
Life = tuple[int, int]  # id and number of start: a replica that was started again counts from nothing


class ReplicaCounters:
    """Of our own replicas: what others count is not ours to add up."""

    def __init__(self) -> None:
        self._lives = MonotonicCounters()
        self._clients: dict[Life, HttpClient] = {}
        self.recent = RecentCounters(FRESH_S)
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
        if self.recent.due(now):
            self.recent.take(now, total)
        return total

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
                self._lives.saw(life, Snapshot.from_wire(msgspec.msgpack.decode(response.body)))
        except (GpuinferError, msgspec.MsgspecError, ValueError, TypeError, KeyError):  # gone, or of another version
            return

    def _client(self, life: Life, worker: Worker) -> HttpClient:
        if life not in self._clients:
            bearer = [("Authorization", f"Bearer {worker.key}")]
            self._clients[life] = HttpClient(worker.url, connections=1, timeout_s=ANSWER_S, headers=bearer)
        return self._clients[life]
