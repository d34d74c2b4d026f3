"""Causes in how a run is divided over nodes: they wait for work or for their records to be taken, one is slow, some
were lost, or there are more of them than the work keeps busy.

Each costs a share of the nodes' time; the dearest is the verdict. Where none costs much, the run is held up by what
holds each node up, and the causes of a single machine are looked for in the node in the middle.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpuinfer.report import thresholds
from gpuinfer.report.cluster_forecast import ClusterForecast
from gpuinfer.report.document import ClusterSection, NodeLine, VerdictClass
from gpuinfer.report.evidence import Evidence
from gpuinfer.report.forecast import Gain, Verdict
from gpuinfer.units import lasting

LEAST_SHARE = 0.005  # of the time: less is not reported
Cost = tuple[float, Verdict]
"""The share of the nodes' time, and the cause."""


def dearest(run: Evidence) -> Verdict | None:
    """The cause that costs the nodes most of their time; None where none costs much, or there are no nodes."""
    found = run.cluster
    if found is None or not found["wall_s"] or not found["nodes"]:
        return None
    costs = [*_lost(found), *_computed_twice(found, run), *_waits(found), *_too_many(found, run), *_slow(found, run)]
    cost, verdict = max(costs, key=lambda one: one[0], default=(0.0, None))
    return verdict if cost >= thresholds.LOST_TO_NODES else None


MORE_NODES = ("device-saturated", "search-bound", "memory bandwidth", "client-bound")
"""Classes of a machine that is at work all the time: more of them are the cure."""


def of_the_middle(verdict: Verdict, run: Evidence) -> Verdict:
    """A verdict on one machine says which node that is and, where it does all it can, what more nodes would bring."""
    found = run.cluster
    if found is None or len(found["nodes"]) < 2:
        return verdict
    why = f"Node {run.node}, in the middle of {len(found['nodes'])} by its speed: {verdict.why}"
    twice, advice = found["twice"], verdict.advice
    if twice is not None and verdict.kind in MORE_NODES and twice["factor"] >= thresholds.WORTH_A_CHANGE:
        advice += f" Or use more nodes: {twice['nodes']} would be {twice['factor']:.1f} times as fast, by a forecast."
    return replace(verdict, why=why, advice=advice)


def _without(share: float) -> Gain:
    """Of the nodes' time that would be work."""
    return Gain.up_to(1 / max(1 - share, 1 / thresholds.MOST_GAIN))


def _lost(found: ClusterSection) -> Iterator[Cost]:
    gone = [line for line in found["nodes"] if _is_gone(line) or line["restarts"]]
    if not gone:
        return
    share = found["time"]["gone"]
    times = sum(line["restarts"] + _is_gone(line) for line in gone)
    reasons = list(dict.fromkeys(line["why"] for line in gone if line["why"]))
    why = (
        f"{_named(gone)} left or {'was' if len(gone) == 1 else 'were'} lost before the end, {_times(times)}: "
        f"{share:.0%} of the nodes' time was missing"
    )
    returned = found["ranges"]["returned"]
    why += f", and {returned:,} ranges were computed again." if returned else "."
    why += f" Last: {reasons[-1]}." if reasons else ""
    advice = "See the nodes' logs for why. Where no launcher does it, start them again by hand."
    yield share, Verdict("lost nodes", "idle", why, advice, None, _without(share))


def _computed_twice(found: ClusterSection, run: Evidence) -> Iterator[Cost]:
    """Much of what idle nodes did at the end, in case that others are late, was for nothing."""
    ranges = found["ranges"]
    kept = ranges["count"] * (ranges["units_mean"] or 0.0)
    share = ranges["duplicates"] / (ranges["duplicates"] + kept) if kept else 0.0
    nodes = max(1, round(len(found["nodes"]) * (1 - share)))
    if not share or run.stopped or nodes == len(found["nodes"]):
        return
    why = (
        f"{ranges['duplicates']:,} {found['unit']} besides the {kept:,.0f} of the run were computed twice: nodes with "
        "nothing left to do were given what others had begun, and came second. All of them were under way at once."
    )
    advice = f"Give them more to do, or use {nodes} node{'' if nodes == 1 else 's'} for so few {found['unit']}."
    yield share, Verdict("too many nodes", "idle", why, advice, run.change("-L", nodes, "nodes"))


