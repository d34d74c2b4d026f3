"""The figures of a simulated run on many nodes: the document `gpuinfer.cluster-simulation/1`, its table and remarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuinfer import __version__
from gpuinfer.cluster.range_policy import RangePolicy
from gpuinfer.lab.presenter import Note, Page, Table
from gpuinfer.lab.simulate.simulated_cluster import ClusterOutcome, ClusterScenario
from gpuinfer.units import number, short, whole

SCHEMA = "gpuinfer.cluster-simulation/1"
GIB = 1 << 30
MEMORY_LIMIT = GIB  # of the coordinator's process
BASE_BYTES = 100 << 20  # of a coordinator that has begun and has no nodes
NODE_BYTES = 160 << 10  # of a node's connections, their buffers and what the core knows of it
ITEM_BYTES = 49  # of a row that is with a node, on top of its own bytes: an object and its place in a range
INTERVAL_BYTES = 16
COLUMNS = ("nodes", "time", "efficiency", "idle", "ranges", "CPU", "network", "memory")
EXCHANGE_COST_S, RANGE_COST_S, MB_COST_S = 100e-6, 200e-6, 600e-6  # of the coordinator's processor: docs/scale.md
FIGURES_SHARE = 0.05  # of it, for the sum of all nodes' counters


def memory_of(scenario: ClusterScenario, outcome: ClusterOutcome, name_bytes: float) -> dict[str, int]:
    """The coordinator's memory in bytes, by what holds it. `name_bytes`: what a workload remembers of each row."""
    return {
        "process": BASE_BYTES,
        "nodes": scenario.nodes * NODE_BYTES,
        "rows with nodes": outcome.most_held * (scenario.item_bytes + ITEM_BYTES) if scenario.item_bytes else 0,
        "names of rows": round(scenario.units * name_bytes),
        "gaps in what is kept": outcome.most_intervals * INTERVAL_BYTES,
    }


def cluster_run_figures(
    scenario: ClusterScenario, policy: RangePolicy, outcome: ClusterOutcome, name_bytes: float, files: bool
) -> dict[str, Any]:
    """One run in plain values. `files`: nodes write their records into a folder that all see."""
    idle, seconds = outcome.idle_end_s, outcome.seconds or 1.0
    memory = memory_of(scenario, outcome, name_bytes)
    network = max(outcome.way_there_s, outcome.way_back_s) / seconds
    shares = {
        "processor": outcome.processor_s / seconds + FIGURES_SHARE,
        "network": network,
        "memory": sum(memory.values()) / MEMORY_LIMIT,
    }
    calls = outcome.exchanges + outcome.ranges
    return {
        "nodes": scenario.nodes,
        "rows": scenario.units,
        "node_rate": scenario.rate,
        "range_target_s": policy.target_s,
        "seconds": outcome.seconds,
        "efficiency": outcome.efficiency,
        "idle_at_end_s": {"mean": sum(idle) / len(idle), "max": max(idle)} if idle else {},
        "exchanges": outcome.exchanges,
        "exchanges_per_s": outcome.exchanges / seconds,
        "ranges": outcome.ranges,
        "range_rows_mean": scenario.units / outcome.ranges if outcome.ranges else 0.0,
        "files": outcome.ranges if files else 0,
        "duplicate_rows": outcome.duplicates,
        "computed_again": outcome.computed - scenario.units,
        "lost_nodes": outcome.lost_nodes,
        "rows_with_nodes_max": outcome.most_held,
        "gaps_max": outcome.most_intervals,
        "memory_bytes": memory,
        "bytes_to_nodes_per_s": scenario.units * scenario.item_bytes / seconds,
        "bytes_from_nodes_per_s": scenario.units * scenario.record_bytes / seconds,
        "shares": shares,
        "breaks_first": max(shares, key=lambda name: shares[name]),
        "core_s": outcome.core_s,
        "core_s_per_call": outcome.core_s / calls if calls else 0.0,
    }


def cluster_document(command: str, seed: int, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`runs` are made by `cluster_run_figures`."""
    return {"schema": SCHEMA, "gpuinfer": __version__, "command": command, "seed": seed, "runs": list(runs)}


def cluster_page(document: Mapping[str, Any]) -> Page:
    """A line for each number of nodes, and what breaks first."""
    runs = document["runs"]
    rows = [
        [
            whole(run["nodes"]),
            f"{run['seconds']:,.0f} s",
            f"{run['efficiency']:.1%}",
            f"{run['idle_at_end_s'].get('mean', 0.0):.1f} s",
            whole(run["ranges"]),
            f"{run['shares']['processor']:.1%}",
            f"{run['shares']['network']:.1%}",
            f"{number(sum(run['memory_bytes'].values()))}B",
        ]
        for run in runs
    ]
    notes = [note for run in runs[-1:] for note in _notes(run)]
    title = f"simulate cluster · {number(runs[0]['rows'])} rows" if runs else "simulate cluster"
    verdict = dict(notes).get("breaks first", "")
    return Page(title, verdict, document["command"], Table(COLUMNS, rows), notes=notes)


def _notes(run: Mapping[str, Any]) -> Iterator[Note]:
    """Of the run with the most nodes."""
    files = f"; {whole(run['files'])} files, each gone once it is kept" if run["files"] else ""
    yield "a range", f"{number(run['range_rows_mean'])} rows on average{files}"
    idle = run["idle_at_end_s"]
    if idle:
        yield "idle", f"a node at the end, on average; at most {idle['max']:.1f} s"
    yield "exchanges", f"{number(run['exchanges_per_s'])} a second"
    there, back = number(run["bytes_to_nodes_per_s"]), number(run["bytes_from_nodes_per_s"])
    yield "network", f"{there}B/s to the nodes, {back}B/s back"
    largest = sorted(run["memory_bytes"].items(), key=lambda item: -item[1])
    yield "memory", ", ".join(f"{name} {number(size)}B" for name, size in largest[:3])
    if run["lost_nodes"] or run["computed_again"]:
        again = whole(max(0, run["computed_again"]))
        yield "lost", f"{whole(run['lost_nodes'])} nodes were given up; {again} rows were computed again"
    yield "deciding", f"{short(run['core_s_per_call'])} an exchange or range, measured here"
    first, shares = run["breaks_first"], run["shares"]
    limit = {"processor": "one core", "network": "--link", "memory": "1 GiB"}[first]
    share = shares[first]
    if first == "memory":
        text = f"memory: {share:.0%} of {limit}"
    else:
        text = f"{first}: {share:.0%} of {limit}, all of it at about {number(run['nodes'] / share)} nodes like these"
    yield "breaks first", text if share >= 0.01 else f"nothing: under 1% of {limit}"
