"""Activation checkpointing: of a model's layers only the inputs of each segment are kept on the way forward, and what
lies between is computed again on the way back (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

Its layers must each be called with what the one before it answered (`models/layers.py` finds them).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpuinfer.errors import UsageError
from gpuinfer.models.layers import find_layers
from gpuinfer.models.load import called

Segments = int | Literal["auto"]
CURE = "leave -B checkpoint_segments out"


class Segment(nn.Module):
    """Consecutive layers, of which the input alone is kept unless `kept`."""

    def __init__(self, layers: Sequence[nn.Module], kept: bool) -> None:
        super().__init__()
        self.layers, self._kept = nn.ModuleList(layers), kept

    def forward(self, inputs: Any, *rest: Any, **named: Any) -> Any:
        if self._kept or not torch.is_grad_enabled():
            return self._through(inputs, *rest, **named)
        return checkpoint(self._through, inputs, *rest, use_reentrant=False, **named)

    def _through(self, inputs: Any, *rest: Any, **named: Any) -> Any:
        for layer in self.layers:
            inputs = layer(inputs, *rest, **named)
        return inputs


def divide(module: nn.Module, segments: Segments, attribute: str | None, name: str) -> tuple[nn.Module, int]:
    """`module` with its layers in so many segments (`auto`: about the square root of the layers), and how many there
    are. Its parameters stay the same objects; their names do not. Raises `UsageError`.
    """
    found = find_layers(module, name, attribute, CURE)
    layers = found.layers
    count = round(math.sqrt(len(layers))) if segments == "auto" else segments
    if count > len(layers):
        raise UsageError(
            f"checkpoint_segments={count}, and {called(name)} has {len(layers)} layers. Give no more, or auto."
        )
    bounds = [round(index * len(layers) / count) for index in range(count + 1)]
    # what comes last is needed first on the way back: to compute it again would save nothing
    made = [Segment(layers[low:high], high == len(layers)) for low, high in itertools.pairwise(bounds)]
    if not found.path:
        return nn.Sequential(*made), count
    held = module.get_submodule(found.path)
    owner, _, place = found.path.rpartition(".")
    row = nn.Sequential(*made) if isinstance(held, nn.Sequential) else nn.ModuleList(made)
    setattr(module.get_submodule(owner), place, row)
    return module, count
