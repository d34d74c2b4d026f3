"""How a run over nodes stands: where the nodes' time went, a line a node, and what all of them together could do.

The time of `n` nodes is `n` times that from the first node's joining to the end; each of them worked, started, waited
or was gone at each moment of it.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

from gpuinfer.api import BETWEEN_DEVICES, Roofline, TextRoofline
from gpuinfer.cluster.node_figures import SILENT_S, ClusterFigures, NodeAccount, RangeFigures
from gpuinfer.cluster.node_report import CoreUse
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.report.cluster_forecast import twice_as_many
from gpuinfer.report.cluster_state import ClusterState, TypicalNode
from gpuinfer.report.document import (
    ClusterSection,
    CoresSection,
    NodeLine,
    NodeTime,
    RangesSection,
    RecordsSection,
    SpreadSection,
)
from gpuinfer.stats import mean_size, summarise

COMPARED_S = 3.0  # of work: a node reports once a second, so that of a shorter time its speed is not known
TIMES = ("working", "starting", "starved", "records", "tail", "gone")


def state_of(figures: ClusterFigures, now: float) -> ClusterState:
    """After `figures.snapshot(now)`."""
    accounts = sorted(figures.accounts.values(), key=lambda one: (one.name.startswith("+"), int(one.name)))
    end = figures.clock_to if figures.clock_to is not None else now
    shares = host_shares(figures.present or accounts)
    rooflines = {one.name: _scaled(figures.measured.get(one.machine.kind), shares[one.name]) for one in figures.present}
    section = _section(figures, accounts, now, end, rooflines)
    return ClusterState(
        section,
        _together([rooflines[one.name] for one in figures.present]),
        _texts_together([one.report.text_roofline for one in figures.present]),
        _cores(figures.present or accounts),
        _typical(section["nodes"], figures, rooflines),
    )


def host_shares(accounts: Sequence[NodeAccount]) -> dict[str, float]:
    """Of the cores that each node may use, the share that it has to itself when all nodes of its host compute."""
    hosts: dict[str, list[NodeAccount]] = defaultdict(list)
    for one in accounts:
        hosts[one.machine.host].append(one)
    found = dict[str, float]()
    for neighbours in hosts.values():
        known = [one.machine for one in neighbours if one.machine.cpus]
        wanted = sum(len(each.cpus) for each in known)
        there = len({core for each in known for core in each.cpus})
        found |= {one.name: there / wanted if wanted and one.machine.cpus else 1.0 for one in neighbours}
    return found


def _section(
    figures: ClusterFigures,
    accounts: Sequence[NodeAccount],
    now: float,
    end: float,
    rooflines: Mapping[str, Roofline | None],
) -> ClusterSection:
    first = figures.first_joined if figures.first_joined is not None else end
    wall_s = max(0.0, end - first)
    done = min(end, figures.done_at) if figures.done_at is not None else end
    spoke = max((one.heard_at for one in accounts), default=end)
    spent = {one.name: time_of(one, first, done, end, spoke) for one in accounts}
    lines = [_line(figures, one, spent[one.name], now, spoke, rooflines.get(one.name)) for one in accounts]
    _compare([line for line in lines if spent[line["node"]]["working"] >= COMPARED_S])
    tail_s = max((max(0.0, done - idle_from_of(one, end)) for one in figures.present), default=0.0)
    all_s = wall_s * len(accounts)
    time = {name: math.fsum(each[name] for each in spent.values()) / all_s if all_s else 0.0 for name in TIMES}
    compared = [line for line in lines if line["relative"] is not None]
    ranges, records = _ranges(figures.count_ranges()), _records(accounts)
    cpu_s = figures.cpu_s()
    section: ClusterSection = {
        "unit": figures.unit,
        "wall_s": wall_s,
        "nodes": lines,
        "slowest": min(compared, key=lambda line: line["relative"] or 0.0)["node"] if compared else None,
        "time": cast(NodeTime, time),
        "start_up_s": statistics.fmean([(one.began_at or end) - figures.began_at for one in accounts])
        if accounts
        else 0.0,
        "tail_s": tail_s,
        "tail_cost_s": figures.tail_cost_s(done - tail_s, done) if tail_s else 0.0,
        "ranges": ranges,
        "records": records,
        "coordinator": {
            "host": os.uname().nodename,
            "cpu_share": cpu_s / wall_s if wall_s else 0.0,
            "reading_share": min(1.0, figures.reading_s / wall_s) if wall_s else 0.0,
            "keeping_share": min(1.0, figures.keeping_s / wall_s) if wall_s else 0.0,
        },
        "wanted_cores": _wanted_cores(figures, accounts, spent),
        "twice": None,
    }
    return {**section, "twice": twice_as_many(section)}


def time_of(one: NodeAccount, first: float, done: float, end: float, spoke: float) -> dict[str, float]:
    """Seconds of a node from `first` to `end`, by `TIMES`. From `done` on all that was left was to keep records.
    `spoke`: when one of the nodes was last heard.
    """
    until = end
    if one.last_word_at is not None:
        until = min(end, max(first, one.last_word_at))
    elif is_silent(one, spoke):
        until = min(end, max(first, one.heard_at))
    began = end if one.began_at is None else min(end, max(first, one.began_at))
    gone_s = one.gone_s + max(0.0, end - until)
    starting_s = max(0.0, min(began, until) - first) + one.starting_s
    idle_from = idle_from_of(one, end)
    tail_s, kept_s = max(0.0, done - idle_from) * one.tail_empty, end - max(done, idle_from)
    left_s = max(0.0, end - first - gone_s - starting_s - tail_s - kept_s)
    starved_s = min(left_s, one.starved_before_tail_s)
    room_s = min(left_s - starved_s, one.total("room_s"))
    working_s, records_s = left_s - starved_s - room_s, room_s + kept_s
    seconds = (working_s, starting_s, starved_s, records_s, tail_s, gone_s)
    return {name: max(0.0, each) for name, each in zip(TIMES, seconds, strict=True)}


def is_silent(one: NodeAccount, spoke: float) -> bool:
    """It is there, and others have been heard long after it: the coordinator itself is not cut off."""
    return one.left_at is None and spoke - one.heard_at > SILENT_S


def idle_from_of(one: NodeAccount, end: float) -> float:
    """From when on nothing was left for it to take, or the end."""
    if one.idle_since is None or (one.left_at is not None and one.left_at < end):
        return end
    return max(end if one.began_at is None else min(end, one.began_at), min(end, one.idle_since))


def _wanted_cores(
    figures: ClusterFigures, accounts: Sequence[NodeAccount], spent: Mapping[str, Mapping[str, float]]
) -> float | None:
    """Cores that nodes on hosts with several of them would use at once, over those that they have there. None where
    each node has cores of its own, or nothing is known of how many it uses.
    """
    here = figures.present or accounts
    shares = host_shares(here)
    crowded = [one for one in here if one.machine.cpus and (figures.one_host or shares[one.name] < 1)]
    wanted = there = 0.0
    for one in crowded:
        counted, at_work = one.own_snapshot(), spent[one.name]["working"]
        lasted_s = min(at_work, one.report.elapsed_s) or at_work
        if not lasted_s or not counted.cpu_s:
            return None
        others = (others_of(one, list(figures.accounts.values())) or 0.0) / max(one.report.elapsed_s, lasted_s)
        wanted += min(float(one.machine.cores), (counted.cpu_s + counted.cpu_wait_s) / lasted_s)
        # Programs that use all cores leave half of them to more nodes: the system shares them fairly.
        there += shares[one.name] * max(one.machine.cores / 2, one.machine.cores - others)
    return wanted / there if there else None


def _line(
    figures: ClusterFigures,
    one: NodeAccount,
    spent: Mapping[str, float],
    now: float,
    spoke: float,
    roofline: Roofline | None,
) -> NodeLine:
    snapshot, at_work = one.own_snapshot(), spent["working"]
    rows = one.rows
    lasted = at_work + spent["starved"] + spent["records"]
    rows_per_s = rows / at_work if at_work else 0.0
    cores, ran, waited = one.report.cores, snapshot.cpu_s, snapshot.cpu_wait_s
    others_s = None if cores is None else others_of(one, list(figures.accounts.values()))
    return {
        "node": one.name,
        "host": one.machine.host,
        "cpu": one.machine.cpu,
        "cores": one.machine.cores,
        "gpuinfer": one.version,
        "state": _state(one, now, spoke, over=figures.clock_to is not None),
        "joined_s": max(0.0, one.joined_at - figures.began_at),
        "start_up_s": None if one.began_at is None else max(0.0, one.began_at - (figures.first_joined or 0.0)),
        "left_s": None if one.left_at is None else max(0.0, one.left_at - figures.began_at),
        "why": one.why or None,
        "restarts": one.restarts,
        "units": one.kept,
        "units_per_s": one.units / at_work if at_work else 0.0,
        "rows_per_s": rows_per_s,
        "relative": None,
        "starved_share": spent["starved"] / lasted if lasted else 0.0,
        "records_share": spent["records"] / lasted if lasted else 0.0,
        "records": "folder" if one.report.through_folder else "wire",
        "efficiency": rows_per_s / roofline.rows_per_s if roofline is not None and rows else None,
        "rows_mean": mean_size(snapshot.batches) if snapshot.batches else None,
        "latency_s": cast(SpreadSection, summarise(snapshot.latency)),
        "others_cores": None if others_s is None or not one.report.elapsed_s else others_s / one.report.elapsed_s,
        "waited_share": waited / (ran + waited) if ran and waited else 0.0,
        "clock_share": one.report.clock_share,
        "clock_offset_s": one.report.clock_offset_s,
    }


def _state(
    one: NodeAccount, now: float, spoke: float, over: bool
) -> Literal["starting", "working", "waiting", "silent", "left", "lost"]:
    if one.lost:
        return "lost"
    if one.left_at is not None:
        return "left"
    if over:
        return "silent" if is_silent(one, spoke) else "working"
    if now - one.heard_at > SILENT_S:
        return "silent"
    if one.began_at is None or one.report.setup:
        return "starting"
    return "waiting" if one.report.idle_s else "working"


def _compare(lines: Sequence[NodeLine]) -> None:
    """Set each node's speed relative to the median of the others: by rows where there are some, else by units."""
    by = "rows_per_s" if any(line["rows_per_s"] for line in lines) else "units_per_s"
    speeds = [cast(float, line[by]) for line in lines if line[by]]  # type: ignore[literal-required]
    if len(speeds) < 2:
        return
    ordered = sorted(speeds)
    for line in lines:
        if speed := cast(float, line[by]):  # type: ignore[literal-required]
            line["relative"] = speed / _median_without(ordered, speed)


