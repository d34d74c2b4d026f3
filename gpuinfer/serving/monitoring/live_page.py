"""The live page: its files with security headers, and its server-sent events, one view of the server a second for all
watchers. The format is that of https://html.spec.whatwg.org/multipage/server-
sent-events.html.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from gpuinfer.errors import GpuinferError
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.serving.monitoring.metrics import lane_kind, short_name, worker_name
from gpuinfer.stats import FLOOR, SUB_BUCKETS, DiffusionCounters, Snapshot, counted_tokens, mean_size, since, summarise

MOST_WORKERS, MOST_PLACES, MOST_NOTICES = 256, 12, 4  # in one view
SHOWN = (
    "healthy",
    "state",
    "url",
    "requests_served",
    "errors",
    "in_flight",
    "breaker",
    "restarts",
    "retried",
    "resumed",
)
IDLE = "idle"  # the station of a lane that waits for work
TEXT = 300  # characters of a sentence from outside
LEAST_SHARE = 0.001  # of the lanes' time: less is not named
Numbers = dict[str, float]


def live_view(
    snapshot: Snapshot,
    before: Snapshot | None,
    seconds: float,
    workers: Sequence[Mapping[str, Any]] = (),
    about: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """The change between two snapshots of one server that are `seconds` apart; without `before` since its start.

    `workers` are a fleet's, as in `/stats`; `about` has plain facts that the page shows (model, url, version, up_s, …).
    Times are in seconds, rates per second, memory in MB. The size is bounded. A counter that has fallen, since the
    server was started again, counts as unchanged.
    """
    recent = since(snapshot, before) if before is not None else snapshot
    totals = live_totals(snapshot)
    earlier = live_totals(before) if before is not None else {}
    unmasking = DiffusionCounters.of(recent.device.get("steps"))  # of a diffusion model, while it computes
    return {
        "about": {name: _plain(value) for name, value in about.items()},
        "seconds": seconds,
        "rates": (
            {name: max(0.0, now - earlier.get(name, 0)) / seconds for name, now in totals.items()}
            if seconds > 0
            else {}
        ),
        "totals": totals,
        "latency_s": _summary(recent.latency),
        "queue_wait_s": _summary(recent.queue_wait),
        "first_token_s": _summary(recent.first_token),
        "between_tokens_s": _summary(recent.between_tokens),
        "waiting_rows": snapshot.waiting,
        "batches": _batches(recent, snapshot.slots),
        "unmasking": unmasking.plain() if unmasking else {},
        "errors": {kind: count for kind, count in snapshot.errors.items() if count},
        "failure": snapshot.failure[:TEXT],
        "notices": [notice[:TEXT] for notice in snapshot.notices[-MOST_NOTICES:]],
        "places": _places(recent),
        "workers": [
            {
                "name": worker_name(worker),
                **{key: _plain(worker[key]) for key in SHOWN if key in worker},
                "last_event": _plain(worker.get("last_event") or ""),
            }
            for worker in workers[:MOST_WORKERS]
        ],
        "device": _device(snapshot),
    }


def live_totals(snapshot: Snapshot) -> Numbers:
    """The counters of a server since its start."""
    return {
        "requests": snapshot.requests,
        "rows": snapshot.rows,
        "batches": sum(snapshot.batches.values()),
        "errors": sum(snapshot.errors.get(kind, 0) for kind in ("failed", "rejected", "expired")),
        **counted_tokens(snapshot),
    }


def _summary(wire: Mapping[str, Any]) -> Numbers:
    """`{mean, p50, p95, p99, max}` of these alone: a snapshot's own maximum is that of all times."""
    counts = {int(bucket): times for bucket, times in wire["counts"].items() if times > 0}
    if not counts:
        return {}
    longest = min(wire["max"], FLOOR * 2 ** ((max(counts) + 1) / SUB_BUCKETS))
    return summarise({"counts": counts, "total": max(0.0, wire["total"]), "max": longest})


def _batches(recent: Snapshot, slots: int) -> dict[str, Any]:
    """Sizes by doublings (`4`: 3 and 4 rows), why they were cut, the mean size, and the slots where there are some."""
    ran = {int(size): times for size, times in recent.batches.items() if times > 0}
    alike: Counter[int] = Counter()
    for size, times in ran.items():
        alike[1 << max(0, size - 1).bit_length()] += times
    return {
        "sizes": {str(size): alike[size] for size in sorted(alike)},
        "reasons": {reason: times for reason, times in recent.reasons.items() if times > 0},
        "rows_mean": mean_size(ran),
        "slots": slots,
    }


def _places(recent: Snapshot) -> list[dict[str, Any]]:
    """Where the lanes' time went: kind of lane, station, share of that kind's time.

    The busiest kind comes first, its stations from the largest on, and idle last.
    """
    spent: Counter[tuple[str, str]] = Counter()
    whole: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    for lane in recent.lanes:
        kind = lane_kind(lane["name"])
        for station, seconds in lane["stations"].items():
            spent[kind, short_name(station)] += max(0.0, seconds)
            whole[kind] += max(0.0, seconds)
            busy[kind] += max(0.0, seconds) * (station != IDLE)
    shares = [(kind, station, seconds / whole[kind]) for (kind, station), seconds in spent.items() if whole[kind]]
    shares.sort(key=lambda place: (-busy[place[0]], place[0], place[1] == IDLE, -place[2]))
    worth = [place for place in shares if place[2] >= LEAST_SHARE][:MOST_PLACES]
    return [{"lane": kind, "station": station, "share": share} for kind, station, share in worth]


