"""A model that raises at one block of rows: found by halving, so that the blocks beside it are answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gpuinfer.errors import BackendDied, DeviceLost

Block = TypeVar("Block")


def answers_to(forward: Callable[[Sequence[Block]], list[Any]], blocks: Sequence[Block]) -> list[Any]:
    """One result for each block, in order: what `forward` gives, and for a block at which it raises that exception.

    Where nothing raises, it is one forward. Of n blocks one bad one costs about 2 log2(n) forwards more; if all are
    bad it is twice as many as if each had come alone.
    """
    try:
        return forward(blocks)
    except (BackendDied, DeviceLost) as error:  # no block is known to be at fault, and each try costs a device
        return [error] * len(blocks)
    except Exception as error:  # noqa: BLE001 (a model may raise anything, which is its block's answer)
        if len(blocks) == 1:
            return [error]
    middle = len(blocks) // 2
    return [*answers_to(forward, blocks[:middle]), *answers_to(forward, blocks[middle:])]
