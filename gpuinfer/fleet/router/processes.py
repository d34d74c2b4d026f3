"""The router as its owner sees it: some processes, told who is in the fleet, and started anew when one dies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import msgspec

from gpuinfer.errors import WorkError
from gpuinfer.fleet.roster import Roster
from gpuinfer.fleet.router.board import Board, Cell, Total
from gpuinfer.fleet.router.child import Seat, main
from gpuinfer.fleet.router.config import RouterConfig
from gpuinfer.fleet.router.frames import Frames
from gpuinfer.fleet.router.seats import Seats
from gpuinfer.host import children
from gpuinfer.http.binding import listeners

Breaker = Literal["closed", "half-open", "open"]
_BREAKERS: tuple[Breaker, ...] = ("closed", "half-open", "open")

START_S = 60.0  # for a process to come up
END_S = 5.0  # for the system to take one away
AGAIN_S = (0.0, 0.1, 0.5, 2.0, 5.0)  # before a process that died is started anew, by how often it has lately
STEADY_S = 30.0  # a process that has lived so long begins anew with these


@dataclass(frozen=True, slots=True)
class MemberCounters:
    """What became of one member's requests, in all router processes together."""

    requests: int = 0  # attempts that were sent there
    errors: int = 0  # of these, failures of its own: refused, reset, timed out, broken, or answered with 500 and above
    in_flight: int = 0
    retried: int = 0  # went elsewhere after it
    resumed: int = 0  # streams that broke off there and went on elsewhere
    breaker: Breaker = "closed"


@dataclass(frozen=True, slots=True)
class RouterCounters:
    """What became of clients' requests, in all router processes together."""

    connections: int = 0  # open now
    requests: int = 0
    unrouted: int = 0  # answered 503, since no replica could take them
    timeouts: int = 0
    client_gone: int = 0
    broken_off: int = 0  # answers that had begun and could not be brought to their end
    restarts: int = 0  # of router processes


