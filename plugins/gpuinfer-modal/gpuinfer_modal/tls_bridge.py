"""A port of this machine that leads to a TLS port of another: a fleet's router speaks plain HTTP to its replicas, and
what crosses the internet must not be plain.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

CHUNK = 1 << 16
CONNECT_S = 30.0


class TlsBridge:
    """Open between `start` and `close`."""

    def __init__(self, host: str, port: int) -> None:
        self._there = (host, port)
        self._context = ssl.create_default_context()
        self._server: asyncio.Server | None = None
        self._carrying: set[asyncio.Task[None]] = set()

    async def start(self) -> tuple[str, int]:
        """The address of this machine."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._carrying:
            task.cancel()
        if self._carrying:
            await asyncio.wait(self._carrying)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)
        host, port = self._there
        writers = [writer]
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):  # the client sees that its connection ends
                async with asyncio.timeout(CONNECT_S):
                    there, to_there = await asyncio.open_connection(host, port, ssl=self._context)
                writers.append(to_there)
                ways = [asyncio.ensure_future(one) for one in (_carry(reader, to_there), _carry(there, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
        finally:
            for one in writers:
                one.close()
                with contextlib.suppress(OSError):
                    await one.wait_closed()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while more := await reader.read(CHUNK):
            writer.write(more)
            await writer.drain()
