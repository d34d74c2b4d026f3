"""Work of a fixed shape, launched as a CUDA graph when the shape comes again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from gpuinfer.models.memory import first_line, is_out_of_memory

logger = logging.getLogger("gpuinfer")

Shape = TypeVar("Shape", bound=Hashable)


class Replays(Generic[Shape]):
    """Does work that reads and writes the same memory each time for the same shape.

    The first time, and always on a device that has no graphs, it simply runs. The second time it is captured too, since
    a shape that came twice will come often; from then on the graph is launched. Graphs share their working memory: they
    never run at the same time.
    """

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self.device = device
        self.wanted = wanted and device.type == "cuda"
        self._seen: set[Shape] = set()
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.wanted else None

    def __call__(self, work: Callable[[Shape], None], shape: Shape) -> None:
        if (graph := self._graphs.get(shape)) is not None:
            graph.replay()
            return
        work(shape)
        if self.wanted and shape in self._seen:
            self._capture(work, shape)
        self._seen.add(shape)

    def _capture(self, work: Callable[[Shape], None], shape: Shape) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    work(shape)
        except RuntimeError as error:
            self.wanted = False
            logger.warning(
                "%s, so that from here on each kernel is launched by itself. -B graphs=false silences this.",
                "there is no memory for a further CUDA graph"
                if is_out_of_memory(error)
                else f"this model cannot be captured in a CUDA graph ({first_line(error)})",
            )
            return
        self._graphs[shape] = graph
