"""One request on its way: to a replica, to another one when that fails, and the answer back to its client."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote

from gpuinfer.fleet.router.connection_pool import ConnectionPool, ReplicaConnection
from gpuinfer.fleet.router.event_stream import ByteBudget, RelayedEvents
from gpuinfer.fleet.router.http_message import LAST, RequestHead, ResponseHead, encode_chunk
from gpuinfer.fleet.router.replica_table import RoutedReplica
from gpuinfer.http.http_exchange import error_bytes, error_type_of

TRY_AGAIN = frozenset({429, 502, 503})
STALE_S = 0.1  # a link used before that breaks so soon was closed while nobody looked, by no fault of the replica's
STALE = 2  # times that this is believed of one request

_USED = re.compile(rb"(?mi)^x-gpuinfer-used:[ \t]*([0-9]{1,15} [0-9]{1,15})[ \t]*\r$")
_WAITING, _WHOLE, _PASSING, _STREAMING = range(4)


class ResponseReceiver(Protocol):
    """The client's connection."""

    def write(self, data: bytes) -> None: ...

    def finish(self, close: bool) -> None:
        """The answer is whole."""

    def break_off(self) -> None:
        """The answer cannot be brought to its end, and the client sees that: its connection closes in the middle."""

    def refuse(self, status: int, message: str, retry_s: int = 0, route: bytes = b"") -> None:
        """An answer of the router's own."""


class RequestDispatcher(Protocol):
    """Who decides where trips go, and counts what becomes of them."""

    now: float
    wall: float
    closing: bool
    whole_bytes: int
    kept_bytes: int
    room: ByteBudget

    def clock(self) -> float: ...

    def place(self, trip: ProxiedRequest) -> None: ...

    def may_try_again(self, trip: ProxiedRequest, status: int) -> bool: ...

    def sent_away(self, trip: ProxiedRequest) -> None: ...

    def failed(self, trip: ProxiedRequest, kind: str) -> None: ...

    def answered(self, trip: ProxiedRequest, status: int) -> None: ...

    def over(self, trip: ProxiedRequest) -> None: ...

    def broken_off(self) -> None: ...


