"""Where nodes reach their coordinator: HTTP, the run's key, and messages in msgpack."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from gpuinfer.cluster import messages
from gpuinfer.cluster.messages import CoordinatorReply, Hello, KeptReply, NodeMessage, Welcome
from gpuinfer.cluster.node_entry import UnknownNode
from gpuinfer.cluster.node_processes import NodesPlan
from gpuinfer.division import WorkRange
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.fleet.plan import is_loopback
from gpuinfer.http.access import LOOPBACK, Access, Keys
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.network import ListenFlags
from gpuinfer.http.parser import HttpLimits
from gpuinfer.http.route_table import Route, RouteTable
from gpuinfer.http.server import HttpServer

PIECE_BYTES = 1 << 20  # of weights that are sent

log = logging.getLogger(__name__)


class AnswersNodes(Protocol):
    """What a coordinator answers. Its methods say which errors they raise."""

    def join(self, hello: Hello) -> Welcome: ...

    async def exchange(self, state: NodeMessage) -> CoordinatorReply: ...

    async def keep(self, node: int, run: str, work: WorkRange, records: bytes | str) -> KeptReply: ...

    def weights(self, version: str) -> Path: ...

    def fail(self, error: Exception) -> None: ...


class NodeEndpoint:
    """Listens for the nodes of one coordinator; who has no `key` is refused."""

    def __init__(self, coordinator: AnswersNodes, key: str) -> None:
        self._coordinator, self._key = coordinator, key
        self.server: HttpServer | None = None

    async def listen(self, plan: NodesPlan) -> str:
        """Listen; HOST:PORT by which nodes reach this. Raises `UsageError` for an address that cannot be had."""
        launcher, address = plan.launcher, plan.address
        parts = urlsplit(f"//{address}") if address else None
        try:
            port = (parts.port if parts else None) or 0
        except ValueError as error:
            raise UsageError(f"-L coordinator={address}: {error}. Write HOST or HOST:PORT.") from None
        host = (parts.hostname if parts else None) or launcher.reached_at()
        if is_loopback(launcher.bind) and not is_loopback(host):
            raise UsageError(
                f"nodes would dial {host}, and --launcher {launcher.name} has the coordinator listen on "
                f"{launcher.bind} alone, which no other machine reaches. Write -L coordinator=127.0.0.1"
                f"{f':{port}' if port else ''}, or let it listen elsewhere: --launcher external -L bind=0.0.0.0."
            )
        names = LOOPBACK if launcher.bind == "127.0.0.1" else None
        routes = RouteTable(self._routes(), Access(Keys([self._key]), None, names))
        limits = HttpLimits(body_bytes=messages.RECORDS_BYTES, bodies_bytes=2 * messages.RECORDS_BYTES, body_s=600.0)
        self.server = HttpServer(routes, limits, quick=routes.quick)
        flags = ListenFlags("-L bind=", f"-L coordinator={host}:")
        port = await self.server.listen(launcher.bind, port, flags=flags)
        reached_at = f"{f'[{host}]' if ':' in host else host}:{port}"
        log.info("nodes reach the coordinator at %s", reached_at)
        return reached_at

    async def close(self) -> None:
        if self.server is not None:
            await self.server.close()

    def _routes(self) -> list[Route]:
        answers: dict[str, tuple[Callable[[Exchange], Awaitable[bytes]], str]] = {
            messages.JOIN: (self._join, "A node joins the run."),
            messages.EXCHANGE: (self._exchange, "How a node is, and what it is to do."),
            messages.RECORDS: (self._records, "The records of a range."),
        }
        posted = [Route("POST", path, self._handler(answer), "api", about) for path, (answer, about) in answers.items()]
        return [*posted, Route("GET", messages.WEIGHTS, self._handler(self._weights), "api", "Weights of a version.")]

    def _handler(self, answer: Callable[[Exchange], Awaitable[bytes | None]]) -> Callable[[Exchange], Awaitable[None]]:
        """`answer` gives the body of the response; None: it has responded itself."""

        async def handle(exchange: Exchange) -> None:
            exchange.routine = True
            try:
                if (body := await answer(exchange)) is not None:
                    exchange.respond(200, body, messages.MSGPACK)
            except UnknownNode as error:
                exchange.refuse(410, str(error))
            except UsageError as error:  # another version of gpuinfer, or no node at all
                exchange.refuse(409, str(error))
            except WorkError as error:
                self._coordinator.fail(error)
                exchange.refuse(500, str(error))

        return handle

    async def _join(self, exchange: Exchange) -> bytes:
        return messages.encode_message(self._coordinator.join(messages.decode_message(exchange.body, Hello)))

    async def _exchange(self, exchange: Exchange) -> bytes:
        state: NodeMessage = messages.decode_message(exchange.body, NodeMessage)
        return messages.encode_message(await self._coordinator.exchange(state))

    async def _records(self, exchange: Exchange) -> bytes:
        query = exchange.query
        try:
            node, start, stop = (int(query[name]) for name in ("node", "start", "stop"))
            run = query["run"]
        except (KeyError, ValueError):
            raise UsageError("records need node, run, start and stop. Let both ends run one version.") from None
        records = query.get("file", exchange.body)
        reply = await self._coordinator.keep(node, run, WorkRange(start, stop), records)
        return messages.encode_message(reply)

    async def _weights(self, exchange: Exchange) -> None:
        """In pieces: all nodes want a new version at once, and the file may be large."""
        place = self._coordinator.weights(exchange.query.get("version", ""))
        try:
            file = await asyncio.to_thread(place.open, "rb")
        except OSError as error:
            raise WorkError(f"{place} cannot be read: {error.strerror}. Put the file back.") from error
        with file:
            exchange.begin(200, messages.FILE)
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                await exchange.write(piece)
        exchange.end()
