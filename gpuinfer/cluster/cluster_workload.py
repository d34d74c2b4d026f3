"""A divided run as the runtime sees it: a workload whose work is done by nodes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from gpuinfer.api import Infer, Plugin, Progress, Setup, Workload
from gpuinfer.cluster.coordinator import Coordinator
from gpuinfer.cluster.messages import Job
from gpuinfer.cluster.node_figures import ClusterFigures
from gpuinfer.cluster.node_processes import NodesPlan
from gpuinfer.division import Division
from gpuinfer.fleet.plan import is_loopback


class ClusterWorkload(Workload):
    """Follows the coordinator of this division. `inner`: the workload that nodes run."""

    def __init__(self, inner: Workload, division: Division, job: Job, plan: NodesPlan) -> None:
        self.inner, self._division, self._job, self._plan = inner, division, job, plan
        self.figures = ClusterFigures(time.monotonic())
        self.figures.unit = division.unit
        self.figures.one_host = plan.launcher.starts and is_loopback(plan.launcher.bind)
        self.setup, self.options = inner.setup, inner.options
        self.goes_on_by, self.writes_to = inner.goes_on_by, inner.writes_to  # type: ignore[misc]
        self.writes_answers, self.max_failures = inner.writes_answers, inner.max_failures  # type: ignore[misc]

    @property
    def acts_for(self) -> type[Plugin] | None:
        return type(self.inner)

    @property
    def asks(self) -> bool:
        """No backend here."""
        return False

    @property
    def writes_stdout(self) -> bool:
        return self.inner.writes_stdout

    @property
    def shows_answers(self) -> bool:
        return False

    def trial(self, setup: Setup, **changes: Any) -> None:
        """None: advice is not tried on a cluster."""
        return

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        count = self._plan.nodes
        starting = (
            f"starting {count} {'node' if count == 1 else 'nodes'}" if self._plan.launcher.starts else "listening"
        )
        yield Progress(0, note=starting, setup=True)
        await infer.ready()  # its counters are read from here on
        async with Coordinator(self._division, self._job, self._plan, self.figures) as coordinator:
            self.coordinator = coordinator
            async for progress in coordinator.follow(infer.stopping):
                yield progress
        yield coordinator.progress()