def _median_without(ordered: list[float], one: float) -> float:
    """The median of all but one of them; of an even number the higher of the two, since nodes are slow, never fast."""
    at, middle = ordered.index(one), (len(ordered) - 1) // 2
    return ordered[middle + (middle >= at)]


def _ranges(counted: RangeFigures) -> RangesSection:
    return {
        "count": counted.kept,
        "units_mean": counted.units / counted.kept if counted.kept else None,
        "mean_s": counted.held_s / counted.kept if counted.kept else None,
        "returned": counted.returned,
        "stolen": counted.stolen,
        "copied": counted.copied,
        "duplicates": counted.duplicates,
    }


def _records(accounts: Sequence[NodeAccount]) -> RecordsSection:
    size = math.fsum(one.total("records_bytes") for one in accounts)
    through = math.fsum(one.total("records_bytes") for one in accounts if one.report.through_folder)
    sendings = math.fsum(one.total("sendings") for one in accounts)
    return {
        "bytes": size,
        "through_folder": through / size if size else 0.0,
        "sending_s": math.fsum(one.total("sending_s") for one in accounts) / sendings if sendings else None,
    }


def others_of(one: NodeAccount, accounts: Sequence[NodeAccount]) -> float | None:
    """Seconds that programs which are none of this run's had the node's cores; None: not known."""
    use = one.report.cores
    if use is None or use.others_s is None:
        return None
    return max(0.0, use.others_s - math.fsum(_on_its_cores(one, other) for other in accounts if other is not one))


