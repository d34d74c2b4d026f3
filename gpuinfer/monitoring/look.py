"""One look at a server: the small JSON that the live page is sent once a second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gpuinfer.monitoring.measured import kind_of, short
from gpuinfer.monitoring.workers import name_of
from gpuinfer.stats import FLOOR, SUB_BUCKETS, Snapshot, mean_size, since, summarise, tokens_of
from gpuinfer.unmasked import Unmasked

MOST_WORKERS, MOST_PLACES, MOST_NOTICES = 256, 12, 4  # that one look names
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


def look(
    snapshot: Snapshot,
    before: Snapshot | None,
    seconds: float,
    workers: Sequence[Mapping[str, Any]] = (),
    about: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """What happened between two snapshots of one server that are `seconds` apart; without `before`: since its start.

    `workers` are a fleet's, as `/stats` has them, `about` plain facts of the server that the page shows (model, url,
    version, up_s, …). Times are in seconds, rates per second, memory in MB. Everything in it is bounded in size. A
    counter that has fallen, as that of a server which was started again, counts as not moved.
    """
    recent = since(snapshot, before) if before is not None else snapshot
    totals = totals_of(snapshot)
    earlier = totals_of(before) if before is not None else {}
    return {
        "about": {name: _plain(value) for name, value in about.items()},
        "seconds": seconds,
        "rates": _rates(totals, earlier, seconds),
        "totals": totals,
        "latency_s": _summary(recent.latency),
        "queue_wait_s": _summary(recent.queue_wait),
        "first_token_s": _summary(recent.first_token),
        "between_tokens_s": _summary(recent.between_tokens),
        "waiting_rows": snapshot.waiting,
        "batches": _batches(recent, snapshot.slots),
        "unmasking": _unmasking(recent),
        "errors": {kind: count for kind, count in snapshot.errors.items() if count},
        "failure": snapshot.failure[:TEXT],
        "notices": [notice[:TEXT] for notice in snapshot.notices[-MOST_NOTICES:]],
        "places": _places(recent),
        "workers": [_worker(worker) for worker in workers[:MOST_WORKERS]],
        "device": _device(snapshot),
    }


def totals_of(snapshot: Snapshot) -> Numbers:
    """What a server has done since its start."""
    return {
        "requests": snapshot.requests,
        "rows": snapshot.rows,
        "batches": sum(snapshot.batches.values()),
        "errors": sum(snapshot.errors.get(kind, 0) for kind in ("failed", "rejected", "expired")),
        **tokens_of(snapshot),
    }


def _rates(now: Numbers, then: Numbers, seconds: float) -> Numbers:
    """Per second. What a rate cannot be told of, as no time has passed, is left out."""
    return {name: max(0.0, now[name] - then.get(name, 0)) / seconds for name in now} if seconds > 0 else {}


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


def _unmasking(recent: Snapshot) -> Numbers:
    """Of a diffusion model; empty of others, and while nothing is computed."""
    found = Unmasked.of(recent.device.get("steps"))
    return found.plain() if found else {}


def _places(recent: Snapshot) -> list[dict[str, Any]]:
    """Where the lanes' time went: kind of lane, station, share of that kind's time.

    The busiest kind comes first, its stations from the largest on, and idle last.
    """
    spent: Counter[tuple[str, str]] = Counter()
    whole: Counter[str] = Counter()
    busy: Counter[str] = Counter()
    for lane in recent.lanes:
        kind = kind_of(lane["name"])
        for station, seconds in lane["stations"].items():
            spent[kind, short(station)] += max(0.0, seconds)
            whole[kind] += max(0.0, seconds)
            busy[kind] += max(0.0, seconds) * (station != IDLE)
    shares = [(kind, station, seconds / whole[kind]) for (kind, station), seconds in spent.items() if whole[kind]]
    shares.sort(key=lambda place: (-busy[place[0]], place[0], place[1] == IDLE, -place[2]))
    worth = [place for place in shares if place[2] >= LEAST_SHARE][:MOST_PLACES]
    return [{"lane": kind, "station": station, "share": share} for kind, station, share in worth]


def _worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    told = {key: _plain(worker[key]) for key in SHOWN if key in worker}
    event = worker.get("last_event")
    return {"name": name_of(worker), **told, "last_event": "" if event is None else _plain(event)}


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
