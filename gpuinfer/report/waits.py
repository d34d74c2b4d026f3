"""Causes in which nothing is busy: rows wait for a timer or for one another, or do not come.

Beside them the arithmetic of rows outstanding, and what would keep more of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from gpuinfer.report.case import Case, Verdict
from gpuinfer.report.evidence import Evidence
from gpuinfer.report.forecast import Gain, with_rows, with_workers, without_waiting
from gpuinfer.report.laws import outstanding, served_s, think_s

KIND = "too few rows outstanding"
AGAIN = 2.0  # times as many, where nothing says how many would do


def more_rows(case: Case, best: float, gain: Gain | None = None) -> Verdict:
    """Batches are small because there is no more to put into them. `gain`: of larger ones; None: by a replay."""
    run = case.run
    rows = outstanding(run)
    need = f"the model is {case.faster(best):.1f} times as fast with {best:,.0f} a batch"
    if len(run.forwards) > 1:
        need += f", {best * len(run.forwards):,.0f} for {len(run.forwards)} forwards at once"
    why = f"{product(run.facts, rows)} rows outstanding, batches of {run.rows_mean:,.0f}; {need}."
    told = advise(case, why, max(best / run.rows_usual, 1.0), gain)
    return replace(told, advice=told.advice + _lift(run, best))


def _lift(run: Evidence, rows: float) -> str:
    """What the strategy's cap would do to batches of so many rows."""
    cap = run.options.get("-S", {}).get("max_rows")
    return f" Leave -S max_rows={cap} out then: it would keep them small." if cap and cap < rows else ""


def advise(case: Case, why: str, factor: float, gain: Gain | None = None) -> Verdict:
    """`factor` times the games in flight; where there are no games, larger requests or more clients."""
    run, games = case.run, round(case.run.facts.get("games_in_flight", 0))
    wanted = math.ceil(games * factor)
    if games and run.total is not None and run.total <= games:
        advice = f"All {run.total:,} games are in flight at once: play {wanted:,} or more in one run."
        return Verdict(KIND, "idle", why, advice)
    advice = "Keep more rows outstanding: "
    search = factor if run.work else 1.0  # what a client of which nothing is known does beside it stays what it is
    gain = gain or case.gain_of(lambda now: with_rows(now, factor, search))
    if games:
        most = min(wanted, run.total or wanted)
        advice += "more games in flight." if most == wanted else f"all games in flight, and {wanted:,} games or more."
        return Verdict(KIND, "idle", why, advice, run.change("--", most, "games_in_flight"), gain)
    advice += f"{max(2, math.ceil(run.block_rows * factor)):,} in each request, or {factor:.1f} times the clients."
    return Verdict(KIND, "idle", why, advice, None, gain)


def product(facts: Mapping[str, float], rows_outstanding: float) -> str:
    """The arithmetic behind the rows outstanding: "2 workers × 2 blocks × 96 rows = 384"."""
    workers, blocks = facts.get("workers", 1), facts.get("blocks", 1)
    rows = rows_outstanding / max(workers * blocks, 1)
    factors = [f"{count:,.0f} {name}" for name, count in (("workers", workers), ("blocks", blocks)) if name in facts]
    factors = [factor.removesuffix("s") if factor.startswith("1 ") else factor for factor in factors]
    total = f"{rows_outstanding:,.0f}"
    return " × ".join([*factors, f"{rows:,.0f} rows"]) + f" = {total}" if factors else total


KEEPS_UP = 0.93  # of the rows that are offered: the rest is still on its way
WORTH = 1.1  # what not waiting must promise, where it is not plain that a timer is set
FEW = 0.01  # of the requests: so many may be lost
NEARLY_FULL = 0.9  # of the lanes' time: whoever is lost then is lost for want of room
NOTICED = 0.1  # of a request's time: a timer that takes less is not to blame


