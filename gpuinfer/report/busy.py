"""Causes in which something is busy all the time: the model, the transfers, the search, one worker, or the cores."""

from __future__ import annotations

import math
import statistics

from gpuinfer.config.change import Flag
from gpuinfer.report.case import Case, Verdict
from gpuinfer.report.evidence import Evidence, busy_s, place, station_s
from gpuinfer.report.forecast import Gain, alike, search_times, with_cap, with_lanes, with_workers
from gpuinfer.report.laws import BINDS
from gpuinfer.report.waits import more_rows

UNEXPLAINED = 0.05  # of the lanes' time: above it the ledger is not to be trusted
SATURATED = 0.90  # of the roofline
FULL = 0.90  # of the cores
LEAST_AT_WORK = 0.5  # cores, of a forward on the CPU that lacks nothing
UNUSED = 0.2  # of the cores: so much is idle in no run that is saturated
FASTER_DTYPE = 2.0  # the most that bfloat16 is known to bring
WORTH = 1.15  # what a larger batch must promise before its size is to blame
BUSY = 0.80  # of the lanes' time: more cannot be had of lanes that take turns with those who ask
UNEVEN = 0.75  # the workers' mean use of the busiest one's: below it one holds the others up
SLOWER = 1.3  # a worker's time for a block, of the middle worker's
ROOM = 1.1  # times what the cores do now: less than that is no room for anything else
MOST_WORKERS = 8  # times those there are: nothing measured reaches further


def numbers_do_not_add_up(case: Case) -> Verdict | None:
    lost = case.run.share("other")
    if lost <= UNEXPLAINED:
        return None
    why = f"{lost:.0%} of the lanes' time is in no known station, so any cause named here would be a guess."
    return Verdict("inconclusive", "other", why, "Let the workload and the backend name their stations.")


def at_the_roofline(case: Case) -> Verdict | None:
    run = case.run
    if run.efficiency < SATURATED or run.roofline is None:
        return None
    why = (
        f"The run does {run.rows_per_s:,.0f} rows/s, {run.efficiency:.0%} of what the bare model does on this machine "
        f"({run.roofline.rows_per_s:,.0f} rows/s at {run.roofline.at_rows:,} rows, {run.roofline.arrangement})."
    )
    return _saturated(run, why)


def forwards(case: Case) -> Verdict | None:
    """The forward lanes are busy: with moving rows, with batches of the wrong size, or with what they are there for."""
    run = case.run
    limit = "cap" if "cap" in case.bounds else "forward"
    searching = case.binds("search") and case.reached("search") > case.reached(limit)
    if not run.forwards or run.busy(run.forwards) < BUSY or searching:
        return None
    moving, computing = station_s(run.answering, "transfer"), station_s(run.answering, "forward")
    if moving > computing:
        return _transfer(case, moving, computing)
    best = case.curve.best() if case.curve else 0.0
    if case.curve and best > run.rows_mean > 0 and case.faster(best) > WORTH:
        return cap_too_small(case, best) if limit == "cap" else more_rows(case, case.curve.enough())
    why = f"The forward lanes were busy {run.busy(run.forwards):.0%} of the time, {run.rows_mean:,.0f} rows a batch"
    if (idle := _idle_cores(case, why) or _idle_device(case, why, computing)) is not None:
        return idle
    return _saturated(run, why + (f"; {run.efficiency:.0%} of the roofline." if run.roofline else "."))


