"""What people see of a run over nodes: a table while it goes on, lines of the final panel, a part of a plain line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuinfer.cli.screen.workload_rows import PanelRow
from gpuinfer.units import lasting, number, short, whole

PANEL_NODES = 8  # lines of nodes in the final panel
SLOW = 0.9  # of the others: slower, and the slowest is named
MOST_SPEED = 9.99  # of the others, at which the column stops
LEAST_SHARE = 0.005
GONE = ("lost", "left")
TROUBLED = ("lost", "silent")
NOT_THERE = (*GONE, "silent")
WIDE = 100  # columns from which there is room for more
TIMES = {
    "working": "working",
    "starting": "starting",
    "starved": "waiting for units",
    "records": "waiting with records",
    "tail": "out of work at the end",
    "gone": "gone",
}


@dataclass(frozen=True, slots=True)
class NodeTable:
    """The columns' names, a row for each visible node, which of these are in trouble, and a remark on all."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    bad: Sequence[bool]
    remark: str


def node_table(found: Mapping[str, Any], rows: int, width: int) -> NodeTable:
    """Of the report's `cluster`, for so many lines and columns: all nodes, or those in trouble and the slowest ones."""
    lines, wide = list(found["nodes"]), width >= WIDE
    visible = lines if len(lines) <= rows else worst(lines)[:rows]
    columns = ["node", "state", found["unit"], _rate_word(found), "speed", "idle", "host"]
    if wide:
        columns[-1:] = ["batch", "p99", "cores", "host"]
    cells = [_cells(line, found, wide) for line in visible]
    hidden = len(lines) - len(visible)
    return NodeTable(columns, cells, [line["state"] in TROUBLED for line in visible], _remark(found, hidden))


