"""The server's side of its clients: the acceptor of connections, and a session for each client with its line and its
blocks.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import math
import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from gpuinfer.central.blocks import PER_CLIENT, Block, BlockForm
from gpuinfer.central.protocol import VERSION, GarbledRecord, RecordKind, Unpacker, WireRecord, is_own_user, pack_record
from gpuinfer.errors import BackendError, GpuinferError, UsageError
from gpuinfer.host import error_text, shared_memory
from gpuinfer.host.error_text import error_to_wire

CHUNK = 1 << 16  # bytes read at once
DESCRIPTORS = 16  # taken along with them
ANCILLARY = socket.CMSG_SPACE(4 * DESCRIPTORS)
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class RecordBounds(NamedTuple):
    """What one client may send, and what is kept for it, in bytes."""

    body: int = 1 << 16  # of a record: a token, or the group of a request
    unsent: int = 4 << 20  # far more than all that a client can have outstanding


ROW_BOUNDS = RecordBounds()


class ClientSession:
    """One connected client. Sending never blocks: what the socket does not take at once waits in `_unsent`."""

    def __init__(self, line: socket.socket, number: int, pin: Callable[[Any], Any], bounds: RecordBounds) -> None:
        self.number = number
        self.welcome = False  # its greeting was accepted
        self.gone = False
        self.client = b""  # of the client, the same when it reconnects
        self.serving = 0  # requests of the client in a batch now
        self.asked: set[int] = set()  # numbers of blocks whose requests are not settled
        self.since = time.monotonic()
        self.names: set[Hashable] = set()  # of the clients in that process, as the queue knows them
        self.blocks: dict[int, Block] = {}
        self.sending = threading.RLock()  # held while the line's descriptor is used
        self._line = line
        self._pin = pin  # registers a block's memory with the device
        self._unpacker = Unpacker(bounds.body)
        self._most_unsent = bounds.unsent
        self._descriptors: deque[int] = deque()
        self._unsent = bytearray()
        line.setblocking(False)

    def fileno(self) -> int:
        return self._line.fileno()

    def receive(self) -> Iterator[WireRecord]:
        """The records that have arrived. Raises `EOFError` at the connection's end, `GarbledRecord` for nonsense."""
        try:
            data, ancillary, _, _ = self._line.recvmsg(CHUNK, ANCILLARY, CLOSE_ON_EXEC)
        except BlockingIOError:
            return iter(())
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        with contextlib.suppress(OSError):  # nothing more, or its end, which the next read meets
            while ancillary:  # each read ends where the next descriptor comes
                for level, kind, packed in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        self._descriptors.extend(memoryview(packed[: len(packed) // 4 * 4]).cast("i"))
                if len(self._descriptors) >= DESCRIPTORS:
                    break
                more, ancillary, _, _ = self._line.recvmsg(CHUNK, ANCILLARY, CLOSE_ON_EXEC)
                data += more
        if len(self._descriptors) > DESCRIPTORS:
            raise GarbledRecord("more descriptors than blocks")
        return self._unpacker.feed(data)

    def admit(self, hello: WireRecord, token: bytes) -> None:
        """Check the token. Raises `GarbledRecord`, or `UsageError` for another version."""
        told = hello.body if isinstance(hello.body, dict) else {}
        given = told.get("token")
        if hello.kind != RecordKind.HELLO or not isinstance(given, bytes) or not hmac.compare_digest(given, token):
            raise GarbledRecord("no greeting")
        if told.get("version") != VERSION:
            raise UsageError("client and server run different versions of gpuinfer. Let both run the same.")
        if not isinstance(client := told.get("client"), bytes):
            raise GarbledRecord("a greeting without a client")
        self.welcome, self.client = True, client

    def attach(self, record: WireRecord, form: BlockForm, max_rows: int) -> None:
        """Map a block of the client's memory, in place of an idle one of the same number.

        Raises `GarbledRecord` when the memory is not of the announced form.
        """
        if not self._descriptors:
            raise GarbledRecord("a block without its memory")
        descriptor = self._descriptors.popleft()
        if not (1 <= record.rows <= max_rows and record.block < PER_CLIENT and record.block not in self.asked):
            os.close(descriptor)
            raise GarbledRecord("a block of impossible size or number")
        try:
            mapping = shared_memory.attach(descriptor, form.size(record.rows))
        except shared_memory.Unshareable as error:
            raise GarbledRecord(f"a block of {error}") from error
        if (replaced := self.blocks.pop(record.block, None)) is not None:
            replaced.let_go()
        block = Block(record.block, record.rows, mapping, form)
        block.pin = self._pin(block.memory)
        self.blocks[record.block] = block

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> bool:
        """Send as much as the socket takes; whether all of it was sent. Any thread may call this.

        For a client that is gone the data is dropped.
        """
        with self.sending:
            was_stuck = self.stuck
            if data and not was_stuck and not descriptors:
                data = data[self._sent(data) :]
                if not data:  # as nearly always
                    return True
                was_stuck = True
            self._unsent += data
            if was_stuck and len(self._unsent) > self._most_unsent:  # the client asks, and reads no answers
                self._unsent.clear()
                with contextlib.suppress(OSError):
                    self._line.shutdown(socket.SHUT_RDWR)
            elif data == b"" or not was_stuck:
                del self._unsent[: self._sent(self._unsent, descriptors)]
            return not self._unsent

    def _sent(self, data: bytes | bytearray, descriptors: tuple[int, ...] = ()) -> int:
        """How many bytes the socket has taken; all when the client is gone, which the next read notices."""
        try:
            return socket.send_fds(self._line, [data], descriptors) if descriptors else self._line.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    @property
    def stuck(self) -> bool:
        return bool(self._unsent)

    def dismiss(self, error: GpuinferError) -> None:
        """Tell the client why it is served no more. The caller hangs up afterwards."""
        self.send(pack_record(WireRecord(RecordKind.GOODBYE, body=error_to_wire(error))))

    def hang_up(self) -> None:
        """Close the line now, and unmap the memory as soon as no batch uses it."""
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


log = logging.getLogger(__name__)

GREETING_S = 5.0  # for a new client to send its greeting
PAUSE_S = 0.1  # without new clients while there are no descriptors
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MOST_UNIDENTIFIED = 256  # connections without a greeting
LONGEST_WAIT_S = 3600.0  # at once: the system counts a wait in milliseconds, and refuses one of a month
WAITING_LINE_S = 0.01  # between two checks whether a client that has reconnected may be greeted
FINE_S = 2e-3  # below it a wait needs a finer clock than the selector's milliseconds

Ready = Sequence[tuple[selectors.SelectorKey, int]]
OnRecord = Callable[[ClientSession, WireRecord], None]
Forget = Callable[[ClientSession], None]


class ClientAcceptor:
    """One thread at a time waits and takes in; any thread may send.

    A client that takes us for dead may come back with the same blocks on another line. It is let in once no batch
    uses them any more for the line before: what that writes, or has the device write, is never over something else.
    """

    def __init__(
        self,
        listener: socket.socket,
        token: bytes,
        most_clients: int,
        welcome: tuple[bytes, int],
        pin: Callable[[Any], Any],
        bounds: RecordBounds = ROW_BOUNDS,
    ) -> None:
        """`welcome`: the record that greets a client, and its descriptor; `pin`: see `ClientSession`."""
        self.sessions: dict[int, ClientSession] = {}
        self._unidentified: set[ClientSession] = set()  # sessions without a greeting
        self._waiting_lines: list[ClientSession] = []  # of those that have, with another line that is not over
        self._leaving: list[ClientSession] = []  # gone, with requests in a batch
        self._listener, self._token = listener, token
        self._most_clients = most_clients
        self._welcome, self._pin, self._bounds = welcome, pin, bounds
        self._numbers = 0
        self._paused = False  # since the last that was accepted
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)

    # Waiting

    def fileno(self) -> int:
        """Readable when `ready` returns something: for an event loop."""
        return self._selector.fileno()

    def wake(self) -> None:
        """End every `wait`, now and from now on."""
        self._wake_writer.send(b"!")

    def ready(self) -> Ready:
        return self._selector.select(0)

    def wait(self, seconds: float) -> Ready:
        """Block until something is ready, for so many seconds at most."""
        if self._unidentified:
            seconds = min(seconds, GREETING_S)
        if self._waiting_lines:
            seconds = min(seconds, WAITING_LINE_S)
        if LONGEST_WAIT_S < seconds < math.inf:
            seconds = LONGEST_WAIT_S
        if seconds < FINE_S:
            select.select([self._selector], [], [], max(0.0, seconds))  # type: ignore[list-item]
            seconds = 0
        return self._selector.select(None if seconds == math.inf else seconds)

    # Taking in

    def take_in(self, ready: Ready, on_record: OnRecord, forget: Forget) -> None:
        """Pass each record to `on_record`, and each session that ends to `forget`.

        For a record that makes no sense `on_record` raises `GarbledRecord`, or a `GpuinferError` for the client.
        """
        for key, events in ready:
            if key.fileobj is self._listener:
                self._accept(forget)
            elif key.data is not None and not key.data.gone and not self._receive(key.data, events, on_record):
                self._drop(key.data, forget)
        for session in self._overdue():
            self._drop(session, forget)
        for session in tuple(self._waiting_lines):
            if not self._has_another_line(session):
                self._waiting_lines.remove(session)
                self._greet(session)

    @property
    def due(self) -> bool:
        """Whether `take_in` may have something to do although nothing is ready."""
        return bool(self._waiting_lines or self._overdue())

    def _overdue(self) -> list[ClientSession]:
        """Sessions whose greeting is late; the next `take_in` drops them."""
        return [one for one in self._unidentified if time.monotonic() - one.since > GREETING_S]

    def _accept(self, forget: Forget) -> None:
        try:
            line, _ = self._listener.accept()
        except OSError as error:  # the client has left, or there are no more descriptors
            if error.errno in SCARCE:
                self._pause(error)
            return
        if not is_own_user(line):
            line.close()
            return
        self._paused = False
        self._numbers += 1
        session = ClientSession(line, self._numbers, self._pin, self._bounds)
        self._selector.register(line, selectors.EVENT_READ, session)
        self.sessions[session.number] = session
        self._unidentified.add(session)
        if len(self._unidentified) > MOST_UNIDENTIFIED:  # our own client greets at once
            self._drop(min(self._unidentified, key=lambda one: one.since), forget)

    def _pause(self, error: OSError) -> None:
        """Accept nothing for a moment: the listener stays ready, and the thread that waits would spin."""
        if not self._paused:
            log.warning("no client can be taken in: %s. Allow more open files (`ulimit -n`).", error.strerror)
        self._paused = True
        self._selector.unregister(self._listener)
        again = threading.Timer(PAUSE_S, self._selector.register, (self._listener, selectors.EVENT_READ, None))
        again.daemon = True
        again.start()

    def _receive(self, session: ClientSession, events: int, on_record: OnRecord) -> bool:
        """Process what one client has sent; whether its session goes on."""
        if events & selectors.EVENT_WRITE:
            self.send(session, b"")
        if not events & selectors.EVENT_READ:
            return True
        try:
            for record in session.receive():
                if session in self._waiting_lines:
                    raise GarbledRecord("a request before the greeting was answered")
                if session.welcome:
                    on_record(session, record)
                else:
                    self._admit(session, record)
        except EOFError:
            return False
        except GarbledRecord as error:
            session.dismiss(UsageError(f"the server was sent {error}. Use gpuinfer's own client."))
        except GpuinferError as error:
            session.dismiss(error)
        except Exception as error:  # noqa: BLE001 (whatever one client sends, the others are served)
            log.warning("a client was dropped: %s.", error_text.full_message(error))
            session.dismiss(BackendError("the server could not make sense of this client. See its last words."))
        else:
            return True
        return False

    def _admit(self, session: ClientSession, hello: WireRecord) -> None:
        session.admit(hello, self._token)
        self._unidentified.discard(session)
        if len(self.sessions) - len(self._unidentified) > self._most_clients:
            raise UsageError(
                f"the server has {self._most_clients} clients already. "
                "Close some, or start it with a larger max_clients."
            )
        if self._has_another_line(session):
            self._waiting_lines.append(session)
        else:
            self._greet(session)

    def _greet(self, session: ClientSession) -> None:
        record, descriptor = self._welcome
        session.send(record, (descriptor,))

    def _has_another_line(self, session: ClientSession) -> bool:
        """Whether the same client has an older session that has not ended, or whose requests are in a batch."""
        self._leaving = [one for one in self._leaving if one.serving]
        others = [*self.sessions.values(), *self._leaving]
        return any(
            one is not session and one.client == session.client and one not in self._waiting_lines for one in others
        )

    def _drop(self, session: ClientSession, forget: Forget) -> None:
        with session.sending:  # another thread may be about to register the line for writing
            self._selector.unregister(session.fileno())
        del self.sessions[session.number]
        self._unidentified.discard(session)
        if session in self._waiting_lines:
            self._waiting_lines.remove(session)
        forget(session)
        session.hang_up()
        if session.serving:
            self._leaving.append(session)

    # Sending

    def dismiss_all(self, error: GpuinferError) -> None:
        """Tell every client why the server serves it no more."""
        for session in tuple(self.sessions.values()):
            session.dismiss(error)

    def send(self, session: ClientSession, data: bytes) -> None:
        """Best without a lock held: the client that this wakes may take this core at once."""
        with session.sending:
            stuck = session.stuck
            if session.gone or session.send(data) != stuck:
                return
            # from now on, or no longer, wait for room on the line
            events = selectors.EVENT_READ if stuck else selectors.EVENT_READ | selectors.EVENT_WRITE
            with contextlib.suppress(KeyError):  # it is being dropped
                self._selector.modify(session.fileno(), events, session)
