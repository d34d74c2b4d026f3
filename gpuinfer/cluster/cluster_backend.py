"""Provisional."""

from __future__ import annotations

from collections.abc import Sequence

from gpuinfer.api import Backend, Limits, Request, Result, Setup
from gpuinfer.cluster.node_figures import ClusterFigures


class ClusterBackend(Backend):
    remote = True

    def __init__(self, setup: Setup, figures: ClusterFigures) -> None:
        super().__init__(setup)
        self.figures = figures
        self.limits = Limits(max_rows=1)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        raise NotImplementedError
