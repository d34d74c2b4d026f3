"""From a run that is ready to the same run on nodes: its settings checked, its job described, its launcher made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field

from gpuinfer import api
from gpuinfer.config import blame, options, registry
from gpuinfer.config.settings import Settings, table_name
from gpuinfer.errors import UsageError
from gpuinfer.host import machine
from gpuinfer.launchers import base

if TYPE_CHECKING:
    from gpuinfer.cluster.messages import Job
    from gpuinfer.cluster.node_processes import NodesPlan
    from gpuinfer.runtime.run import RunPlan


LEAST_HERE, HERE_A_CORE = 8, 4  # nodes that may be had on this machine: so many at least, and so many a core


class ClusterOptions(api.Options):
    """What `-L` says of a run on nodes, whatever the launcher."""

    nodes: int | None = Field(
        None,
        ge=1,
        le=100_000,
        description="how many nodes [as many as the launcher has room for]; of external: are expected",
    )
    coordinator: str | None = Field(
        None, description="HOST[:PORT] of this machine, by which nodes reach it [as the launcher knows it]"
    )


def over_nodes(name: str, plan: RunPlan, merged: Settings) -> RunPlan:
    """The same run, coordinated here and computed by nodes. Raises `UsageError` for what cannot be divided."""
    from gpuinfer.cluster.cluster_backend import ClusterBackend
    from gpuinfer.cluster.cluster_workload import ClusterWorkload
    from gpuinfer.runtime.run import RunPlan

    for flag, value in (("--trace", merged.common.trace), ("--profile", merged.common.profile)):
        if value is not None:
            raise UsageError(f"{flag} looks into one process, and this run has many. Leave it out, or --launcher.")
    with blame.blaming(plan.workload, "division"):
        division = plan.workload.division()
    division.arithmetic = plan.backend.arithmetic
    nodes = nodes_plan(merged)
    workload = ClusterWorkload(plan.workload, division, job_of(name, plan, merged), nodes)
    backend = ClusterBackend(replace(plan.backend.setup, trace=None), workload.figures)
    return RunPlan(workload, backend, plan.strategy, plan.settings)


def nodes_plan(merged: Settings) -> NodesPlan:
    """The launcher with its options, and how many nodes there are to be. Raises `UsageError`."""
    from gpuinfer.cluster.node_processes import NodesPlan

    common = merged.common
    launcher_name = common.launcher or "local"
    settings = merged.table(table_name("launchers", launcher_name))
    taken = {key: one for key, one in settings.items() if key in ClusterOptions.model_fields}
    wanted = ClusterOptions(**options.check(ClusterOptions, taken, "a run on nodes"))
    launcher = base.make_launcher(launcher_name, {key: one for key, one in settings.items() if key not in taken})
    room = launcher.capacity if launcher.starts else common.nodes_min
    count = wanted.nodes if wanted.nodes is not None else room
    if count is None:
        raise UsageError(f"--launcher {launcher_name}: how many nodes? Add -L nodes=4.")
    if launcher.here and count > (most := max(LEAST_HERE, HERE_A_CORE * machine.cores())):
        raise UsageError(
            f"-L nodes={count} on this machine: more than {most} nodes on {machine.cores()} cores only take turns, and "
            "each needs memory for its own model. Ask for fewer, or name a launcher for other machines."
        )
    if common.nodes_min > count > 0:
        raise UsageError(
            f"--nodes-min {common.nodes_min} is more than the {count} nodes that there are to be. Ask for more with "
            "-L nodes=, or for fewer."
        )
    return NodesPlan(
        launcher,
        count,
        least=common.nodes_min,
        deadline_s=common.deadline,
        address=wanted.coordinator,
        quiet=common.quiet,
        verbose=common.verbose,
        devices=common.devices,
    )


def job_of(name: str, plan: RunPlan, merged: Settings) -> Job:
    """What nodes run. Raises `UsageError` for options that do not travel."""
    from gpuinfer.cluster.messages import Job

    common = merged.common
    setup = replace(plan.workload.setup, trace=None, profile=None)
    return Job(
        workload=name,
        options=plan.workload.node_options(),
        setup=setup,
        backend=common.backend,
        backend_options=explicit_options(merged, "backends", common.backend),
        strategy=common.strategy,
        strategy_options=explicit_options(merged, "strategies", common.strategy),
        roofline=common.roofline,
        disabled_plugins=tuple(registry.switched_off()),
    )


def explicit_options(merged: Settings, kind: str, name: str) -> Mapping[str, Any]:
    """Those that are set, as plain values."""
    return merged.read_options(kind, name, registry.load(kind, name))
