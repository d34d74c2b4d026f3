"""How fast a bare module runs on a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from gpuinfer.models.looks import LOOK_S

MOST_LAUNCHES = 20_000
MOST_LOOKS = 100


def cuda_looks(module: nn.Module, inputs: Tensor, streams: int, seconds: float) -> list[float]:
    """Rows per second of `streams` streams together, each replaying a CUDA graph of one forward over `inputs`, in each
    look.
    """
    with torch.inference_mode(), torch.cuda.device(inputs.device):
        launches = [launcher(module, inputs.clone()) for _ in range(streams)]
        once = min(timed(launches, 1) for _ in range(3))
        rounds = min(max(1, int(min(LOOK_S, seconds) / once)), MOST_LAUNCHES)
        times = max(1, round(seconds / (rounds * once)))
        return [rounds * streams * len(inputs) / timed(launches, rounds) for _ in range(min(times, MOST_LOOKS))]


def timed(launches: Sequence[Callable[[], None]], rounds: int) -> float:
    """Seconds for `rounds` rounds of all `launches`."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(rounds):
        for launch in launches:
            launch()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def launcher(module: nn.Module, inputs: Tensor) -> Callable[[], None]:
    """Queues one forward on a stream of its own; by itself, kernel by kernel, when it cannot be captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()

    def eager() -> None:
        with torch.cuda.stream(stream):
            module(inputs)

    for _ in range(2):
        eager()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            answers = module(inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return eager

    def replay(answers: object = answers) -> None:  # the answers' memory must live as long as the graph
        with torch.cuda.stream(stream):
            graph.replay()

    return replay
