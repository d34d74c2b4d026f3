"""Steps for decoders under test, from plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gpuinfer.text.step import Step


def step_of(*segments: tuple[int, int, Sequence[int]], last_only: bool = False) -> Step:
    """A step of (slot, start, tokens) segments that asks for the logits of all tokens, or of each segment's last."""
    tokens = [token for _, _, run in segments for token in run]
    lengths = [len(run) for _, _, run in segments]
    wanted = np.cumsum(lengths) - 1 if last_only else np.arange(len(tokens))
    slots, starts, _ = zip(*segments, strict=True)
    arrays = (np.ascontiguousarray(part, np.int32) for part in (tokens, slots, starts, lengths, wanted))
    return Step(*arrays)


def seeing(*segments: tuple[int, int, Sequence[int], Sequence[int]]) -> Step:
    """A step of (slot, start, tokens, sees) segments that asks for the logits of all tokens."""
    sees = [seen for *_, run in segments for seen in run]
    return replace(step_of(*(segment[:3] for segment in segments)), sees=np.array(sees, np.int32))
