"""From a run's setup to a model in stages that answers blocks: checked, cut, tried, split, and each stage on its device
or on a CPU with its own threads and cores.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from gpuinfer.api import BackendContext, Lane, ModelSpec, Roofline, Setup
from gpuinfer.host import machine
from gpuinfer.models.device import MEGABYTE, Gauge, merged_readings, resolve_devices
from gpuinfer.models.load import build, probe, resolve_dtype
from gpuinfer.models.model_layers import check_same
from gpuinfer.models.model_options import StageOptions
from gpuinfer.models.networks import unpack
from gpuinfer.models.open_model import CPU_ENOUGH_ROWS, Opened, cores_of, limits_for
from gpuinfer.models.out_of_memory import LARGEST, LARGEST_OF_ROWS, keep_freed_memory
from gpuinfer.models.pinned_memory import register
from gpuinfer.models.pipeline.layer_trace import Segments, segments_of
from gpuinfer.models.pipeline.schedule import Pipeline
from gpuinfer.models.pipeline.stage import CpuStage, CudaStage, Segment
from gpuinfer.models.pipeline.stage_plan import (
    RowsStageTuning,
    Split,
    as_many_as_fit,
    cores_by_stage,
    count_for,
    fits_one,
    module_bytes,
    places_of,
    rows_for,
    split_for,
    starts_of,
    times_on,
)
from gpuinfer.models.pipeline.staged_forward import OnCpu, OnCuda, StagedForward, ToCuda, from_cuda
from gpuinfer.models.processor import computed_in
from gpuinfer.models.row_format import AnswerLayout, row_dtype

Placed = CpuStage | CudaStage


def stages_at(
    places: Sequence[torch.device],
    split: Split,
    segments: Sequence[nn.Module],
    times: Sequence[Sequence[float]],
    spec: ModelSpec,
    setup: Setup,
    tuning: RowsStageTuning,
    dtype: torch.dtype,
) -> list[Placed]:
    """The stages, each with its layers on its device; on the CPU with its threads, and cores of its own where there are
    enough.
    """
    seconds = [sum(times[number][start:stop]) for number, (start, stop) in enumerate(split)]
    # As in one forward, a row's answer must not depend on how many they are.
    threads = threads_of(seconds, setup, tuning.threads or (1 if setup.deterministic else None))
    layers: list[list[nn.Module]] = []
    there: dict[object, torch.device] = {}  # modules and parameters → where they are
    for place, (start, stop) in zip(places, split, strict=True):
        own = nn.ModuleList(segments[start:stop])
        if any(there.get(part, place) != place for part in (*own.modules(), *own.parameters())):
            own = copy.deepcopy(own)  # layers that share weights, on two devices
        there |= dict.fromkeys([*own.modules(), *own.parameters()], place)
        layers.append(list(own.to(place)))
    enter = ToCuda(spec, places[0], dtype) if places[0].type == "cuda" else None
    return placed(places, split, layers, threads, setup, enter, from_cuda)


def placed(
    places: Sequence[torch.device],
    split: Split,
    segments: Sequence[Sequence[Segment]],
    threads: Sequence[int],
    setup: Setup,
    enter: Segment | None,
    leave: Segment | None,
    **mode: Any,
) -> list[Placed]:
    """Stages that call these `segments`, each at its place; on a CPU with its threads, and cores of its own where there
    are enough. `enter` and `leave`: what comes into the first and out of the last on a CUDA device goes through them.
    """
    cores, stages = own_cores(threads, setup), list[Placed]()
    for number, (place, (start, stop)) in enumerate(zip(places, split, strict=True)):
        name = f"layer {start} on {place}" if stop == start + 1 else f"layers {start} to {stop - 1} on {place}"
        if place.type == "cpu":
            stages.append(CpuStage(name, segments[number], threads[number], cores[number], **mode))
        else:
            first, last = enter if number == 0 else None, leave if number == len(places) - 1 else None
            stages.append(CudaStage(name, segments[number], place, first, last, **mode))
    return stages


def readings_of(stages: Sequence[Placed]) -> Callable[[], dict[str, Any]]:
    """Of `Backend.device`: what the stages' devices say, as one."""
    gauges = [Gauge(device) for device in dict.fromkeys(stage.device for stage in stages)]
    return lambda: merged_readings([gauge.read() for gauge in gauges])