def _is_gone(line: NodeLine) -> bool:
    return line["state"] in ("lost", "silent") or (line["state"] == "left" and bool(line["why"]))


def _waits(found: ClusterSection) -> Iterator[Cost]:
    """Nodes wait for units, or for their records to be taken. What is busy all of the time is to blame, for either:
    units and records pass through the coordinator one at a time.
    """
    time, coordinator, records = found["time"], found["coordinator"], found["records"]
    share = time["starved"] + time["records"]
    waited = f"The nodes waited {_what_for(found)} of their time"
    if coordinator["cpu_share"] >= thresholds.COORDINATOR_FULL:
        why = f"{waited}, and the coordinator's loop was busy {coordinator['cpu_share']:.0%} of it, with "
        why += f"{_ranges_a_second(found)} of {found['ranges']['units_mean'] or 0:,.0f} {found['unit']}."
        advice = "Give it a core of its own, or a faster one."
        yield share, Verdict("coordinator saturated", "idle", why, advice, None, _without(share))
        return
    by_keeping = coordinator["keeping_share"] >= thresholds.COORDINATOR_BUSY
    sending = f"a range took {lasting(records['sending_s'] or 0.0)} to be taken"
    if by_keeping or (time["records"] >= time["starved"] and records["through_folder"] >= 0.5):
        why = f"{waited}, and records were being written {coordinator['keeping_share']:.0%} of it: {sending}."
        advice = "Name a faster folder for the output."
        yield share, Verdict("waiting for the folder", "idle", why, advice, None, _without(share))
        return
    kind: VerdictClass = "waiting for the coordinator"
    if coordinator["reading_share"] >= thresholds.COORDINATOR_BUSY:
        why = f"{waited}, and the coordinator was reading its input {coordinator['reading_share']:.0%} of it."
        advice = "Read the input from a faster disk."
    elif time["records"] >= time["starved"]:
        why = f"{waited}: {sending} over the wire, and it was busy {coordinator['cpu_share']:.0%} of a core."
        advice = "Name an output folder that all nodes see, so that they write their records themselves."
    else:
        idle = f"{coordinator['cpu_share']:.0%} of a core and read its input {coordinator['reading_share']:.0%} of it"
        why = f"{waited}, although the coordinator used {idle}: the way to it is long, or it lacks a core."
        advice = "Run the coordinator near the nodes, on a core of its own."
    yield share, Verdict(kind, "idle", why, advice, None, _without(share))


def _what_for(found: ClusterSection) -> str:
    """For units, for their records to be taken, or for both, each with its share."""
    shares = {"for units": found["time"]["starved"], "for their records to be taken": found["time"]["records"]}
    return " and ".join(f"{what} {share:.0%}" for what, share in shares.items() if share >= LEAST_SHARE)


def _ranges_a_second(found: ClusterSection) -> str:
    per_s = found["ranges"]["count"] / found["wall_s"]
    return f"{per_s:,.1f} ranges a second" if per_s < 10 else f"{per_s:,.0f} ranges a second"


def _too_many(found: ClusterSection, run: Evidence) -> Iterator[Cost]:
    """Start and end of the run, in which not all nodes work, take much of it."""
    nodes, wall_s, ranges = len(found["nodes"]), found["wall_s"], found["ranges"]
    forecast = ClusterForecast.of(found)
    if nodes < 2 or forecast is None or not forecast.badly_divided or run.stopped:
        return
    right = forecast.right_nodes()
    few = f"{right} node{'' if right == 1 else 's'}"
    change = run.change("-L", right, "nodes") if right < nodes else None
    started_s, tail_s, share = forecast.start_s, forecast.tail_s, forecast.undivided_s / wall_s
    mean_s, units = ranges["mean_s"] or 0.0, ranges["units_mean"] or 0.0
    if units >= 2 and mean_s >= thresholds.LARGE_RANGES * found["tail_s"] > 0 and tail_s > started_s:
        why = (
            f"The first node had nothing left to do {lasting(found['tail_s'])} before the end, which cost "
            f"{tail_s / wall_s:.0%} of the time: a range of {units:,.0f} {found['unit']} took {lasting(mean_s)}."
        )
        advice = f"Give it more {found['unit']} to do{f', or use {few}' if right < nodes else ''}."
        yield share, Verdict("ranges too large", "idle", why, advice, change)
        return
    if right >= nodes:
        return
    done = round(ranges["count"] * units) or sum(line["units"] for line in found["nodes"])
    why = (
        f"{nodes} nodes for {done:,} {found['unit']}: until they had work took {lasting(started_s)} of the "
        f"{lasting(wall_s)} from the first node's joining until all was kept, and the last {found['unit']}, at "
        f"which few nodes worked, cost {lasting(tail_s)}. "
    )
    if (forecast.wanted_cores or 0.0) > 1:
        why += f"They share the cores of their host, and would use {forecast.wanted_cores:.1f} times as many. "
    why += f"{few} would have taken {lasting(forecast.seconds(right))}, by a forecast."
    advice = f"Use {few} for so few {found['unit']}, or give them more to do."
    yield share, Verdict("too many nodes", "idle", why, advice, change)


