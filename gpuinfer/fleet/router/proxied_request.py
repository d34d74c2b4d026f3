"""One request on its way to a replica, to another one when that fails, and its answer."""

from __future__ import annotations

import contextlib
import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import unquote

from gpuinfer.api import Priority
from gpuinfer.fleet.router.connection_pool import ConnectionPool, ReplicaConnection
from gpuinfer.fleet.router.event_stream import RelayedEvents
from gpuinfer.fleet.router.http_message import RequestHead, ResponseHead, without_headers
from gpuinfer.fleet.router.replica_table import RoutedReplica
from gpuinfer.fleet.router.request_queue import QueueTicket
from gpuinfer.fleet.router.shared_counters import ProcessCell
from gpuinfer.http.access import RequestRefusal
from gpuinfer.http.http_exchange import chunk_bytes, error_bytes, error_type_of, last_chunk

if TYPE_CHECKING:
    from gpuinfer.fleet.router.client_connection import RouterClientConnection
    from gpuinfer.fleet.router.relay import Relay
    from gpuinfer.fleet.router.request_trace import RequestTrace

CLASSES = {priority.name.lower(): priority for priority in Priority}
TRY_AGAIN = frozenset({429, 502, 503})
STALE_S = (
    0.1  # a connection used before that breaks so soon was closed while nobody looked, by no fault of the replica's
)
LEAST_S = 0.001  # shortest timeout passed to a replica, for a request that is about to expire
RETRY_S = 5  # after a wait that was too long
STALE = 2  # times that a request is sent again for this reason

_USED = re.compile(rb"(?mi)^x-gpuinfer-used:[ \t]*([0-9]{1,15} [0-9]{1,15})[ \t]*\r$")
_WAITING, _WHOLE, _PASSING, _STREAMING = range(4)