def parallel_facts(
    mode: str, fits: bool | None, stages: Sequence[Placed], split: Split, sizes: Sequence[int]
) -> dict[str, Any]:
    """How a model is cut, for the report, in plain values; `fits`: whether one device would hold it, `sizes`: bytes of
    each layer's weights.
    """
    each = [
        {
            "layers": [start, stop - 1],
            "device": str(stage.device),
            "threads": stage.threads,
            "weights_mb": sum(sizes[start:stop]) / MEGABYTE,
        }
        for stage, (start, stop) in zip(stages, split, strict=True)
    ]
    return {"mode": mode, "fits_one": fits, "stages": each}


def threads_of(seconds: Sequence[float], setup: Setup, threads: int | None) -> list[int]:
    """Threads of each stage on the CPU: `threads`, or a share of the cores, the rest to the slowest stages."""
    return cores_by_stage(cores_of(setup), seconds) if threads is None else [threads] * len(seconds)


def own_cores(threads: Sequence[int], setup: Setup) -> list[list[int] | None]:
    """The cores of each stage; None for all of them where there are too few, or other processes of
    the run use them too.
    """
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


HOST = torch.device("cpu")
CHECKED_ROWS = 2  # as few as a model is tried with in any case
BY_LAYER = "layer by layer"


@dataclass(frozen=True)
class ModelCut:
    """A model of rows on the host, cut into stages that are not on their devices yet."""

    segments: Sequence[nn.Module]
    places: Sequence[torch.device]  # of each stage
    split: Split
    times: Sequence[Sequence[float]]  # seconds of each layer at each stage's place
    sizes: Sequence[int]  # bytes of each layer's weights
    rows: int  # of a micro-batch, at most
    answer: AnswerLayout
    computed: str  # the number format
    on_cpu: bool

    @property
    def dtype(self) -> torch.dtype:
        return resolve_dtype(self.computed)


def cut_model(spec: ModelSpec, setup: Setup, tuning: RowsStageTuning) -> ModelCut:
    """Build the model and cut it by the measured time of each layer. Sets threads and the allocator for the whole
    process. Raises `UsageError` when the model cannot be loaded or cut.
    """
    row_dtype(spec)  # refuses one that is unknown before anything is built
    devices = resolve_devices(setup.devices)
    on_cpu = all(device.type == "cpu" for device in devices)
    computed = computed_in(setup.dtype, tuning.compute, on_cpu)
    dtype = resolve_dtype(computed)
    keep_freed_memory(LARGEST_OF_ROWS if on_cpu else LARGEST)
    torch.set_num_threads(1 if setup.deterministic else cores_of(setup))
    module = build(spec, device=HOST, dtype=resolve_dtype(setup.dtype), seed=setup.seed, compute=dtype)
    if not on_cpu:
        unpack(module)
    answer = probe(module, spec, device=HOST, dtype=dtype)
    found = segments_of(module, spec.name, tuning.layers)
    segments = found.modules
    check_cut(module, segments, spec, dtype)

    places, starts = places_of(tuning, devices, found.paths, spec.name), starts_of(tuning, found.paths, spec.name)
    rows = rows_for(setup, tuning, on_cpu)
    features = torch.zeros(min(rows, CPU_ENOUGH_ROWS) if on_cpu else rows, spec.inputs, dtype=dtype)
    threads = tuning.threads or (1 if setup.deterministic else None)
    times = times_on(places, setup, threads, lambda place, each: as_many_as_fit(segments, features, place, each))
    sizes = [module_bytes(segment) for segment in segments]
    split = split_for(starts, places, sizes, times, spec.name)
    return ModelCut(segments, places, split, times, sizes, rows, answer, computed, on_cpu)


