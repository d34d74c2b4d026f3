"""One connection of the server: bytes → requests, one after the other → the bytes of their responses.

The next request is read when the response to the one before is complete. What arrives meanwhile is kept, and once
something is, no more is read: at most one read of the loop's, 256 KB, is buffered beside the body.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol, cast

from gpuinfer.errors import GpuinferError
from gpuinfer.http import diagnosis, replies
from gpuinfer.http.chunked import ChunkedBody
from gpuinfer.http.exchange import ClientGone, Exchange, Handler, Quick
from gpuinfer.http.limits import HttpLimits
from gpuinfer.http.malformed import Malformed
from gpuinfer.http.strict import Head, check_target, parse_head

if TYPE_CHECKING:
    from gpuinfer.http.departures import Departures

log = logging.getLogger(__name__)

# What a connection is at. NEW and IDLE differ in how long they may last.
NEW, IDLE, HEAD, BODY, CHUNKS, ANSWERING, LINGERING, GONE = range(8)
READING = frozenset({NEW, IDLE, HEAD, BODY, CHUNKS})
LINGER_S = 2.0  # how long the rest of a refused request is read and dropped, so that the refusal arrives
LINGER_BYTES = 1 << 20
CROWDED = Malformed(503, "too many connections. Try again.")
CROWDED_S = 2.0
QUICK_TURNS = 64  # pipelined requests that are answered on the spot before others have their turn


class Host(Protocol):
    """What a connection needs of its server."""

    limits: HttpLimits
    handler: Handler
    quick: Quick | None
    loop: asyncio.AbstractEventLoop
    departures: Departures
    bodies: int  # bytes of all bodies that are held
    closing: bool

    def opened(self, connection: Connection) -> None: ...
    def closed(self, connection: Connection) -> None: ...
    def count(self, what: str) -> None: ...


class Connection(asyncio.Protocol):
    """Talks HTTP/1.1 with one client."""

    __slots__ = (
        "_body",
        "_buffer",
        "_crowded",
        "_dropped",
        "_exchange",
        "_full",
        "_half",
        "_head",
        "_held",
        "_host",
        "_paused",
        "_peer",
        "_task",
        "_turning",
        "_unread_since",
        "_waiter",
        "_written",
        "deadline",
        "stage",
        "transport",
    )

    def __init__(self, host: Host) -> None:
        self._host = host
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until the connection is made
        self.stage = NEW
        self.deadline = 0.0  # when the present stage has lasted too long, in the loop's time
        self._buffer = b""  # what has come of a head, or after the present request
        self._head: Head | None = None
        self._exchange: Exchange | None = None
        self._body: ChunkedBody | list[bytes] | None = None
        self._held = 0  # bytes of the present body
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None  # of a writer, while the client reads too slowly
        self._full = False  # the transport has enough to write
        self._paused = False
        self._half = False  # the client sends no more
        self._crowded = False  # one connection too many: only what is quick is answered
        self._turning = False
        self._dropped = 0
        self._peer = ""
        self._written = 0
        self._unread_since = 0.0

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        self._peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix"
        self._set(NEW, self._host.limits.head_s)
        self._host.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.stage = GONE
        self._host.departures.forget(self.transport)
        self._release()
        self._buffer = b""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ClientGone("the client went away"))
        self._cancel()
        self._host.closed(self)

    def data_received(self, data: bytes) -> None:
        stage = self.stage
        if stage == ANSWERING:
            self._buffer += data
            self._pause()
        elif stage == LINGERING:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
        elif stage != GONE:
            self._buffer = self._buffer + data if self._buffer else data
            self._advance(len(self._buffer) - len(data))

    def eof_received(self) -> bool:
        """The client sends no more. Whether the connection stays open: as long as something is to be answered."""
        self._half = True
        if self.stage == ANSWERING:
            self._look_for_reader()
            return True
        if self.stage in (HEAD, BODY, CHUNKS):
            self._host.count("broken_off")
        return False

    def pause_writing(self) -> None:
        self._full = True
        self._unread_since = self._host.loop.time()
        self._written = self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        self._full = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.stage == IDLE:
            self._advance(0)

    # Requests

    def _advance(self, scanned: int) -> None:
        """Read what the buffer holds, as far as that goes. `scanned`: so much of a head has been seen before."""
        if self._turning:
            return
        self._turning = True
        turns = 0
        try:
            while self._buffer and self.stage in READING and not self._full:
                if turns == QUICK_TURNS:
                    self._host.loop.call_soon(self._advance, 0)
                    return
                if not self._read(scanned):
                    break
                scanned = 0
                turns += 1
        except Malformed as error:
            self._refuse(error)
        finally:
            self._turning = False

    def _read(self, scanned: int) -> bool:
        """Take the next piece from the buffer. Whether there may be another."""
        if self.stage == BODY:
            return self._read_body()
        if self.stage == CHUNKS:
            return self._read_chunks()
        data = self._buffer
        end = data.find(b"\r\n\r\n", max(0, scanned - 3))
        limits = self._host.limits
        if end < 0 or end + 4 > limits.head_bytes:
            if diagnosis.early(data, scanned, limits):
                raise diagnosis.of(data, limits)
            if self.stage != HEAD:
                self._set(HEAD, limits.head_s)
            return False
        head = parse_head(data[: end + 4], limits)
        path = check_target(head.target)
        self._buffer = data[end + 4 :]
        return self._begin(head, path)

    def _begin(self, head: Head, path: str) -> bool:
        """A head is there. Answer at once, or see to the body."""
        host = self._host
        exchange = self._exchange = Exchange(self, head, path, self._peer)
        if host.closing or self._crowded:
            exchange.keep = False
        length, come = head.length, len(self._buffer)
        whole = length is not None and length <= come
        self._head = head
        if host.quick is not None:
            keep = exchange.keep
            exchange.keep = keep and whole
            self.stage = ANSWERING
            if self._quick(host.quick, exchange):
                self._buffer = self._buffer[length:] if whole else b""
                return self._next()
            exchange.keep = keep
        if self._crowded:
            raise CROWDED
        if length is not None and length > host.limits.body_bytes:
            raise Malformed(413, f"a body of more than {host.limits.body_bytes:,} bytes.")
        if whole:
            exchange.body = self._buffer[:length] if length != come else self._buffer
            self._buffer = self._buffer[length:] if length != come else b""
            if length:
                self._hold(length)
            self._answer()
            return False
        return self._await_body(head)

    def _quick(self, quick: Quick, exchange: Exchange) -> bool:
        try:
            return quick(exchange)
        except Malformed as error:
            exchange.keep = False
            exchange.refuse(error.status, error.message)
        except Exception:
            log.exception("the answer to %s %s failed", exchange.method, exchange.path)
            exchange.keep = False
            if not exchange.begun:
                exchange.refuse(500, "the server failed at this request; its log says how. Try another.")
        return True

    def _await_body(self, head: Head) -> bool:
        host, expect = self._host, head.headers.get("expect")
        if head.length is not None and host.bodies + head.length > host.limits.bodies_bytes:
            raise Malformed(503, "the bodies of other requests fill the server's memory. Try again.")
        if expect is not None and head.minor:
            if expect.lower() != "100-continue":
                raise Malformed(417, "an unknown expectation. Leave the Expect header out.")
            if not self._buffer:
                self.transport.write(replies.CONTINUE)
        if head.length is None:
            self._body = ChunkedBody(host.limits.body_bytes)
            self._set(CHUNKS, host.limits.body_s)
        else:
            self._body = []
            self._set(BODY, host.limits.body_s)
        return True

    def _read_body(self) -> bool:
        parts, head, exchange = cast("list[bytes]", self._body), self._head, self._exchange
        if head is None or head.length is None or exchange is None:
            raise RuntimeError("a body without a head")
        missing = head.length - self._held
        data, self._buffer = self._buffer, b""
        if len(data) > missing:
            data, self._buffer = data[:missing], data[missing:]
        self._hold(len(data))
        parts.append(data)
        if len(data) < missing:
            return False
        exchange.body = b"".join(parts)
        self._answer()
        return False

    def _read_chunks(self) -> bool:
        body, exchange = cast("ChunkedBody", self._body), self._exchange
        if exchange is None:
            raise RuntimeError("a body without a head")
        before, data = body.size, self._buffer
        self._buffer = b""
        self._buffer = body.feed(data)
        self._hold(body.size - before)
        if not body.complete:
            return False
        exchange.body = b"".join(body.parts)
        self._answer()
        return False

    def _hold(self, size: int) -> None:
        host = self._host
        self._held += size
        host.bodies += size
        if host.bodies > host.limits.bodies_bytes:
            raise Malformed(503, "the bodies of other requests fill the server's memory. Try again.")

    def _release(self) -> None:
        self._host.bodies -= self._held
        self._held = 0
        self._body = None

    # Responses

    def _answer(self) -> None:
        self._body = None
        self.stage = ANSWERING
        self._host.count("requests")
        if self._buffer:
            self._pause()
        exchange = cast("Exchange", self._exchange)
        self._task = self._host.loop.create_task(self._run(exchange))

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._host.handler(exchange)
            if not exchange.ended:
                log.error("%s %s was left without an answer", exchange.method, exchange.path)
                self._fail(exchange, 500, "the server gave no answer to this request. Try another.")
        except Malformed as error:
            self._fail(exchange, error.status, error.message)
        except ClientGone:
            self.transport.abort()
        except GpuinferError as error:
            log.error("%s %s failed: %s", exchange.method, exchange.path, error)
            self._fail(exchange, 500, str(error))
        except asyncio.CancelledError:
            if self.stage != GONE:
                exchange.keep = False
                self._fail(exchange, 503, "the server stops. Try again.")
        except Exception:
            log.exception("%s %s failed", exchange.method, exchange.path)
            self._fail(exchange, 500, "the server failed at this request; its log says how. Try another.")
        finally:
            self._task = None
            if self.stage == ANSWERING and self._next():
                self._advance(0)

    def _fail(self, exchange: Exchange, status: int, message: str) -> None:
        """Say so; where the response has begun, break it off, so that nobody takes it for whole."""
        if exchange.ended or self.stage == GONE:
            return
        if exchange.begun:
            self.transport.abort()
        else:
            exchange.refuse(status, message, [("Retry-After", "1")] if status == 503 else ())

    def _next(self) -> bool:
        """The response is complete. Whether there may be another request."""
        exchange, self._exchange, self._head = self._exchange, None, None
        self._release()
        if exchange is None or not exchange.keep or self._host.closing:
            self._close()
            return False
        self._set(IDLE, self._host.limits.idle_s)
        if self._half and not self._buffer:
            self._close()
            return False
        if self._paused and not self._half:
            self._resume()
        return bool(self._buffer)

    def _refuse(self, error: Malformed) -> None:
        """The bytes are at fault: say so, and close."""
        self._host.count("refused")
        self._release()
        self._exchange = None
        headers = [("Retry-After", "1")] if error.status == 503 else []
        body = replies.error_bytes(error.message, replies.type_of(error.status))
        self.transport.write(replies.head(error.status, "application/json", len(body), False, headers) + body)
        self._close()

    # As the Outlet of an exchange

    def send(self, data: bytes) -> None:
        if self.stage != GONE:
            self.transport.write(data)

    async def room(self) -> None:
        if self.stage == GONE:
            raise ClientGone("the client went away")
        if self._full:
            self._waiter = self._host.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def ended(self) -> None:
        """The response is complete. What is to follow, follows where the request is handled."""

    # Its end

    def overdue(self, now: float) -> None:
        """Called now and then: end what has lasted too long."""
        if self._full:
            left = self.transport.get_write_buffer_size()
            if left < self._written:
                self._written, self._unread_since = left, now
            elif now - self._unread_since > self._host.limits.write_s:
                self._host.count("unread")
                self.transport.abort()
                return
        if self.stage == ANSWERING or now < self.deadline:
            return
        if self.stage in (HEAD, BODY, CHUNKS):
            self._host.count("slow")
            self._refuse(Malformed(408, "the request did not come in time. Send it faster."))
        elif self.stage == LINGERING:
            self.transport.abort()
        else:
            self._close()

    def crowd(self, *, heard: bool) -> None:
        """There are too many: answer nothing but what is quick, or not even that."""
        self._crowded = True
        self.deadline = self._host.loop.time() + CROWDED_S
        if not heard:
            self._refuse(CROWDED)

    def end(self) -> asyncio.Task[None] | None:
        """The server stops now: cancel what is under way. Its task."""
        task = self._task
        if task is not None:
            task.cancel()
        else:
            self.transport.abort()
        return task

    def shut(self) -> None:
        """The server stops: end now, or after the present response."""
        if self.stage in (NEW, IDLE):
            self._close()

    def _close(self) -> None:
        """Let what is written arrive; drop what still comes."""
        self._buffer = b""
        if self.stage == GONE or self.transport.is_closing():
            return
        if self._half or not self.transport.can_write_eof():
            self._set(LINGERING, self._host.limits.write_s)
            self.transport.close()
            return
        self._set(LINGERING, LINGER_S)
        self.transport.write_eof()
        self._resume()

    def _cancel(self) -> None:
        if self._task is not None and self._exchange is not None and not self._exchange.ended:
            self._host.count("cancelled")
            self._task.cancel()

    def _look_for_reader(self) -> None:
        """The client sends no more: it may have gone, or wait for the response."""
        exchange = self._exchange
        if exchange is not None and exchange.begun:
            self.transport.abort()
            return
        if exchange is not None and exchange.minor:
            self.transport.write(replies.CONTINUE)  # whoever has gone answers this with a reset
        self._host.departures.watch(self.transport, self.transport.abort, half=False)

    def _other_side_ended(self) -> None:
        if self.stage == ANSWERING and not self._half:
            self._half = True
            self._look_for_reader()

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()
            self._host.departures.watch(self.transport, self._other_side_ended, half=True)

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._host.departures.forget(self.transport)
            self.transport.resume_reading()

    def _set(self, stage: int, seconds: float) -> None:
        self.stage = stage
        self.deadline = self._host.loop.time() + seconds
