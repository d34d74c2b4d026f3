"""Stages in this thread, one after the other: modes of torch, and so fake tensors, are a thread's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpuinfer.api import Lane
from gpuinfer.models.pipeline.stage import CpuStage, CudaStage


class Inline:
    """In the place of `stages.pipeline.Pipeline`. Raises what a stage raises."""

    under_way = 0

    def __init__(self, stages: Sequence[CpuStage | CudaStage], lane: Callable[[str], Lane]) -> None:
        self.stages, self._lane = stages, lane("inline")

    def run(self, values: Iterable[Any], count: int) -> list[Any]:
        outcomes = list(map(self._through, values))
        for stage in self.stages:
            stage.settle()
        return outcomes

    def _through(self, value: Any) -> Any:
        for stage in self.stages:
            with stage.at_work():
                value = stage.compute(value, self._lane)
        return value

    def counts(self) -> Mapping[str, Any]:
        return {}

    def waits_for(self) -> str:
        return ""

    def close(self) -> None:
        pass


def at_once(measure: Callable[[], Any], threads: int) -> Any:
    """In the place of `stages.timing.in_thread`."""
    return measure()
