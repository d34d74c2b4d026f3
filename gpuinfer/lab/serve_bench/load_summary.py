"""One run under load in figures: rates, percentiles, errors, goodput, which replica answered, and how far the load
generator itself can be trusted. Goodput is the requests per second that are answered within all promised times
(Zhong et al., DistServe, OSDI 2024).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.config.options import natural
from gpuinfer.errors import UsageError
from gpuinfer.lab.serve_bench.requests import RequestRecord

NAMES = ("ttft", "tpot", "e2e")
EXAMPLE = "--goodput ttft:200ms,tpot:20ms,e2e:1s"


def promises(text: str) -> dict[str, float]:
    """`ttft:200ms,tpot:20ms` as seconds by name. Raises `UsageError`."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, limit = (word.strip().lower() for word in part.partition(":"))
        try:
            seconds = float(natural(limit, float))
        except (TypeError, ValueError):
            seconds = 0.0
        if name not in NAMES or not 0 < seconds < float("inf"):
            raise UsageError(f"--goodput {text}: '{part}' promises nothing. Write {EXAMPLE}, or some of these.")
        found[name] = seconds
    return found


def keeps_promises(record: RequestRecord, promised: Mapping[str, float]) -> bool:
    """Whether it was answered, and in time. An unknown time, such as the TPOT of one token, keeps promises."""
    if record.error is not None:
        return False
    taken = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
    return all((seconds := taken[name]) is None or seconds <= most for name, most in promised.items())


BUSY = 0.9  # of a core: a sender that needs more than this has no time to look at its clock
LATE_S, LATE_SHARE = 2e-3, 0.05  # at p99, and of the median latency: less lag than either hides nothing
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
STEPS = 50  # of a curve
Figures = dict[str, float]


@dataclass
class LoadRun:
    """What a sender brings back. The window from `began` to `ended` is what counts for rates."""

    records: list[RequestRecord]
    began: float  # of counting; before it was the warm-up
    ended: float
    cpu_share: float = 0.0  # of a core, that the sender's process used
    loop_lags_s: list[float] = field(default_factory=list)
    offered_per_s: float | None = None  # of an open loop
    stopped: bool = False  # by the user


def percentiles(values: Iterable[float]) -> Figures:
    """`{mean, p50, p90, p95, p99, max}`, nearest rank; empty for none."""
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {name: ordered[max(0, math.ceil(share * len(ordered)) - 1)] for name, share in SHARES.items()}
    return {"mean": math.fsum(ordered) / len(ordered), **at, "max": ordered[-1]}


def curve(values: Iterable[float | None]) -> list[float]:
    """The percentiles 0, 2, … 100, for a plot; empty for no values."""
    ordered = sorted(value for value in values if value is not None)
    return [ordered[round(step * (len(ordered) - 1) / STEPS)] for step in range(STEPS + 1)] if ordered else []


def summarised(run: LoadRun, promised: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run, in plain values. Requests that were due in the warm-up have no latency here; rates count
    what ended within the window, whenever it began, so that neither end of a steady load is missing.
    """
    asked = [one for one in run.records if one.due >= run.began]
    right = [one for one in asked if one.error is None]
    inside = [one for one in run.records if one.error is None and run.began <= one.ended <= run.ended]
    seconds = max(run.ended - run.began, 1e-9)
    met = sum(keeps_promises(one, promised) for one in inside) if promised else None
    tokens = 0.0  # that came within the window: of an answer that began or ended outside, the share of its time inside
    for one in run.records:
        if one.error is None and one.ended >= run.began:
            first = one.first if one.events is not None and one.first else one.ended
            last = max(one.last, first) if one.events is not None else one.ended
            share = float(run.began <= last <= run.ended)
            if last > first:
                share = max(0.0, min(last, run.ended) - max(first, run.began)) / (last - first)
            tokens += share * one.counted
    return {
        "requests": len(asked),
        "answered": len(right),
        "errors": dict(Counter(one.error for one in asked if one.error is not None)),
        "seconds": seconds,
        "offered_per_s": run.offered_per_s,
        "requests_per_s": len(inside) / seconds,
        "rows_per_s": sum(one.rows for one in inside) / seconds,
        "output_tokens_per_s": tokens / seconds,
        "input_tokens_per_s": sum(one.input_tokens or 0 for one in inside) / seconds,
        "tokens_by_events": any(one.tokens is None and one.events is not None for one in right),
        "goodput_per_s": None if met is None else met / seconds,
        "goodput_share": None if met is None else met / max(len(inside), 1),
        "ttft_s": percentiles(value for one in right if (value := one.ttft_s) is not None),
        "tpot_s": percentiles(value for one in right if (value := one.tpot_s) is not None),
        "itl_s": percentiles(gap for one in right for gap in gaps(one)),
        "e2e_s": percentiles(one.e2e_s for one in right),
        "input_tokens": _mean([one.input_tokens for one in right if one.input_tokens is not None]),
        "output_tokens": _mean([one.counted for one in right]) if any(one.counted for one in right) else None,
        "curves": {"ttft_s": curve(one.ttft_s for one in right), "e2e_s": curve(one.e2e_s for one in right)},
        "routes": routes(right),
        "sender": sender(run, asked),
    }


def gaps(record: RequestRecord) -> Iterable[float]:
    """Between the events of one stream: of several that came at once, all but the first waited for nothing."""
    times = record.events
    return [] if times is None else [times[at] - times[at - 1] for at in range(1, len(times))]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def routes(records: Iterable[RequestRecord]) -> dict[str, dict[str, int]]:
    """How many requests each replica answered, by why they went there: `{replica: {policy: requests}}`.

    The router says `replica=3; why=least-loaded 3<5; attempt=1` with each answer.
    """
    found: dict[str, Counter[str]] = {}
    for one in records:
        if one.route:
            route = dict(part.strip().partition("=")[::2] for part in one.route.split(";"))
            why = route.get("why", "").split(" ")[0] or "not said"
            if route.get("attempt", "1") != "1":
                why += ", repeated"
            found.setdefault(route.get("replica", one.route), Counter())[why] += 1
    return {name: dict(found[name]) for name in sorted(found, key=lambda text: (len(text), text))}


def sender(run: LoadRun, asked: Sequence[RequestRecord]) -> dict[str, Any]:
    """Its own lag, that of its event loop, and whether it was the bottleneck itself."""
    lag = percentiles(one.lag_s for one in asked)
    e2e = percentiles(one.e2e_s for one in asked if one.error is None)
    late = lag.get("p99", 0.0)
    saturated = run.cpu_share > BUSY or (late > LATE_S and late > LATE_SHARE * e2e.get("p50", 0.0))
    return {
        "cpu_share": run.cpu_share,
        "send_lag_s": lag,
        "loop_lag_s": percentiles(run.loop_lags_s),
        "saturated": saturated,
    }
