"""A client's connection to the router: requests come in one after the other, are admitted or refused before their body
is read (keys, quotas, Host and Origin), and answers go out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
from dataclasses import dataclass, field
from itertools import count
from typing import cast

from gpuinfer.fleet.router.http_message import CHUNKED, RequestHead
from gpuinfer.fleet.router.protocol import CONTROL_KEY_HEADER, RouterConfig
from gpuinfer.fleet.router.proxied_request import ProxiedRequest
from gpuinfer.fleet.router.relay import Relay
from gpuinfer.fleet.router.request_trace import RequestTracer
from gpuinfer.fleet.router.shared_counters import ProcessCell
from gpuinfer.http import http_exchange
from gpuinfer.http.access import Access, Key, Keys, Quotas, RequestRefusal, cors
from gpuinfer.http.network import close_write_side
from gpuinfer.http.parser import CROWDED_S, ChunkDecoder, Malformed, overflow_connections


@dataclass(slots=True)
class AdmittedRequest:
    """What the gate has found of a request. `headers` are those that each answer to it has."""

    key: Key | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    refusal: RequestRefusal | None = None


OPEN = AdmittedRequest()


class RequestGate:
    """Checks each request's Host, Origin, key and quota; where none of them matters, the gate is `open`."""

    def __init__(self, config: RouterConfig) -> None:
        hosts = frozenset(host.lower() for host in config.hosts) or None
        self.access = Access(Keys(config.api_keys) if config.api_keys else None, None, hosts, frozenset(config.origins))
        self.quotas = Quotas()
        self.open = hosts is None and self.access.api is None and not config.origins

    def check(self, head: RequestHead, for_replicas: bool) -> AdmittedRequest:
        """The control application checks keys itself: some of its routes need none, others another one."""
        found = AdmittedRequest(refusal=self.access.check_host(head.headers))
        if found.refusal is not None or not for_replicas:
            return found
        found.headers += cors(self.access.origins, head.headers.get("origin"))
        key = self.access.check_key("api", head.headers.get("authorization"))
        if isinstance(key, RequestRefusal):
            found.refusal = key
        elif key is not None:
            found.key = key
            if head.method == b"POST" and key.limits():
                found.refusal = self.quotas.take(key)
                found.headers += self.quotas.headers(key)
        return found


log = logging.getLogger(__name__)

SMALL = 8 << 10  # bytes of a body that is not counted against the budget of all requests
AHEAD = 16 << 10  # bytes of further requests that are taken in while one is answered
SLOWEST = 16 << 10  # bytes a second: a body that comes more slowly is not waited for beyond `body_s`
RETRY = [("Retry-After", "1")]
FULL = RequestRefusal(503, "the router holds as many requests as it may. Try again later.", RETRY)
CROWDED = RequestRefusal(503, "too many connections. Try again later.", RETRY)
HEALTH = b"/health"
TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")  # attributes of a span
TRACE = re.compile(rb"(?i)\r\ntraceparent:[ \t]*([0-9a-f-]{55,128})[ \t]*(?=\r|$)")
WARN_S = 10.0  # from one line of the log about too many connections to the next
LINGER_S = 1.0  # for a client to read its refusal; for a request on its way while the router closes


