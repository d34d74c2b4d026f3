"""A client's connection to the router: requests come in one after the other, are admitted or refused before their body
is read (keys, quotas, Host and Origin), and answers go out.
"""

from __future__ import annotations

import asyncio
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
from gpuinfer.fleet.router.shared_counters import ProcessCell
from gpuinfer.http import http_exchange
from gpuinfer.http.access import CODE, Key, Keys, Quotas, cors, host_name, host_refusal, origin_refusal
from gpuinfer.http.network import close_write_side
from gpuinfer.http.parser import CROWDED_S, ChunkedBody, Malformed, overflow_connections

REMEMBERED = 256  # names that were let in


@dataclass(frozen=True, slots=True)
class GateRefusal:
    """An answer in place of the replicas'. `kind` and `code` as OpenAI's errors have them; None: as the status says."""

    status: int
    message: str
    retry_s: int = 0
    kind: str | None = None
    code: str | None = None


@dataclass(slots=True)
class AdmittedRequest:
    """What the gate has found of a request. `headers` are those that each answer to it has."""

    key: Key | None = None
    headers: list[tuple[str, str]] = field(default_factory=list)
    refusal: GateRefusal | None = None


ANYBODY = AdmittedRequest()


class RequestGate:
    """Looks at each request; one that is open lets everybody in."""

    def __init__(self, config: RouterConfig) -> None:
        self.keys = Keys(config.api_keys) if config.api_keys else None
        self.origins = frozenset(config.origins)
        self.quotas = Quotas()
        self._hosts = frozenset(host.lower() for host in config.hosts)
        self._known: set[bytes] = set()
        self.open = not self._hosts and self.keys is None and not self.origins

    def look(self, head: RequestHead, for_replicas: bool) -> AdmittedRequest:
        """The control application looks at keys itself, since some of its routes need none and others another one."""
        found = AdmittedRequest()
        if self._hosts and (why := self._called_wrong(head)):
            found.refusal = GateRefusal(403, why)
        elif for_replicas:
            origin = None if head.origin is None else head.origin.decode("latin-1")
            found.headers += cors(self.origins, origin)
            if self.keys is not None:
                self._ask_for_key(self.keys, head, found)
        return found

    def _ask_for_key(self, keys: Keys, head: RequestHead, found: AdmittedRequest) -> None:
        given = None if head.authorization is None else head.authorization.decode("latin-1")
        found.key = key = keys.find(given)
        if key is None:
            found.refusal = GateRefusal(401, "no valid API key. Send one: Authorization: Bearer KEY.")
        elif head.method == b"POST" and key.limits():
            exceeded = self.quotas.take(key)
            found.headers += self.quotas.headers(key)
            if exceeded is not None:
                found.refusal = GateRefusal(429, exceeded.message, exceeded.retry_s, exceeded.kind, CODE)

    def _called_wrong(self, head: RequestHead) -> str | None:
        if head.host is None:  # no browser asks: a probe by HTTP/1.0
            return None
        host = head.host.lower()
        if host not in self._known:
            name = host.decode("latin-1")
            if name not in self._hosts and host_name(name) not in self._hosts:
                return host_refusal(name)
            if len(self._known) < REMEMBERED:
                self._known.add(host)
        origin = None if head.origin is None else head.origin.lower()
        if origin is None or self.origins & {"*", origin.decode("latin-1")}:
            return None
        return None if origin in (b"http://" + host, b"https://" + host) else origin_refusal()


log = logging.getLogger(__name__)

SMALL = 8 << 10  # bytes of a body that is not counted among what all requests keep
AHEAD = 16 << 10  # bytes of further requests that are taken in while one is answered
SLOWEST = 16 << 10  # bytes a second: a body that comes more slowly is not waited for beyond `body_s`
FULL = GateRefusal(503, "the router holds as many requests as it may. Try again later.", 1)
CROWDED = GateRefusal(503, "too many connections. Try again later.", 1)
HEALTH = b"/health"
TRACE = re.compile(rb"(?i)\r\ntraceparent:[ \t]*([0-9a-f-]{55,128})[ \t]*(?=\r|$)")
TOLD_S = 10.0  # from one line of the log about too many connections to the next
LINGER_S = 1.0  # for a client to hear that it was refused; for a request on its way while the router closes


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
        self._nobody: asyncio.Event | None = None
        self._refused, self._told_at = 0, -TOLD_S

    def crowded(self) -> None:
        """A connection more than there may be."""
        self._refused += 1
        if self.relay.now - self._told_at >= TOLD_S:
            self._told_at = self.relay.now
            most = self.relay.config.connections
            log.warning("more than %d connections at once: %d have been refused so far, with 503.", most, self._refused)

    async def empty(self) -> None:
        """Wait until all have gone."""
        self._nobody = asyncio.Event()
        if self.open:
            await self._nobody.wait()

    def left(self) -> None:
        self.open -= 1
        if not self.open and self._nobody is not None:
            self._nobody.set()

    def protocol(self) -> RouterClientConnection:
        return RouterClientConnection(self)


