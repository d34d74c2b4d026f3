"""What many decoders do: take the best few, take those from a bound upwards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.diffusion.deciding import UnmaskingDecoder, View


def best(scores: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The `count` largest of scores [n], at least one and at most all; of equal ones those that come first."""
    chosen = np.zeros(len(scores), np.bool_)
    chosen[np.argsort(-scores, kind="stable")[: max(count, 1)]] = True
    return chosen


def threshold_of(decoder: UnmaskingDecoder, view: View) -> float:
    """The request's threshold, or else the decoder's own."""
    own = 1.0 if decoder.default_threshold is None else decoder.default_threshold
    return own if view.threshold is None else view.threshold