class ProxiedRequest:
    """A request with its body, which is kept until the answer is complete."""

    __slots__ = (
        "_answer_head",
        "_begun",
        "_close",
        "_created",
        "_events",
        "_held",
        "_mode",
        "_more",
        "_pool",
        "_relay",
        "_reused",
        "_sent",
        "_sent_at",
        "_stale",
        "attempt",
        "body",
        "client",
        "connection",
        "error_body",
        "extra",
        "head",
        "last",
        "losses",
        "member",
        "method",
        "paused",
        "probes",
        "queued_us",
        "reason",
        "replica",
        "request_id",
        "retried",
        "started",
        "ticket",
        "trace",
        "tried",
        "used",
        "waits",
    )

    def __init__(
        self,
        relay: Relay,
        client: RouterClientConnection,
        head: RequestHead,
        body: bytes,
        request_id: bytes,
        more: bytes = b"",
        extra: bytes = b"",
    ) -> None:
        """`more`: lines that are added to the request; `extra`: to its answer; each line begins with CRLF."""
        self._relay, self.client, self.head, self.body = relay, client, head, body
        self.request_id, self._more, self._created = request_id, more, relay.wall
        self.extra = extra
        self.error_body = b""  # of the answer, where that is an error
        self.member: int | None = None  # the replica that had the request last
        self.used = b""  # "INPUT OUTPUT", in tokens, from the replica's trailer
        self.method = head.method
        self.started = self._sent_at = relay.clock()
        self.last = relay.now  # when bytes of an answer last came, or the request was sent
        self.attempt = self.losses = self._stale = self.queued_us = 0
        self.tried: tuple[int, ...] = ()  # members that failed, or refused since they drain
        self.probes = False  # its outcome decides about a half-open breaker
        self.retried = ""  # the statuses after which the request was sent again, as X-Gpuinfer-Route lists them
        self.replica: RoutedReplica | None = None
        self.reason = ""
        self.trace: RequestTrace | None = None  # where requests are traced
        self.connection: ReplicaConnection | None = None
        self.waits = False  # for a connection
        self.ticket: QueueTicket | None = None  # of the queue for replicas, once it has waited there
        self._mode = _WAITING
        self._sent = False  # whether the client has been sent any of an answer
        self._reused = self._close = False
        self._begun = b""
        self._answer_head: ResponseHead | None = None
        self._held: list[bytes] = []
        self._events: RelayedEvents | None = None
        self._pool: ConnectionPool | None = None
        self.paused = False

    # To a replica

    def urgency(self) -> tuple[Priority, float]:
        """Class, and deadline on the relay's clock, by its headers. What a replica will refuse in them counts as not
        being there.
        """
        headers, deadline = self.head.headers, math.inf
        priority = CLASSES.get(headers.get("x-gpuinfer-priority", ""), Priority.NORMAL)
        if (text := headers.get("x-gpuinfer-timeout")) is not None:
            with contextlib.suppress(ValueError):
                if (timeout_s := float(text)) > 0:
                    deadline = self.started + timeout_s
        return priority, deadline

    def start(self, pool: ConnectionPool) -> None:
        """Send the request over a connection of this pool, at once or when one is free."""
        self._pool = pool
        self.waits = True
        self.last = self._relay.now
        pool.take(self)

    def attach(self, connection: ReplicaConnection) -> bytes:
        """The request has got this connection; returns its bytes."""
        self.waits, self.connection, self._reused = False, connection, connection.reused
        self._sent_at = self._relay.clock()
        if self.replica is not None:
            self.member = self.replica.member
        self.queued_us = int((self._sent_at - self.started) * 1e6)
        if self.paused:
            connection.pause()
        head, body = self.head, self.body
        lines = head.lines if self.trace is None else self.trace.lines()
        if self.ticket is not None and self.ticket.deadline < math.inf:  # a replica counts anew; part of it is over
            left_s = max(LEAST_S, self.ticket.deadline - self._sent_at)
            lines = b"%b\r\nX-Gpuinfer-Timeout: %.3f" % (without_headers(lines, {b"x-gpuinfer-timeout"}), left_s)
        where = self._more if self.replica is None else self.replica.lines
        mine = b"%b%b\r\nX-Request-Id: %b\r\nX-Gpuinfer-Created: %d" % (
            lines,
            where,
            self.request_id,
            self._created,
        )
        if self._begun:
            begun, size = len(self._begun), len(self._begun) + len(body)
            mine += b"\r\nX-Gpuinfer-Begun: %d\r\nContent-Length: %d\r\n\r\n" % (begun, size)
            return mine + self._begun + body
        if head.sized:
            return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (mine, len(body), body)
        return mine + b"\r\n\r\n"

    # The answer

    def answered(self, head: ResponseHead) -> None:
        """The head of an answer has come."""
        self.last = self._relay.now
        self._relay.answered(self, head.status)
        if self._sent:
            if head.status != 200 or not head.events:  # else the answer continues another replica's
                self._drop_connection()
                if head.leaving:
                    self._relay.refused_draining(self)
                    self._relay.place(self)
                else:
                    self._lost("refused" if head.status in TRY_AGAIN else "broken")
            return
        self._answer_head = head
        if 0 <= head.length <= self._relay.whole_bytes:
            self._mode = _WHOLE
            return
        self._mode = _PASSING
        if head.events and head.status == 200 and head.length < 0 and self.replica is not None:
            self._mode = _STREAMING
            limit = self._relay.kept_bytes if self.replica.fleet_member.ours else 0
            self._events = RelayedEvents(limit, self._relay.budget)
        more = b"" if head.length >= 0 or self.head.old else b"\r\nTransfer-Encoding: chunked"
        self._write(self._lines(head) + more + b"\r\n\r\n")

    def answered_whole(self, head: ResponseHead, body: bytes) -> None:
        """The answer has come in one piece."""
        if self._sent or len(body) > self._relay.whole_bytes:
            self.answered(head)
            if self._answer_head is head:
                if body:
                    self.content(body, False)
                self.ended()
            return
        self.connection, self._answer_head = None, head
        self._relay.answered(self, head.status)
        if head.status in TRY_AGAIN and self._again(head):
            return
        self._sent = True
        if head.status >= 400:
            self.error_body = body
        self.client.write(b"%b\r\n\r\n%b" % (self._lines(head), body))
        self._finish()

    def _again(self, head: ResponseHead) -> bool:
        """Send the request to another replica, where the answer says to try again and that is allowed."""
        if head.leaving and self.replica is not None:
            self._relay.refused_draining(self)
        elif not self._relay.may_try_again(self, head.status):
            return False
        self._forget()
        self._relay.place(self)
        return True

    def _lines(self, head: ResponseHead) -> bytes:
        self._close = self.head.close or self._relay.closing or (self.head.old and head.length < 0)
        more = self.route() + self.extra
        if not head.request_id:
            more += b"\r\nX-Request-Id: " + self.request_id
        if self._close:
            more += b"\r\nConnection: close"
        return head.lines + more

    def route(self) -> bytes:
        """The header X-Gpuinfer-Route: which replica answers, and why that one."""
        if not self.reason:
            return b""
        where = "none" if self.replica is None else self.replica.member
        chosen = _chosen(where, self.reason, self.attempt)
        if self.retried:
            return b"%b%d%b" % (chosen, self.queued_us, self.retried.encode("latin-1"))
        return b"%b%d" % (chosen, self.queued_us)

    @property
    def status(self) -> int:
        """The answer's status; 0 before it is known."""
        return 0 if self._answer_head is None else self._answer_head.status

    @property
    def model(self) -> str | None:
        """The name of the model that answers, where the replica tells it."""
        return (
            unquote(self._answer_head.model.decode("latin-1"))
            if self._answer_head is not None and self._answer_head.model
            else None
        )

    def tokens(self) -> tuple[int, int] | None:
        """Tokens of prompt and answers, where they are known; of an answer that breaks off, those that were sent."""
        used = (self.used or (self._answer_head.used if self._answer_head is not None else b"")).split()
        if len(used) == 2 and all(part.isdigit() for part in used):
            return int(used[0]), int(used[1])
        sent = 0 if self._events is None else self._events.tokens()
        return (0, sent) if sent else None

    def trailer(self, lines: bytes) -> None:
        """Read the headers that follow the answer."""
        found = _USED.search(lines)
        if found is not None:
            self.used = found[1]

    def content(self, data: bytes, whole: bool) -> None:
        """Take a part of the body. `whole`: it stands in whole chunks in `connection.received`."""
        self.last = self._relay.now
        if self._mode == _WHOLE:
            self._held.append(data)
        elif self._events is not None:
            events = self._events.take(data)
            if events:
                self._pass(events, whole and events is data)
        else:
            self._pass(data, whole)

    def _pass(self, data: bytes, whole: bool) -> None:
        head = self._answer_head
        if head is None or head.length >= 0 or self.head.old:
            self._write(data)
        elif whole and self.connection is not None:
            self._write(self.connection.received)
        else:
            self._write(chunk_bytes(data))

    def _write(self, data: bytes) -> None:
        self._sent = True
        self.client.write(data)

    def ended(self) -> None:
        """The answer is complete."""
        self.connection = None
        head = self._answer_head
        if head is None:
            return
        if self._mode == _WHOLE:
            if head.status in TRY_AGAIN and self._again(head):
                return
            self._write(b"".join((self._lines(head), b"\r\n\r\n", *self._held)))
        elif head.length < 0 and not self.head.old:
            self._write(last_chunk())
        self._finish()

    def _finish(self) -> None:
        self._over()
        self.client.finish(self._close)

    def _over(self) -> None:
        if self._events is not None:
            self._events.forget()
        self._relay.over(self)

    def _forget(self) -> None:
        """Drop an answer that the client is not sent."""
        self._mode, self._answer_head = _WAITING, None
        self._held.clear()

    # When it goes wrong

    def lost(self, kind: str) -> None:
        """The connection is lost, or none could be made; `kind`: reset, broken, refused, timeout."""
        self.waits = False
        connection, self.connection = self.connection, None
        early = connection is not None and not connection.answering and self._reused
        if early and self._stale < STALE and self._relay.clock() - self._sent_at < STALE_S:
            self._stale += 1
            if self._pool is not None:
                self.start(self._pool)
                return
        self._lost(kind)

    def _lost(self, kind: str) -> None:
        """Nothing more comes from this replica: end, go on at another one, or give up."""
        if self._events is not None and self._events.ended:
            if self._answer_head is not None and self._answer_head.length < 0 and not self.head.old:
                self._write(last_chunk())
            self._finish()
            return
        self._relay.failed(self, kind)
        if self.replica is None:
            self.give_up(502, "the fleet's control application does not answer. See its log.")
        elif not self._sent:
            self._forget()
            self._relay.place(self)
        elif self._events is not None and self.resumes:
            events = self._events
            if events.moved:  # further than before: the request is not what replicas die of
                self.attempt = self.losses = 0
            self._begun = events.begun()
            events.restart()
            self._relay.place(self)
        else:
            self.give_up(502, "the replica was lost while it answered. Send the request again.")

    def _drop_connection(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.drop()

    @property
    def resumes(self) -> bool:
        """Whether the client has been sent the beginning of a stream that another replica can continue."""
        return self._sent and self._events is not None and self._events.resumable

    def give_up(self, status: int, message: str, retry_s: int = 0, error: str = "") -> None:
        """Answer with an error, within a stream of events as an event; another answer that has begun is broken off.

        `error`: what other processes of ours know it by, the name of a class in `gpuinfer.errors`.
        """
        self.waits = False
        self._drop_connection()
        route = self.route()
        self._over()
        if not self._sent:
            headers = [("Retry-After", str(retry_s))] if retry_s else []
            headers += [("X-Gpuinfer-Error", error)] if error else []
            self.client.refuse(RequestRefusal(status, message, headers), route)
            return
        self._relay.count(ProcessCell.BROKEN_OFF)
        if self._events is not None:
            event = error_bytes(message, error_type_of(status), code=str(status))
            self._pass(b"data: " + event + b"\n\n", False)
            if not self.head.old:
                self._write(last_chunk())
            self.client.finish(self._close)
        else:
            self.client.break_off()

    def abandon(self) -> None:
        """The client has disconnected."""
        self.waits = False
        self._drop_connection()
        if self._events is not None:
            self.used = self.used or b"0 %d" % self._events.tokens()
        self._over()

    def time_out(self) -> None:
        """No byte of an answer has come for too long."""
        if self.ticket is not None and self.ticket.queued:
            waited = f"no replica had room for this request within {self._relay.config.timeout_s:g} s."
            self.give_up(503, f"{waited} Ask again later, or have more replicas.", retry_s=RETRY_S)
            return
        self._drop_connection()
        if self._sent and self._events is not None:
            self._lost("timeout")
            return
        self._relay.failed(self, "timeout")
        self.give_up(504, "no answer came in time. Ask for less at once, or raise the router's timeout.")

    def pause(self) -> None:
        """The client reads too slowly: read no more of the answer."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self.paused = False
        self.last = self._relay.now
        if self.connection is not None:
            self.connection.resume()


@lru_cache(maxsize=4096)
def _chosen(where: object, why: str, attempt: int) -> bytes:
    return f"\r\nX-Gpuinfer-Route: replica={where}; why={why}; attempt={attempt}; queued_us=".encode("latin-1")
