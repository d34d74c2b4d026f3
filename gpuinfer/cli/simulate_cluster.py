"""Simulate a run on many nodes (`gpuinfer simulate cluster`): the real coordinator's decisions on a virtual clock."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from gpuinfer import api
from gpuinfer.cli import flags, output
from gpuinfer.cli.comparison_progress import interruptible
from gpuinfer.cli.grid import whole_numbers
from gpuinfer.cli.problems import PARTIAL
from gpuinfer.config.options import check

if TYPE_CHECKING:
    from gpuinfer.cluster.range_policy import RangePolicy
    from gpuinfer.lab.simulate.simulated_cluster import ClusterScenario

NAME = "simulate cluster"
COMMON = ("seed", "json", "quiet", "verbose", "config")
MOST_NODES = 100_000
MB = 1e6
TEXT = """Simulate a run on many nodes: how well they are used, and what of the coordinator breaks first.

The coordinator's own decisions, on a virtual clock; nodes, network and disk are made up.

Several numbers of nodes: `--nodes 10,100,1000`.
"""


class ClusterSimulationOptions(api.Options):
    """The flags of `gpuinfer simulate cluster`."""

    nodes: str = Field("1000", description="how many; 10,100,1000 for one simulation each")
    rows: int = Field(10_000_000, ge=1, le=10**12, description="of the run: rows, games or groups")
    node_rate: float = Field(1000.0, gt=0, le=1e9, description="rows per second of a node, on average")
    spread: float = Field(0.1, ge=0, le=3, description="of the nodes' rates: standard deviation of the logarithm")
    parallel: int = Field(64, ge=1, le=10**6, description="rows that a node works on at once")
    join: float = Field(10.0, ge=0, le=1e6, description="time over which the nodes join")
    slow: int = Field(0, ge=0, le=MOST_NODES, description="nodes that are ten times as slow")
    deaths: float = Field(
        0.0, ge=0, le=1e6, description="of a node in an hour, on average; another one takes its place"
    )
    row_bytes: int = Field(500, ge=0, le=10**9, description="of a row on its way to a node; 0: numbers suffice")
    record_bytes: int = Field(1000, ge=0, le=10**9, description="of a row's record on its way back")
    name_bytes: float = Field(
        12.0, ge=0, le=1e6, description="that the coordinator remembers of each row, as generate does of names"
    )
    folder: bool = Field(False, description="records go into a folder that all nodes see, not over the network")
    link: float = Field(1.25e9, gt=0, description="bytes per second of the coordinator's network, each way")
    target: float = Field(10.0, gt=0, le=1e6, description="time of a node's work that a range should last")
    exchange_cost: float | None = Field(
        None, ge=0, le=10, description="of the coordinator's processor for an exchange; default: as measured"
    )
    range_cost: float | None = Field(None, ge=0, le=10, description="to keep a range; default: as measured")


def execute(values: Mapping[str, Any]) -> int:
    """Simulate, show, write. The exit code: 3 when stopped before all numbers of nodes were simulated, else 0."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.screen.display import show_page
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.lab.simulate.cluster_figures import cluster_document, cluster_page, cluster_run_figures
    from gpuinfer.lab.simulate.simulated_cluster import simulate_cluster

    merged = merge(NAME, values)
    options = ClusterSimulationOptions(**check(ClusterSimulationOptions, merged.table(NAME), NAME))
    counts = whole_numbers("nodes", options.nodes, MOST_NODES, "10,100,1000")
    common = merged.common
    destination = output.Destination(common.report)
    log_to_people(common.verbose)
    runs: list[dict[str, Any]] = []
    with interruptible():
        for nodes in counts:
            scenario, policy = _scenario(options, nodes, common.seed)
            try:
                outcome = simulate_cluster(scenario, policy)
            except KeyboardInterrupt:
                if not runs:
                    raise
                print(f"stopped; {len(runs)} of {len(counts)} are simulated", file=sys.stderr)
                break
            runs.append(cluster_run_figures(scenario, policy, outcome, options.name_bytes, options.folder))
            if len(counts) > 1 and not common.quiet:
                print(f"{len(runs)} of {len(counts)} · {nodes:,} nodes", file=sys.stderr, flush=True)
    command = flags.spelled("simulate", values).replace("simulate", NAME, 1)  # two words
    document = cluster_document(command, common.seed, runs)
    show_page(cluster_page(document), on_stderr=destination.stdout)
    destination.write(document)
    return 0 if len(runs) == len(counts) else PARTIAL


def _scenario(options: ClusterSimulationOptions, nodes: int, seed: int) -> tuple[ClusterScenario, RangePolicy]:
    from gpuinfer.cluster.range_policy import RangePolicy
    from gpuinfer.lab.simulate.cluster_figures import EXCHANGE_COST_S, MB_COST_S, RANGE_COST_S
    from gpuinfer.lab.simulate.simulated_cluster import ClusterScenario, Faults

    scenario = ClusterScenario(
        units=options.rows,
        nodes=nodes,
        rate=options.node_rate,
        spread=options.spread,
        parallel=options.parallel,
        join_s=options.join,
        slow=options.slow,
        item_bytes=options.row_bytes,
        record_bytes=0 if options.folder else options.record_bytes,
        link_bytes_per_s=options.link,
        exchange_cost_s=EXCHANGE_COST_S if options.exchange_cost is None else options.exchange_cost,
        range_cost_s=RANGE_COST_S if options.range_cost is None else options.range_cost,
        byte_cost_s=MB_COST_S / MB,
        seed=seed,
        faults=Faults(deaths=options.deaths / 3600),
    )
    return scenario, RangePolicy(target_s=options.target, nodes=nodes)


_app = flags.command("cluster", flags.of(ClusterSimulationOptions, NAME), COMMON, TEXT, execute)
COMMANDS = {"cluster": _app}
