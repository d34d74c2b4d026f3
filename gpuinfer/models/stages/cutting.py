"""A model as a list of layers that can be called one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from torch import nn

from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.models.load import called
from gpuinfer.models.stages.tracing import traced_along

SEGMENTS = "segments"
SHOWN = 5  # attributes in a message


def segments_of(module: nn.Module, name: str, attribute: str | None = None) -> list[nn.Module]:
    """What `module` computes, as modules that are called in this order, each with what the one before it answered.

    A `Sequential` is its members, and theirs where they are Sequential too; a module with a method `segments()` is
    what that lists. With `attribute` (dotted: `encoder.layers`), a ModuleList or Sequential of the module, its forward
    is cut at each of the members. Raises `UsageError` for a model `name` whose layers cannot be told apart.
    """
    if attribute is not None:
        return traced_along(module, members_of(module, name, attribute), name, attribute)
    if callable(listing := getattr(module, SEGMENTS, None)):
        return listed(listing(), name)
    if is_plain_sequential(module):
        return flattened(module)
    raise UsageError(
        f"the layers of {called(name)} cannot be told apart: it is a {type(module).__name__}, no Sequential. "
        f"{cure_for(module)}"
    )


def listed(found: object, name: str) -> list[nn.Module]:
    """What `segments()` gave. Raises `UsageError` for anything but modules."""
    parts = list(found) if isinstance(found, Sequence | nn.ModuleList) else []
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        raise UsageError(
            f"{called(name)}: segments() returned {type(found).__name__}, not a list of modules. Let it return the "
            "modules that its forward calls one after the other."
        )
    return parts


def is_plain_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether calling the members in turn is all that it does: no forward of its own, and no hooks."""
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and not (module._forward_hooks or module._forward_pre_hooks)


def flattened(module: nn.Module) -> list[nn.Module]:
    if not is_plain_sequential(module):
        return [module]
    return [part for child in module for part in flattened(child)]


def members_of(module: nn.Module, name: str, attribute: str) -> list[nn.Module]:
    """The members of that ModuleList or Sequential. Raises `UsageError`, which names those that there are."""
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, nn.ModuleList | nn.Sequential) and len(found):
        return list(found)
    known = candidates(module)
    if found is None and known:
        raise UnknownName(f"list of layers in {called(name)}", attribute, known, label="It has")
    what = "has no such attribute" if found is None else f"'{attribute}' is {type(found).__name__}"
    raise UsageError(f"{called(name)}: layers={attribute}: {what}, and a ModuleList is wanted. {cure_for(module)}")


def candidates(module: nn.Module) -> list[str]:
    """The names of attributes that may hold its layers, the longest list first."""
    lists = [
        (len(part), path)
        for path, part in module.named_modules()
        if path and isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
    ]
    return [path for _, path in sorted(lists, key=lambda one: -one[0])]


def cure_for(module: nn.Module) -> str:
    own = "a method segments() that lists the modules which its forward calls one after the other"
    if names := candidates(module):
        others = f" (or {', '.join(names[1:SHOWN])})" if len(names) > 1 else ""
        return f"Name the attribute that holds them, -B layers={names[0]}{others}, or give it {own}."
    return f"It has no ModuleList to name either: give it {own}, or use -B parallel=data."
