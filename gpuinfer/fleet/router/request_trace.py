"""The spans of a relayed request: its own, and below it one for each attempt at a replica, so that a request that was
repeated, or a stream that another replica has taken up, is one trace. A replica's own span is below its attempt.

They are recorded as plain values, and handed to the process that exports them.
"""

from __future__ import annotations

import math
import os
import random
import re
import time
from collections import deque
from typing import TYPE_CHECKING

from msgspec import Struct

from gpuinfer.serving.telemetry.spans import FinishedSpan

if TYPE_CHECKING:
    from gpuinfer.fleet.router.http_message import RequestHead
    from gpuinfer.fleet.router.replica_table import RoutedReplica

TRACEPARENT = re.compile(  # W3C Trace Context: version, trace, parent, flags
    rb"(?i)\r\ntraceparent:[ \t]*(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
    rb"(?=[- \t\r]|$)"
)
SAMPLED = 1  # a bit of the flags
LONGEST_PATH = 200  # characters of it in a span
MOST_KEPT = 16_384  # spans that wait to be handed over; the oldest are dropped beyond
_dice = random.Random(os.urandom(16))


class TraceSampling(Struct, frozen=True):
    """Which requests are traced, as OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG say."""

    share: float = 1.0  # of the traces that begin here
    follows_parent: bool = True  # a request with a `traceparent` is traced where its sender traces it

    @classmethod
    def named(cls, sampler: str, argument: str) -> TraceSampling:
        """Raises `ValueError` for a sampler that is not known, or a ratio that is none."""
        kind = sampler.removeprefix("parentbased_") or "always_on"
        share = {"always_on": 1.0, "always_off": 0.0}.get(kind)
        if kind == "traceidratio":
            share = float(argument or 1.0)
        if share is None or not 0 <= share <= 1:
            raise ValueError(f"{sampler} {argument}".strip())
        return cls(share, sampler.startswith("parentbased_") or not sampler)

    def takes(self, trace_id: int) -> bool:
        """By the trace's last 64 bits, as the SDK's TraceIdRatioBased."""
        return trace_id & ((1 << 64) - 1) < math.ceil(self.share * (1 << 64))


class RequestTracer:
    """Begins the traces of one router process, and keeps finished spans until they are taken."""

    def __init__(self, sampling: TraceSampling) -> None:
        self._sampling = sampling
        self.finished: deque[FinishedSpan] = deque(maxlen=MOST_KEPT)

    def begin(self, head: RequestHead, request_id: bytes) -> RequestTrace:
        """The trace of a request that has come now: a new one, or the one that its `traceparent` names."""
        found = TRACEPARENT.search(head.lines)
        if found is None:
            trace, parent = _dice.getrandbits(128) or 1, b""
            sampled = self._sampling.takes(trace)
        else:
            trace, parent = int(found[1], 16), bytes.fromhex(found[2].decode())
            follows = self._sampling.follows_parent
            sampled = bool(int(found[3], 16) & SAMPLED) if follows else self._sampling.takes(trace)
        return RequestTrace(self.finished if sampled else None, trace.to_bytes(16), parent, head, request_id)

    def take(self) -> list[FinishedSpan]:
        """The spans that have finished since the last call."""
        taken = list(self.finished)
        self.finished.clear()
        return taken


def new_span_id() -> bytes:
    return (_dice.getrandbits(64) or 1).to_bytes(8)


