"""The backend of a coordinator's own run: it computes nothing, and its counters are those of all nodes together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpuinfer.api import Backend, Limits, Request, Result, Setup
from gpuinfer.cluster.cluster_section import state_of
from gpuinfer.cluster.node_figures import ClusterFigures
from gpuinfer.errors import UsageError
from gpuinfer.stats import RULES

EVERY_S = 1.0  # between two sums: nodes report no more often
PAUSE = 20.0  # times as long as a sum took: of a thousand nodes it takes a tenth of a second


class ClusterBackend(Backend):
    """Its workload asks for nothing: nodes make the requests, and count them."""

    serves = ("rows", "text", "gradients")
    remote = True
    counts_requests = True
    limits = Limits(max_rows=1)

    def __init__(self, setup: Setup, figures: ClusterFigures) -> None:
        super().__init__(setup)
        self.figures = figures
        self._counted: Mapping[str, Any] | None = None
        self._changes = self._events = 0  # of the figures, as of the sum
        self._due = 0.0

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        raise UsageError("the coordinator of a divided run computes nothing. Ask a node.")

    async def stats(self) -> Mapping[str, Any] | None:
        now, figures = time.monotonic(), self.figures
        event = figures.events != self._events
        if self._counted is None or event or (figures.changes != self._changes and now >= self._due):
            self._changes, self._events = figures.changes, figures.events
            total = figures.snapshot(now)
            counted = {name: getattr(total, name) for name in RULES}
            self._counted = {**counted, "cluster": state_of(figures, now)}
            ended = time.monotonic()
            self._due = ended + max(EVERY_S, PAUSE * (ended - now))
        return self._counted