def for_arrivals(case: Case) -> Verdict | None:
    """Everything that comes is answered, or lost though there was time: the load is what its sources make it."""
    run, offered = case.run, case.run.facts.get("offered_rows_per_s", 0.0)
    busy, asked = run.busy(run.forwards), run.requests + run.lost
    few_lost = run.lost <= FEW * asked
    if not offered or (run.rows_per_s < KEEPS_UP * offered and (few_lost or busy > NEARLY_FULL)):
        return None
    why = f"{offered:,.0f} rows/s arrived and {run.rows_per_s:,.0f} were answered"
    why += f"; the forward lanes were busy {busy:.0%} of the time."
    if few_lost:
        return _arrivals(case, why)
    advice = "Requests failed, came too late or were turned away although there was time: see `errors` for which."
    return Verdict("arrival-bound", "idle", f"{run.lost:,} of {asked:,} requests have no answer. {why}", advice)


def _arrivals(case: Case, why: str) -> Verdict:
    room = case.bounds.get("forward", 0.0) if case.run.roofline else 0.0  # else only sizes that were seen are known
    advice = "Nothing needs mending: it keeps up."
    if room:
        advice = f"Nothing needs mending: it keeps up, and batches of the best size would allow {room:,.0f} rows/s."
    return Verdict("arrival-bound", "idle", why, advice, healthy=True)


def for_the_timer(case: Case) -> Verdict | None:
    run = case.run
    waited, everybody, idle = run.cut_by("waited"), run.cut_by("clients", "gain"), 1 - run.busy(run.forwards)
    if waited + everybody < 0.5 or run.queue_wait_s < NOTICED * run.latency_s:
        return None
    what = "the oldest request had waited as long as it may" if waited >= everybody else "every client waited by then"
    why = (
        f"Requests waited {run.queue_wait_s * 1e3:,.1f} ms on average for company while the forward lanes were idle "
        f"{idle:.0%} of the time; {max(waited, everybody):.0%} of the batches were cut because {what}."
    )
    gain = case.gain_of(without_waiting, 1 / max(1 - idle, 0.01), anchored=False)
    if waited < everybody and (gain.expected or 1.0) < WORTH:
        return None
    advice = "Do not wait: while the backend is busy a batch grows by itself."
    return Verdict("timer-bound", "idle", why, advice, run.change("-S", 0, "max_wait"), gain)


def for_clients(case: Case) -> Verdict | None:
    """Clients that nobody looks into think for longer than they wait, by the interactive response time law."""
    run, thinking = case.run, think_s(case.run)
    if run.work or run.blocks_outstanding is None or thinking <= run.latency_s:
        return None
    why = (
        f"From an answer to its next request a client takes {thinking * 1e3:,.1f} ms, and waits for an answer "
        f"{run.latency_s * 1e3:,.1f} ms; the forward lanes were busy {run.busy(run.forwards):.0%} of the time."
    )
    gain = case.gain_of(lambda now: with_workers(now, AGAIN))
    return Verdict("client-bound", "idle", why, "Use more clients, or let each keep more outstanding.", None, gain)


def for_one_another(case: Case) -> Verdict | None:
    """No part is busy and nothing else waits: there is not enough under way to keep them so."""
    run = case.run
    if not run.forwards or run.blocks_outstanding is None or run.busy(run.forwards) < 0.05:
        return None
    idle = f"The forward lanes were idle {1 - run.busy(run.forwards):.0%} of the time"
    if run.work:
        idle += f" and the workers {1 - run.busy(run.work):.0%}"
    why = f"{idle}: each waited for the other, with {product(run.facts, outstanding(run))} rows outstanding."
    best = case.curve.best() if case.curve else 0.0
    return advise(case, why, max(AGAIN, best * len(run.forwards) / max(outstanding(run), 1.0)))


def for_nobody_known(case: Case) -> Verdict | None:
    """Idle lanes, no wait in the queue, and no client that the run knows of."""
    run = case.run
    if not run.forwards or run.work or not run.requests or run.queue_wait_s > served_s(run):
        return None
    why = f"The forward lanes were idle {1 - run.busy(run.forwards):.0%} of the time, and requests hardly waited."
    return _arrivals(case, why)


def no_cause_fits(case: Case) -> Verdict:
    why = f"The lanes were idle {case.run.share('idle'):.0%} of the time, and nothing here says what they waited for."
    return Verdict("inconclusive", "idle", why, "Let it run for longer, so that there is more to go by.")
