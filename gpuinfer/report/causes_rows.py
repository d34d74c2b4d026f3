"""Causes of a run of rows: a part is busy all the time (model, transfers, search, one worker, cores), or none is, and
rows wait for a timer, for one another, or do not come.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from gpuinfer.config.options import OptionFlag
from gpuinfer.report import thresholds
from gpuinfer.report.document import VerdictClass
from gpuinfer.report.evidence import Evidence, busy_s, outstanding, place, served_s, station_s, think_s
from gpuinfer.report.forecast import (
    Gain,
    RunCase,
    Verdict,
    alike,
    search_times,
    with_rows,
    with_workers,
)

KIND: Final = "too few rows outstanding"


def more_rows(case: RunCase, best: float, gain: Gain | None = None) -> Verdict:
    """Batches are small because no more rows are outstanding. `gain`: of larger ones; None: by a replay."""
    run = case.run
    rows = outstanding(run)
    need = f"the model is {case.faster(best):.1f} times as fast with {best:,.0f} a batch"
    if len(run.forwards) > 1:
        need += f", {best * len(run.forwards):,.0f} for {len(run.forwards)} forwards at once"
    why = f"{outstanding_product(run.facts, rows)} rows outstanding, batches of {run.rows_mean:,.0f}; {need}."
    told = advise(case, why, max(best / run.rows_usual, 1.0), gain)
    cap = run.options.get("-S", {}).get("max_rows")
    if cap and cap < best:
        return replace(told, advice=f"{told.advice} Leave -S max_rows={cap} out then: it would keep them small.")
    return told


def advise(case: RunCase, why: str, factor: float, gain: Gain | None = None) -> Verdict:
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


def outstanding_product(facts: Mapping[str, float], rows_outstanding: float) -> str:
    """The arithmetic behind the rows outstanding: "2 workers × 2 blocks × 96 rows = 384"."""
    workers, blocks = facts.get("workers", 1), facts.get("blocks", 1)
    rows = rows_outstanding / max(workers * blocks, 1)
    factors = [f"{count:,.0f} {name}" for name, count in (("workers", workers), ("blocks", blocks)) if name in facts]
    factors = [factor.removesuffix("s") if factor.startswith("1 ") else factor for factor in factors]
    total = f"{rows_outstanding:,.0f}"
    return " × ".join([*factors, f"{rows:,.0f} rows"]) + f" = {total}" if factors else total


def for_arrivals(case: RunCase) -> Verdict | None:
    """All that arrives is answered, or lost in spite of idle lanes: the load is set by its sources."""
    run, offered = case.run, case.run.facts.get("offered_rows_per_s", 0.0)
    busy, asked = run.busy(run.forwards), run.requests + run.lost
    few_lost = run.lost <= thresholds.FEW_LOST * asked
    if not offered or (run.rows_per_s < thresholds.KEEPS_UP * offered and (few_lost or busy > thresholds.LANES_FULL)):
        return None
    why = f"{offered:,.0f} rows/s arrived and {run.rows_per_s:,.0f} were answered"
    why += f"; the forward lanes were busy {busy:.0%} of the time."
    if few_lost:
        return _arrivals(case, why)
    advice = "Requests failed, came too late or were turned away although there was time: see `errors` for which."
    return Verdict("arrival-bound", "idle", f"{run.lost:,} of {asked:,} requests have no answer. {why}", advice)


def _arrivals(case: RunCase, why: str) -> Verdict:
    room = case.bounds.get("forward", 0.0) if case.run.roofline else 0.0  # else only sizes that were seen are known
    advice = "Nothing needs mending: it keeps up."
    if room:
        advice = f"Nothing needs mending: it keeps up, and batches of the best size would allow {room:,.0f} rows/s."
    return Verdict("arrival-bound", "idle", why, advice, healthy=True)


def for_the_timer(case: RunCase) -> Verdict | None:
    run = case.run
    waited, everybody, idle = run.cut_by("waited"), run.cut_by("clients", "gain"), 1 - run.busy(run.forwards)
    if waited + everybody < 0.5 or run.queue_wait_s < thresholds.TIMER_NOTICED * run.latency_s:
        return None
    what = "the oldest request had waited as long as it may" if waited >= everybody else "every client waited by then"
    why = (
        f"Requests waited {run.queue_wait_s * 1e3:,.1f} ms on average for company while the forward lanes were idle "
        f"{idle:.0%} of the time; {max(waited, everybody):.0%} of the batches were cut because {what}."
    )
    most = 1 / max(1 - idle, 0.01)
    gain = case.gain_of(lambda now: [replace(one, wait_s=0.0, patience_s=0.0) for one in now], most, anchored=False)
    if waited < everybody and (gain.expected or 1.0) < thresholds.WORTH_NOT_WAITING:
        return None
    advice = "Do not wait: while the backend is busy a batch grows by itself."
    return Verdict("timer-bound", "idle", why, advice, run.change("-S", 0, "max_wait"), gain)


def for_clients(case: RunCase) -> Verdict | None:
    """Clients outside the ledger think for longer than they wait, by the interactive response time law."""
    run, thinking = case.run, think_s(case.run)
    if run.work or run.blocks_outstanding is None or thinking <= run.latency_s:
        return None
    why = (
        f"From an answer to its next request a client takes {thinking * 1e3:,.1f} ms, and waits for an answer "
        f"{run.latency_s * 1e3:,.1f} ms; the forward lanes were busy {run.busy(run.forwards):.0%} of the time."
    )
    gain = case.gain_of(lambda now: with_workers(now, thresholds.AGAIN))
    return Verdict("client-bound", "idle", why, "Use more clients, or let each keep more outstanding.", None, gain)


def for_one_another(case: RunCase) -> Verdict | None:
    """No part is busy: there are too few rows outstanding to keep the parts busy."""
    run = case.run
    if not run.forwards or run.blocks_outstanding is None or run.busy(run.forwards) < 0.05:
        return None
    idle = f"The forward lanes were idle {1 - run.busy(run.forwards):.0%} of the time"
    if run.work:
        idle += f" and the workers {1 - run.busy(run.work):.0%}"
    why = (
        f"{idle}: each waited for the other, with {outstanding_product(run.facts, outstanding(run))} rows outstanding."
    )
    best = case.curve.best() if case.curve else 0.0
    return advise(case, why, max(thresholds.AGAIN, best * len(run.forwards) / max(outstanding(run), 1.0)))


def for_nobody_known(case: RunCase) -> Verdict | None:
    """Idle lanes, no wait in the queue, and clients that the run does not know of."""
    run = case.run
    if not run.forwards or run.work or not run.requests or run.queue_wait_s > served_s(run):
        return None
    why = f"The forward lanes were idle {1 - run.busy(run.forwards):.0%} of the time, and requests hardly waited."
    return _arrivals(case, why)


def no_cause_fits(case: RunCase) -> Verdict:
    why = f"The lanes were idle {case.run.share('idle'):.0%} of the time, and nothing here says what they waited for."
    return Verdict("inconclusive", "idle", why, "Let it run for longer, so that there is more to go by.")


def numbers_do_not_add_up(case: RunCase) -> Verdict | None:
    lost = case.run.share("other")
    if lost <= thresholds.UNEXPLAINED:
        return None
    why = f"{lost:.0%} of the lanes' time is in no known station, so any cause named here would be a guess."
    return Verdict("inconclusive", "other", why, "Let the workload and the backend name their stations.")


def at_the_roofline(case: RunCase) -> Verdict | None:
    run = case.run
    if run.efficiency < thresholds.SATURATED or run.roofline is None:
        return None
    why = (
        f"The run does {run.rows_per_s:,.0f} rows/s, {run.efficiency:.0%} of what the bare model does on this machine "
        f"({run.roofline.rows_per_s:,.0f} rows/s at {run.roofline.at_rows:,} rows, {run.roofline.arrangement})."
    )
    return _saturated(run, why)


def forwards(case: RunCase) -> Verdict | None:
    """The forward lanes are busy: with transfers, with batches of the wrong size, or with computing."""
    run = case.run
    limit = "cap" if "cap" in case.bounds else "forward"
    searching = case.binds("search") and case.reached("search") > case.reached(limit)
    lanes = len(run.forwards)
    if not lanes or run.busy(run.forwards) < thresholds.BUSY or searching:
        return None
    queues = max(1, len({place(lane["name"]) for lane in run.forwards}))
    change = run.change("-B", lanes // queues + 1, "in_flight")
    moving, computing = station_s(run.answering, "transfer"), station_s(run.answering, "forward")
    if moving > computing:
        why = f"The forward lanes spent {moving:,.1f} s moving rows and {computing:,.1f} s computing on them."
        if not run.on_cpu and lanes > queues:  # they overlap already, and there is one way to the device
            return Verdict("transfer-bound", "transfer", why, "Send fewer bytes for each row: uint8 or bits.")
        most = _spare(run) if run.on_cpu else (moving + computing) / moving
        gain = case.gain_of(lambda now: [replace(one, lanes=one.lanes + 1) for one in now], most)
        return Verdict("transfer-bound", "transfer", why, "Move one batch while another is computed.", change, gain)
    best = case.curve.best() if case.curve else 0.0
    if case.curve and best > run.rows_mean > 0 and case.faster(best) > thresholds.WORTH_A_CHANGE:
        return cap_too_small(case, best) if limit == "cap" else more_rows(case, case.curve.enough())
    why = f"The forward lanes were busy {run.busy(run.forwards):.0%} of the time, {run.rows_mean:,.0f} rows a batch"
    # Too few lanes, or lanes with too few threads, for the cores.
    if run.idle_cores > thresholds.IDLE_CORES * run.cores and any(lane.get("ran") for lane in run.answering):
        why += f", and {run.idle_cores:.1f} of {run.cores} cores were idle."
        gain, advice = (
            Gain.up_to(_left(run, run.cores / max(run.cores - run.idle_cores, 1.0))),
            "Compute more batches at once.",
        )
        if run.threads is not None and run.threads * lanes < run.cores:
            why += f" A forward has {run.threads} thread{'' if run.threads == 1 else 's'}."
            advice, change = "Let forwards compute on all cores.", run.change("-B", run.cores // lanes, "threads")
        return Verdict("idle cores", "forward", why, advice, change, gain)
    # A CUDA device that even one forward after the other leaves idle, while rows and answers are moved.
    at_work = computing / run.wall_s
    if not run.on_cpu and max(at_work, run.efficiency) < thresholds.SATURATED:
        why += f". But all of them together computed for {at_work:.0%} of it, and moved rows and answers meanwhile."
        gain = Gain.up_to(_left(run, 1 / at_work))
        return Verdict("transfer-bound", "transfer", why, "Compute one batch while others are moved.", change, gain)
    return _saturated(run, why + (f"; {run.efficiency:.0%} of the roofline." if run.roofline else "."))


def cap_too_small(case: RunCase, best: float, gain: Gain | None = None) -> Verdict:
    """A cap should let batches of `best` rows through, or of the largest size that is known to be faster."""
    run = case.run
    why = f"{run.cut_by('full', 'cap'):.0%} of the batches were cut because no more rows may go in"
    why += f", {run.rows_mean:,.0f} on average"
    if case.faster(best) > 1:
        why += f"; the model is {case.faster(best):.1f} times as fast at {best:,.0f}"
    flag: OptionFlag = "-S" if run.cut_by("cap") > run.cut_by("full") else "-B"
    change = run.change(flag, round(best), "max_rows")
    gain = gain or case.gain_of(lambda now: [replace(one, cap=best) for one in now])
    return Verdict("batch cap too small", "forward", why + ".", "Allow larger batches.", change, gain)


def one_worker(case: RunCase) -> Verdict | None:
    """One worker is busy all the time while the others have nothing left to do."""
    run = case.run
    use = [run.busy([lane]) for lane in run.work]
    if len(use) < 2 or max(use) < thresholds.BINDS or statistics.fmean(use) > thresholds.UNEVEN_WORKERS * max(use):
        return None
    slow = use.index(max(use))
    name, others = run.work[slow]["name"], (sum(use) - max(use)) / (len(use) - 1)
    why = f"The lane “{name}” was busy {max(use):.0%} of the time, the others {others:.0%} on average"
    times = search_times(run, run.work)
    usual = statistics.median(times)
    most = max(use) / statistics.fmean(use)
    gain = case.gain_of(alike, most)
    if 0 < thresholds.SLOW_WORKER * usual < times[slow]:
        why += f": a block takes it {times[slow] / usual:.1f} times as long."
        advice = "See what slows that worker down (another program on its core, a slower core), or give it less to do."
    else:
        why += ": it was given more to do."
        advice = "Give work out in smaller parts, and on demand."
    return Verdict("imbalance between workers", run.largest(), why, advice, None, gain)


def all_workers(case: RunCase) -> Verdict | None:
    run = case.run
    if not run.work or not case.binds("search"):
        return None
    kind: VerdictClass = "search-bound"
    station = "search"
    if station_s(run.work, "search") < 0.5 * busy_s(run.work):
        kind, station = "client-bound", run.largest()
    why = f"The workers were busy {run.busy(run.work):.0%} of the time, most of it with {station}"
    why += f"; the forward lanes {run.busy(run.forwards):.0%}." if run.forwards else ", and answer themselves."
    # As many more as the forward lanes can answer and the cores have room for.
    now = run.facts.get("workers", 0)
    room = math.floor(now * _spare(run) + 0.1)
    others = [bound for name, bound in case.bounds.items() if name in ("forward", "roofline")]
    useful = math.ceil(now * min(others) / run.rows_per_s) if others and run.rows_per_s else room
    wanted = min(room, useful)
    if wanted <= now:
        advice = f"Only {run.cores_busy:.1f} of {run.cores} cores are busy: use more workers, or more clients."
        return Verdict(kind, station, why, ALL_AT_WORK if _spare(run) < thresholds.ROOM else advice)
    most = wanted / now
    gain = case.gain_of(lambda now: with_workers(now, most), most)
    advice = f"Only {run.cores_busy:.1f} of {run.cores} cores are busy: use more workers."
    return Verdict(kind, station, why, advice, run.change("--", wanted, "workers"), gain)


ALL_AT_WORK = "All cores are at work: only more cores, or less work for each row, make this faster."


def all_cores(case: RunCase) -> Verdict | None:
    """Search and model share cores that are all busy: the part that takes most of them should get cheaper."""
    run = case.run
    if not run.on_cpu or run.cores_busy < thresholds.ALL_CORES * run.cores_left:
        return None
    why = f"{run.cores_busy:.1f} of {run.cores} cores were at work"
    why += f"; {run.efficiency:.0%} of the roofline." if run.roofline else "."
    searching, answering = busy_s(run.work), busy_s(run.answering)
    if searching > answering:
        return Verdict("search-bound", "search", f"Searching took most of the time, and {why}", ALL_AT_WORK)
    return _saturated(run, f"The forward lanes took most of the time, and {why}")


def _saturated(run: Evidence, why: str) -> Verdict:
    kind: VerdictClass = "device-saturated"
    station = "forward"
    if run.on_cpu and run.computes_here and run.cpu_s and run.cores_busy < thresholds.LEAST_AT_WORK:
        why += f" Yet only {run.cores_busy:.1f} of {run.cores} cores were at work: its threads waited for one another."
        advice = "Use one thread in each forward, or let it run alone."
        change = run.change("-B", 1, "threads")
        return Verdict("oversubscribed CPUs", station, why, advice, None if change and run.in_force(change) else change)
    if run.dtype == "float32" and run.computes and run.bfloat16_pays:
        change, gain = run.change("--", "bfloat16", "dtype"), Gain(1.0, thresholds.FASTER_DTYPE)
        return Verdict(kind, station, why, "Compute in bfloat16.", change, gain, healthy=True)
    advice = "Only a smaller model or a faster device makes this faster."
    return Verdict(kind, station, why, advice, healthy=True)


def _spare(run: Evidence) -> float:
    """How many times the present use of the cores they have room for."""
    return min(thresholds.MOST_WORKERS, run.cores_left / run.cores_busy if run.cores_busy > 0 else math.inf)


def _left(run: Evidence, factor: float) -> float:
    """A gain, bounded by the roofline."""
    return max(1.0, min(factor, 1 / run.efficiency if run.efficiency else factor))