class RequestTrace:
    """One request's spans. Where the trace is not sampled nothing is recorded, and replicas learn so."""

    __slots__ = (
        "_attempt_attributes",
        "_attempt_began_ns",
        "_attempt_error",
        "_attempt_id",
        "_attributes",
        "_began_ns",
        "_finished",
        "_id",
        "_lines",
        "_name",
        "_parent",
        "_trace",
        "attempts",
    )

    def __init__(
        self, finished: deque[FinishedSpan] | None, trace: bytes, parent: bytes, head: RequestHead, request_id: bytes
    ) -> None:
        """`finished`: where finished spans go; None: the trace is not sampled."""
        self._finished, self._trace, self._parent = finished, trace, parent
        self._id, self._lines = new_span_id(), head.untraced
        self.attempts = 0
        self._attempt_id = b""
        if finished is None:
            return
        self._began_ns = time.time_ns()
        path = head.target.partition(b"?")[0][:LONGEST_PATH].decode("latin-1")
        method = head.method.decode()
        self._name = f"{method} {path}"
        self._attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.path": path,
            "gpuinfer.request_id": request_id.decode("latin-1"),
        }
        self._attempt_began_ns, self._attempt_error = 0, ""
        self._attempt_attributes: dict[str, str | int] = {}

    @property
    def ids(self) -> dict[str, str]:
        """For the log: `trace_id` and `span_id` in hexadecimal; empty of a trace that is not sampled."""
        return {} if self._finished is None else {"trace_id": self._trace.hex(), "span_id": self._id.hex()}

    def lines(self) -> bytes:
        """The request's lines for a replica, with the present attempt as the parent of its span."""
        flags = 0 if self._finished is None else SAMPLED
        parent = self._attempt_id or self._id
        return b"%b\r\ntraceparent: 00-%b-%b-%02x" % (
            self._lines,
            self._trace.hex().encode(),
            parent.hex().encode(),
            flags,
        )

    def attempt(self, replica: RoutedReplica, reason: str, resumed: bool) -> None:
        """The request goes to this replica. `resumed`: to continue a stream that another one has begun."""
        if self._finished is None:
            return
        self._attempt_id, self._attempt_began_ns, self._attempt_error = new_span_id(), time.time_ns(), ""
        member = replica.fleet_member
        self._attempt_attributes = {
            "gpuinfer.replica": member.id,
            "gpuinfer.routing_reason": reason,
            "server.address": member.host,
            "server.port": member.port,
        }
        if self.attempts:
            self._attempt_attributes["http.request.resend_count"] = self.attempts
        if resumed:
            self._attempt_attributes["gpuinfer.resumed"] = "true"
        self.attempts += 1

    def answered(self, status: int) -> None:
        """The attempt's replica has answered with this HTTP status."""
        if self._finished is None:
            return
        self._attempt_attributes["http.response.status_code"] = status
        if status >= 500:
            self.failed(str(status))

    def failed(self, kind: str) -> None:
        """The attempt has failed: `reset`, `refused`, `timeout`, `broken`, or the status that says to try again."""
        if self._finished is None:
            return
        self._attempt_error = kind
        self._attempt_attributes["error.type"] = kind

    def left(self) -> None:
        """The request has left the attempt's replica: the attempt is over."""
        if not self._attempt_id or self._finished is None:
            return
        self._finished.append(
            FinishedSpan(
                f"attempt {self.attempts}",
                "client",
                self._trace,
                self._attempt_id,
                self._id,
                self._attempt_began_ns,
                time.time_ns(),
                self._attempt_attributes,
                self._attempt_error,
            )
        )
        self._attributes["gpuinfer.replica"] = self._attempt_attributes["gpuinfer.replica"]
        self._attempt_id = b""

    def end(self, status: int, error: str, more: dict[str, str | int]) -> None:
        """The request is over, with this HTTP status for its client. `error`: what the client was refused with."""
        if self._finished is None:
            return
        attributes = {**self._attributes, **more, "gpuinfer.attempts": self.attempts}
        if status:
            attributes["http.response.status_code"] = status
        wrong = status >= 499 or (error and status < 400)  # 499: the client has gone; below 400: an answer broke off
        failed = (error or str(status)) if wrong else ""
        now_ns, trace = time.time_ns(), self._trace
        self._finished.append(
            FinishedSpan(
                self._name, "server", trace, self._id, self._parent, self._began_ns, now_ns, attributes, failed
            )
        )
        self._finished = None
