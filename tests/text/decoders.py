"""The decoders that are held to the same oracle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from gpuinfer.api import ModelSpec
from gpuinfer.text.checkpoint import Checkpoint, open_checkpoint
from gpuinfer.text.decoder.cpu import CpuDecoder, available
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import Decoder
from gpuinfer.text.weights import Weights

Make = Callable[..., Decoder]  # shape, weights, dtype, slots=, length=


def on_the_cpu(shape: Shape, weights: Weights, dtype: torch.dtype, **options: object) -> TorchDecoder:
    return TorchDecoder(shape, weights, torch.device("cpu"), dtype, **options)


DECODERS: dict[str, Make] = {
    "torch": partial(on_the_cpu, graphs=False),
    "torch in fixed shapes": partial(on_the_cpu, graphs=True),
    "torch, deterministic": partial(on_the_cpu, deterministic=True),
}
if available(torch.float32):
    DECODERS["kernels"] = partial(CpuDecoder, threads=1)
    DECODERS["kernels on two lanes"] = partial(CpuDecoder, threads=2)

each_decoder = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in DECODERS.items()])


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(ModelSpec(str(folder), None, 0, "int32", kind="text"))
