"""What holds a run back: the evidence, and the one change that would help most.

Every rule looks at the same evidence and either recognises its class or passes; the first that recognises one wins, so
their order is the argument: first whether the numbers add up, then whether anything is left to gain, then the causes
from the cheapest to cure to the dearest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuinfer.evidence import Evidence, busy_s, station_s

UNEXPLAINED = 0.05  # of the lanes' time: above it the ledger is not to be trusted
SATURATED = 0.90  # of the roofline
BUSY = 0.80  # of a lane's time
CROWDED = 1.15  # busy threads per core
FASTER_DTYPE = 2.0  # the most that bfloat16 is known to bring


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence of evidence, one of advice, and what following it should bring (`gain`, as factors of the speed)."""

    kind: str
    station: str
    why: str
    advice: str
    command: str | None = None
    gain: tuple[float, float] = (1.0, 1.0)


def judge(run: Evidence) -> dict[str, Any]:
    """`{class, station, share, why, advice, command, gain{low, high}, unexplained}` for the report."""
    measured = run.wall_s > 0 and len(run.lanes) > 0
    verdict = next(found for rule in RULES if (found := rule(run))) if measured else NOTHING
    return {
        "class": verdict.kind,
        "station": verdict.station,
        "share": run.share(verdict.station) if measured else 0.0,
        "why": verdict.why,
        "advice": verdict.advice,
        "command": verdict.command,
        "gain": {"low": verdict.gain[0], "high": verdict.gain[1]},
        "unexplained": run.share("other") if measured else 0.0,
    }


NOTHING = Verdict("inconclusive", "idle", "Nothing was measured.", "Let the run go on for longer.")


def numbers_do_not_add_up(run: Evidence) -> Verdict | None:
    lost = run.share("other")
    if lost <= UNEXPLAINED:
        return None
    why = f"{lost:.0%} of the lanes' time is in no known station, so any cause named here would be a guess."
    return Verdict("inconclusive", "other", why, "Let the workload and the backend name their stations.")


def at_the_roofline(run: Evidence) -> Verdict | None:
    if run.efficiency < SATURATED or run.roofline is None:
        return None
    why = (
        f"The run does {run.rows_per_s:,.0f} rows/s, {run.efficiency:.0%} of what the bare model does on this machine "
        f"({run.roofline.rows_per_s:,.0f} rows/s at {run.roofline.at_rows:,} rows, {run.roofline.arrangement})."
    )
    return _saturated(run, why)


def waits_for_the_timer(run: Evidence) -> Verdict | None:
    waited = run.cut_by("waited")
    if waited < 0.5 or run.busy(run.forwards) > BUSY:
        return None
    why = (
        f"{waited:.0%} of the batches were cut because the oldest request had waited as long as it may, while the "
        f"forward lanes were idle {1 - run.busy(run.forwards):.0%} of the time."
    )
    served = max(run.latency_s - run.queue_wait_s, 1e-9)
    high = _most(run, run.latency_s / served if run.latency_s else 1.0)
    advice = "Do not wait: while the backend is busy a batch grows by itself."
    return Verdict("timer-bound", "idle", why, advice, f"{run.command} -S max_wait=0", (1.0, high))


def too_few_rows(run: Evidence) -> Verdict | None:
    outstanding = run.facts.get("rows_outstanding", 0.0)
    if run.roofline is None or not run.batches_small or not outstanding:
        return None
    needed = run.roofline.at_rows * len(run.forwards)
    if outstanding >= needed:
        return None
    need = f"the roofline needs {run.roofline.at_rows:,} a batch"
    if len(run.forwards) > 1:
        need += f", {needed:,} for {len(run.forwards)} forwards at once"
    why = f"{_product(run.facts, outstanding)} rows outstanding; {need}."
    gain = _between(_most(run, needed / outstanding))
    return _outstanding(run, why, "Keep more rows outstanding", needed / outstanding, gain)


def cap_too_small(run: Evidence) -> Verdict | None:
    capped = run.cut_by("full", "cap")
    if run.roofline is None or not run.batches_small or capped < 0.5:
        return None
    why = (
        f"{capped:.0%} of the batches were cut because no more rows may go in, {run.rows_mean:,.0f} on average; the "
        f"model is fastest at {run.roofline.at_rows:,}."
    )
    command = f"{run.command} -B max_rows={run.roofline.at_rows}"
    return Verdict("batch cap too small", "forward", why, "Allow larger batches.", command, _between(_most(run)))


def transfer_bound(run: Evidence) -> Verdict | None:
    moving, computing = station_s(run.forwards, "transfer"), station_s(run.forwards, "forward")
    if moving < computing or moving < 0.25 * run.wall_s * len(run.forwards) or not moving:
        return None
    why = f"The forward lanes spent {moving:,.1f} s moving rows and {computing:,.1f} s computing on them."
    command = f"{run.command} -B in_flight={len(run.forwards) + 1}"
    high = _most(run, (moving + computing) / moving)
    return Verdict("transfer-bound", "transfer", why, "Move one batch while another is computed.", command, (1.0, high))


