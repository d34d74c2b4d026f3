"""A model's layers: where they are, whether calling them in turn gives the model's answers, and activation
checkpointing by segments of layers.

Of each segment only the inputs are kept in the forward; what lies between is recomputed in the backward (Chen et al.
2016, "Training Deep Nets with Sublinear Memory Cost").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.models.load import title
from gpuinfer.models.out_of_memory import first_line
from gpuinfer.models.row_blocks import tensors_of

SEGMENTS = "segments"
SHOWN = 5  # attributes in a message
RELATIVE, ABSOLUTE = 1e-3, 1e-5  # tolerance between answers of the same operations


@dataclass(frozen=True)
class Layers:
    """A model's layers in order. `path` is the attribute that holds them, dotted (`encoder.blocks`); "" where the model
    does nothing but call them in turn.
    """

    layers: Sequence[nn.Module]
    path: str = ""


def find_layers(module: nn.Module, name: str, attribute: str | None, otherwise: str) -> Layers:
    """The layers of `module`, the model `name`: those under `attribute`; else what its method `segments()` lists; else
    the members of a `Sequential`, nested ones included; else its one list of alike layers.

    Raises `UsageError` where they cannot be told apart, with the attributes to choose from and `otherwise` as the cure.
    """
    if attribute is not None:
        return Layers(_members(module, name, attribute, otherwise), attribute)
    if callable(listing := getattr(module, SEGMENTS, None)):
        found = listing()
        parts = list(found) if isinstance(found, Sequence | nn.ModuleList) else []
        if not parts or not all(isinstance(part, nn.Module) for part in parts):
            raise UsageError(
                f"{title(name)}: segments() returned {type(found).__name__}, not a list of modules. Let it return the "
                "modules that its forward calls one after the other."
            )
        return Layers(parts)
    if _is_plain_sequential(module):
        return Layers(_flattened(module))
    rows = list(_rows_of_layers(module, ""))
    if len(rows) == 1:
        return Layers(_members(module, name, rows[0], otherwise), rows[0])
    what = f"{', '.join(rows)} are all rows of alike layers" if rows else f"it is a {type(module).__name__}"
    raise UsageError(f"the layers of {title(name)} cannot be told apart: {what}. {_cure(module, otherwise)}")


def layer_paths(module: nn.Module, layers: Sequence[nn.Module]) -> list[list[str]]:
    """For each of a module's layers the dotted paths that mean it, its own before those of what it begins with: of a
    module that holds several layers (`encoder`) the first of these. A layer may be a wrapper that holds the named one.
    """
    within = [{id(part) for part in layer.modules()} for layer in layers]
    held: dict[int, int] = {}  # the first layer that a module is in
    for number, parts in enumerate(within):
        for part in parts:
            held.setdefault(part, number)
    own: list[list[str]] = [[] for _ in layers]
    holding: list[list[str]] = [[] for _ in layers]
    for path, part in module.named_modules(remove_duplicate=False):
        if not path:
            continue
        parent = module.get_submodule(path.rpartition(".")[0])
        place = held.get(id(part))
        if place is not None and id(parent) not in within[place]:
            own[place].append(path)
        elif place is None and (begins := [held[id(one)] for one in part.modules() if id(one) in held]):
            holding[min(begins)].append(path)
    return [one + more for one, more in zip(own, holding, strict=True)]


def check_same(name: str, before: Any, again: Callable[[], Any], how: str, cure: str) -> None:
    """Raises `UsageError`, which ends with `cure`, unless the model called `how` ("layer by layer") answers `again` as
    it did `before`, up to rounding.
    """
    try:
        with torch.inference_mode():
            after = tensors_of(again())
    except Exception as error:
        raise UsageError(
            f"{title(name)} cannot be called {how}: {type(error).__name__}: {first_line(error)}. {cure}"
        ) from error
    old = tensors_of(before)
    alike = [
        one.shape == other.shape and torch.allclose(one.float(), other.float(), RELATIVE, ABSOLUTE, equal_nan=True)
        for one, other in zip(old, after, strict=False)
    ]
    if len(old) != len(after) or not all(alike):
        raise UsageError(f"{title(name)} answers otherwise when it is called {how}. {cure}")


def _is_plain_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether it does nothing but call its members in turn: no forward of its own, and no hooks."""
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and not (module._forward_hooks or module._forward_pre_hooks)


def _flattened(module: nn.Module) -> list[nn.Module]:
    if not _is_plain_sequential(module):
        return [module]
    return [part for child in module for part in _flattened(child)]


def _members(module: nn.Module, name: str, attribute: str, otherwise: str) -> list[nn.Module]:
    """The members of that ModuleList or Sequential. Raises `UsageError` with the attributes that exist."""
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, nn.ModuleList | nn.Sequential) and len(found):
        return list(found)
    known = _candidates(module)
    if found is None and known:
        raise UnknownName(f"list of layers in {title(name)}", attribute, known, label="It has")
    what = "has no such attribute" if found is None else f"'{attribute}' is {type(found).__name__}"
    raise UsageError(
        f"{title(name)}: layers={attribute}: {what}, and a ModuleList is wanted. {_cure(module, otherwise)}"
    )


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


def _candidates(module: nn.Module) -> list[str]:
    """The names of attributes that may hold its layers, the longest list first."""
    lists = [
        (len(part), path)
        for path, part in module.named_modules()
        if path and isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
    ]
    return [path for _, path in sorted(lists, key=lambda one: -one[0])]


def _cure(module: nn.Module, otherwise: str) -> str:
    own = "a method segments() that lists the modules which its forward calls one after the other"
    if names := _candidates(module):
        others = f" (or {', '.join(names[1:SHOWN])})" if len(names) > 1 else ""
        return f"Name the attribute that holds them, -B layers={names[0]}{others}, or give it {own}."
    return f"It has no ModuleList to name either: give it {own}, or {otherwise}."


Segments = int | Literal["auto"]
CURE = "leave -B checkpoint_segments out"


class Segment(nn.Module):
    """Consecutive layers of which only the input is kept, unless `kept`."""

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
    """Divide `module` into so many segments (`auto`: about the square root of the layers); returns it and their number.
    Parameters stay the same objects, under other names. Raises `UsageError`.
    """
    found = find_layers(module, name, attribute, CURE)
    layers = found.layers
    count = round(math.sqrt(len(layers))) if segments == "auto" else segments
    if count > len(layers):
        raise UsageError(
            f"checkpoint_segments={count}, and {title(name)} has {len(layers)} layers. Give no more, or auto."
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