def open_staged(
    spec: ModelSpec,
    setup: Setup,
    tuning: RowsStageTuning,
    roofline: Roofline | None = None,
    lane: Callable[[str], Lane] | None = None,
) -> Opened:
    """`cut_model`, and each stage on its device. `lane` makes a lane of the time ledger for each stage."""
    made = cut_model(spec, setup, tuning)
    places, split, sizes, rows, on_cpu = made.places, made.split, made.sizes, made.rows, made.on_cpu
    dtype, fits = made.dtype, fits_one(places, sum(sizes))
    stages = stages_at(places, split, made.segments, made.times, spec, setup, tuning, dtype)
    cut, reading = parallel_facts(tuning.parallel, fits, stages, split, sizes), readings_of(stages)

    # Limits as of a whole model, except for batches in flight and the rows that keep all stages busy.
    limits = limits_for(places[0], setup, tuning, roofline)
    enough = min(limits.max_rows, rows * len(places)) if places[0].type == "cpu" else None
    limits = replace(limits, in_flight=in_flight_of(tuning, places), enough_rows=enough)
    pipeline = Pipeline(stages, lane or BackendContext().lane)
    torch.set_num_threads(1)  # of those who call `forward`: they only join what the stages have computed
    forward = StagedForward(
        pipeline,
        OnCpu(spec, dtype) if on_cpu else OnCuda(spec),
        rows,
        even=on_cpu and tuning.parallel == "pipeline" and not (setup.deterministic or tuning.micro_batch_rows),
        fixed_shape=setup.deterministic,
        alone=tuning.parallel == "layers",
    )
    threads = max(stage.threads for stage in stages)
    in_force = {
        "max_rows": limits.max_rows,
        "in_flight": limits.in_flight,
        "threads": threads,
        "stages": len(stages),
        "micro_batch_rows": rows,
    }
    facts = {"computes_in": made.computed, "threads": threads, "in_force": in_force, "parallel": cut}

    def device() -> Mapping[str, Any]:
        return {**reading(), **facts, "stages": pipeline.counts()}

    return Opened(
        spec,
        limits,
        forward,
        made.answer,
        device,
        partial(register, device=places[0]),
        pipeline.close,
        pipeline.waits_for,
    )


def check_cut(module: nn.Module, segments: Sequence[nn.Module], spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raises `UsageError` unless the segments, one after the other, answer as the model itself."""
    features = torch.ones(CHECKED_ROWS, spec.inputs, dtype=dtype)
    with torch.inference_mode():
        whole = module(features.clone())
    cure = "Mend its segments(), or name the attribute with its layers, -B layers=attribute."
    check_same(spec.name, whole, lambda: reduce(lambda value, layer: layer(value), segments, features), BY_LAYER, cure)


def in_flight_of(tuning: RowsStageTuning, places: Sequence[torch.device]) -> int:
    """Batches in flight: 1 with `layers`, else enough to keep all stages busy if each batch is one micro-batch."""
    return 1 if tuning.parallel == "layers" else tuning.in_flight or len(places) + 1


def check_layers(spec: ModelSpec, setup: Setup, options: StageOptions) -> None:
    """Raises `UsageError` where `open_staged` would: layers that cannot be told apart, impossible stages and split
    points. Reads no weights.
    """

    def find() -> Segments:
        bare = replace(spec, weights=None)
        module = build(bare, device=HOST, dtype=torch.float32, seed=setup.seed)
        return segments_of(module, spec.name, options.layers)

    devices = resolve_devices(setup.devices)
    with ThreadPoolExecutor(1) as thread:  # which ends: others are told their number of cores as they first compute
        found = thread.submit(find).result()
    count_for(options, devices, found.paths, spec.name)