def _on_its_cores(one: NodeAccount, other: NodeAccount) -> float:
    """Seconds that another node ran on cores that this one may use too."""
    use = other.report.cores
    if use is None or other.machine.host != one.machine.host or not other.machine.cpus:
        return 0.0
    shared = len(set(one.machine.cpus) & set(other.machine.cpus))
    return use.busy_s * shared / len(other.machine.cpus)


def _cores(accounts: Sequence[NodeAccount]) -> CoresSection:
    """Of all hosts; a core that several nodes may use counts once."""
    shares = host_shares(accounts)
    uses = {one.name: one.report.cores or CoreUse() for one in accounts}

    def total(of: Callable[[CoreUse], float]) -> float:
        return math.fsum(of(use) for use in uses.values())

    others = {one.name: others_of(one, accounts) for one in accounts}
    stations: dict[str, float] = {}
    for use in uses.values():
        for name, seconds in use.stations.items():
            stations[name] = stations.get(name, 0.0) + seconds
    return {
        "count": max(1, round(math.fsum(one.machine.cores * shares[one.name] for one in accounts))),
        "busy_s": total(lambda use: use.busy_s),
        "waiting_s": total(lambda use: use.waiting_s),
        "threads_waited_s": 0.0,
        "others_s": None
        if None in others.values()
        else math.fsum(shares[name] * (seconds or 0.0) for name, seconds in others.items()),
        "stolen_s": total(lambda use: use.stolen_s or 0.0),
        "idle_s": None,
        "stations": stations,
    }