def _device(snapshot: Snapshot) -> dict[str, Any]:
    kept = ("name", "utilisation", "allocated_mb", "reserved_mb")
    known = {key: _plain(snapshot.device[key]) for key in kept if snapshot.device.get(key) is not None}
    several = snapshot.device.get("devices") or {}
    rows = sum(one["rows"] for one in several.values())
    each = {
        name: _plain(f"failed: {one['failed']}" if one["failed"] else f"{one['rows'] / max(rows, 1):.0%} of the rows")
        for name, one in several.items()
    }
    return {**known, **({"each": each} if each else {}), "rss_peak_mb": snapshot.rss_peak_mb}


def _plain(value: Any) -> Any:
    """A number as it is, anything else as a short text."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)[:TEXT]


EVERY_S = 1.0
WINDOW_S = 5.0  # rates and percentiles are those of the last seconds
TIMEOUT_S = 5.0  # of a snapshot: then an error is sent instead
MOST_WATCHERS = 64
EVENT_HEADERS = (("Cache-Control", "no-store"), ("X-Accel-Buffering", "no"), ("X-Content-Type-Options", "nosniff"))


@dataclass(frozen=True, slots=True)
class LiveState:
    """The arguments of `live_view`."""

    snapshot: Snapshot
    workers: Sequence[Mapping[str, Any]] = ()
    about: Mapping[str, Any] = field(default_factory=dict)


class LiveEvents:
    """The handler of `/events`. One task makes the views while there are watchers; all get the same bytes.

    A watcher that reads slowly misses views, and gets the newest one next; one that reads nothing is disconnected.
    """

    def __init__(
        self, see: Callable[[], Awaitable[LiveState]], *, every_s: float = EVERY_S, most: int = MOST_WATCHERS
    ) -> None:
        self._see, self._every_s, self._most = see, every_s, most
        self._taker: asyncio.Task[None] | None = None
        self._news = asyncio.Event()  # set, and replaced, when there is another view
        self._number, self._latest = 0, b""
        self._closed = False
        self.watchers = 0

    async def __call__(self, exchange: Exchange) -> None:
        """Send views until the client disconnects or the server closes. Raises unexpected errors of `see`."""
        if self._closed or self.watchers >= self._most:
            why = "The server is closing." if self._closed else f"{self._most} watch already, which is the most."
            return exchange.refuse(503, why, [("Retry-After", "5")])
        self.watchers += 1
        if self._taker is None or self._taker.done():
            self._number, self._latest = 0, b""
            self._taker = asyncio.create_task(self._take(), name="views of the live page")
        taker = self._taker
        try:
            exchange.begin(200, "text/event-stream", EVENT_HEADERS)
            sent = 0
            while not self._closed and not taker.done():
                if self._number == sent:
                    await self._news.wait()
                    continue
                sent = self._number
                await exchange.write(self._latest)
            if taker.done():
                taker.result()  # raises what it died of
            exchange.end()
        finally:
            self.watchers -= 1
            if not self.watchers:
                taker.cancel()
                self._taker = None

    async def _take(self) -> None:
        past: deque[tuple[float, Snapshot]] = deque()
        try:
            while True:
                try:
                    async with asyncio.timeout(TIMEOUT_S):
                        seen = await self._see()
                except TimeoutError:
                    why = f"The server did not say how it is within {TIMEOUT_S:.0f} s."
                    latest = event_bytes("trouble", {"message": why})
                except (GpuinferError, OSError) as error:
                    latest = event_bytes("trouble", {"message": str(error)[:TEXT]})
                else:
                    now = time.monotonic()
                    while len(past) > 1 and past[1][0] <= now - WINDOW_S:
                        past.popleft()
                    then, before = past[0] if past else (now, seen.snapshot)
                    past.append((now, seen.snapshot))
                    view = live_view(seen.snapshot, before, now - then, seen.workers, seen.about)
                    latest = event_bytes("look", view)
                self._number, self._latest = self._number + 1, latest
                self._wake()
                await asyncio.sleep(self._every_s)
        finally:
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """End all streams after the present view: a server that drains would wait for them in vain."""
        self._closed = True
        self._wake()


def event_bytes(name: str, value: Mapping[str, Any]) -> bytes:
    """One event; JSON has no bare newline that could end it."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(value))


FILES = {
    "/": ("page/page.html", "text/html; charset=utf-8"),
    "/page.js": ("page/page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page/page.css", "text/css; charset=utf-8"),
    "/dashboard.json": ("dashboard.json", "application/json"),
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
PAGE_HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-cache"),
)


@cache
def asset(path: str) -> tuple[bytes, str, tuple[tuple[str, str], ...]] | None:
    """The bytes, content type and headers of one of these files by its path on the server; None for another path.

    They hold nothing that is secret: serve them without a key, since the page itself asks for one.
    """
    if path not in FILES:
        return None
    name, kind = FILES[path]
    return resources.files("gpuinfer.serving.monitoring").joinpath(name).read_bytes(), kind, PAGE_HEADERS


async def send_file(exchange: Exchange) -> None:
    """The handler of each of these paths."""
    found = asset(exchange.path)
    if found is None:
        exchange.refuse(404, f"there is nothing at {exchange.path}.")
        return
    body, content_type, headers = found
    exchange.respond(200, body, content_type, headers)