class ProxiedRequest:
    """Its request is kept whole until its answer has come to its end."""

    __slots__ = (
        "_begun",
        "_close",
        "_created",
        "_dispatcher",
        "_events",
        "_head",
        "_held",
        "_mode",
        "_more",
        "_pool",
        "_reused",
        "_sent",
        "_sent_at",
        "_stale",
        "asked",
        "asker",
        "attempt",
        "body",
        "extra",
        "last",
        "link",
        "losses",
        "member",
        "method",
        "paused",
        "queued_us",
        "replica",
        "request_id",
        "retried",
        "said",
        "started",
        "tried",
        "tries",
        "used",
        "waits",
        "why",
    )

    def __init__(
        self,
        dispatcher: RequestDispatcher,
        asker: ResponseReceiver,
        asked: RequestHead,
        body: bytes,
        request_id: bytes,
        more: bytes = b"",
        extra: bytes = b"",
    ) -> None:
        """`more` are lines that are added to the request, `extra` to its answer, each with CRLF before it."""
        self._dispatcher, self.asker, self.asked, self.body = dispatcher, asker, asked, body
        self.request_id, self._more, self._created = request_id, more, dispatcher.wall
        self.extra = extra
        self.said = b""  # the answer, where that is an error
        self.member: int | None = None  # who had it last
        self.used = b""  # "INPUT OUTPUT", in tokens, as the replica said it
        self.method = asked.method
        self.started = self._sent_at = dispatcher.clock()
        self.last = dispatcher.now  # when something of an answer last came, or the request was sent
        self.attempt = self.losses = self._stale = self.queued_us = 0
        self.tried: tuple[int, ...] = ()  # members that failed it, or sent it away
        self.tries = False  # what becomes of it decides about a half-open breaker
        self.retried = ""  # statuses that it was repeated for
        self.replica: RoutedReplica | None = None
        self.why = ""
        self.link: ReplicaConnection | None = None
        self.waits = False
        self._mode = _WAITING
        self._sent = False  # whether anything of an answer has gone to the client
        self._reused = self._close = False
        self._begun = b""
        self._head: ResponseHead | None = None
        self._held: list[bytes] = []
        self._events: RelayedEvents | None = None
        self._pool: ConnectionPool | None = None
        self.paused = False

    # To a replica

    def go(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self.waits = True
        self.last = self._dispatcher.now
        pool.take(self)

    def board(self, link: ReplicaConnection) -> bytes:
        self.waits, self.link, self._reused = False, link, link.reused
        self._sent_at = self._dispatcher.clock()
        if self.replica is not None:
            self.member = self.replica.member
        self.queued_us = int((self._sent_at - self.started) * 1e6)
        if self.paused:
            link.pause()
        asked, body = self.asked, self.body
        where = self._more if self.replica is None else self.replica.lines
        mine = b"%b%b\r\nX-Request-Id: %b\r\nX-Gpuinfer-Created: %d" % (
            asked.lines,
            where,
            self.request_id,
            self._created,
        )
        if self._begun:
            begun, size = len(self._begun), len(self._begun) + len(body)
            mine += b"\r\nX-Gpuinfer-Begun: %d\r\nContent-Length: %d\r\n\r\n" % (begun, size)
            return mine + self._begun + body
        if asked.sized:
            return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (mine, len(body), body)
        return mine + b"\r\n\r\n"

    # The answer, by the link

    def answered(self, head: ResponseHead) -> None:
        self.last = self._dispatcher.now
        self._dispatcher.answered(self, head.status)
        if self._sent:
            self._go_on(head)
            return
        self._head = head
        if 0 <= head.length <= self._dispatcher.whole_bytes:
            self._mode = _WHOLE
            return
        self._mode = _PASSING
        if head.events and head.status == 200 and head.length < 0 and self.replica is not None:
            self._mode = _STREAMING
            limit = self._dispatcher.kept_bytes if self.replica.about.ours else 0
            self._events = RelayedEvents(limit, self._dispatcher.room)
        more = b"" if head.length >= 0 or self._to_the_end(head) else b"\r\nTransfer-Encoding: chunked"
        self._write(self._lines(head) + more + b"\r\n\r\n")

    def answered_whole(self, head: ResponseHead, body: bytes) -> None:
        if self._sent or len(body) > self._dispatcher.whole_bytes:
            self.answered(head)
            if self._head is head:
                if body:
                    self.content(body, False)
                self.ended()
            return
        self.link, self._head = None, head
        self._dispatcher.answered(self, head.status)
        if head.status in TRY_AGAIN and self._again(head):
            return
        self._sent = True
        if head.status >= 400:
            self.said = body
        self.asker.write(b"%b\r\n\r\n%b" % (self._lines(head), body))
        self._finish()

    def _again(self, head: ResponseHead) -> bool:
        """Go elsewhere, if an answer that says to try again may be heeded."""
        if head.leaving and self.replica is not None:
            self._dispatcher.sent_away(self)
        elif not self._dispatcher.may_try_again(self, head.status):
            return False
        self._forget()
        self._dispatcher.place(self)
        return True

    def _go_on(self, head: ResponseHead) -> None:
        """The head of an answer that continues one: the client has had its own."""
        if head.status != 200 or not head.events:
            link, self.link = self.link, None
            if link is not None:
                link.drop()
            if head.leaving:
                self._dispatcher.sent_away(self)
                self._dispatcher.place(self)
                return
            self._lost("refused" if head.status in TRY_AGAIN else "broken")

    def _to_the_end(self, head: ResponseHead) -> bool:
        """Whether the client learns by the connection's end where the body ends."""
        return self.asked.old and head.length < 0

    def _lines(self, head: ResponseHead) -> bytes:
        self._close = self.asked.close or self._dispatcher.closing or self._to_the_end(head)
        more = self.route() + self.extra
        if not head.request_id:
            more += b"\r\nX-Request-Id: " + self.request_id
        if self._close:
            more += b"\r\nConnection: close"
        return head.lines + more

    def route(self) -> bytes:
        """The header that says why the answer comes from where it does."""
        if not self.why:
            return b""
        where = "none" if self.replica is None else self.replica.member
        chosen = _chosen(where, self.why, self.attempt)
        if self.retried:
            return b"%b%d%b" % (chosen, self.queued_us, self.retried.encode("latin-1"))
        return b"%b%d" % (chosen, self.queued_us)

    @property
    def status(self) -> int:
        """Of the answer that its client gets; 0 before that is known."""
        return 0 if self._head is None else self._head.status

    @property
    def model(self) -> str | None:
        """Who answers, as the replica said it."""
        return unquote(self._head.model.decode("latin-1")) if self._head is not None and self._head.model else None

    def tokens(self) -> tuple[int, int] | None:
        """Of prompt and answers, as far as that is known; of an answer that breaks off, those that were sent."""
        used = (self.used or (self._head.used if self._head is not None else b"")).split()
        if len(used) == 2 and all(part.isdigit() for part in used):
            return int(used[0]), int(used[1])
        sent = 0 if self._events is None else self._events.tokens()
        return (0, sent) if sent else None

    def trailer(self, lines: bytes) -> None:
        """What the replica says after its answer."""
        found = _USED.search(lines)
        if found is not None:
            self.used = found[1]

    def content(self, data: bytes, plain: bool) -> None:
        self.last = self._dispatcher.now
        if self._mode == _WHOLE:
            self._held.append(data)
        elif self._events is not None:
            whole = self._events.take(data)
            if whole:
                self._pass(whole, plain and whole is data)
        else:
            self._pass(data, plain)

    def _pass(self, data: bytes, plain: bool) -> None:
        head = self._head
        if head is None or head.length >= 0 or self.asked.old:
            self._write(data)
        elif plain and self.link is not None:
            self._write(self.link.received)
        else:
            self._write(encode_chunk(data))

    def _write(self, data: bytes) -> None:
        self._sent = True
        self.asker.write(data)

    def ended(self) -> None:
        self.link = None
        head = self._head
        if head is None:
            return
        if self._mode == _WHOLE:
            if head.status in TRY_AGAIN and self._again(head):
                return
            self._write(b"".join((self._lines(head), b"\r\n\r\n", *self._held)))
        elif head.length < 0 and not self.asked.old:
            self._write(LAST)
        self._finish()

    def _finish(self) -> None:
        self._over()
        self.asker.finish(self._close)

    def _over(self) -> None:
        if self._events is not None:
            self._events.forget()
        self._dispatcher.over(self)

    def _forget(self) -> None:
        """What came of an answer that its client never sees."""
        self._mode, self._head = _WAITING, None
        self._held.clear()

    # When it goes wrong

    def lost(self, kind: str) -> None:
        self.waits = False
        link, self.link = self.link, None
        early = link is not None and not link.heard and self._reused
        if early and self._stale < STALE and self._dispatcher.clock() - self._sent_at < STALE_S:
            self._stale += 1
            if self._pool is not None:
                self.go(self._pool)
                return
        self._lost(kind)

    def _lost(self, kind: str) -> None:
        """Nothing more comes from this replica."""
        if self._events is not None and self._events.ended:
            self._end_stream()
            return
        self._dispatcher.failed(self, kind)
        if self.replica is None:
            self.give_up(502, "the fleet's control application does not answer. See its log.")
        elif not self._sent:
            self._forget()
            self._dispatcher.place(self)
        elif self._events is not None and self.resumes:
            self._go_on_elsewhere(self._events)
        else:
            self.give_up(502, "the replica was lost while it answered. Send the request again.")

    def _go_on_elsewhere(self, events: RelayedEvents) -> None:
        if events.moved:  # it has come further since the last time, so it is not what replicas die of
            self.attempt = self.losses = 0
        self._begun = events.begun()
        events.restart()
        self._dispatcher.place(self)

    def _end_stream(self) -> None:
        if self._head is not None and self._head.length < 0 and not self.asked.old:
            self._write(LAST)
        self._finish()

    @property
    def resumes(self) -> bool:
        """Whether its client has had the beginning of a stream that can go on elsewhere."""
        return self._sent and self._events is not None and self._events.resumable

    def give_up(self, status: int, message: str, retry_s: int = 0) -> None:
        """There is no way on. A client that has had nothing gets this answer; one that reads events gets it as one."""
        self.waits = False
        link, self.link = self.link, None
        if link is not None:
            link.drop()
        route = self.route()
        self._over()
        if not self._sent:
            self.asker.refuse(status, message, retry_s, route)
            return
        self._dispatcher.broken_off()
        if self._events is not None:
            self._pass(error_event(status, message), False)
            if not self.asked.old:
                self._write(LAST)
            self.asker.finish(self._close)  # its client has been told of the end, and may go on
        else:
            self.asker.break_off()

    def abandon(self) -> None:
        """The client has gone."""
        self.waits = False
        link, self.link = self.link, None
        if link is not None:
            link.drop()
        if self._events is not None:
            self.used = self.used or b"0 %d" % self._events.tokens()
        self._over()

    def time_out(self) -> None:
        """Nothing has come for too long."""
        link, self.link = self.link, None
        if link is not None:
            link.drop()
        if self._sent and self._events is not None:
            self._lost("timeout")
            return
        self._dispatcher.failed(self, "timeout")
        self.give_up(504, "no answer came in time. Ask for less at once, or raise the router's timeout.")

    def pause(self) -> None:
        """The client takes no more for now."""
        self.paused = True
        if self.link is not None:
            self.link.pause()

    def resume(self) -> None:
        self.paused = False
        self.last = self._dispatcher.now
        if self.link is not None:
            self.link.resume()


@lru_cache(maxsize=4096)
def _chosen(where: object, why: str, attempt: int) -> bytes:
    """The beginning of the header, up to the time."""
    return f"\r\nX-Gpuinfer-Route: replica={where}; why={why}; attempt={attempt}; queued_us=".encode("latin-1")


def error_event(status: int, message: str) -> bytes:
    """What ends a stream that cannot go on."""
    return b"data: " + error_bytes(message, error_type_of(status), code=str(status)) + b"\n\n"
