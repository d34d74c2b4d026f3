"""Steps for decoders under test, from plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.transformer import Step

COLUMNS = 8  # pages of a row: 256 positions


def table_of(slots: Sequence[int], columns: int = COLUMNS) -> NDArray[np.int32]:
    """The pages of rows that have them side by side, each as many: [rows, columns]."""
    return (np.array(slots, np.int32)[:, None] * columns + np.arange(columns, dtype=np.int32)).astype(np.int32)


def step_of(*segments: tuple[int, int, Sequence[int]], last_only: bool = False) -> Step:
    """A step of (slot, start, tokens) segments that asks for the logits of all tokens, or of each segment's last."""
    tokens = [token for _, _, run in segments for token in run]
    lengths = [len(run) for _, _, run in segments]
    wanted = np.cumsum(lengths) - 1 if last_only else np.arange(len(tokens))
    slots, starts, _ = zip(*segments, strict=True)
    arrays = (np.ascontiguousarray(part, np.int32) for part in (tokens, table_of(slots), starts, lengths, wanted))
    return Step(*arrays)


def seeing(*segments: tuple[int, int, Sequence[int], Sequence[int]]) -> Step:
    """A step of (slot, start, tokens, sees) segments that asks for the logits of all tokens."""
    sees = [seen for *_, run in segments for seen in run]
    return replace(step_of(*(segment[:3] for segment in segments)), sees=np.array(sees, np.int32))


def scattered(step: Step, order: Sequence[int]) -> Step:
    """The same with every page of the cache in the place of another: page i is `order[i]`."""
    return replace(step, pages=np.array(order, np.int32)[step.pages])


def copy_row(decoder, source: int, targets: Sequence[int]) -> None:
    """Give the slots `targets` all that `source` has."""
    pages, others = table_of([source])[0].tolist(), table_of(targets)
    decoder.copy_pages(pages * len(others), others.ravel().tolist())
