"""Activation checkpointing: of a model's layers only the inputs of each segment are kept on the way forward, and what
lies between is computed again on the way back (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

The layers must be told apart: those of an nn.Sequential, or of the one ModuleList (or Sequential) of alike layers that
the module has, each called with what the one before it answered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpuinfer.errors import UsageError
from gpuinfer.models.load import called
from gpuinfer.models.staging import tensors_of

Segments = int | Literal["auto"]
CURE = "Leave -B checkpoint_segments out"


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
    owner, place, layers = find_layers(module, attribute, name)
    count = round(math.sqrt(len(layers))) if segments == "auto" else segments
    if count > len(layers):
        raise UsageError(
            f"checkpoint_segments={count}, and {called(name)} has {len(layers)} layers. Give no more, or auto."
        )
    bounds = [round(index * len(layers) / count) for index in range(count + 1)]
    # what comes last is needed first on the way back: to compute it again would save nothing
    made = [Segment(layers[low:high], high == len(layers)) for low, high in itertools.pairwise(bounds)]
    if owner is None:
        return nn.Sequential(*made), count
    setattr(
        owner, place, nn.Sequential(*made) if isinstance(getattr(owner, place), nn.Sequential) else nn.ModuleList(made)
    )
    return module, count


def find_layers(
    module: nn.Module, attribute: str | None, name: str
) -> tuple[nn.Module | None, str, Sequence[nn.Module]]:
    """Whose layers they are (None: the module is the row of layers itself), under which attribute, and the layers."""
    if attribute is not None:
        return _named(module, attribute, name)
    if isinstance(module, nn.Sequential):
        return None, "", list(module)
    found = list(_rows_of_layers(module, ""))
    if len(found) == 1:
        return _named(module, found[0], name)
    if not found:
        raise UsageError(
            f"the layers of {called(name)} cannot be told apart: it has no ModuleList or Sequential of alike layers. "
            f"Name the attribute that holds them with -B checkpoint_layers=NAME, or {CURE[0].lower()}{CURE[1:]}."
        )
    raise UsageError(
        f"the layers of {called(name)} cannot be told apart: {', '.join(found)} are all rows of alike layers. "
        f"Name one of them: -B checkpoint_layers={found[0]}."
    )


def _named(module: nn.Module, path: str, name: str) -> tuple[nn.Module, str, Sequence[nn.Module]]:
    owner_path, _, place = path.rpartition(".")
    try:
        owner = module.get_submodule(owner_path)
        layers = owner.get_submodule(place)
    except AttributeError:
        layers = None
    if not isinstance(layers, nn.ModuleList | nn.Sequential):
        known = [one for one, part in module.named_modules() if one and isinstance(part, nn.ModuleList | nn.Sequential)]
        raise UsageError(
            f"checkpoint_layers={path}: {called(name)} has no ModuleList or Sequential of that name. "
            f"It has: {', '.join(known) or 'none'}."
        )
    return owner, place, list(layers)


def _rows_of_layers(module: nn.Module, before: str) -> Iterator[str]:
    """The paths of all rows of alike layers, without those inside such a row."""
    for name, child in module.named_children():
        path = f"{before}{name}"
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1 and len({*map(_form, child)}) == 1:
            yield path
        else:
            yield from _rows_of_layers(child, f"{path}.")


def _form(layer: nn.Module) -> Any:
    """What alike layers have in common: their class, and the names and shapes of their parameters."""
    return type(layer), tuple((name, tuple(one.shape)) for name, one in layer.named_parameters())


def same_answers(before: Any, after: Any) -> bool:
    """Whether two answers are the same up to rounding."""
    old, new = tensors_of(before), tensors_of(after)
    return len(old) == len(new) and all(map(_close, old, new))


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), 1e-4, 1e-5, equal_nan=True)
