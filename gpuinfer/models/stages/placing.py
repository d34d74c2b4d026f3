"""Each stage at its place: its layers on their device, on a CPU with threads and cores of its own."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

import torch
from torch import nn

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.host import machine
from gpuinfer.models.open_model import cores_of
from gpuinfer.models.stages.moving import ToCuda, from_cuda
from gpuinfer.models.stages.planning import StageTuning
from gpuinfer.models.stages.splitting import Split, deal
from gpuinfer.models.stages.stage import CpuStage
from gpuinfer.models.stages.stage_cuda import CudaStage

Placed = CpuStage | CudaStage


def stages_at(
    places: Sequence[torch.device],
    split: Split,
    segments: Sequence[nn.Module],
    times: Sequence[Sequence[float]],
    spec: ModelSpec,
    setup: Setup,
    tuning: StageTuning,
    dtype: torch.dtype,
) -> list[Placed]:
    """Each with its layers where it computes; on the CPU with its threads, and its cores where there are enough."""
    seconds = [sum(times[number][start:stop]) for number, (start, stop) in enumerate(split)]
    # As in one forward, a row's answer must not depend on how many they are.
    threads = threads_of(seconds, setup, tuning.threads or (1 if setup.deterministic else None))
    cores = own_cores(threads, setup)
    stages: list[Placed] = []
    there: dict[object, torch.device] = {}  # modules and parameters → where they are
    for number, (place, (start, stop)) in enumerate(zip(places, split, strict=True)):
        own = nn.ModuleList(segments[start:stop])
        if any(there.get(part, place) != place for part in (*own.modules(), *own.parameters())):
            own = copy.deepcopy(own)  # layers that share weights, on two devices
        there |= dict.fromkeys([*own.modules(), *own.parameters()], place)
        own = own.to(place)
        name = f"{said(start, stop)} on {place}"
        if place.type == "cpu":
            stages.append(CpuStage(name, list(own), threads[number], cores[number]))
        else:
            enter = ToCuda(spec, place, dtype) if number == 0 else None
            leave = from_cuda if number == len(places) - 1 else None
            stages.append(CudaStage(name, list(own), place, enter, leave))
    return stages


def threads_of(seconds: Sequence[float], setup: Setup, threads: int | None) -> list[int]:
    """For each stage on the CPU: `threads`, or its share of the cores and those left over to the slowest."""
    return deal(cores_of(setup), seconds) if threads is None else [threads] * len(seconds)


def own_cores(threads: Sequence[int], setup: Setup) -> list[list[int] | None]:
    """The cores of each stage; None for all where they do not suffice, or other processes of the run want them too."""
    none: list[list[int] | None] = [None] * len(threads)
    if setup.processes > 1 or not hasattr(os, "sched_getaffinity"):
        return none
    allowed = sorted(os.sched_getaffinity(0))
    if sum(threads) > len(allowed) or len(allowed) > machine.cores():  # a quota of time is no core of one's own
        return none
    found: list[list[int] | None] = []
    for count in threads:
        found.append(allowed[:count])
        allowed = allowed[count:]
    return found


def said(start: int, stop: int) -> str:
    return f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}"