def crowded(run: Evidence) -> Verdict | None:
    if not run.on_cpu or run.threads_busy <= CROWDED * run.cores:
        return None
    why = f"{run.threads_busy:.1f} threads were busy at once on {run.cores} cores, so they took turns."
    flag, fewer = None, max(1, math.floor(run.facts.get("workers", 0) * run.cores / run.threads_busy))
    if fewer < run.facts.get("workers", 0):
        flag = f"{run.command} --workers {fewer}"
    station = max(("search", "forward"), key=run.share)
    advice = "Use fewer workers, or fewer threads in each."
    return Verdict("oversubscribed CPUs", station, why, advice, flag, (1.0, _most(run, run.threads_busy / run.cores)))


def search_bound(run: Evidence) -> Verdict | None:
    searching, answering = station_s(run.work, "search"), busy_s(run.forwards)
    starved = run.busy(run.work) >= BUSY and run.busy(run.forwards) < BUSY
    if not (starved or (_cores_full(run) and searching > answering)) or not searching:
        return None
    why = f"The search was busy {run.busy(run.work):.0%} of the time"
    why += f"; the forward lanes {run.busy(run.forwards):.0%}." if run.forwards else " and answers itself."
    now = run.facts.get("workers", 0)
    room = math.floor(now * run.cores / run.threads_busy + 0.1)  # as many as keep every core busy
    if room > now:
        gain = _between(_most(run, room / now))
        advice = f"Only {run.threads_busy:.1f} of {run.cores} cores are busy: search with more workers."
        return Verdict("search-bound", "search", why, advice, f"{run.command} --workers {room}", gain)
    advice = "All cores search already: only more cores, or fewer simulations, make this faster."
    return Verdict("search-bound", "search", why, advice)


def in_turns(run: Evidence) -> Verdict | None:
    if not run.forwards or not run.work or _cores_full(run):
        return None
    if max(run.busy(run.work), run.busy(run.forwards)) >= BUSY or run.busy(run.forwards) < 0.05:
        return None
    why = (
        f"The workers were idle {1 - run.busy(run.work):.0%} of the time and the forward lanes "
        f"{1 - run.busy(run.forwards):.0%}: each waited for the other."
    )
    gain = _between(_most(run, 1 / max(run.busy(run.work), run.busy(run.forwards))))
    return _outstanding(
        run, why, "Keep more outstanding, so that one block is searched while another is served", 2, gain
    )


def model_busy(run: Evidence) -> Verdict | None:
    busy = run.busy(run.forwards)
    if not run.forwards or (busy < BUSY and not _cores_full(run)):
        return None
    why = f"The forward lanes were busy {busy:.0%} of the time"
    if run.on_cpu and run.work:
        why += f", and {run.threads_busy:.1f} of {run.cores} cores in all"
    return _saturated(run, why + (f"; {run.efficiency:.0%} of the roofline." if run.roofline else "."))


def no_rule_fits(run: Evidence) -> Verdict:
    why = f"The lanes were idle {run.share('idle'):.0%} of the time, and nothing here says what they waited for."
    return Verdict("inconclusive", "idle", why, "Let it run for longer, so that there is more to go by.")


RULES: Sequence[Callable[[Evidence], Verdict | None]] = (
    numbers_do_not_add_up,
    at_the_roofline,
    waits_for_the_timer,
    too_few_rows,
    cap_too_small,
    transfer_bound,
    crowded,
    search_bound,
    in_turns,
    model_busy,
    no_rule_fits,
)


def _saturated(run: Evidence, why: str) -> Verdict:
    if run.dtype == "float32":
        command, gain = f"{run.command} --dtype bfloat16", (1.0, FASTER_DTYPE)
        return Verdict("device-saturated", "forward", why, "Compute in bfloat16.", command, gain)
    return Verdict("device-saturated", "forward", why, "Only a smaller model or a faster device makes this faster.")


def _cores_full(run: Evidence) -> bool:
    return run.on_cpu and run.threads_busy >= 0.9 * run.cores


def _most(run: Evidence, factor: float = math.inf) -> float:
    """A gain, bounded by what the roofline leaves."""
    left = 1 / run.efficiency if run.efficiency else factor
    return max(1.0, min(factor, left)) if math.isfinite(min(factor, left)) else 1.0


def _between(high: float) -> tuple[float, float]:
    """A range for a gain that can at best be `high`: a quarter of it is the least that we have reason to expect."""
    return 1 + (high - 1) / 4, high


def _outstanding(run: Evidence, why: str, advice: str, factor: float, gain: tuple[float, float]) -> Verdict:
    """Too few rows: more games in flight, unless the workload plays all of them at once already."""
    games, kind = run.facts.get("games_in_flight", 0), "too few rows outstanding"
    if run.total is not None and 0 < run.total <= games:
        return Verdict(kind, "idle", why, f"All {run.total} games are in flight at once: play more of them in one run.")
    flag = f"{run.command} --games-in-flight {math.ceil(games * factor)}" if games else None
    return Verdict(kind, "idle", why, advice + (": more games in flight." if games else "."), flag, gain)


def _product(facts: Mapping[str, float], outstanding: float) -> str:
    """The arithmetic behind the rows outstanding: "2 workers × 2 blocks × 96 rows = 384"."""
    workers, blocks = facts.get("workers", 1), facts.get("blocks", 1)
    rows = outstanding / (workers * blocks)
    factors = [f"{count:,.0f} {name}" for name, count in (("workers", workers), ("blocks", blocks)) if name in facts]
    factors = [factor.removesuffix("s") if factor.startswith("1 ") else factor for factor in factors]
    return " × ".join([*factors, f"{rows:,.0f} rows"]) + f" = {outstanding:,.0f}" if factors else f"{outstanding:,.0f}"