def _scaled(roofline: Roofline | None, share: float) -> Roofline | None:
    return None if roofline is None else replace(roofline, rows_per_s=roofline.rows_per_s * share)


def _together(rooflines: Sequence[Roofline | None]) -> Roofline | None:
    """Their sum; None where one of them is not known."""
    known = [one for one in rooflines if one is not None]
    if not known or len(known) < len(rooflines):
        return None
    each: dict[str, int] = defaultdict(int)
    for one in known:
        each[one.arrangement] += 1
    arrangement = BETWEEN_DEVICES.join(f"{count} nodes × {name}" if count > 1 else name for name, count in each.items())
    total = math.fsum(one.rows_per_s for one in known)
    return Roofline(total, known[0].at_rows, arrangement, measured=(total,))


def _texts_together(rooflines: Sequence[TextRoofline | None]) -> TextRoofline | None:
    known = [one for one in rooflines if one is not None]
    if not known or len(known) < len(rooflines):
        return None
    return TextRoofline(
        flops_per_s=math.fsum(one.flops_per_s for one in known),
        prompt_flops_per_s=math.fsum(one.prompt_flops_per_s for one in known),
        bytes_per_s=math.fsum(one.bytes_per_s for one in known),
        at_rows=round(statistics.fmean(one.at_rows for one in known)),
        at_tokens=round(statistics.fmean(one.at_tokens for one in known)),
        own_flops_per_s=math.fsum(one.own_flops_per_s for one in known),
        remembered=any(one.remembered for one in known),
    )


def _typical(
    lines: Sequence[NodeLine], figures: ClusterFigures, rooflines: Mapping[str, Roofline | None]
) -> TypicalNode | None:
    there = sorted(
        (line for line in lines if line["relative"] is not None and line["state"] != "lost"),
        key=lambda line: line["relative"] or 0.0,
    ) or [line for line in lines if line["units"]]
    if not there:
        return None
    one = figures.accounts[there[(len(there) - 1) // 2]["node"]]
    use, others = one.report.cores, others_of(one, list(figures.accounts.values()))
    cores = None
    if use is not None and others is not None:
        cores = CoreTime(use.busy_s, use.busy_s + others, use.stolen_s or 0.0)
    return TypicalNode(
        one.name,
        one.own_snapshot(),
        one.report.facts,
        one.report.elapsed_s,
        one.machine.cores,
        cores,
        rooflines.get(one.name),
        one.report.text_roofline,
    )