def worst(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those in trouble first, then the slowest; nodes that have not begun after these."""

    def badness(line: Mapping[str, Any]) -> tuple[int, float]:
        relative = line["relative"]
        return (0 if line["state"] in TROUBLED else 1 if relative is not None else 2), relative or 0.0

    return sorted(lines, key=badness)


def _rate_word(found: Mapping[str, Any]) -> str:
    return "/min" if found["unit"] == "games" else "/s"


def _rate(line: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    return number(line["units_per_s"] * (60 if found["unit"] == "games" else 1))


def _cells(line: Mapping[str, Any], found: Mapping[str, Any], wide: bool) -> list[str]:
    relative, latency = line["relative"], line["latency_s"]
    again = f" ×{line['restarts'] + 1}" if line["restarts"] else ""
    cells = [
        line["node"] + again,
        line["state"],
        whole(line["units"]),
        _rate(line, found),
        "" if relative is None else f"{min(relative, MOST_SPEED):.2f}",
        f"{line['starved_share'] + line['records_share']:.0%}",
    ]
    if wide:
        cells += [
            "" if line["rows_mean"] is None else whole(line["rows_mean"]),
            short(latency["p99"]) if latency else "",
        ]
        cells.append(f"{line['cores']}" + (f" −{others:.1f}" if (others := line["others_cores"] or 0.0) >= 0.1 else ""))
    return [*cells, line["host"]]


def _remark(found: Mapping[str, Any], hidden: int) -> str:
    states = Counter(line["state"] for line in found["nodes"])
    parts = [", ".join(f"{count} {state}" for state, count in states.most_common())]
    if hidden:
        parts.append(f"{hidden} not shown")
    if slowest := slowest_of(found):
        parts.append(slowest)
    return " · ".join(parts)


def slowest_of(found: Mapping[str, Any]) -> str:
    """Such as `slowest: node 5, 0.41 of the others`; empty where none is slow."""
    line = next((line for line in found["nodes"] if line["node"] == found["slowest"]), None)
    if line is None or line["relative"] is None or line["relative"] >= SLOW:
        return ""
    return f"slowest: node {line['node']}, {line['relative']:.2f} of the others"


def nodes_in_line(found: Mapping[str, Any] | None) -> Iterator[str]:
    """Of the report's `cluster`, for a plain line; nothing where there is none."""
    if not found or not found["nodes"]:
        return
    count = len(found["nodes"])
    states = Counter(line["state"] for line in found["nodes"])
    busy = states["working"] + states["waiting"]
    if none_there(found):
        yield "no node is there"
    if not busy:
        return
    yield f"{count} node{'' if count == 1 else 's'}" if busy == count else f"{busy} of {count} nodes"
    if slowest := slowest_of(found):
        yield slowest


def none_there(found: Mapping[str, Any] | None) -> bool:
    """Of the report's `cluster`: all nodes have left, are lost or silent."""
    nodes = found["nodes"] if found else ()
    return bool(nodes) and all(line["state"] in NOT_THERE for line in nodes)


def node_panel_rows(found: Mapping[str, Any] | None) -> Iterator[PanelRow]:
    """Of the report's `cluster`; none where there is none."""
    if not found or not found["nodes"]:
        return
    lines, hosts = found["nodes"], {line["host"] for line in found["nodes"]}
    where = f"on {len(hosts)} hosts" if len(hosts) > 1 else f"on {next(iter(hosts))}"
    time = ", ".join(f"{share:.0%} {TIMES[name]}" for name, share in found["time"].items() if share >= LEAST_SHARE)
    yield PanelRow("nodes", f"{len(lines)} {where}: {time}")
    visible = lines if len(lines) <= PANEL_NODES else worst(lines)[:PANEL_NODES]
    for line in visible:
        yield PanelRow(
            "", _in_words(line, found), "warning" if line["state"] == "lost" or line["restarts"] else "plain"
        )
    if len(visible) < len(lines):
        yield PanelRow("", f"and {len(lines) - len(visible)} faster ones")
    ranges, records, coordinator = found["ranges"], found["records"], found["coordinator"]
    if ranges["count"]:
        counts = ", ".join(f"{whole(ranges[name])} {name}" for name in ("returned", "stolen", "copied") if ranges[name])
        twice = f"{whole(ranges['duplicates'])} {found['unit']} computed twice" if ranges["duplicates"] else ""
        each = f"{number(ranges['units_mean'])} {found['unit']} and {lasting(ranges['mean_s'])}"
        size = f"{whole(ranges['count'])}, of {each} on average"
        yield PanelRow("ranges", ", ".join(filter(None, [size, counts, twice])))
    if records["bytes"]:
        way = {0: "over the wire", 1: "through the folder"}.get(records["through_folder"])
        way = way or f"{records['through_folder']:.0%} through the folder, the rest over the wire"
        yield PanelRow(
            "", f"{number(records['bytes'])}B of records {way}, {short(records['sending_s'] or 0.0)} a range"
        )
    if found["tail_s"]:
        cost = f", which cost {lasting(found['tail_cost_s'])}" if found["tail_cost_s"] else ""
        yield PanelRow("", f"the first node was out of work {lasting(found['tail_s'])} before the end{cost}")
    yield PanelRow("coordinator", f"{coordinator['cpu_share']:.1%} of a core")
    if (twice := found["twice"]) is not None:
        faster = (
            f"{twice['nodes']} nodes: {twice['factor']:.1f} times as fast ({lasting(twice['wall_s'])} with their start)"
        )
        yield PanelRow("twice as many", f"predicted, {faster}; {twice['why']}")


def _in_words(line: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    rate = _rate(line, found)
    parts = [f"{whole(line['units'])} {found['unit']}, {rate}{_rate_word(found)}"]
    if line["relative"] is not None and line["relative"] < SLOW:
        parts.append(f"{line['relative']:.2f} of the others")
    waited = [("for units", line["starved_share"]), ("with records", line["records_share"])]
    parts += [f"waited {share:.0%} {what}" for what, share in waited if share >= LEAST_SHARE]
    if line["restarts"]:
        parts.append(f"started {line['restarts'] + 1} times")
    if line["state"] in GONE and line["why"]:
        parts.append(f"{line['state']}: {line['why']}")
    return f"node {line['node']} ({line['host']}): {', '.join(parts)}"
