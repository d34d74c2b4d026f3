"""The line between a process and its child: whole msgpack messages over a socket pair, in order, both ways.

What to say of a worker process that could not start, failed, or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from gpuinfer.errors import GpuinferError, UsageError, WorkerDied, WorkError
from gpuinfer.host import spoken
from gpuinfer.host.error_wire import rebuilt

HEADER = struct.Struct(">I")
LARGEST = 256 * 2**20  # bytes of one message: the receiver checks it before it takes the memory


class LineClosed(EOFError):
    """The other end is gone."""


class WorkerLine:
    """One end of the line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> WorkerLine:
        return cls(*await asyncio.open_connection(sock=end))

    async def send(self, message: Any) -> None:
        """Send plain values. Raises `LineClosed` when the other end is gone, `WorkError` for a message over 256 MiB."""
        packed = msgpack.packb(message)
        if len(packed) > LARGEST:
            raise WorkError(f"a message of {len(packed):,} bytes is over the limit of {LARGEST:,}. Send it in parts.")
        try:
            self._writer.write(HEADER.pack(len(packed)) + packed)  # `writelines` of a closed line fails in Python 3.12
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


def obituary(worker: int, exitcode: int | None) -> str:
    """What to say of a worker process that is gone without having said why."""
    if exitcode is None:
        return (
            f"worker {worker} hears nothing and cannot be killed: it hangs in a call of the system, such as to a disk "
            "or a device that does not answer. See to that, then run again."
        )
    if exitcode == 0:
        return f"worker {worker} has ended and takes no more messages. Send nothing after the message that ends it."
    if exitcode == -signal.SIGKILL:
        return (
            f"worker {worker} was killed (SIGKILL). If nobody did it by hand, the machine ran out of memory: "
            "use fewer workers, or less work in flight."
        )
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"worker {worker} crashed ({name}). Its last words are above; run again with one worker to see it alone."
    return (
        f"worker {worker} ended with exit code {exitcode} and did not say why. See its last words above; a script that "
        "starts workers must do so under `if __name__ == '__main__':`."
    )


def as_error(worker: int, told: Mapping[str, str]) -> GpuinferError:
    """The worker's error, with its own traceback as a note."""
    error = rebuilt(told["type"], told["message"]) or WorkerDied(
        f"worker {worker} failed: {told['type']}: {told['message']}. Run again with -vv for its traceback."
    )
    error.add_note(f"In worker {worker}:\n{told['traceback']}")
    return error


def cannot_start(error: Exception) -> UsageError:
    return UsageError(
        f"a worker process could not be started: {spoken.in_full(error)}. What a backend's connect() returns, its "
        "options, the strategy's class and the arguments must be picklable: define classes at the top of a module."
    )
