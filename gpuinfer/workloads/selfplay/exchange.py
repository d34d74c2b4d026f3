"""What passes between a worker's search and the backend: room for blocks, and answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuinfer.api import Infer
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.workloads.selfplay.game import Game

Answers = tuple[np.ndarray, np.ndarray]  # policy logits float32 [rows, actions], values float32 [rows, seats]


def room(infer: Infer, game: Game, rows: int) -> np.ndarray | None:
    """Where the backend reads rows in place, if anywhere. Raises WorkError when that is not made for this game."""
    block = infer.block(rows)
    if block is None:
        return None
    if (block.shape, block.dtype) != ((rows, game.features), game.feature_dtype):
        raise WorkError(
            f"the backend gave room for {block.dtype} {list(block.shape)} where {game.feature_dtype} "
            f"{[rows, game.features]} was asked for. Mend its block(), or let it return None."
        )
    return np.asarray(block)


def as_answers(result: Any, rows: int, game: Game) -> Answers:
    """(policy logits float32 [rows, actions], values float32 [rows, seats]) of a model's answer."""
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise UsageError(
            f"the model answered with {type(result).__name__}, not (policy logits, values). Return these two tensors."
        )
    logits, values = (np.require(part, np.float32, ("C", "A", "W")) for part in result)  # as the kernel is compiled
    expected = (rows, game.actions), (rows, game.seats)
    if (logits.shape, values.shape) != expected:
        raise WorkError(
            f"the model answered with shapes {logits.shape} and {values.shape} where {expected[0]} and {expected[1]} "
            "were due. Mend the model, or choose the game that it was made for."
        )
    if not np.isfinite(values).all():  # the engine lets -inf pass, for the sake of the logits
        raise WorkError(f"the model answered with -inf among its values {expected[1]}. Check its weights and inputs.")
    return logits, values
