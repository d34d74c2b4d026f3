"""Causes in which nothing is busy: rows wait for a timer or for one another, or do not come."""

from __future__ import annotations

from gpuinfer.verdict.bounds import outstanding, served_s, think_s
from gpuinfer.verdict.case import Case, Verdict
from gpuinfer.verdict.forecast import with_workers, without_waiting
from gpuinfer.verdict.outstanding import AGAIN, advise, product

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
