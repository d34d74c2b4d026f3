"""A model as a list of layers to be called in turn, also where its forward is no plain sequence: embed → layers →
heads, values that skip some.

The forward is traced once with torch.fx (Reed et al., "torch.fx: Practical Program Capture and Transformation for Deep
Learning in Python", MLSys 2022), layers left whole. Operations before the first layer go with it, those after a layer
with the next one, and those after the last layer with that; values that are needed later travel along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from gpuinfer.errors import UsageError
from gpuinfer.host import error_text
from gpuinfer.models.load import title
from gpuinfer.models.model_layers import find_layers, layer_paths


class _Alone(nn.Module):
    """The module with the features as its only argument; other arguments of its forward have their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: Tensor) -> Any:
        return self.module(features)


class _Whole(fx.Tracer):
    """A tracer that leaves these modules whole and enters the modules that hold them."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = set(layers)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self.layers:
            return True
        return not self.layers & set(m.modules()) and super().is_leaf_module(m, module_qualified_name)


class TracedSegment(nn.Module):
    """One stretch of a traced forward. The first takes the features and the last gives the answer; between them goes a
    tuple of the values that are still needed.
    """

    def __init__(self, root: nn.Module, nodes: Sequence[fx.Node], takes: Sequence[fx.Node], gives: Any) -> None:
        super().__init__()
        graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in takes:
            known[node] = graph.placeholder(node.name)
        for node in nodes:
            known[node] = graph.node_copy(node, known.__getitem__)
        graph.output(fx.node.map_arg(gives, known.__getitem__))
        self.body = fx.GraphModule(root, graph)
        self._first = [node.op for node in takes] == ["placeholder"]

    def forward(self, values: Any) -> Any:
        return self.body(values) if self._first else self.body(*values)


def traced_along(module: nn.Module, layers: Sequence[nn.Module], name: str, attribute: str) -> list[nn.Module]:
    """The forward of `module` as one segment for each of `layers`. Raises `UsageError` where it cannot be cut there."""
    root, tracer = _Alone(module), _Whole(layers)
    try:
        nodes = list(tracer.trace(root).nodes)
    except Exception as error:
        raise UsageError(
            f"{title(name)}: its forward cannot be cut at '{attribute}', as what it does depends on values that it "
            f"computes ({error_text.short_message(error)}). Give it a method "
            "segments() that lists the modules which it calls one after the other."
        ) from error
    modules = {node: root.get_submodule(str(node.target)) for node in nodes if node.op == "call_module"}
    calls = [node for node, one in modules.items() if one in tracer.layers]
    if [modules[node] for node in calls] != list(layers):
        raise UsageError(
            f"{title(name)}: its forward does not call the members of '{attribute}' once each and in their order. "
            "Name another attribute, or give it a method segments()."
        )
    places = [nodes.index(node) + 1 for node in calls[:-1]]  # the segments end before each of these
    at = {node: place for place, node in enumerate(nodes)}
    answer = nodes[-1].args[0]
    segments: list[nn.Module] = []
    takes = [node for node in nodes if node.op == "placeholder"]
    for start, stop in pairwise([0, *places, len(nodes)]):
        inside = [node for node in nodes[start:stop] if node.op not in ("placeholder", "output")]
        needed = [node for node in [*takes, *inside] if any(at[user] >= stop for user in node.users)]
        gives: Any = answer if stop == len(nodes) else tuple(needed)
        segments.append(TracedSegment(root, inside, takes, gives))
        takes = needed
    return segments


@dataclass(frozen=True)
class Segments:
    """A model as modules to be called in turn, and for each the dotted paths of modules that mean it."""

    modules: Sequence[nn.Module]
    paths: Sequence[Sequence[str]]


def segments_of(module: nn.Module, name: str, attribute: str | None = None) -> Segments:
    """`module` as modules to be called in turn. Where its forward does more than call its layers
    (`models.model_layers`), it is cut at each of them. Raises `UsageError` for a model `name` whose layers cannot be
    told apart.
    """
    found = find_layers(module, name, attribute, "use -B parallel=data")
    modules = traced_along(module, found.layers, name, found.path) if found.path else list(found.layers)
    return Segments(modules, layer_paths(module, found.layers))
