"""What a model's layers do not allow, said before anything is measured: the model is built for that, and let go of."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.models.device import resolve_devices
from gpuinfer.models.load import build
from gpuinfer.models.stages.cutting import segments_of
from gpuinfer.models.stages.options import StageOptions
from gpuinfer.models.stages.planning import count_for


def check_layers(spec: ModelSpec, setup: Setup, options: StageOptions) -> None:
    """Raises `UsageError` where `open_staged` would: for layers that cannot be told, and for stages and points that
    they do not allow. The weights are not read.
    """
    devices = resolve_devices(setup.devices)
    with ThreadPoolExecutor(1) as thread:  # which ends: others are told their number of cores as they first compute
        segments = thread.submit(_count, spec, setup, options.layers).result()
    count_for(options, devices, segments, spec.name)


def _count(spec: ModelSpec, setup: Setup, layers: str | None) -> int:
    bare = replace(spec, weights=None)
    module = build(bare, device=torch.device("cpu"), dtype=torch.float32, seed=setup.seed)
    return len(segments_of(module, spec.name, layers))
