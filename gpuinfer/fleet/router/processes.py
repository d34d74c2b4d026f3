"""The router processes: as their owner sees them (started, told who is in the fleet, started again when one dies), and
the life of one. A member that has left keeps its slot among the shared counters until all others are taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.fleet.router.client_connection import Listener
from gpuinfer.fleet.router.protocol import FleetMember, Roster, RouterConfig
from gpuinfer.fleet.router.relay import Relay
from gpuinfer.fleet.router.shared_counters import SLOTS, MemberCell, ProcessCell, SharedCounters
from gpuinfer.host import children, error_text, machine
from gpuinfer.host.child import AsyncChannel, ChannelClosed, Child
from gpuinfer.host.process import shorten_collections
from gpuinfer.http.access import reload_changed_files
from gpuinfer.http.http_exchange import JsonLogFormatter
from gpuinfer.http.network import Certificate, bind_tcp, new_network_loop, take_backlog
from gpuinfer.serving.telemetry.otlp_logs import LoggedRecord, attach_log_handler
from gpuinfer.serving.telemetry.spans import FinishedSpan

log = logging.getLogger(__name__)

BACKLOG = 4096
SPENDING_S = 0.1  # between two tellings of what keys have spent
TELEMETRY_S = 0.2  # between two hand-overs of spans and log records
MOST_RECORDS = 4096  # log records that wait to be handed over; the oldest are dropped beyond


class MemberSlot(msgspec.Struct, frozen=True):
    """A member, and the slot on the board that it has."""

    member: FleetMember
    slot: int


def router_main(
    line: socket.socket, listeners: Sequence[socket.socket], board: SharedCounters, row: int, config: bytes
) -> None:
    """Runs until its owner ends it, or is gone."""
    children.set_up_child()
    machine.descriptors()  # as many as it may have
    settings = msgspec.msgpack.decode(config, type=RouterConfig)
    if settings.log is not None:  # requests on standard error, which is the supervisor's
        handler, ours = logging.StreamHandler(), logging.getLogger("gpuinfer")
        formatter = JsonLogFormatter() if settings.log == "json" else logging.Formatter("gpuinfer: %(message)s")
        handler.setFormatter(formatter)
        ours.setLevel(logging.INFO)
        ours.handlers = [handler]
    kept = KeptRecords() if settings.hands_over_log else None
    if kept is not None:
        attach_log_handler(kept)

    async def serve() -> None:
        await _RouterProcess(listeners, board, row, settings, kept).run(line)

    with asyncio.Runner(loop_factory=new_network_loop) as runner:
        runner.run(serve())
    os._exit(0)


class KeptRecords(logging.Handler):
    """Keeps log records until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._records: deque[LoggedRecord] = deque(maxlen=MOST_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(LoggedRecord.of(record))

    def take(self) -> list[LoggedRecord]:
        taken = list(self._records)
        self._records.clear()
        return taken


class _RouterProcess:
    """Does what its owner says on their line."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        board: SharedCounters,
        row: int,
        config: RouterConfig,
        kept: KeptRecords | None,
    ) -> None:
        self._kept = kept
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._draining: asyncio.Task[None] | None = None
        self._servers: list[asyncio.Server] = []
        self._channel: AsyncChannel  # once it runs
        self._relay = Relay(config, board, row, self._loop, self._tell)
        self._listener = Listener(self._relay)
        self._several = config.processes > 1
        self._certificate = None if config.tls is None else Certificate(*map(Path, config.tls))
        self._tls: dict[str, Any] = {}
        if self._certificate is not None:
            self._tls = self._certificate.of_server(config.head_s)

    async def run(self, line: socket.socket) -> None:
        self._channel = await AsyncChannel.open(line)
        self._relay.timer.start()
        shorten_collections()
        self._tell({"event": "here"})
        fresh = self._loop.create_task(reload_changed_files([] if self._certificate is None else [self._certificate]))
        spending = self._loop.create_task(self._tell_spending())
        telemetry = self._loop.create_task(self._hand_over_telemetry())
        with contextlib.suppress(ChannelClosed):  # the owner has gone
            while True:
                self._obey(await self._channel.receive())
        for task in (fresh, spending, telemetry):
            task.cancel()

    def _tell(self, news: Mapping[str, Any]) -> None:
        self._channel.post(news)

    async def _tell_spending(self) -> None:
        """What keys have spent here, for the other processes."""
        while self._several:
            await asyncio.sleep(SPENDING_S)
            if news := self._listener.gate.quotas.take_news():
                self._tell({"event": "spent", "spent": news})

    async def _hand_over_telemetry(self) -> None:
        """To the supervisor, which exports it: what encodes and sends would keep this process from relaying."""
        while self._listener.tracer is not None or self._kept is not None:
            await asyncio.sleep(TELEMETRY_S)
            await self._send_telemetry()

    async def _send_telemetry(self) -> None:
        tracer, kept = self._listener.tracer, self._kept
        spans = [] if tracer is None else tracer.take()
        records = [] if kept is None else kept.take()
        if spans or records:  # waits for room: what does not fit meanwhile is dropped where it is kept
            try:
                await self._channel.send({"event": "telemetry", "spans": spans, "records": records})
            except ChannelClosed:
                pass  # the owner has gone
            except Exception as error:  # noqa: BLE001 (what cannot be handed over must not end the hand-over)
                log.warning("spans and log records of requests are lost: %s", error_text.short_message(error))

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "members" in message:
            seats = msgspec.convert(message["members"], list[MemberSlot])
            self._relay.members.update((seat.member, seat.slot) for seat in seats)
            if not self._servers and self._draining is None:
                self._loop.create_task(self._listen())
        elif "spent" in message:
            self._listener.gate.quotas.add_news((name, kind, amount) for name, kind, amount in message["spent"])
        elif "keys" in message:
            if (keys := self._listener.gate.access.api) is not None:
                keys.replace(message["keys"])
        elif "drain" in message and self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    async def _listen(self) -> None:
        for listener in self._listeners:
            own = listener.dup()  # the server closes what it is given
            made = await self._loop.create_server(self._listener.protocol, sock=own, backlog=BACKLOG, **self._tls)
            self._servers.append(made)
        self._tell({"event": "ready"})

    async def _drain(self) -> None:
        """Take in who is at the door, answer what is under way, and say so."""
        self._relay.closing = True
        for server in self._servers:
            server.close()
        for listener in self._listeners:
            for connection in take_backlog(listener):
                await self._loop.connect_accepted_socket(self._listener.protocol, connection, **self._tls)
            listener.close()
        await self._listener.until_empty()
        self._relay.close()
        await self._send_telemetry()
        self._tell({"event": "drained"})


class MemberSlots:
    """A member that has left keeps its slot, and with it its counters, until all others are taken."""

    def __init__(self, board: SharedCounters) -> None:
        self._board = board
        self.taken: dict[int, int] = {}  # member id → slot; who has left longest ago first among those who have left

    def seated(self, roster: Roster) -> list[MemberSlot]:
        """All of a roster; those for whom there is no slot are left out."""
        present = {member.id for member in roster.members}
        return [
            MemberSlot(member, slot) for member in roster.members if (slot := self._slot(member, present)) is not None
        ]

    def _slot(self, member: FleetMember, present: set[int]) -> int | None:
        if member.id in self.taken:
            return self.taken[member.id]
        if len(self.taken) < SLOTS:
            slot = len(self.taken)
        else:
            gone = next((one for one in self.taken if one not in present), None)
            if gone is None:
                return None
            slot = self.taken.pop(gone)
            self._board.clear(slot)
        self.taken[member.id] = slot
        return slot


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
    queued: int = 0  # wait now for room at a replica
    queue_taken: int = 0  # have waited, and were sent to one
    queue_full: int = 0  # answered 429, since no replica had room and too many waited
    queue_expired: int = 0  # whose deadline passed while they waited
    queue_wait_us: int = 0  # microseconds that those which were sent had waited, together
    policy_faults: int = 0  # choices that the routing policy did not make: the least loaded replica was taken
    restarts: int = 0  # of router processes


OnTelemetry = Callable[[Sequence[FinishedSpan], Sequence[LoggedRecord]], None]


class Routers:
    """Router processes on one port, each with a listening socket of its own (SO_REUSEPORT): the kernel gives a new
    connection to one of them by a hash of both ends' addresses and ports, evenly over many connections, whatever they
    do. The sockets stay open here while a process is replaced, so that who connects meanwhile waits for the new one.

    `on_event` is called on the loop with `{"event": "failed", "member": id, "kind": "refused" | "reset" | "timeout" |
    "broken"}` when a replica failed a request, `on_telemetry` with spans and log records of requests. Everything here
    is called on the event loop that ran `start`.
    """

    def __init__(
        self,
        config: RouterConfig,
        on_event: Callable[[Mapping[str, Any]], None],
        on_telemetry: OnTelemetry = lambda spans, records: None,
    ) -> None:
        self.config = config
        self.heard, self.on_telemetry = on_event, on_telemetry
        self.board = SharedCounters(config.processes)
        self._seats = MemberSlots(self.board)
        self._roster = Roster(-1, ())
        self.members: list[MemberSlot] = []
        self._processes: list[_ProcessHandle] = []

    async def start(self) -> int:
        """Start them, and return the port. Raises `UsageError` when it is in use, `WorkError` when none comes up."""
        config, port = self.config, self.config.port
        several = config.processes > 1
        if several:  # a port that others share would not count as in use
            for one in (sockets := bind_tcp(config.host, port, False)):
                port = int(one.getsockname()[1])
                one.close()
        for row in range(config.processes):
            sockets = bind_tcp(config.host, port, several)
            port = sockets[0].getsockname()[1]
            self._processes.append(_ProcessHandle(self, row, sockets))
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
        self.members = self._seats.seated(roster)
        for process in self._processes:
            process.tell({"members": self.members})

    def exchange_keys(self, lines: list[str]) -> None:
        """Let these keys in from now on, in place of those of before."""
        self.config = msgspec.structs.replace(self.config, api_keys=tuple(lines))
        for process in self._processes:
            process.tell({"keys": lines})

    def spread(self, teller: _ProcessHandle, news: Mapping[str, Any]) -> None:
        """Tell all processes but the one that says so."""
        for process in self._processes:
            if process is not teller:
                process.tell(news)

    def counters(self) -> Mapping[int, MemberCounters]:
        """By member id, of all that were ever in a roster and are not long gone."""
        board, summed = self.board, [cell for cell in MemberCell if cell is not MemberCell.BREAKER]
        return {
            member: MemberCounters(
                **{cell.name.lower(): board.sum_of(slot, cell) for cell in summed},
                breaker=_BREAKERS[board.most_of(slot, MemberCell.BREAKER)],
            )
            for member, slot in self._seats.taken.items()
        }

    def totals(self) -> RouterCounters:
        return RouterCounters(
            **{total.name.lower(): self.board.total(total) for total in ProcessCell},
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


class _ProcessHandle:
    """One of them: started, heard, started again."""

    def __init__(self, routers: Routers, row: int, sockets: list[socket.socket]) -> None:
        self._routers, self._row, self._sockets = routers, row, sockets
        self._process: Child | None = None
        self._channel: AsyncChannel | None = None
        self._listener: asyncio.Task[None] | None = None
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
        self._lost.clear()
        self._here.clear()
        packed = msgspec.msgpack.encode(self._routers.config)
        arguments = (self._sockets, self._routers.board, self._row, packed)
        self._process = Child(router_main, *arguments, name=f"gpuinfer router {self._row}")
        channel = self._channel = await AsyncChannel.open(self._process.end)
        self._listener = asyncio.create_task(self._listen(channel))
        await self._up()
        if self._routers.config.api_keys:  # they may have been exchanged while it started
            channel.post({"keys": self._routers.config.api_keys})
        channel.post({"members": self._routers.members})

    async def _listen(self, channel: AsyncChannel) -> None:
        try:
            with contextlib.suppress(ChannelClosed):
                while True:
                    self._hear(await channel.receive())
        finally:
            channel.close()
            self._lost.set()

    async def _up(self) -> None:
        here, lost = asyncio.ensure_future(self._here.wait()), asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait((here, lost), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            here.cancel()
            lost.cancel()
        if not self._here.is_set():
            if self._process is not None and self._process.exit_code() == children.UNGUARDED:
                raise UsageError(children.UNGUARDED_SAID.format("a fleet"))
            raise WorkError(f"router process {self._row} did not come up. Its last words are above.")

    def _hear(self, message: Mapping[str, Any]) -> None:
        if message["event"] == "here":
            self._here.set()
        elif message["event"] == "drained":
            self._drained.set()
        elif message["event"] == "spent":
            self._routers.spread(self, {"spent": message["spent"]})
        elif message["event"] == "telemetry":
            spans = msgspec.convert(message["spans"], list[FinishedSpan])
            self._routers.on_telemetry(spans, msgspec.convert(message["records"], list[LoggedRecord]))
        elif message["event"] in ("failed", "policy"):
            self._routers.heard(message)

    def tell(self, news: Mapping[str, Any]) -> None:
        if self._channel is not None and self._here.is_set():
            self._channel.post(news)

    async def _keep(self) -> None:
        """Start it anew whenever it dies."""
        loop, lately = asyncio.get_running_loop(), 0
        while True:
            begun = loop.time()
            await self._lost.wait()
            if self._process is not None:
                self._process.kill(END_S)
            self._routers.board.bury(self._row)
            if self._ending:
                return
            self.restarts += 1
            lately = 0 if loop.time() - begun > STEADY_S else lately + 1
            await asyncio.sleep(AGAIN_S[min(lately, len(AGAIN_S)) - 1] if lately else 0)
            with contextlib.suppress(WorkError, OSError):
                await self._spawn()

    def _stop_listening(self) -> None:
        for one in self._sockets:
            one.close()

    async def drain(self) -> None:
        self._ending = True
        self._stop_listening()
        if self._channel is None or self._lost.is_set():
            return
        self._channel.post({"drain": True})
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
        if self._listener is not None:
            self._listener.cancel()
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.kill, END_S)
