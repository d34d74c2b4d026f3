"""The life of one router process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gpuinfer.fleet.roster import Member
from gpuinfer.fleet.router.board import Board
from gpuinfer.fleet.router.client_side import Door
from gpuinfer.fleet.router.config import RouterConfig
from gpuinfer.fleet.router.frames import Frames
from gpuinfer.fleet.router.relay import Relay
from gpuinfer.host import children, machine, pauses
from gpuinfer.http.access import keep_fresh
from gpuinfer.http.loop import new_loop
from gpuinfer.http.request_log import JsonLines
from gpuinfer.http.tls import Certificate

BACKLOG = 4096
SPENDING_S = 0.1  # between two tellings of what keys have spent


class Seat(msgspec.Struct, frozen=True):
    """A member, and the slot on the board that it has."""

    member: Member
    slot: int


def main(line: socket.socket, listeners: Sequence[socket.socket], board: Board, row: int, config: bytes) -> None:
    """Runs until its owner ends it, or is gone."""
    children.settle_in()
    machine.descriptors()  # as many as it may have
    told = msgspec.msgpack.decode(config, type=RouterConfig)
    if told.log is not None:
        _log(told.log)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_serve(line, listeners, board, row, told))
    os._exit(0)


def _log(form: str) -> None:
    """Requests on standard error, which is the supervisor's."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter("gpuinfer: %(message)s"))
    log = logging.getLogger("gpuinfer")
    log.setLevel(logging.INFO)
    log.handlers = [handler]


async def _serve(
    line: socket.socket, listeners: Sequence[socket.socket], board: Board, row: int, config: RouterConfig
) -> None:
    router = _Router(listeners, board, row, config)
    await router.run(line)


class _Router:
    """Does what its owner says on their line."""

    def __init__(self, listeners: Sequence[socket.socket], board: Board, row: int, config: RouterConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._over = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._servers: list[asyncio.Server] = []
        self._frames = Frames(self._obey, self._over.set)
        self._relay = Relay(config, board, row, self._loop, self._frames.send)
        self._door = Door(self._relay)
        self._several = config.processes > 1
        self._certificate = None if config.tls is None else Certificate(*map(Path, config.tls))
        self._tls: dict[str, Any] = {}
        if self._certificate is not None:
            self._tls = self._certificate.of_server(config.head_s)

    async def run(self, line: socket.socket) -> None:
        await self._loop.create_connection(lambda: self._frames, sock=line)
        self._relay.wheel.start()
        pauses.keep_short()
        self._frames.send({"event": "here"})
        fresh = self._loop.create_task(keep_fresh([] if self._certificate is None else [self._certificate]))
        spending = self._loop.create_task(self._tell_spending())
        await self._over.wait()
        fresh.cancel()
        spending.cancel()

    async def _tell_spending(self) -> None:
        """What keys have spent here, for the other processes."""
        while self._several:
            await asyncio.sleep(SPENDING_S)
            if news := self._door.gate.quotas.news():
                self._frames.send({"event": "spent", "spent": news})

    def _obey(self, message: Mapping[str, Any]) -> None:
        if "members" in message:
            seats = msgspec.convert(message["members"], list[Seat])
            self._relay.members.update((seat.member, seat.slot) for seat in seats)
            if not self._servers and self._draining is None:
                self._loop.create_task(self._listen())
        elif "spent" in message:
            self._door.gate.quotas.hear((name, kind, amount) for name, kind, amount in message["spent"])
        elif "keys" in message:
            if self._door.gate.keys is not None:
                self._door.gate.keys.replace(message["keys"])
        elif "drain" in message and self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    async def _listen(self) -> None:
        for listener in self._listeners:
            own = listener.dup()  # the server closes what it is given
            made = await self._loop.create_server(self._door.protocol, sock=own, backlog=BACKLOG, **self._tls)
            self._servers.append(made)
        self._frames.send({"event": "ready"})

    async def _drain(self) -> None:
        """Take in who is at the door, answer what is under way, and say so."""
        self._relay.closing = True
        for server in self._servers:
            server.close()
        for listener in self._listeners:
            await self._take_last(listener, self._door.protocol)
            listener.close()
        await self._door.empty()
        self._relay.close()
        self._frames.send({"event": "drained"})

    async def _take_last(self, listener: socket.socket, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Connections that the system has made, and nobody has accepted yet, would be lost with their socket."""
        listener.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = listener.accept()
                connection.setblocking(False)
                await self._loop.connect_accepted_socket(protocol, connection, **self._tls)
