"""Checks a store against a layout, and reads it: each tensor once, straight to its place."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.models.text.checkpoint.layout import Layout, Part
from gpuinfer.models.text.checkpoint.store import Store
from gpuinfer.models.text.weights import Weights

SHOWN = 3  # tensors in a message
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn\.(bias|masked_bias))$")  # older files keep what can be computed


def parts_of(layout: Layout) -> list[Part]:
    """All tensors that the layout takes from a store."""
    found: list[Part] = []

    def take(parts: Sequence[Part], wide: bool) -> Tensor:
        found.extend(parts)
        return torch.empty(0)

    layout.weights(take)
    return found


def check(store: Store, layout: Layout, spare: Sequence[str] = ()) -> None:
    """Raises `UsageError` that names the first tensors that are missing, unknown or of another shape.

    `spare` names those that may be there and are not used.
    """
    wanted = {part.name: part.shape for part in parts_of(layout)}
    problems = [f"'{name}' {list(shape)} is missing" for name, shape in wanted.items() if name not in store.tensors]
    problems += [
        f"'{name}' is {list(store.tensors[name].shape)}, config.json makes it {list(shape)}"
        for name, shape in wanted.items()
        if name in store.tensors and store.tensors[name].shape != shape
    ]
    known = wanted.keys() | set(spare)
    problems += [
        f"'{name}' is not part of it" for name in store.tensors if name not in known and not BUFFERS.search(name)
    ]
    if problems:
        more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise UsageError(
            f"the weights in {store.where} are not those of a {layout.shape.family} model of this config: "
            f"{'; '.join(problems[:SHOWN])}{more}. Copy the whole folder again, or save the model again."
        )


def read_weights(store: Store, layout: Layout, dtype: torch.dtype) -> Weights:
    """All weights on the CPU, matrices in `dtype`, norms in float32. Beside them a tensor's worth of memory is used."""

    def take(parts: Sequence[Part], wide: bool) -> Tensor:
        into = torch.empty(_size(parts), dtype=torch.float32 if wide else dtype)
        row = 0
        for part in parts:
            rows = part.shape[-1] if part.transposed else part.shape[0]
            _read(store, part, into[row : row + rows])
            row += rows
        return into

    return layout.weights(take)


def _size(parts: Sequence[Part]) -> tuple[int, ...]:
    shapes = [part.shape[::-1] if part.transposed else part.shape for part in parts]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _read(store: Store, part: Part, into: Tensor) -> None:
    if not part.transposed:
        store.read(part.name, into)
        return
    staging = torch.empty(part.shape, dtype=into.dtype)
    store.read(part.name, staging)
    into.copy_(staging.T)
