"""The line between a process and its child: whole msgpack messages over a socket pair, in order, both ways."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from typing import Any

import msgpack

from gpuinfer.errors import WorkError

HEADER = struct.Struct(">I")
LARGEST = 256 * 2**20  # bytes of one message: the receiver checks it before it takes the memory


class LineClosed(EOFError):
    """The other end is gone."""


class Line:
    """One end of the line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> Line:
        return cls(*await asyncio.open_connection(sock=end))

    async def send(self, message: Any) -> None:
        """Send plain values. Raises `LineClosed` when the other end is gone, `WorkError` for a message over 256 MiB."""
        packed = msgpack.packb(message)
        if len(packed) > LARGEST:
            raise WorkError(f"a message of {len(packed):,} bytes is over the limit of {LARGEST:,}. Send it in parts.")
        try:
            self._writer.writelines((HEADER.pack(len(packed)), packed))
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # RuntimeError: after `finish`
            raise LineClosed("the line is closed") from error

    async def receive(self) -> Any:
        """The next message. Raises `LineClosed` when the other end is gone, also in the middle of a message."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > LARGEST:
                raise LineClosed(f"the other end announced a message of {size:,} bytes")
            return msgpack.unpackb(await self._reader.readexactly(size), strict_map_key=False)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LineClosed("the other end is gone") from error

    def last_words(self, message: Any) -> None:
        """Send a short message from another thread while the event loop is blocked, as well as that goes."""
        packed = msgpack.packb(message)
        with contextlib.suppress(OSError):
            os.write(self._writer.get_extra_info("socket").fileno(), HEADER.pack(len(packed)) + packed)

    def finish(self) -> None:
        """Say that nothing more will be sent; what the other end still sends can be received."""
        if not self._writer.is_closing():
            self._writer.write_eof()

    async def hang_up(self) -> None:
        """Finish, and wait until the other end closes: closing on unread bytes would take the last sent ones away."""
        self.finish()
        with contextlib.suppress(OSError):
            while await self._reader.read(2**16):
                pass

    def close(self) -> None:
        """Hang up. What was sent before still arrives."""
        self._writer.close()
