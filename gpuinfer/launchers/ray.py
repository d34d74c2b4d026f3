"""Processes as actors of Ray: each runs one of gpuinfer, on a running cluster or a fresh local one.

Ray places them by the GPUs and cores that each requires; when an actor is gone with its node, the supervisor starts
another. Nothing is read from a shared folder: the files of a process come with the order, and its log goes back.
Importing Ray takes a second, so it happens at the first use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.extras import require_extra
from gpuinfer.launchers import base, carried_process
from gpuinfer.launchers.base import LaunchedProcess, Launcher, ProcessPlan
from gpuinfer.launchers.carried_process import CarriedProcess, ProcessOrder

CHUNK = 256 << 10  # bytes of log that travel at once


class RayActor:
    """One process's. All methods come back at once, but `end`, which waits for the system for a moment."""

    def __init__(self) -> None:
        self._carried = CarriedProcess()
        self._log = self._carried.folder / "log"

    def start(self, order: ProcessOrder, host: str | None = None) -> int:
        """The process id. One that serves listens at `host`, by default at this node's address."""
        if order.ready is not None and host is None:
            import ray

            util: Any = ray.util
            host = str(util.get_node_ip_address())  # as the other nodes know this one
        with self._log.open("ab") as log:
            return self._carried.start(order, log.fileno(), host)

    def poll(self, after: int) -> dict[str, Any]:
        """Whether it runs, its address once it serves, and its log from this byte on."""
        code = self._carried.code
        with self._log.open("rb") as log:
            log.seek(after)
            more = log.read(CHUNK)
        address = self._carried.address
        where = None if address is None else [address.host, address.port]
        return {"alive": self._carried.started and code is None, "code": code, "log": more, "address": where}

    def terminate(self) -> None:
        """Ask it to finish what is under way and leave."""
        self._carried.terminate()

    def end(self) -> None:
        """Now, with all that it has started."""
        self._carried.end()


log = logging.getLogger(__name__)

LOOK_S = 0.5  # between two questions how a process is
ANSWER_S = 10.0  # for an actor to answer one
SILENT = 6  # questions without an answer, after which an actor counts as gone: Ray itself takes half a minute
PLACED_S = 5.0  # after which it is said that one waits for its place
END_S = 20.0
ADDRESS = r"^(auto|[A-Za-z0-9.\-\[\]:]+:\d+)$"
FRESH = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
"""Of a cluster for this run alone: it announces itself nowhere, its node's address is that of loopback, and processes
are no background work, which by Ray's default of 15 a busy neighbour would starve.
"""


class RayLauncher(Launcher):
    """Actors of Ray: one for each process, on a cluster that runs or on a fresh one of this machine."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

        address: str | None = Field(
            None, pattern=ADDRESS, description="a cluster that runs: auto or HOST:PORT; default a fresh one here"
        )
        gpus: float | None = Field(None, ge=0, le=64, description="of one process; default 1 where there are any")
        cpus: float = Field(1.0, ge=0, le=4096, description="cores of one process")
        pending: float = Field(3600.0, gt=0, description="seconds that a process may wait for its place")

    name = "ray"
    bind = "0.0.0.0"  # the actor names its node's own address in its place
    options: Options

    def __init__(self, options: BaseModel | None = None, command: Sequence[str] = ()) -> None:
        """`command` is for tests: what a plan's arguments follow on the node."""
        super().__init__(options)
        self._command = tuple(command)
        self._ray: Any = None
        self._ours = False  # whether this launcher has connected, and lets go
        self._opening = asyncio.Lock()
        self._launched: set[RayProcess] = set()

    def check(self) -> None:
        require_extra("ray", "--launcher ray")

    def reached_at(self) -> str:
        return "127.0.0.1" if self.options.address is None else base.own_address()

    async def launch(self, plan: ProcessPlan) -> RayProcess:
        if plan.devices is not None:
            raise UsageError("--gpus names devices of this machine, and Ray chooses them. Say -L gpus=1 instead.")
        async with self._opening:
            if self._ray is None:
                self._ray = await asyncio.to_thread(self._open)
                if threading.current_thread() is threading.main_thread():
                    # Ray's own code has put a handler before Python's, which aborts the process at a SIGTERM
                    for number in (signal.SIGTERM, signal.SIGINT):
                        if (handler := signal.getsignal(number)) is not None:
                            signal.signal(number, handler)
        gpus = self.options.gpus
        if gpus is None:
            gpus = 1.0 if self._ray.cluster_resources().get("GPU") else 0.0
        wanted: dict[str, Any] = {"num_cpus": self.options.cpus, "num_gpus": gpus, "max_restarts": 0}
        wanted["max_concurrency"] = 4
        if not plan.serves:  # by default Ray fills one machine first; the nodes of a run have no use for one another
            wanted["scheduling_strategy"] = "SPREAD"
        placed = self._ray.remote(RayActor).options(**wanted).remote()  # Ray finds a place for it
        actor = RayProcess(plan, self._ray, placed, self.options.pending)
        # a fresh cluster is on loopback, whatever a cluster before it in this process has left in Ray's memory
        host = "127.0.0.1" if self.options.address is None else None
        actor.begin(carried_process.process_order(plan, command=self._command), host)
        self._launched.add(actor)
        return actor

    def _open(self) -> Any:
        """Connect, in a thread: there Ray leaves the signals alone. Raises `WorkError` in Ray's own words."""
        address = self.options.address
        if address is not None and address != "auto":
            _try(address)
        more: dict[str, Any] = {}
        if address is None:
            os.environ.update({name: os.environ.get(name, value) for name, value in FRESH.items()})
            more = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        import ray

        if ray.is_initialized():  # by a program that uses us
            return ray
        with contextlib.ExitStack() as stack:
            stack.callback(ray.shutdown)
            try:
                ray.init(
                    address=address or "local",
                    namespace="gpuinfer",
                    log_to_driver=False,
                    configure_logging=False,
                    **more,
                )
            except Exception as error:  # noqa: BLE001  (Ray raises what it likes)
                where = f"a Ray cluster at {address}" if address else "a Ray cluster of its own"
                raise WorkError(f"{where} cannot be had: {_short(error)}\nSee `ray status`, or -L address.") from None
            stack.pop_all()
        self._ours = True
        return ray

    async def close(self) -> None:
        await asyncio.gather(*(actor.kill() for actor in self._launched), return_exceptions=True)
        self._launched.clear()
        if self._ours:
            self._ours = False
            await asyncio.wait({asyncio.ensure_future(asyncio.to_thread(self._ray.shutdown))}, timeout=END_S)
        self._ray = None


