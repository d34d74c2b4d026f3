"""The decoders that are held to the same oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from text.steps import COLUMNS

from gpuinfer.api import BackendContext, ModelSpec, Setup
from gpuinfer.text.checkpoint import Checkpoint, open_checkpoint
from gpuinfer.text.checkpoint.model_family import Biases
from gpuinfer.text.checkpoint.tensor_layout import RotaryLayout, TensorLayout
from gpuinfer.text.decoder.compiled_decoder import CpuDecoder, cpu_available
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.decoder.torch_layers import tensors_of
from gpuinfer.text.stages.open_staged_decoder import open_in_stages
from gpuinfer.text.stages.staged_decoder import StagedDecoder
from gpuinfer.text.text_options import TorchModelOptions
from gpuinfer.text.transformer import Decoder, Shape, Weights

Make = Callable[..., Decoder]  # shape, weights, dtype, slots=, length=, and the pages of `steps.py` for so many rows


def on_the_cpu(
    shape: Shape, weights: Weights, dtype: torch.dtype, slots: int, pages: int | None = None, **options: object
) -> TorchDecoder:
    of_all = pages or slots * COLUMNS
    return TorchDecoder(shape, weights, torch.device("cpu"), dtype, slots=slots, pages=of_all, **options)


def kernels(
    shape: Shape, weights: Weights, dtype: torch.dtype, slots: int, pages: int | None = None, **options: object
) -> CpuDecoder:
    return CpuDecoder(shape, weights, dtype, slots=slots, pages=pages or slots * COLUMNS, **options)


@dataclass(frozen=True)
class Given:
    """As much of a checkpoint as stages ask for."""

    shape: Shape
    given: Weights
    name: str = "a-model"

    def weights(self, dtype: torch.dtype) -> Weights:
        return self.given

    @property
    def layout(self) -> TensorLayout:
        return RotaryLayout(self.shape, Biases())


def in_stages(
    shape: Shape,
    weights: Weights,
    dtype: torch.dtype,
    *,
    slots: int,
    length: int,
    pages: int | None = None,
    places: tuple[str, ...] = ("cpu",),
    deterministic: bool = True,
) -> StagedDecoder:
    """Two of them, with micro-batches of a few tokens, so that prompts are cut in the middle."""
    tuning = TorchModelOptions(parallel="pipeline", stages=2, threads=1, micro_batch_rows=3)
    decoder, _ = open_in_stages(
        Given(shape, weights),
        dtype,
        Setup(devices=places, deterministic=deterministic),
        tuning,
        slots=slots,
        pages=pages or slots * COLUMNS,
        length=length,
        step_tokens=64,
        lane=BackendContext().lane,
    )
    return decoder


DECODERS: dict[str, Make] = {
    "torch": partial(on_the_cpu, graphs=False),
    "torch in fixed shapes": partial(on_the_cpu, graphs=True),
    "torch, deterministic": partial(on_the_cpu, deterministic=True),
}
if cpu_available(torch.float32):
    DECODERS["kernels"] = partial(kernels, threads=1)
    DECODERS["kernels on two threads"] = partial(kernels, threads=2)
    DECODERS["in stages"] = in_stages

STAGES = [pytest.mark.thorough]  # each hand-over takes a while on a busy machine; the quick ones: test_stages_of_text
each_decoder = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=STAGES if name == "in stages" else []) for name, make in DECODERS.items()],
)


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(ModelSpec(str(folder), None, 0, "int32", kind="text"))


def same_weights(one: Weights, other: Weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))
