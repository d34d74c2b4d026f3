"""Tokens far from one another first: they say least about each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gpuinfer import api
from gpuinfer.text.diffusion.deciding import Decision, UnmaskingDecoder, View
from gpuinfer.text.diffusion.decoders.picking import best


class Hierarchical(UnmaskingDecoder):
    """Commits of each run of masks the surest token if it is above `low_threshold`, all tokens above the threshold, and
    the surest of the block always. So runs are halved, as in divide and conquer (Ma et al. 2025, dInfer).
    """

    class Options(api.Options):
        low_threshold: float = Field(0.4, ge=0, le=1, description="confidence that the surest of a run must be above")

    default_threshold: ClassVar[float | None] = 0.9

    def decide(self, kept: Any, view: View) -> Decision:
        commit = best(view.confidence, 1) | (view.confidence > view.threshold)
        for run in runs(view.positions):
            surest = run.start + int(view.confidence[run].argmax())
            commit[surest] |= view.confidence[surest] > self.options.low_threshold
        return Decision(commit)


def runs(positions: NDArray[np.int32]) -> Iterator[slice]:
    """Where positions follow one another without a gap."""
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return (slice(start, end) for start, end in itertools.pairwise(edges) if end > start)
