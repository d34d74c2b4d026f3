"""Models of rows: what a backend of your own builds from the run's `ModelSpec`.

module = build(self.setup.model, device=self.setup.device, dtype=self.setup.dtype, seed=self.setup.seed)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuinfer.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from gpuinfer.api import ModelSpec

__all__ = ["build"]


def build(spec: ModelSpec, *, device: str = "cpu", dtype: str = "float32", seed: int = 0) -> nn.Module:
    """The model that `spec` names, with its weights, ready to answer: on `device` (auto, cpu, cuda, cuda:1) in `dtype`.

    It takes features [rows, spec.inputs] of that dtype and answers with a tensor, or a tuple or dict of tensors, of as
    many rows. Nothing in it is trainable. The same spec and seed give the same weights in every process.

    Imports torch. Raises `UsageError` when the model cannot be had: no such name, a factory that raises, weights that
    do not fit; and for a model of text, which is no module but a checkpoint that `spec.name` leads to.
    """
    if spec.kind != "rows":
        raise UsageError(
            f"'{spec.name}' is a model of text, and gpuinfer.models.build makes models of rows. Open the checkpoint "
            "that `spec.name` leads to, or leave text to the backend inprocess."
        )
    from gpuinfer.models import load

    return load.build(spec, device=load.resolve_device(device), dtype=load.resolve_dtype(dtype), seed=seed)
