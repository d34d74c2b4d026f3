"""From a run's setup to a model in stages that answers blocks: cut, tried out, split, and each stage at its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from gpuinfer.api import BackendContext, Lane, Limits, ModelSpec, Roofline, Setup
from gpuinfer.models.device import MEGABYTE, Gauge, resolve_devices
from gpuinfer.models.frozen import unpack
from gpuinfer.models.layers import check_same
from gpuinfer.models.layouts import AnswerLayout, row_dtype
from gpuinfer.models.load import build, probe, resolve_dtype
from gpuinfer.models.memory import LARGEST, LARGEST_OF_ROWS, keep_freed_memory
from gpuinfer.models.nvml import seen_together
from gpuinfer.models.open_model import CPU_ENOUGH_ROWS, Opened, cores_of, limits_for
from gpuinfer.models.pinned import register
from gpuinfer.models.processor import computed_in
from gpuinfer.models.stages.cutting import segments_of
from gpuinfer.models.stages.forward import StagedForward
from gpuinfer.models.stages.moving import OnCpu, OnCuda
from gpuinfer.models.stages.pipeline import Pipeline
from gpuinfer.models.stages.placing import Placed, stages_at
from gpuinfer.models.stages.planning import StageTuning, bytes_of, fits_one, places_of, rows_for, split_for, times_on
from gpuinfer.models.stages.splitting import Split

HOST = torch.device("cpu")
CHECKED_ROWS = 2  # as few as a model is tried with in any case
BY_LAYER = "layer by layer"


@dataclass(frozen=True)
class Cut:
    """A model of rows on the host, cut into stages that are not at their places yet."""

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


def cut_model(spec: ModelSpec, setup: Setup, tuning: StageTuning) -> Cut:
    """Build the model and cut it: how long each layer takes is measured. Sets threads and the allocator for the whole
    process. Raises `UsageError` when the model cannot be had or not be cut.
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
    segments = segments_of(module, spec.name, tuning.layers)
    check_cut(module, segments, spec, dtype)

    places = places_of(tuning, devices, len(segments), spec.name)
    rows = rows_for(setup, tuning, on_cpu)
    features = torch.zeros(min(rows, CPU_ENOUGH_ROWS) if on_cpu else rows, spec.inputs, dtype=dtype)
    times = times_on(places, segments, features, setup, tuning)
    sizes = [bytes_of(segment) for segment in segments]
    split = split_for(tuning, places, sizes, times, spec.name)
    return Cut(segments, places, split, times, sizes, rows, answer, computed, on_cpu)


def open_staged(
    spec: ModelSpec,
    setup: Setup,
    tuning: StageTuning,
    roofline: Roofline | None = None,
    lane: Callable[[str], Lane] | None = None,
) -> Opened:
    """`cut_model`, and each stage where it runs. `lane` gives a lane of the ledger for each."""
    made = cut_model(spec, setup, tuning)
    places, split, sizes, rows, on_cpu, dtype = made.places, made.split, made.sizes, made.rows, made.on_cpu, made.dtype
    cut: dict[str, Any] = {"mode": tuning.parallel, "fits_one": fits_one(places, sum(sizes))}
    stages = stages_at(places, split, made.segments, made.times, spec, setup, tuning, dtype)
    weights = [sum(sizes[start:stop]) for start, stop in split]
    cut["stages"] = [told_of(*one) for one in zip(stages, split, weights, strict=True)]

    limits = limits_of(setup, tuning, places, rows, roofline)
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
    gauges = [Gauge(device) for device in dict.fromkeys(places)]
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
        return {**reading(gauges), **facts, "stages": pipeline.counts()}

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


def limits_of(
    setup: Setup, tuning: StageTuning, places: Sequence[torch.device], rows: int, roofline: Roofline | None
) -> Limits:
    """As of a whole model, but for how many batches are in flight and what is enough for all stages."""
    usual = limits_for(places[0], setup, tuning, roofline)
    in_flight = in_flight_of(tuning, places)
    enough = min(usual.max_rows, rows * len(places)) if places[0].type == "cpu" else None
    return replace(usual, in_flight=in_flight, enough_rows=enough)


def in_flight_of(tuning: StageTuning, places: Sequence[torch.device]) -> int:
    """Batches: of `layers` one, else as many as keep all stages at work where each is but one micro-batch."""
    return 1 if tuning.parallel == "layers" else tuning.in_flight or len(places) + 1


def told_of(stage: Placed, layers: tuple[int, int], weights: int) -> dict[str, Any]:
    """What the report says of a stage with so many bytes of weights, in plain values."""
    return {
        "layers": [layers[0], layers[1] - 1],
        "device": str(stage.device),
        "threads": stage.threads,
        "weights_mb": weights / MEGABYTE,
    }


def reading(gauges: Sequence[Gauge]) -> dict[str, Any]:
    """Of all devices together: memory added up, the mean utilisation."""
    parts = [gauge.read() for gauge in gauges]
    found: dict[str, Any] = {"name": ", ".join(dict.fromkeys(str(part["name"]) for part in parts))}
    for key in ("allocated_mb", "reserved_mb"):
        if known := [part[key] for part in parts if key in part]:
            found[key] = sum(known)
    if used := [part["utilisation"] for part in parts if "utilisation" in part]:
        found["utilisation"] = sum(used) / len(used)
    return {**found, **seen_together(parts)}