def _slow(found: ClusterSection, run: Evidence) -> Iterator[Cost]:
    lines = [line for line in found["nodes"] if line["relative"] is not None and not _is_gone(line)]
    # One that was restarted was lost, which is its cause; its speed is that of several processes.
    slow = [line for line in lines if not line["restarts"] and (line["relative"] or 0.0) < thresholds.SLOW_NODE]
    if not slow:
        return
    worst = min(slow, key=lambda line: line["relative"] or 0.0)
    others = [line for line in lines if line not in slow]
    missing = math.fsum(1 - (line["relative"] or 0.0) for line in slow) / len(lines)
    why = f"Node {worst['node']} ({worst['host']}) is slow: {worst['relative']:.2g} of the others"
    if len(slow) > 1:
        why += f", and {len(slow) - 1} more below {thresholds.SLOW_NODE:g} of them"
    seen = list(_why_slow(worst, others, run.on_cpu))
    why += f": {', '.join(seen)}." if seen else ". What it reports of its cores does not say why."
    advice = f"Let nothing else run on {worst['host']}, or leave it out."
    if len({line["host"] for line in found["nodes"]}) == 1:
        advice = "Let nothing else run on its cores, or use fewer nodes on this host."
    # One of many costs little, and is still what there is to mend. At the end all wait for the slow ones.
    share = missing + found["tail_cost_s"] / found["wall_s"]
    yield (
        max(share, thresholds.LOST_TO_NODES),
        Verdict("slow node", "idle", why, advice, None, Gain.up_to(1 / max(1 - missing, 0.1))),
    )


def _why_slow(one: NodeLine, others: Sequence[NodeLine], on_cpu: bool) -> Iterator[str]:
    """What it has less of than the others, as far as it was seen."""
    if not others:
        return
    usual = statistics.median(line["cores"] for line in others)
    if one["cores"] < thresholds.FEW_CORES * usual:
        yield f"it has {one['cores']} core{'' if one['cores'] == 1 else 's'}, and the others {usual:g}"
    names = {line["cpu"] for line in others}
    if one["cpu"] not in names:
        yield f"its processor is another one ({one['cpu']})"
    taken = one["others_cores"] or 0.0
    theirs = statistics.median(line["others_cores"] or 0.0 for line in others)
    if on_cpu and taken - theirs >= thresholds.TAKEN * one["cores"]:
        yield f"other programs have {taken:.1f} of its {one['cores']} cores"
    batches = statistics.median(line["rows_mean"] or 0.0 for line in others)
    if batches and (own_rows := one["rows_mean"] or 0.0) < thresholds.FEW_ROWS * batches:
        yield f"its batches have {own_rows:,.0f} rows, and those of the others {batches:,.0f}: it has too few units"
    waited = statistics.median(line["waited_share"] for line in others)
    if one["waited_share"] - waited >= thresholds.WAITED_FOR_CORES:
        yield f"ready to run, its threads waited {one['waited_share']:.0%} of their time for a core"
    clocks = [line["clock_share"] for line in others if line["clock_share"] is not None]
    if clocks and one["clock_share"] is not None:
        usual = statistics.median(clocks)
        if one["clock_share"] < thresholds.SLOW_CLOCK * usual:
            own = one["clock_share"]
            yield f"its cores run at {own:.0%} of their highest clock, and those of the others at {usual:.0%}"


def _named(lines: Sequence[NodeLine]) -> str:
    names = [line["node"] for line in lines]
    if len(names) == 1:
        return f"Node {names[0]}"
    return f"Nodes {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _times(times: int) -> str:
    return "once" if times == 1 else f"{times} times"
