"""The records of self-play as a torch Dataset."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from gpuinfer.models.positions import read_shard, readable, shards_of

FIELDS = ("observation", "legal", "policy", "value", "player", "game", "move")
OPEN_SHARDS = 8  # kept in memory; a shuffled epoch over many shards reads them again and again


class SelfPlayRecords(Dataset[dict[str, torch.Tensor]]):
    """One searched move an item: a dict of the arrays that `game_records.py` describes, without their first dimension.

    `torch.utils.data.DataLoader` batches it as it is. Raises UsageError when the folder holds no records, or a shard
    that cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._shards = shards_of(Path(path))
        self._ends = list(accumulate(len(readable(shard, ["game"])["game"]) for shard in self._shards))
        self._open = lru_cache(OPEN_SHARDS)(_load)

    def __repr__(self) -> str:
        return (
            f"<SelfPlayRecords: {len(self):,} moves in {len(self._shards):,} shards of {str(self._shards[0].parent)!r}>"
        )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        shard = bisect_right(self._ends, index)
        row = index - (self._ends[shard - 1] if shard else 0)
        return {name: torch.as_tensor(array[row]) for name, array in self._open(self._shards[shard]).items()}

    def __getstate__(self) -> dict[str, Any]:
        """Loader processes open the shards for themselves."""
        return {"_shards": self._shards, "_ends": self._ends}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open = lru_cache(OPEN_SHARDS)(_load)


def _load(shard: Path) -> dict[str, np.ndarray]:
    return read_shard(shard, FIELDS)