class Listener:
    """What all client connections of a process share."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.gate = RequestGate(relay.config)
        self.control_line = f"\r\n{CONTROL_KEY_HEADER}: {relay.config.control_key}".encode()
        self.open = 0
        self.id_prefix = b"req-" + os.urandom(8).hex().encode()
        self.ids = count(1)
        self.logs = http_exchange.log.isEnabledFor(logging.INFO)
        tracing = relay.config.tracing
        self.tracer = None if tracing is None else RequestTracer(tracing)
        self._empty: asyncio.Event | None = None
        self.refused, self.warned_at = 0, -WARN_S  # connections over the limit

    async def until_empty(self) -> None:
        """Wait until all connections are closed."""
        self._empty = asyncio.Event()
        if self.open:
            await self._empty.wait()

    def closed(self) -> None:
        """A connection is closed."""
        self.open -= 1
        if not self.open and self._empty is not None:
            self._empty.set()

    def protocol(self) -> RouterClientConnection:
        return RouterClientConnection(self)


class RouterClientConnection(asyncio.Protocol):
    """One client's connection. A head that repeats the last one but for its Content-Length is not parsed again."""

    __slots__ = (
        "_admission",
        "_admitted_head",
        "_ahead",
        "_ahead_counted",
        "_chunks",
        "_crowded",
        "_half_closed",
        "_head",
        "_last_head",
        "_lingers",
        "_listener",
        "_missing",
        "_paused_at",
        "_pieces",
        "_reading",
        "_relay",
        "_request",
        "_since",
        "_size",
        "_timer_slot",
        "_transport",
    )

    def __init__(self, listener: Listener) -> None:
        self._listener, self._relay = listener, listener.relay
        self._transport = cast(asyncio.Transport, None)
        self._timer_slot = -1
        self._request: ProxiedRequest | None = None  # that is being answered
        self._admission = OPEN  # of the latest request,
        self._admitted_head: RequestHead | None = None  # and its head
        self._ahead = b""  # received and not parsed yet
        self._head: RequestHead | None = None  # of the request whose body is being received
        self._last_head: RequestHead | None = None
        self._pieces: list[bytes] = []
        self._missing = self._size = 0  # bytes of the body: still to come, and counted against the budget
        self._chunks: ChunkDecoder | None = None
        self._since = self._relay.now  # when the present wait for the client began
        self._paused_at = 0.0
        self._reading = True
        self._ahead_counted = 0  # bytes of `_ahead` counted against the budget
        self._crowded = False  # over the limit: /health is answered, and nothing else
        self._lingers = False  # refused: what still comes is dropped until the client has read the refusal
        self._half_closed = False  # the client sends no more, and still reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        config, listener = self._relay.config, self._listener
        self._transport.set_write_buffer_limits(high=config.write_bytes)
        self._timer_slot = self._relay.timer.add(self)
        listener.open += 1
        self._relay.count(ProcessCell.CONNECTIONS)
        if (beyond := listener.open - config.connections) > 0:
            listener.refused += 1
            if self._relay.now - listener.warned_at >= WARN_S:
                listener.warned_at, most = self._relay.now, config.connections
                what = "more than %d connections at once: %d have been refused so far, with 503."
                log.warning(what, most, listener.refused)
            if beyond <= overflow_connections(config.refusals):
                self._crowded = True
                return
            self.refuse(CROWDED)
            if beyond > config.refusals:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._relay.timer.remove(self, self._timer_slot)
        self._listener.closed()
        self._relay.disconnects.forget(self._transport)
        self._relay.count(ProcessCell.CONNECTIONS, -1)
        request, self._request = self._request, None
        if request is not None:
            self._relay.count(ProcessCell.CLIENT_GONE)
            request.abandon()
            self._account(request, http_exchange.GONE)
        self._release()
        self._relay.budget.give(self._ahead_counted)

    def _release(self) -> None:
        """Give the bytes of the last request's body back to the budget."""
        if self._size:
            self._relay.budget.give(self._size)
            self._size = 0

    # Requests

    def data_received(self, data: bytes) -> None:
        if self._lingers or self._transport.is_closing():
            return
        if self._request is None:
            if self._head is None:
                self._take_head(self._ahead + data if self._ahead else data)
            else:
                self._take_body(data)
            return
        self._ahead += data
        if len(self._ahead) > AHEAD:
            if self._reading:
                self._reading = False
                self._transport.pause_reading()
            self._count_ahead()

    def eof_received(self) -> bool:
        """The client sends no more: answer what is complete. A client that is gone resets the connection."""
        self._half_closed = True
        self._next()
        if self._head is not None or self._transport.is_closing() or not self._transport.can_write_eof():
            return False
        self._relay.disconnects.watch_half_closed(self._transport, self._transport.abort)
        return True

    def _count_ahead(self) -> None:
        """Count what is received ahead against the budget, where it is much."""
        budget, size = self._relay.budget, len(self._ahead)
        budget.give(self._ahead_counted)
        self._ahead_counted = size if size > AHEAD else 0
        if not budget.take(self._ahead_counted):
            self._ahead_counted = 0
            self._transport.abort()

    def _take_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            if not self._ahead:
                self._since = self._relay.now
            self._ahead = data
            if self._half_closed:
                self._transport.close()
            elif len(data) > self._relay.config.head_bytes:
                self.refuse(RequestRefusal(431, "the request's head is too large. Send less in it."))
            return
        raw = data if end == len(data) else data[:end]
        self._ahead = b""
        head = self._last_head
        length = None if head is None else head.length_in(raw)
        if head is None or length is None:
            try:
                head = self._last_head = RequestHead(raw)
            except Malformed as error:
                self.refuse(RequestRefusal(error.status, error.message))
                return
            length = head.length
        self._begin(head, length, data[end:])

    def _begin(self, head: RequestHead, length: int, rest: bytes) -> None:
        """A head is complete, and `rest` has come after it: refuse it, answer it, or wait for its body."""
        config, gate = self._relay.config, self._listener.gate
        refusal: RequestRefusal | None = None
        if self._crowded:
            head.close = True
            if length or head.method not in (b"GET", b"HEAD") or head.target.partition(b"?")[0] != HEALTH:
                refusal = CROWDED
        elif not gate.open:
            if head is not self._admitted_head or gate.access.api is not None:
                self._admission, self._admitted_head = gate.check(head, self._to_replicas(head)), head
            refusal = self._admission.refusal
        if refusal is None and length > config.body_bytes:
            refusal = RequestRefusal(413, f"a body of over {config.body_bytes:,} bytes. Send less at once.")
        if refusal is None and length > SMALL and not self._hold(length):
            refusal = FULL
        if refusal is not None:
            if self._listener.logs:
                self._log(head, refusal.status, 0.0, {"refused": refusal.message})
            self._answer(refusal)
        elif len(rest) == length:
            self._start(head, rest)
        else:
            self._head, self._missing, self._since = head, length, self._relay.now
            self._chunks = ChunkDecoder(config.body_bytes) if length == CHUNKED else None
            if head.expects and not rest:
                self._transport.write(http_exchange.CONTINUE)
            if rest or not length:
                self._take_body(rest)
            if self._half_closed and self._head is not None:
                self._transport.close()

    def _to_replicas(self, head: RequestHead) -> bool:
        """Preflights of other origins' pages (OPTIONS) go to the control application."""
        return head.to_replicas and not (head.method == b"OPTIONS" and self._listener.gate.access.origins)

    def _hold(self, size: int) -> bool:
        """Count bytes of the body against the budget. Whether there were so many left."""
        if not self._relay.budget.take(size):
            return False
        self._size += size
        return True

    def _take_body(self, data: bytes) -> None:
        chunks = self._chunks
        if chunks is None:
            if len(data) > self._missing:
                data, self._ahead = data[: self._missing], data[self._missing :]
            self._pieces.append(data)
            self._missing -= len(data)
            if self._missing:
                return
        else:
            try:
                self._pieces.append(chunks.feed(data))
            except Malformed as error:
                self.refuse(RequestRefusal(error.status, error.message))
                return
            if chunks.size > self._size and not self._hold(chunks.size - self._size):
                self.refuse(FULL)
                return
            if not chunks.complete:
                return
            self._ahead, self._chunks = chunks.rest, None
        head, self._head = self._head, None
        pieces, self._pieces = self._pieces, []
        if head is not None:
            self._start(head, pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _start(self, head: RequestHead, body: bytes) -> None:
        """Send a complete request on its way."""
        relay, listener = self._relay, self._listener
        request_id = head.request_id or b"%b-%x" % (listener.id_prefix, next(listener.ids))
        if self._to_replicas(head):
            extra = b"".join([f"\r\n{name}: {value}".encode("latin-1") for name, value in self._admission.headers])
            self._request = request = ProxiedRequest(relay, self, head, body, request_id, extra=extra)
            if listener.tracer is not None:
                request.trace = listener.tracer.begin(head, request_id)
            relay.send(request)
            return
        lines = listener.control_line
        names = ("Origin", "Host", "Authorization") if listener.gate.access.origins else ("Host", "Authorization")
        for name in names:
            if (value := head.headers.get(name.lower())) is not None:
                lines += f"\r\n{name}: {value}".encode("latin-1")
        self._request = request = ProxiedRequest(relay, self, head, body, request_id, lines)
        relay.active += 1
        request.start(relay.control)

    # Answers

    def write(self, data: bytes) -> None:
        """Send bytes of the answer."""
        self._transport.write(data)

    def finish(self, close: bool) -> None:
        """The answer is complete."""
        request, self._request = self._request, None
        if request is not None:
            self._account(request, request.status)
        self._since = self._relay.now
        self._release()
        if close or (self._half_closed and not self._ahead) or self._transport.is_closing():
            self._transport.close()
        elif self._ahead:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Take the request that came while the last one was answered."""
        if self._request is None and self._head is None and not self._transport.is_closing():
            data, self._ahead = self._ahead, b""
            self._take_head(data)
            if self._ahead_counted:
                self._count_ahead()
            if not self._reading and (self._request is None or len(self._ahead) <= AHEAD):
                self._reading = True
                self._transport.resume_reading()

    def break_off(self) -> None:
        """The answer cannot be completed: close the connection in the middle, so that the client notices."""
        request, self._request = self._request, None
        if request is not None:
            self._account(request, request.status, "broken off")
        self._transport.close()

    def refuse(self, refusal: RequestRefusal, route: bytes = b"") -> None:
        """Answer with an error of the router's own. `route`: the line of X-Gpuinfer-Route."""
        if self._request is not None:
            self._account(self._request, refusal.status, refusal.message)
        elif self._listener.logs:
            self._log(self._head, refusal.status, 0.0, {"refused": refusal.message})
        self._answer(refusal, route)

    def _account(self, request: ProxiedRequest, status: int, refused: str = "") -> None:
        """A request is over: end its trace, charge its tokens to its key, and log it."""
        key, logs, trace = self._admission.key, self._listener.logs, request.trace
        if key is None and not logs and trace is None:
            return
        tokens, ids = request.tokens(), {}
        if trace is not None:
            ids = trace.ids
            trace.end(status, refused, {} if tokens is None else dict(zip(TOKENS, tokens, strict=True)))
        if key is not None and tokens is not None:
            self._listener.gate.quotas.spend(key, sum(tokens))
        probe = request.member is None and request.method == b"GET"  # of /health and /metrics, again and again
        if not logs or (probe and (status < 400 or request.head.target == HEALTH)):
            return
        notes: dict[str, object] = {"id": request.request_id.decode("latin-1"), **ids}
        if request.model is not None:
            notes["model"] = request.model
        if tokens is not None:
            notes |= {"input_tokens": tokens[0], "output_tokens": tokens[1]}
        if request.member is not None:
            notes["replica"] = request.member
        if not refused and request.error_body:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                error = json.loads(request.error_body)["error"]
                refused = error if isinstance(error, str) else str(error["message"])
        if refused:
            notes["refused"] = refused
        self._log(request.head, status, self._relay.clock() - request.started, notes)

    def _log(self, head: RequestHead | None, status: int, took_s: float, notes: dict[str, object]) -> None:
        name = self._transport.get_extra_info("peername")
        method = path = ""
        if head is not None:
            method, path = head.method.decode(), head.target.partition(b"?")[0].decode("ascii")
            if (trace := TRACE.search(head.lines)) is not None:
                notes["trace"] = trace[1].decode()
        if self._admission.key is not None:
            notes["key"] = self._admission.key.name
        peer = f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unix"
        http_exchange.log_request(logging.INFO, method, path, status, took_s, peer, notes)

    def _answer(self, refusal: RequestRefusal, route: bytes = b"") -> None:
        """Send a refusal; before a request is complete, the connection is closed behind it."""
        request, self._request = self._request, None
        keep = request is not None and not request.head.close and not self._relay.closing
        headers = [*refusal.headers, *self._admission.headers]
        if route:
            name, _, value = route.decode("latin-1").strip().partition(": ")
            headers.append((name, value))
        kind = refusal.kind or http_exchange.error_type_of(refusal.status)
        about = self._last_head if request is None else request.head
        path = "" if about is None else about.target.decode("ascii")
        body = http_exchange.error_bytes(refusal.message, kind, refusal.code, path)
        head = http_exchange.head_bytes(refusal.status, "application/json", len(body), keep, headers)
        self._transport.write(head if request is not None and request.method == b"HEAD" else head + body)
        if request is not None:
            self.finish(close=not keep)
            return
        # Close the writing side alone and drop what still comes: a connection that is closed with bytes unread is
        # reset, and the client might never read why its request was refused.
        self._release()
        self._head, self._ahead, self._pieces, self._chunks = None, b"", [], None
        self._lingers, self._since = True, self._relay.now
        if self._half_closed:
            self._transport.close()
        else:
            close_write_side(self._transport)

    def pause_writing(self) -> None:
        self._paused_at = self._relay.now
        if self._request is not None:
            self._request.pause()

    def resume_writing(self) -> None:
        self._paused_at = 0.0
        if self._request is not None:
            self._request.resume()

    # Timeouts

    def check_timeout(self, now: float) -> None:
        """End what has taken too long; `now` is on the timer's clock."""
        config, waited = self._relay.config, now - self._since
        if self._paused_at and now - self._paused_at > config.write_s:
            self._transport.abort()
        elif self._transport.is_closing():
            if waited > config.write_s:
                self._transport.abort()
        elif self._lingers:
            if waited > LINGER_S:
                self._transport.abort()
        elif self._request is not None:
            if not self._paused_at and now - self._request.last > config.timeout_s:
                self._relay.count(ProcessCell.TIMEOUTS)
                self._request.time_out()
        elif self._crowded:
            if waited > CROWDED_S:
                self.refuse(CROWDED)
        elif self._head is not None:
            received = self._chunks.size if self._chunks is not None else sum(map(len, self._pieces))
            if waited > config.body_s + received / SLOWEST:
                self.refuse(RequestRefusal(408, "the request's body did not come in time. Send it at once."))
        elif self._ahead:
            if waited > config.head_s:
                self.refuse(RequestRefusal(408, "the request's head did not come in time. Send it at once."))
        else:
            most = config.head_s if self._last_head is None else config.idle_s
            if waited > (min(LINGER_S, most) if self._relay.closing else most):
                self._transport.close()
