"""One connection of the server: requests, one after the other, and the bytes of their responses.

The next request is read when the response to the one before is complete. What arrives meanwhile is kept, and once
something is, no more is read: at most one read of the loop's, 256 KB, is buffered beside the body.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from gpuinfer.errors import GpuinferError
from gpuinfer.host import error_text
from gpuinfer.http import http_exchange
from gpuinfer.http.http_exchange import CREATED, ClientGone, Exchange, Quick
from gpuinfer.http.network import close_write_side
from gpuinfer.http.parser import CROWDED_S, HttpHead, Malformed, RequestParser, check_target

if TYPE_CHECKING:
    from gpuinfer.http.server import HttpServer

log = logging.getLogger(__name__)

# Stages of a connection. NEW and IDLE differ in their timeouts.
NEW, IDLE, HEAD, BODY, ANSWERING, LINGERING, GONE = range(7)
LINGER_S = 2.0  # how long the rest of a refused request is read and dropped, so that the refusal arrives
LINGER_BYTES = 1 << 20
NEW_S = 1.0  # timeout of a connection without a request, once the server stops
CROWDED = Malformed(503, "too many connections. Try again.")
FULL = Malformed(503, "the bodies of other requests fill the server's memory. Try again.")
QUICK_TURNS = 64  # pipelined requests that are answered at once before other connections have their turn
FAILED = "the server failed at this request; its log says how. Try another."


class ServerConnection(asyncio.Protocol):
    """Talks HTTP/1.1 with one client."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until the connection is made
        self.stage = NEW
        self.deadline = 0.0  # of the present stage, on the loop's clock
        self._peer = ""
        self._in = RequestParser(server.limits)
        self._exchange: Exchange | None = None
        self._held = 0  # bytes of the present body that the server has counted
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None  # of a writer, while the client reads too slowly
        self._full = False  # the transport's write buffer is full
        self._paused = False  # reading is paused
        self._half_closed = False  # the client sends no more
        self._crowded = False  # over the limit: only immediate routes are answered
        self._turning = False
        self._dropped = 0  # bytes received while lingering
        self._unread = 0  # bytes in the write buffer when the client last read some,
        self._unread_since = 0.0  # and when that was

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        name = transport.get_extra_info("peername")
        self._peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix"
        self._set(NEW, self._server.limits.head_s)
        self._server.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        if self.stage in (HEAD, BODY):
            self._server.count("broken_off")
        self.stage = GONE
        self._server.disconnects.forget(self.transport)
        self._in.forget()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ClientGone("the client went away"))
        if self._task is None:
            self._release()
        elif self._exchange is not None and not self._exchange.ended:
            self._server.count("cancelled")
            self._task.cancel()
        self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        if self.stage == LINGERING:
            self._dropped += len(data)
            if self._dropped > LINGER_BYTES:
                self.transport.abort()
        elif self.stage != GONE:
            self._in.add(data)
            if self.stage == ANSWERING:
                self._pause()
            else:
                self._advance()

    def eof_received(self) -> bool:
        """The client sends no more. The connection stays open while a request is answered, except with TLS, where one
        side cannot close alone. A client that is gone resets the connection.
        """
        self._half_closed = True
        if self.stage != ANSWERING or not self.transport.can_write_eof():
            return False
        self._server.disconnects.watch_half_closed(self.transport, self.transport.abort)
        return True

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._paused and self.stage in (IDLE, HEAD):
            self._advance()

    # Requests

    def _advance(self) -> None:
        """Handle the bytes that have come; then resume or pause reading."""
        if self._turning:
            return
        self._turning = True
        try:
            turns = 0
            while self._in.buffer and self.stage < ANSWERING and not self._full and turns < QUICK_TURNS:
                if not self._read():
                    break
                turns += 1
        except Malformed as error:
            self._refuse(error)
        finally:
            self._turning = False
        if self.stage >= ANSWERING:
            return
        if self._full or turns == QUICK_TURNS:
            self._pause()
            if not self._full:
                self._server.loop.call_soon(self._advance)
        else:
            self._resume()

    def _read(self) -> bool:
        """Take the next head or body. Whether another request may follow at once."""
        if self.stage == BODY:
            return self._read_body()
        head = self._in.head()
        if head is not None:
            return self._take(head)
        if self.stage != HEAD:
            self._set(HEAD, self._server.limits.head_s)
        return False

    def _take(self, head: HttpHead) -> bool:
        """A head has come: answer at once, or read its body."""
        server, limits = self._server, self._server.limits
        exchange = self._exchange = Exchange(self, head, check_target(head.target), self._peer)
        exchange.routed = server.behind_router and CREATED in head.headers
        exchange.keep = keep = head.keep and not server.closing and not self._crowded
        whole = head.length is not None and head.length <= len(self._in.buffer)
        if server.quick is not None:
            exchange.keep = keep and whole  # else the rest of the body is dropped
            if self._quick(server.quick, exchange):
                self._in.buffer = self._in.buffer[head.length :]
                return self._next()
            exchange.keep = keep
        if self._crowded:
            raise CROWDED
        if (head.length or 0) > limits.body_bytes:
            raise Malformed(413, f"a body of more than {limits.body_bytes:,} bytes.")
        if not whole:
            if server.bodies + (head.length or 0) > limits.bodies_bytes:
                raise FULL
            if "expect" in head.headers and head.minor and not self._in.buffer:
                self.transport.write(http_exchange.CONTINUE)
            self._set(BODY, limits.body_s)
        self._in.expect(head)
        self.stage = BODY
        return self._read_body()

    def _quick(self, quick: Quick, exchange: Exchange) -> bool:
        try:
            if not quick(exchange):
                return False
            if not exchange.ended:
                raise RuntimeError("an immediate answer is given by respond()")
        except Malformed as error:
            self._fail(exchange, error.status, error.message)
        except Exception:
            log.exception("%s %s failed", exchange.method, exchange.path)
            self._fail(exchange, 500, FAILED)
        return True

    def _read_body(self) -> bool:
        body = self._in.body()
        self._server.bodies += self._in.held - self._held
        self._held = self._in.held
        if self._server.bodies > self._server.limits.bodies_bytes:
            raise FULL
        if body is not None:
            exchange = cast("Exchange", self._exchange)
            exchange.body = body
            self.stage = ANSWERING
            if self._in.buffer:
                self._pause()
            self._server.count("requests")
            self._task = self._server.loop.create_task(self._run(exchange))
        return False

    async def _run(self, exchange: Exchange) -> None:
        try:
            await self._server.handler(exchange)
            if not exchange.ended:
                log.error("%s %s was left without a whole answer", exchange.method, exchange.path)
                self._fail(exchange, 500, "the server gave no answer to this request. Try another.")
        except Malformed as error:
            self._fail(exchange, error.status, error.message)
        except ClientGone:
            self.transport.abort()
        except GpuinferError as error:
            log.error("%s %s failed: %s", exchange.method, exchange.path, error)
            self._fail(exchange, 500, error_text.safe_str(error))
        except asyncio.CancelledError:
            exchange.keep = False
            self._fail(exchange, 503, "the server stops. Try again.")
        except Exception:
            log.exception("%s %s failed", exchange.method, exchange.path)
            self._fail(exchange, 500, FAILED)
        finally:
            self._task = None
            if self._next():
                self._advance()

    def _fail(self, exchange: Exchange, status: int, message: str) -> None:
        """Answer with an error; a response that has begun is broken off, so that the client notices."""
        if exchange.ended or self.stage == GONE:
            return
        if exchange.begun:
            self.transport.abort()
        else:
            exchange.refuse(status, message, http_exchange.RETRY if status == 503 else ())

    def _next(self) -> bool:
        """The response is complete. Whether bytes of another request are in the buffer."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            http_exchange.log_exchange(exchange)
        self._release()
        if self.stage == GONE or self.transport.is_closing():
            return False
        if exchange is None or not exchange.keep or self._server.closing or (self._half_closed and not self._in.buffer):
            self._close()
            return False
        self._set(IDLE, self._server.limits.idle_s)
        if not self._in.buffer:
            self._resume()
        return bool(self._in.buffer)

    def _refuse(self, error: Malformed) -> None:
        """Refuse malformed bytes, and close."""
        self._server.count("refused")
        self._release()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            refused = {"refused": error.message}
            http_exchange.log_request(logging.INFO, "", "", error.status, 0.0, self._peer, refused)
        else:
            exchange.status, exchange.notes["refused"] = error.status, error.message
            http_exchange.log_exchange(exchange)
        path = "" if exchange is None else exchange.path
        body = http_exchange.error_bytes(error.message, http_exchange.error_type_of(error.status), path=path)
        retry = http_exchange.RETRY if error.status == 503 else ()
        head = http_exchange.head_bytes(error.status, "application/json", len(body), False, retry)
        self.transport.write(head if exchange is not None and exchange.method == "HEAD" else head + body)
        self._close()

    def _release(self) -> None:
        self._server.bodies -= self._held
        self._held = 0

    # For an exchange

    def send(self, data: bytes) -> None:
        """Write bytes of the response."""
        if self.stage != GONE:
            self.transport.write(data)

    async def until_writable(self) -> None:
        """Wait while the client reads too slowly. Raises `ClientGone`."""
        if self.stage == GONE:
            raise ClientGone("the client went away")
        if self._full:
            self._waiter = self._server.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    # Timeouts and closing

    def check_timeout(self, now: float) -> None:
        """End what has lasted too long; `now` is on the loop's clock."""
        left = self.transport.get_write_buffer_size()
        if not left or left < self._unread or not self._unread:
            self._unread, self._unread_since = left, now
        elif now - self._unread_since > self._server.limits.write_s:
            self._server.count("unread")
            self.transport.abort()
            return
        if self.stage == LINGERING and left:
            self.deadline = now + LINGER_S
        if self.stage == ANSWERING or now < self.deadline:
            return
        if self.stage in (HEAD, BODY):
            self._server.count("slow")
            self._refuse(Malformed(408, "the request did not come in time. Send it faster."))
        elif self.stage == LINGERING:
            self.transport.abort()
        else:
            self._close()

    def extend(self, seconds: float) -> None:
        """Extend the deadlines: the server itself was suspended or busy for so long."""
        self.deadline += seconds
        self._unread_since += seconds

    def limit(self, *, heard: bool) -> None:
        """The connection is over the limit: answer only immediate routes, or refuse at once."""
        self._crowded = True
        self.deadline = self._server.loop.time() + CROWDED_S
        if not heard:
            self._refuse(CROWDED)

    def drain(self) -> None:
        """The server stops: close now, or after the present response."""
        if self.stage == NEW:
            self.deadline = min(self.deadline, self._server.loop.time() + NEW_S)
        elif self.stage == IDLE and not self._in.buffer:
            self._close()
        elif self._exchange is not None:
            self._exchange.keep = False

    def end(self) -> asyncio.Task[None] | None:
        """Cancel the present request, or abort the connection; returns the request's task."""
        if self._task is not None:
            self._task.cancel()
        else:
            self.transport.abort()
        return self._task

    def _close(self) -> None:
        """Close the writing side, and drop what still comes until the client has read the response."""
        self._in.forget()
        if self.stage in (LINGERING, GONE) or self.transport.is_closing():
            return
        self._set(LINGERING, LINGER_S)
        if self._server.may_linger(self) and not self._half_closed and self.transport.can_write_eof():
            close_write_side(self.transport)
            self._resume()
        else:
            self.transport.close()

    def _pause(self) -> None:
        if not self._paused and not self._half_closed and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()
            self._server.disconnects.watch(self.transport, self.transport.abort)

    def _resume(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self._server.disconnects.forget(self.transport)
            self.transport.resume_reading()

    def _set(self, stage: int, seconds: float) -> None:
        self.stage = stage
        self.deadline = self._server.loop.time() + seconds
