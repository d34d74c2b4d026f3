"""What fits in memory, told before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gpuinfer.errors import UsageError
from gpuinfer.models.text.shape import Shape

if TYPE_CHECKING:
    from gpuinfer.models.text.checkpoint import Checkpoint, Estimate

LONGEST = 4096  # positions of a slot unless the user asks for more
SHORTEST = 256  # below it the user has to ask
SHARE = 0.9  # of what is free: the rest of the program grows too


def fitted(
    checkpoint: Checkpoint, slots: int | None, context: int | None, dtype: torch.dtype, free_bytes: int
) -> tuple[int, Estimate]:
    """Positions in a slot, and what that takes with `slots` (None: one, the least that makes sense).

    A context that nobody asked for is halved until it fits. Raises `UsageError` with the numbers when nothing does.
    """
    from gpuinfer.models.text.checkpoint import refuse_unfit

    count, room = slots or 1, int(free_bytes * SHARE)
    length = checked_context(checkpoint.shape, context)
    estimate = checkpoint.estimate(count, length, dtype)
    while context is None and estimate.peak_bytes > room and length > SHORTEST:
        length = max(SHORTEST, length // 2)
        estimate = checkpoint.estimate(count, length, dtype)
    refuse_unfit(checkpoint.name, estimate, room, slots=count, length=length, dtype=dtype)
    return length, estimate


def checked_context(shape: Shape, context: int | None) -> int:
    """Positions in a slot. Raises `UsageError` for more than the model was made for."""
    if context is None:
        return min(shape.positions, LONGEST)
    if not 1 <= context <= shape.positions:
        raise UsageError(
            f"a context of {context} positions, and the model was made for {shape.positions}. "
            f"Use --context N with N from 1 to {shape.positions}."
        )
    return context
