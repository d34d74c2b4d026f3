"""The members of the fleet: adding and removing them, those by URL included, and the roster that the router gets.

A member that was added by its URL is probed like any other, never started and never killed. Its streams are not
resumed, since it is unknown how it draws its tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.fleet.folder import FleetFolder
from gpuinfer.fleet.managed_replica import ManagedReplica
from gpuinfer.fleet.plan import MOST_REPLICAS, FleetPlan, HealthChecks
from gpuinfer.fleet.router.protocol import Roster
from gpuinfer.fleet.weight_updates import WeightUpdates
from gpuinfer.fleet.worker import ProbedHealth, Worker
from gpuinfer.launchers.base import Launcher, ProcessPlan

HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")


class ExternalWorker(Worker):
    ours = False

    def __init__(
        self,
        id: int,
        url: str,
        key: str | None,
        changed: Callable[[], None],
        tell: Callable[[str], None],
        checks: HealthChecks,
    ) -> None:
        super().__init__(id, key, changed, tell, checks)
        self.host, self.port = address_of(url)
        self.attempts = 1

    async def run(self) -> None:
        async with self._probed(self.host, self.port):
            while True:
                beat = await self._look()
                if beat != "well" and self.state == "up":
                    self.failure = "it gave no sign of life" if beat == "late" else "it says that it is stuck"
                    self._tell(f"{self.url}: {self.failure}; it gets no requests until it answers again.")
                    self._become("down")
                elif beat == "late" and self.state == "starting":
                    self.failure = "it has never answered"
                    self._become("down")

    def _answered(self, health: ProbedHealth) -> None:
        if health.ready:
            self._become("up")
        elif self.state == "up":
            self.failure = "it says that it is not ready"
            self._become("down")

    async def end(self, within_s: float) -> None:
        await self._stop()
        self.state = "down"


def address_of(url: str) -> tuple[str, int]:
    """Host and port of `http://HOST:PORT`. Raises `UsageError` for anything beyond that."""
    port, why = 0, ""
    parts = urlsplit("")
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError:
        why = "its port is none"
    if not why and parts.scheme != "http":
        why = "a worker is reached by http only"
    elif not why and ("@" in parts.netloc or parts.path not in ("", "/") or "?" in url or "#" in url):
        why = "it has a user, a path or a query"
    elif not why and (not parts.hostname or not HOST.fullmatch(parts.hostname)):
        why = "its host is none"
    if why:
        raise UsageError(f"the worker's URL is refused: {why}. Write it as http://HOST:PORT.")
    return parts.hostname or "", port


LOOK_S = 0.1  # between two looks whether one that drains is done
KEY = re.compile(r"[\x21-\x7e]{1,1024}")  # it becomes part of a header
EMPTY_LOOKS = 5  # in a row: a router process may hear of the draining a moment later


class NoRoom(WorkError):
    """There are as many replicas as there may be."""


class Membership:
    """`on_roster` is told of each change, `in_flight` says how many requests are under way at a member."""

    def __init__(
        self,
        plan: FleetPlan,
        launcher: Launcher,
        folder: FleetFolder,
        on_roster: Callable[[Roster], None],
        in_flight: Callable[[int], int],
        tell: Callable[[str], None],
    ) -> None:
        self.all: dict[int, Worker] = {}
        self._plan, self._launcher, self._folder = plan, launcher, folder
        self._setup_file = folder.write("setup.json", plan.setup)
        self._on_roster, self._in_flight, self._tell = on_roster, in_flight, tell
        self._ids, self._versions = itertools.count(), itertools.count(1)
        self._starting = asyncio.Semaphore(launcher.at_once)
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self.changes = WeightUpdates(folder.admin_key)

    @property
    def own(self) -> list[ManagedReplica]:
        """Ours that are to stay, oldest first."""
        return [one for one in self.all.values() if isinstance(one, ManagedReplica) and not one.leaving]

    def start(self) -> ManagedReplica:
        """One more replica of ours. Raises `NoRoom`."""
        if len(self.own) >= self._plan.most or len(self.all) >= MOST_REPLICAS:
            raise NoRoom(
                f"{len(self.own)} replicas run, and no more may. Remove one, or raise --max-replicas (--gpus)."
            )
        folder, devices, port = self._folder, self._plan.devices, self._free_port()
        taken = [one.plan.devices for one in self.all.values() if isinstance(one, ManagedReplica)]
        keys: tuple[str, ...] = ("--admin-key-file", str(folder.admin_key_file))
        if not self._plan.open_workers:
            keys = ("--api-key-file", str(folder.key_file), *keys)
        files = ("--setup-file", str(self._setup_file), *keys)
        place = ("--port", str(port), "--behind-router")
        index = next(self._ids)
        plan = ProcessPlan(
            name=f"replica-{index}",
            index=index,
            port=port,
            files=(self._setup_file, folder.key_file, folder.admin_key_file),
            folder=folder.path,
            # the one that the fewest replicas have
            devices=min(devices, key=lambda one: taken.count(one) / devices.count(one)) if devices else None,
            threads=self._plan.threads() if self._launcher.here else None,
            arguments=("serve", *files, *place, *self._plan.arguments),  # each attempt adds its ready file
            logs=folder.logs,
        )
        start_s, how = self._plan.start_s or self._launcher.start_s, (self.changed, self._tell, self.changes.catch_up)
        replica = ManagedReplica(plan, folder.key, self._launcher, self._starting, start_s, *how, self._plan.health)
        self._join(replica)
        return replica

    def _free_port(self) -> int:
        """The first of the plan's ports that no replica of ours has; 0, any free one, where the plan names none."""
        first = self._plan.worker_port
        if first is None:
            return 0
        taken = {one.plan.port for one in self.all.values() if isinstance(one, ManagedReplica)}
        return next(port for port in itertools.count(first) if port not in taken)

    def visit(self, url: str, key: str | None = None) -> ExternalWorker:
        """A server that somebody else has started. Raises `UsageError` for a URL that is refused or already here."""
        address = address_of(url)
        if key is not None and not KEY.fullmatch(key):
            raise UsageError("the worker's key is refused: it is not of printable ASCII without spaces. Send another.")
        for one in self.all.values():
            if (one.host, one.port) == address and not one.leaving:
                raise UsageError(f"{url} is worker {one.id} already. Remove that first, or add another.")
        if len(self.all) >= MOST_REPLICAS:
            raise NoRoom(f"{MOST_REPLICAS:,} workers are as many as there may be. Remove one.")
        visitor = ExternalWorker(next(self._ids), url, key, self.changed, self._tell, self._plan.health)
        self._join(visitor)
        return visitor

    def remove(self, id: int, within_s: float) -> Worker | None:
        """Let one drain, and end it then or when the time is over. None: there is none of this id."""
        worker = self.all.get(id)
        if worker is not None and id not in self._leaving:
            worker.drain()
            self.changed()
            self._leaving[id] = asyncio.create_task(self._leave(worker, within_s))
        return worker

    def nudge(self, id: int) -> None:
        """A request has failed there."""
        if (worker := self.all.get(id)) is not None:
            worker.nudge()

    def changed(self) -> None:
        members = tuple(worker.member() for worker in self.all.values())
        self._on_roster(Roster(next(self._versions), members))

    async def end(self, within_s: float) -> None:
        """All of them, at once; 0 seconds: without asking."""
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*(worker.end(within_s) for worker in self.all.values()), return_exceptions=True)

    def _join(self, worker: Worker) -> None:
        self.all[worker.id] = worker
        worker.begin()
        self.changed()

    async def _leave(self, worker: Worker, within_s: float) -> None:
        until = time.monotonic() + within_s
        empty = 0
        while empty < EMPTY_LOOKS and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            empty = 0 if self._in_flight(worker.id) else empty + 1
        await worker.end(max(1.0, until - time.monotonic()))
        del self.all[worker.id], self._leaving[worker.id]
        self._tell(f"worker {worker.id} has left.")
        self.changed()