class Routers:
    """Router processes on one port, each with a listening socket of its own (SO_REUSEPORT): the kernel gives a new
    connection to one of them by a hash of both ends' addresses and ports, evenly over many connections, whatever they
    do. The sockets stay open here while a process is replaced, so that who connects meanwhile waits for the new one.

    `on_event` is called on the loop with `{"event": "failed", "member": id, "kind": "refused" | "reset" | "timeout" |
    "broken"}` when a replica failed a request. Everything here is called on the event loop that ran `start`.
    """

    def __init__(self, config: RouterConfig, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        self.config = config
        self._on_event = on_event
        self._board = Board(config.processes)
        self._seats = Seats(self._board)
        self._roster = Roster(-1, ())
        self._members: list[Seat] = []
        self._processes: list[_Process] = []

    async def start(self) -> int:
        """Start them, and return the port. Raises `UsageError` when it is in use, `WorkError` when none comes up."""
        config, port = self.config, self.config.port
        several = config.processes > 1
        if several:  # a port that others share would not count as in use
            port = _free(config.host, port)
        for row in range(config.processes):
            sockets = listeners(config.host, port, several)
            port = sockets[0].getsockname()[1]
            self._processes.append(_Process(self, row, sockets))
        self.config = msgspec.structs.replace(config, port=port)
        try:
            await asyncio.gather(*(process.start() for process in self._processes))
        except BaseException:
            await self.close()
            raise
        return port

    def update(self, roster: Roster) -> None:
        """Tell all of them, those that start later too. An older version than the last one changes nothing."""
        if roster.version < self._roster.version:
            return
        self._roster = roster
        self._members = self._seats.seated(roster)
        for process in self._processes:
            process.tell({"members": self._members})

    def exchange_keys(self, lines: list[str]) -> None:
        """Let these keys in from now on, in place of those of before."""
        self.config = msgspec.structs.replace(self.config, api_keys=tuple(lines))
        for process in self._processes:
            process.tell({"keys": lines})

    def spread(self, teller: _Process, news: Mapping[str, Any]) -> None:
        """Tell all processes but the one that says so."""
        for process in self._processes:
            if process is not teller:
                process.tell(news)

    def counters(self) -> Mapping[int, MemberCounters]:
        """By member id, of all that were ever in a roster and are not long gone."""
        return {member: self._counters(slot) for member, slot in self._seats.taken.items()}

    def _counters(self, slot: int) -> MemberCounters:
        board = self._board
        return MemberCounters(
            requests=board.sum_of(slot, Cell.REQUESTS),
            errors=board.sum_of(slot, Cell.ERRORS),
            in_flight=board.sum_of(slot, Cell.IN_FLIGHT),
            retried=board.sum_of(slot, Cell.RETRIED),
            resumed=board.sum_of(slot, Cell.RESUMED),
            breaker=_BREAKERS[board.most_of(slot, Cell.BREAKER)],
        )

    def totals(self) -> RouterCounters:
        return RouterCounters(
            **{total.name.lower(): self._board.total(total) for total in Total},
            restarts=sum(process.restarts for process in self._processes),
        )

    def pids(self) -> list[int]:
        """Of those that are up."""
        return [pid for process in self._processes if (pid := process.pid) is not None]

    async def drain(self, within_s: float) -> bool:
        """Take no new connections, answer what is under way. Whether all of it was answered in time."""
        try:
            async with asyncio.timeout(within_s):
                await asyncio.gather(*(process.drain() for process in self._processes))
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End the processes, whatever they do."""
        await asyncio.gather(*(process.close() for process in self._processes))

    @property
    def board(self) -> Board:
        return self._board

    @property
    def members(self) -> list[Seat]:
        return self._members

    def heard(self, message: Mapping[str, Any]) -> None:
        self._on_event(message)


class _Process:
    """One of them: started, heard, started again."""

    def __init__(self, routers: Routers, row: int, sockets: list[socket.socket]) -> None:
        self._routers, self._row, self._sockets = routers, row, sockets
        self._process: BaseProcess | None = None
        self._frames: Frames | None = None
        self._here = asyncio.Event()
        self._drained = asyncio.Event()
        self._lost = asyncio.Event()
        self._ending = False
        self._keeper: asyncio.Task[None] | None = None
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._lost.is_set() else self._process.pid

    async def start(self) -> None:
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep())

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._lost.clear()
        self._here.clear()
        try:
            packed = msgspec.msgpack.encode(self._routers.config)
            arguments = (theirs, self._sockets, self._routers.board, self._row, packed)
            self._process = children.spawn(main, *arguments, name=f"gpuinfer router {self._row}")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        frames = self._frames = Frames(self._hear, self._lost.set)
        await asyncio.get_running_loop().create_connection(lambda: frames, sock=ours)
        await self._up()
        if self._routers.config.api_keys:  # they may have been exchanged while it started
            frames.send({"keys": self._routers.config.api_keys})
        frames.send({"members": self._routers.members})

    async def _up(self) -> None:
        here, lost = asyncio.ensure_future(self._here.wait()), asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((here, lost), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            here.cancel()
            lost.cancel()
        if not self._here.is_set():
            raise WorkError(f"router process {self._row} did not come up. Its last words are above.")

    def _hear(self, message: Mapping[str, Any]) -> None:
        if message["event"] == "here":
            self._here.set()
        elif message["event"] == "drained":
            self._drained.set()
        elif message["event"] == "spent":
            self._routers.spread(self, {"spent": message["spent"]})
        elif message["event"] == "failed":
            self._routers.heard(message)

    def tell(self, news: Mapping[str, Any]) -> None:
        if self._frames is not None and self._here.is_set():
            self._frames.send(news)

    async def _keep(self) -> None:
        """Start it anew whenever it dies."""
        loop, lately = asyncio.get_running_loop(), 0
        while True:
            begun = loop.time()
            await self._lost.wait()
            self._bury()
            if self._ending:
                return
            self.restarts += 1
            lately = 0 if loop.time() - begun > STEADY_S else lately + 1
            await asyncio.sleep(AGAIN_S[min(lately, len(AGAIN_S)) - 1] if lately else 0)
            with contextlib.suppress(WorkError, OSError):
                await self._spawn()

    def _bury(self) -> None:
        if self._process is not None:
            children.end(self._process, END_S)
        self._routers.board.bury(self._row)

    def _stop_listening(self) -> None:
        for one in self._sockets:
            one.close()

    async def drain(self) -> None:
        self._ending = True
        self._stop_listening()
        if self._frames is None or self._lost.is_set():
            return
        self._frames.send({"drain": True})
        done, lost = asyncio.ensure_future(self._drained.wait()), asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((done, lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            done.cancel()
            lost.cancel()

    async def close(self) -> None:
        self._ending = True
        self._stop_listening()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        if self._frames is not None:
            self._frames.close()
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.join, END_S)


def _free(host: str, port: int) -> int:
    sockets = listeners(host, port, False)
    port = int(sockets[0].getsockname()[1])
    for one in sockets:
        one.close()
    return port
