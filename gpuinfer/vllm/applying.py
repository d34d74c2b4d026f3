"""What rows may say, done to their logits in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from gpuinfer.text.language.trie.walks import Rules

ONLY = 1  # kinds of rules, as in cpu_walk.py


def keep(logits: Tensor, rows: NDArray[np.int32], rules: Rules | None) -> Tensor:
    """Leave the allowed tokens in `logits` float32 [any rows, vocabulary], in place: `rules` are those of `rows`.

    All others of such a row become minus infinity: one pass over the row, as any mask takes, and a few numbers besides.
    """
    import torch

    if rules is None:
        return logits
    count, kinds, starts = int(rules.starts[len(rows)]), rules.kinds[: len(rows)], rules.starts[: len(rows) + 1]
    lengths = starts[1:] - starts[:-1]
    places = np.repeat(rows * np.int64(logits.stride(0)), lengths)
    places += rules.ids[:count]
    flat = logits.as_strided((logits.shape[0] * logits.stride(0),), (1,), logits.storage_offset())
    at, few = torch.from_numpy(places).to(logits.device), rows
    if kinds.min() != ONLY or kinds.max() != ONLY:
        few = rows[kinds == ONLY]
        only = np.repeat(kinds == ONLY, lengths)
        flat[torch.from_numpy(places[~only]).to(logits.device)] = -torch.inf
        at = torch.from_numpy(places[only]).to(logits.device)
    kept = flat.index_select(0, at)
    for first, end in [(0, len(few))] if len(few) == len(logits) else _runs(few):
        logits[first:end].fill_(-torch.inf)
    flat.index_copy_(0, at, kept)
    return logits


def _runs(rows: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Rows that lie side by side, together: (first, end)."""
    if not len(rows):
        return []
    ordered = np.sort(rows)
    breaks = np.flatnonzero(np.diff(ordered) > 1)
    firsts = np.concatenate([ordered[:1], ordered[breaks + 1]])
    ends = np.concatenate([ordered[breaks], ordered[-1:]]) + 1
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))


def force(logits: Tensor, place: int, tokens: Sequence[int]) -> None:
    """One of these tokens comes next in the row, whatever the model would say."""
    logits[place].fill_(-float("inf"))
    logits[place, list(tokens)] = 0.0