def _idle_cores(case: Case, why: str) -> Verdict | None:
    """The forward lanes are busy, and too few, or of too few threads, for the cores that there are."""
    run = case.run
    if run.idle_cores <= UNUSED * run.cores or not any(lane.get("ran") for lane in run.answering):
        return None
    why += f", and {run.idle_cores:.1f} of {run.cores} cores were idle."
    gain = Gain.up_to(_left(run, run.cores / max(run.cores - run.idle_cores, 1.0)))
    lanes = max(len(run.forwards), 1)
    if run.threads is not None and run.threads * lanes < run.cores:
        why += f" A forward has {run.threads} thread{'' if run.threads == 1 else 's'}."
        change = run.change("-B", run.cores // lanes, "threads")
        return Verdict("idle cores", "forward", why, "Let forwards compute on all cores.", change, gain)
    places = max(1, len({place(lane["name"]) for lane in run.forwards}))
    change = run.change("-B", lanes // places + 1, "in_flight")
    return Verdict("idle cores", "forward", why, "Compute more batches at once.", change, gain)


def _idle_device(case: Case, why: str, computing: float) -> Verdict | None:
    """The forward lanes are busy, and yet a CUDA device is not: even one forward after the other, all of
    them together leave it idle while rows and answers are moved.
    """
    run = case.run
    at_work = computing / run.wall_s
    if run.on_cpu or at_work >= SATURATED or run.efficiency >= SATURATED:
        return None
    why += f". But all of them together computed for {at_work:.0%} of it, and moved rows and answers meanwhile."
    queues = max(1, len({place(lane["name"]) for lane in run.forwards}))
    change = run.change("-B", len(run.forwards) // queues + 1, "in_flight")
    gain = Gain.up_to(_left(run, 1 / at_work))
    return Verdict("transfer-bound", "transfer", why, "Compute one batch while others are moved.", change, gain)


def _transfer(case: Case, moving: float, computing: float) -> Verdict:
    run, lanes = case.run, len(case.run.forwards)
    queues = max(1, len({place(lane["name"]) for lane in run.forwards}))
    why = f"The forward lanes spent {moving:,.1f} s moving rows and {computing:,.1f} s computing on them."
    if not run.on_cpu and lanes > queues:  # they overlap already, and there is one way to the device
        return Verdict("transfer-bound", "transfer", why, "Send fewer bytes for each row: uint8 or bits.")
    most = _spare(run) if run.on_cpu else (moving + computing) / moving
    gain = case.gain_of(lambda now: with_lanes(now, 1), most)
    change = run.change("-B", lanes // queues + 1, "in_flight")
    return Verdict("transfer-bound", "transfer", why, "Move one batch while another is computed.", change, gain)


def cap_too_small(case: Case, best: float, gain: Gain | None = None) -> Verdict:
    """Batches of `best` rows, or of as many as are known to be better, should be let through."""
    run = case.run
    why = f"{run.cut_by('full', 'cap'):.0%} of the batches were cut because no more rows may go in"
    why += f", {run.rows_mean:,.0f} on average"
    if case.faster(best) > 1:
        why += f"; the model is {case.faster(best):.1f} times as fast at {best:,.0f}"
    flag: Flag = "-S" if run.cut_by("cap") > run.cut_by("full") else "-B"
    change = run.change(flag, round(best), "max_rows")
    gain = gain or case.gain_of(lambda now: with_cap(now, best))
    return Verdict("batch cap too small", "forward", why + ".", "Allow larger batches.", change, gain)


def one_worker(case: Case) -> Verdict | None:
    """One worker is busy all the time while the others have nothing left to do."""
    run = case.run
    use = [run.busy([lane]) for lane in run.work]
    if len(use) < 2 or max(use) < BINDS or statistics.fmean(use) > UNEVEN * max(use):
        return None
    slow = use.index(max(use))
    name, others = run.work[slow]["name"], (sum(use) - max(use)) / (len(use) - 1)
    why = f"The lane “{name}” was busy {max(use):.0%} of the time, the others {others:.0%} on average"
    times = search_times(run, run.work)
    usual = statistics.median(times)
    most = max(use) / statistics.fmean(use)
    gain = case.gain_of(alike, most)
    if 0 < SLOWER * usual < times[slow]:
        why += f": a block takes it {times[slow] / usual:.1f} times as long."
        advice = "See what slows that worker down (another program on its core, a slower core), or give it less to do."
    else:
        why += ": it was given more to do."
        advice = "Give work out in smaller parts, and on demand."
    return Verdict("imbalance between workers", run.largest(), why, advice, None, gain)


def all_workers(case: Case) -> Verdict | None:
    run = case.run
    if not run.work or not case.binds("search"):
        return None
    kind, station = "search-bound", "search"
    if station_s(run.work, "search") < 0.5 * busy_s(run.work):
        kind, station = "client-bound", run.largest()
    why = f"The workers were busy {run.busy(run.work):.0%} of the time, most of it with {station}"
    why += f"; the forward lanes {run.busy(run.forwards):.0%}." if run.forwards else ", and answer themselves."
    return _more_workers(case, kind, station, why)


def _more_workers(case: Case, kind: str, station: str, why: str) -> Verdict:
    """As many as the forward lanes can answer, and as the cores have room for."""
    run = case.run
    now = run.facts.get("workers", 0)
    room = math.floor(now * _spare(run) + 0.1)
    others = [bound for name, bound in case.bounds.items() if name in ("forward", "roofline")]
    useful = math.ceil(now * min(others) / run.rows_per_s) if others and run.rows_per_s else room
    wanted = min(room, useful)
    if wanted <= now:
        return Verdict(kind, station, why, _no_room(run))
    most = wanted / now
    gain = case.gain_of(lambda now: with_workers(now, most), most)
    advice = f"Only {run.cores_busy:.1f} of {run.cores} cores are busy: use more workers."
    return Verdict(kind, station, why, advice, run.change("--", wanted, "workers"), gain)


def _no_room(run: Evidence) -> str:
    """What to do when no number of workers can be named that would help."""
    if _spare(run) < ROOM:
        return "All cores are at work: only more cores, or less work for each row, make this faster."
    return f"Only {run.cores_busy:.1f} of {run.cores} cores are busy: use more workers, or more clients."


def all_cores(case: Case) -> Verdict | None:
    """Search and model share cores that are all at work: whoever takes most of them is the one to make cheaper."""
    run = case.run
    if not run.on_cpu or run.cores_busy < FULL * run.cores_left:
        return None
    why = f"{run.cores_busy:.1f} of {run.cores} cores were at work"
    why += f"; {run.efficiency:.0%} of the roofline." if run.roofline else "."
    searching, answering = busy_s(run.work), busy_s(run.answering)
    if searching > answering:
        advice = "All cores are at work: only more cores, or less work for each row, make this faster."
        return Verdict("search-bound", "search", f"Searching took most of the time, and {why}", advice)
    return _saturated(run, f"The forward lanes took most of the time, and {why}")


def _saturated(run: Evidence, why: str) -> Verdict:
    kind, station = "device-saturated", "forward"
    if run.on_cpu and run.computes_here and run.cpu_s and run.cores_busy < LEAST_AT_WORK:
        why += f" Yet only {run.cores_busy:.1f} of {run.cores} cores were at work: its threads waited for one another."
        advice = "Use one thread in each forward, or let it run alone."
        change = run.change("-B", 1, "threads")
        return Verdict("oversubscribed CPUs", station, why, advice, None if change and run.in_force(change) else change)
    if run.dtype == "float32" and run.computes and run.bfloat16_pays:
        change, gain = run.change("--", "bfloat16", "dtype"), Gain(1.0, FASTER_DTYPE)
        return Verdict(kind, station, why, "Compute in bfloat16.", change, gain, healthy=True)
    advice = "Only a smaller model or a faster device makes this faster."
    return Verdict(kind, station, why, advice, healthy=True)


def _spare(run: Evidence) -> float:
    """How many times the present use of the cores they would bear."""
    return min(MOST_WORKERS, run.cores_left / run.cores_busy) if run.cores_busy > 0 else MOST_WORKERS


def _left(run: Evidence, factor: float) -> float:
    """A gain, bounded by what the roofline leaves."""
    return max(1.0, min(factor, 1 / run.efficiency if run.efficiency else factor))
