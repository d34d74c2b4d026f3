"""A model as a list of layers that can be called one after the other."""

from __future__ import annotations

from torch import nn

from gpuinfer.models.layers import find_layers
from gpuinfer.models.stages.tracing import traced_along


def segments_of(module: nn.Module, name: str, attribute: str | None = None) -> list[nn.Module]:
    """What `module` computes, as modules that are called in this order, each with what the one before it answered.

    Where it does more than call its layers (`models.layers`), its forward is cut at each of them. Raises `UsageError`
    for a model `name` whose layers cannot be told apart.
    """
    found = find_layers(module, name, attribute, "use -B parallel=data")
    return traced_along(module, found.layers, name, found.path) if found.path else list(found.layers)