def _message(body: bytes) -> str:
    """Of an error in OpenAI's shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""


class RouterClientConnection(asyncio.Protocol):
    """It reads heads and bodies by itself, with `http.strict` for what may stand in them."""

    __slots__ = (
        "_admission",
        "_ahead",
        "_chunks",
        "_crowded",
        "_door",
        "_head",
        "_held_ahead",
        "_last_head",
        "_lingers",
        "_missing",
        "_paused_at",
        "_pieces",
        "_reading",
        "_relay",
        "_said_all",
        "_since",
        "_size",
        "_slot",
        "_transport",
        "_trip",
    )

    def __init__(self, door: Listener) -> None:
        self._door, self._relay = door, door.relay
        self._transport = cast(asyncio.Transport, None)
        self._slot = -1
        self._trip: ProxiedRequest | None = None
        self._admission = ANYBODY  # of the latest request
        self._ahead = b""  # came already, and is not looked at yet
        self._head: RequestHead | None = None  # of the request that is coming in
        self._last_head: RequestHead | None = None
        self._pieces: list[bytes] = []
        self._missing = self._size = 0  # bytes of the body: to come, and held for it
        self._chunks: ChunkedBody | None = None
        self._since = self._relay.now  # when the present wait for the client began
        self._paused_at = 0.0
        self._reading = True
        self._held_ahead = 0
        self._crowded = False  # one connection too many: it is told how the fleet is, and nothing else
        self._lingers = False  # it has been refused, and only has to hear of it
        self._said_all = False  # the client sends no more, and still reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        config, door = self._relay.config, self._door
        self._transport.set_write_buffer_limits(high=config.write_bytes)
        self._slot = self._relay.wheel.add(self)
        door.open += 1
        self._relay.count(ProcessCell.CONNECTIONS)
        if (beyond := door.open - config.connections) > 0:
            door.crowded()
            if beyond <= overflow_connections(config.refusals):
                self._crowded = True
                return
            self.refuse(CROWDED.status, CROWDED.message, CROWDED.retry_s)
            if beyond > config.refusals:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._relay.wheel.remove(self, self._slot)
        self._door.left()
        self._relay.departures.forget(self._transport)
        self._relay.count(ProcessCell.CONNECTIONS, -1)
        trip, self._trip = self._trip, None
        if trip is not None:
            self._relay.count(ProcessCell.CLIENT_GONE)
            trip.abandon()
            self._account(trip, http_exchange.GONE)
        self._release()
        self._relay.room.give(self._held_ahead)

    def _release(self) -> None:
        """The body of the last request is needed no more."""
        if self._size:
            self._relay.room.give(self._size)
            self._size = 0

    # In

    def data_received(self, data: bytes) -> None:
        if self._lingers or self._transport.is_closing():
            return
        if self._trip is not None:
            self._take_ahead(data)
        elif self._head is None:
            self._take_head(self._ahead + data if self._ahead else data)
        else:
            self._take_body(data)

    def eof_received(self) -> bool:
        """The client has said all, and is answered as far as that goes. One that is gone resets the connection."""
        self._said_all = True
        self._next()
        if self._head is not None or self._transport.is_closing() or not self._transport.can_write_eof():
            return False
        self._relay.departures.watch_half(self._transport, self._transport.abort)
        return True

    def _take_ahead(self, data: bytes) -> None:
        """What comes while a request is answered: the next ones, of which not much is taken in."""
        self._ahead += data
        if len(self._ahead) <= AHEAD:
            return
        if self._reading:
            self._reading = False
            self._transport.pause_reading()
        self._count_ahead()

    def _count_ahead(self) -> None:
        """Much of it counts among what all requests keep."""
        room, size = self._relay.room, len(self._ahead)
        room.give(self._held_ahead)
        self._held_ahead = size if size > AHEAD else 0
        if not room.take(self._held_ahead):
            self._held_ahead = 0
            self._transport.abort()

    def _take_head(self, data: bytes) -> None:
        end = data.find(b"\r\n\r\n") + 4
        if end < 4:
            if not self._ahead:
                self._since = self._relay.now
            self._ahead = data
            if self._said_all:
                self._transport.close()
            elif len(data) > self._relay.config.head_bytes:
                self.refuse(431, "the request's head is too large. Send less in it.")
            return
        raw = data if end == len(data) else data[:end]
        self._ahead = b""
        head = self._last_head
        length = None if head is None else head.length_in(raw)
        if head is None or length is None:
            try:
                head = self._last_head = RequestHead(raw)
            except Malformed as error:
                self.refuse(error.status, error.message)
                return
            length = head.length
        self._begin(head, length, data[end:])

    def _begin(self, head: RequestHead, length: int, rest: bytes) -> None:
        relay = self._relay
        gate = self._door.gate
        if self._crowded:
            if length or head.method not in (b"GET", b"HEAD") or head.target.partition(b"?")[0] != HEALTH:
                self._turn_away(head, CROWDED)
                return
            head.close = True
        self._admission = ANYBODY if gate.open else gate.look(head, self._to_replicas(head))
        if (refusal := self._admission.refusal) is not None:
            self._turn_away(head, refusal)
        elif length > relay.config.body_bytes:
            self._turn_away(
                head, GateRefusal(413, f"a body of over {relay.config.body_bytes:,} bytes. Send less at once.")
            )
        elif length > SMALL and not self._hold(length):
            self._turn_away(head, FULL)
        elif len(rest) == length:
            self._start(head, rest)
        else:
            self._await_body(head, length, rest)

    def _to_replicas(self, head: RequestHead) -> bool:
        """A browser's question whether another server's page may ask goes to the control application."""
        return head.to_replicas and not (head.method == b"OPTIONS" and self._door.gate.origins)

    def _turn_away(self, head: RequestHead, why: GateRefusal) -> None:
        """Before there is a trip."""
        if self._door.logs:
            self._log(head, why.status, 0.0, {"refused": why.message})
        self._answer(why.status, why.message, why.retry_s, kind=why.kind, code=why.code)

    def _hold(self, size: int) -> bool:
        if not self._relay.room.take(size):
            return False
        self._size += size
        return True

    def _await_body(self, head: RequestHead, length: int, rest: bytes) -> None:
        self._head, self._missing, self._since = head, length, self._relay.now
        self._chunks = ChunkedBody(self._relay.config.body_bytes) if length == CHUNKED else None
        if head.expects and not rest:
            self._transport.write(http_exchange.CONTINUE)
        if rest or not length:
            self._take_body(rest)
        if self._said_all and self._head is not None:
            self._transport.close()

    def _take_body(self, data: bytes) -> None:
        if self._chunks is not None:
            self._take_chunks(self._chunks, data)
            return
        if len(data) > self._missing:
            data, self._ahead = data[: self._missing], data[self._missing :]
        self._pieces.append(data)
        self._missing -= len(data)
        if not self._missing:
            self._whole(self._pieces)

    def _take_chunks(self, chunks: ChunkedBody, data: bytes) -> None:
        try:
            rest = chunks.feed(data)
        except Malformed as error:
            self.refuse(error.status, error.message)
            return
        if chunks.size > self._size and not self._hold(chunks.size - self._size):
            self.refuse(503, "the router holds as many requests as it may. Try again later.", retry_s=1)
        elif chunks.complete:
            self._ahead, self._chunks = rest, None
            self._whole(chunks.parts)

    def _whole(self, pieces: list[bytes]) -> None:
        head, self._head, self._pieces = self._head, None, []
        if head is not None:
            self._start(head, pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def _start(self, head: RequestHead, body: bytes) -> None:
        relay = self._relay
        request_id = head.request_id or b"%b-%x" % (self._door.id_prefix, next(self._door.ids))
        if self._to_replicas(head):
            extra = b"".join(f"\r\n{name}: {value}".encode("latin-1") for name, value in self._admission.headers)
            self._trip = trip = ProxiedRequest(relay, self, head, body, request_id, extra=extra)
            relay.send(trip)
            return
        tail = self._door.control_line
        if head.origin is not None and self._door.gate.origins:
            tail += b"\r\nOrigin: " + head.origin
        if head.host is not None:
            tail += b"\r\nHost: " + head.host
        if head.authorization is not None:
            tail += b"\r\nAuthorization: " + head.authorization
        self._trip = trip = ProxiedRequest(relay, self, head, body, request_id, tail)
        relay.send_to_control(trip)

    # Out

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def finish(self, close: bool) -> None:
        trip, self._trip = self._trip, None
        if trip is not None:
            self._account(trip, trip.status)
        self._since = self._relay.now
        self._release()
        if close or (self._said_all and not self._ahead) or self._transport.is_closing():
            self._transport.close()
            return
        if self._ahead:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """The request that came while the last one was answered."""
        if self._trip is None and self._head is None and not self._transport.is_closing():
            data, self._ahead = self._ahead, b""
            self._take_head(data)
            if self._held_ahead:
                self._count_ahead()
            if not self._reading and (self._trip is None or len(self._ahead) <= AHEAD):
                self._reading = True
                self._transport.resume_reading()

    def break_off(self) -> None:
        trip, self._trip = self._trip, None
        if trip is not None:
            self._account(trip, trip.status, "broken off")
        self._transport.close()

    def refuse(self, status: int, message: str, retry_s: int = 0, route: bytes = b"") -> None:
        if self._trip is not None:
            self._account(self._trip, status, message)
        elif self._door.logs:
            self._log(self._head, status, 0.0, {"refused": message})
        self._answer(status, message, retry_s, route)

    def _account(self, trip: ProxiedRequest, status: int, refused: str = "") -> None:
        """A request is over: its key pays for it, and it is logged."""
        key, logs = self._admission.key, self._door.logs
        if key is None and not logs:
            return
        tokens = trip.tokens()
        if key is not None and tokens is not None:
            self._door.gate.quotas.spend(key, sum(tokens))
        looks = trip.member is None and trip.method == b"GET"  # again and again, at /health and /metrics
        if not logs or (looks and (status < 400 or trip.asked.target == HEALTH)):
            return
        notes: dict[str, object] = {"id": trip.request_id.decode("latin-1")}
        if trip.model is not None:
            notes["model"] = trip.model
        if tokens is not None:
            notes |= {"input_tokens": tokens[0], "output_tokens": tokens[1]}
        if trip.member is not None:
            notes["replica"] = trip.member
        if refused := refused or _message(trip.said):
            notes["refused"] = refused
        self._log(trip.asked, status, self._relay.clock() - trip.started, notes)

    def _log(self, head: RequestHead | None, status: int, took_s: float, notes: dict[str, object]) -> None:
        peer = self._transport.get_extra_info("peername")
        method = path = ""
        if head is not None:
            method, path = head.method.decode(), head.target.partition(b"?")[0].decode("ascii")
            if (trace := TRACE.search(head.lines)) is not None:
                notes["trace"] = trace[1].decode()
        if self._admission.key is not None:
            notes["key"] = self._admission.key.name
        said = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "unix"
        http_exchange.log_request(logging.INFO, method, path, status, took_s, said, notes)

    def _answer(
        self,
        status: int,
        message: str,
        retry_s: int,
        route: bytes = b"",
        kind: str | None = None,
        code: str | None = None,
    ) -> None:
        """An answer of the router's own."""
        trip, self._trip = self._trip, None
        keep = trip is not None and not trip.asked.close and not self._relay.closing
        headers = [("Retry-After", str(retry_s))] if retry_s else []
        headers += self._admission.headers
        if status == 401:
            headers.append(("WWW-Authenticate", 'Bearer realm="gpuinfer"'))
        if route:
            name, _, value = route.decode("latin-1").strip().partition(": ")
            headers.append((name, value))
        body = http_exchange.error_bytes(message, kind or http_exchange.error_type_of(status), code=code)
        head = http_exchange.head_bytes(status, "application/json", len(body), keep, headers)
        bare = trip is not None and trip.method == b"HEAD"
        self._transport.write(head if bare else head + body)
        if trip is None:
            self._linger()
        else:
            self.finish(close=not keep)

    def _linger(self) -> None:
        """Say that nothing more will be read, but read it: a connection that is closed with bytes unread is reset, and
        the client might never see why its request was refused.
        """
        self._release()
        self._head, self._ahead, self._pieces, self._chunks = None, b"", [], None
        self._lingers, self._since = True, self._relay.now
        if self._said_all:
            self._transport.close()
        else:
            close_write_side(self._transport)

    def pause_writing(self) -> None:
        self._paused_at = self._relay.now
        if self._trip is not None:
            self._trip.pause()

    def resume_writing(self) -> None:
        self._paused_at = 0.0
        if self._trip is not None:
            self._trip.resume()

    # Time

    def look(self, now: float) -> None:
        config, waited = self._relay.config, now - self._since
        if self._paused_at and now - self._paused_at > config.write_s:
            self._transport.abort()
        elif self._transport.is_closing():
            if waited > config.write_s:
                self._transport.abort()
        elif self._lingers:
            if waited > LINGER_S:
                self._transport.abort()
        elif self._trip is not None:
            if not self._paused_at and now - self._trip.last > config.timeout_s:
                self._relay.count(ProcessCell.TIMEOUTS)
                self._trip.time_out()
        elif self._crowded:
            if waited > CROWDED_S:
                self.refuse(CROWDED.status, CROWDED.message, CROWDED.retry_s)
        elif self._head is not None:
            if waited > config.body_s + self._come() / SLOWEST:
                self.refuse(408, "the request's body did not come in time. Send it at once.")
        elif self._ahead:
            if waited > config.head_s:
                self.refuse(408, "the request's head did not come in time. Send it at once.")
        else:
            most = config.head_s if self._last_head is None else config.idle_s
            if waited > (min(LINGER_S, most) if self._relay.closing else most):
                self._transport.close()

    def _come(self) -> int:
        """Bytes of the body that are here."""
        if self._chunks is not None:
            return self._chunks.size
        return sum(map(len, self._pieces))
