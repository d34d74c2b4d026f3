"""The server's side of one client: its line, its blocks, and what it is owed."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from gpuinfer.central import memory
from gpuinfer.central.memory import PER_CLIENT, Block, BlockForm
from gpuinfer.central.wire import VERSION, Garbled, Kind, Record, Unpacker, pack
from gpuinfer.errors import GpuinferError, UsageError
from gpuinfer.host.error_wire import error_to_wire

CHUNK = 1 << 16  # bytes read at once
DESCRIPTORS = 16  # taken along with them
ANCILLARY = socket.CMSG_SPACE(4 * DESCRIPTORS)
Ancillary = list[tuple[int, int, bytes]]
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Bounds(NamedTuple):
    """What one client may send, and what is kept for it, in bytes."""

    body: int = 1 << 16  # of a record: a token, or the group of a request
    unsent: int = 4 << 20  # far more than all that a client can have outstanding


ROWS = Bounds()


class Caller:
    """One connected client. The line never blocks; what it does not take at once waits in `_unsent`."""

    def __init__(self, line: socket.socket, number: int, pin: Callable[[Any], Any], bounds: Bounds) -> None:
        self.number = number
        self.welcome = False  # it has shown that it is one of ours
        self.gone = False
        self.client = b""  # whose line it is: a client that takes us for dead hangs up, and may come back on another
        self.serving = 0  # of its requests are in a batch now
        self.asked: set[int] = set()  # numbers of the blocks with requests that are not settled
        self.since = time.monotonic()
        self.names: set[Hashable] = set()  # of the clients in that process, as the queue knows them
        self.blocks: dict[int, Block] = {}
        self.sending = threading.RLock()  # held while anything is done with the line's descriptor
        self._line = line
        self._pin = pin  # registers a block's memory with the device
        self._unpacker = Unpacker(bounds.body)
        self._most_unsent = bounds.unsent
        self._descriptors: deque[int] = deque()
        self._unsent = bytearray()
        line.setblocking(False)

    def fileno(self) -> int:
        return self._line.fileno()

    def receive(self) -> Iterator[Record]:
        """What it has sent. Raises `EOFError` when it has hung up, `Garbled` when it is not one of ours."""
        try:
            data, ancillary, _, _ = self._line.recvmsg(CHUNK, ANCILLARY, CLOSE_ON_EXEC)
        except BlockingIOError:
            return iter(())
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        if ancillary:
            data += self._read_on(ancillary)
        return self._unpacker.feed(data)

    def _read_on(self, ancillary: Ancillary) -> bytes:
        """Keep the descriptors. What follows: a read ends where the next descriptor comes, and there may be many."""
        more = bytearray()
        with contextlib.suppress(OSError):  # nothing more, or its end, which the next read meets
            while ancillary:
                for level, kind, packed in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        self._descriptors.extend(memoryview(packed[: len(packed) // 4 * 4]).cast("i"))
                if len(self._descriptors) >= DESCRIPTORS:
                    break
                data, ancillary, _, _ = self._line.recvmsg(CHUNK, ANCILLARY, CLOSE_ON_EXEC)
                more += data
        if len(self._descriptors) > DESCRIPTORS:
            raise Garbled("more descriptors than blocks")
        return bytes(more)

    def admit(self, hello: Record, token: bytes) -> None:
        """Check that this is one of our owner's processes. Raises `Garbled`, or `UsageError` for another version."""
        told = hello.body if isinstance(hello.body, dict) else {}
        given = told.get("token")
        if hello.kind != Kind.HELLO or not isinstance(given, bytes) or not hmac.compare_digest(given, token):
            raise Garbled("no greeting")
        if told.get("version") != VERSION:
            raise UsageError("client and server run different versions of gpuinfer. Let both run the same.")
        if not isinstance(client := told.get("client"), bytes):
            raise Garbled("a greeting of nobody")
        self.welcome, self.client = True, client

    def attach(self, record: Record, form: BlockForm, max_rows: int) -> None:
        """Take a block of its memory in, in the place of any idle one of the same number.

        Raises `Garbled` for one that is not what it says.
        """
        if not self._descriptors:
            raise Garbled("a block without its memory")
        descriptor = self._descriptors.popleft()
        if not (1 <= record.rows <= max_rows and record.block < PER_CLIENT and record.block not in self.asked):
            os.close(descriptor)
            raise Garbled("a block of impossible size or number")
        try:
            mapping = memory.attach(descriptor, form.size(record.rows))
        except memory.Unshareable as error:
            raise Garbled(f"a block of {error}") from error
        if (replaced := self.blocks.pop(record.block, None)) is not None:
            replaced.let_go()
        block = Block(record.block, record.rows, mapping, form)
        block.pin = self._pin(block.memory)
        self.blocks[record.block] = block

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> bool:
        """Send, as far as the line takes it; whether all has gone out. Any thread may.

        A client that is gone loses what it was sent.
        """
        with self.sending:
            was_stuck = self.stuck
            if data and not was_stuck and not descriptors:
                data = data[self._sent(data) :]
                if not data:  # as nearly always
                    return True
                was_stuck = True
            self._unsent += data
            if was_stuck and len(self._unsent) > self._most_unsent:  # it asks and asks, and takes no answers
                self._unsent.clear()
                with contextlib.suppress(OSError):
                    self._line.shutdown(socket.SHUT_RDWR)
            elif data == b"" or not was_stuck:
                self._push(descriptors)
            return not self._unsent

    def _push(self, descriptors: tuple[int, ...]) -> None:
        del self._unsent[: self._sent(self._unsent, descriptors)]

    def _sent(self, data: bytes | bytearray, descriptors: tuple[int, ...] = ()) -> int:
        """How many bytes the line has taken; all, when nobody is there: the reader will notice."""
        try:
            return socket.send_fds(self._line, [data], descriptors) if descriptors else self._line.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    @property
    def stuck(self) -> bool:
        """Whether its line does not take what it was sent."""
        return bool(self._unsent)

    def dismiss(self, error: GpuinferError) -> None:
        """Say why it is served no more; whoever calls this hangs up afterwards."""
        self.send(pack(Record(Kind.GOODBYE, body=error_to_wire(error))))

    def hang_up(self) -> None:
        """Let go of the line now, and of the memory as soon as no batch uses it."""
        with self.sending, contextlib.suppress(OSError):  # a descriptor that is closed may be another client's at once
            self.gone = True
            self._line.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self.release()

    def release(self) -> None:
        if self.gone and not self.serving:
            for block in self.blocks.values():
                block.let_go()
            self.blocks.clear()