class RayProcess(LaunchedProcess):
    """A process in the care of an actor."""

    def __init__(self, plan: ProcessPlan, ray: Any, handle: Any, pending_s: float) -> None:
        super().__init__(plan)
        self._ray, self._handle, self._pending_s = ray, handle, pending_s
        self._over = ""  # why it is not alive any more
        self._placed, self._news = asyncio.Event(), asyncio.Event()
        self._address: tuple[str, int] | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, order: ProcessOrder, host: str | None) -> None:
        """`host`: where one that serves listens; None: at its node's address."""
        self._task = asyncio.create_task(self._follow(self._handle.start.remote(order, host)))

    async def _follow(self, starting: Any) -> None:
        """Until it has ended: learn how it is, and bring its log here."""
        try:
            await asyncio.wrap_future(starting.future())
            self._placed.set()
            await self._listen()
        except Exception as error:  # noqa: BLE001  (Ray raises what it likes; whatever it is, nobody may wait for ever)
            self._over = self._over or f"is gone with its Ray actor ({_short(error)})"
        finally:
            self._over = self._over or "was given up"
            self._placed.set()
            self._news.set()

    async def _listen(self) -> None:
        heard, silent = 0, 0
        while not self._over:
            try:
                told = await asyncio.wait_for(asyncio.wrap_future(self._handle.poll.remote(heard).future()), ANSWER_S)
            except TimeoutError:
                silent += 1
                if silent >= SILENT:
                    raise
                continue
            silent, heard = 0, heard + len(told["log"])
            if told["log"]:
                await asyncio.to_thread(self._keep, told["log"])
            if told["address"] is not None and self._address is None:
                self._address = (told["address"][0], told["address"][1])
            if not told["alive"]:
                self._over = f"ended with code {told['code']}"
            self._news.set()
            if not self._over:
                await asyncio.sleep(LOOK_S)

    def _keep(self, said: bytes) -> None:
        with os.fdopen(os.open(self.plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(said)

    async def ready(self, within_s: float) -> tuple[str, int]:
        """`within_s` counts from when the actor has its place."""
        for seconds in (min(PLACED_S, self._pending_s), self._pending_s - PLACED_S):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._placed.wait(), max(0.0, seconds))
            if self._placed.is_set():
                break
            if seconds == PLACED_S:
                there = await asyncio.to_thread(self._ray.available_resources)
                free = ", ".join(f"{there.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
                log.warning("%s waits for its place: Ray has free %s", self.plan.name, free)
        else:
            raise self.failure(f"waited {self._pending_s:g} s for its place, which -L pending bounds")
        until = time.monotonic() + within_s
        while self._address is None or self._over:
            if self._over:
                raise self.failure(self._over + " before it served")
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), max(0.0, until - time.monotonic()))
            if time.monotonic() > until and self._address is None and not self._over:
                raise self.failure(f"did not come up within {within_s:g} s (--start-timeout)")
        return self._address

    @property
    def alive(self) -> bool:
        return not self._over

    async def terminate(self, within_s: float) -> None:
        if self.alive and self._placed.is_set():
            self._handle.terminate.remote()
            until = time.monotonic() + within_s
            while self.alive and time.monotonic() < until:
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), max(0.0, until - time.monotonic()))
        await self.kill()

    async def kill(self) -> None:
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        self._over = self._over or "was ended"
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=END_S)
        with contextlib.suppress(Exception):  # it, or its node, may be gone
            if self._placed.is_set():
                await asyncio.wait_for(asyncio.wrap_future(handle.end.remote().future()), ANSWER_S)
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self._ray.kill, handle)


def _try(address: str) -> None:
    """Whether anybody listens there, which Ray itself would try for minutes. Raises `WorkError`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise WorkError(
            f"a Ray cluster at {address} cannot be had: {error}.\nSee `ray status`, or -L address."
        ) from None


def _short(error: BaseException) -> str:
    """Ray's messages are pages long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
