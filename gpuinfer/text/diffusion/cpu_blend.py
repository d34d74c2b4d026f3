"""What a model expects at masks, as embeddings: compiled, each mask by itself."""

import numpy as np

from gpuinfer.text.decoder.cpu_math import exp, widen
from gpuinfer.text.sampling.cpu_values import BLOCK, compiled

# mypy: ignore-errors


@compiled
def expect(lane, lanes, logits, places, embedding, tops, totals, weights, out):
    """out[i] = Σ softmax(logits[places[i]]) × embedding, of this lane's columns.

    logits: float32 [all, vocabulary]; places: int64 [n]; embedding: [vocabulary, hidden], float32, or bfloat16 as
    uint16; out: float32 [n, hidden]. The lane's own: tops float32 [n], totals float64 [n], weights float32 [n, BLOCK].
    Tokens are added up one after another, so that a mask's sum depends neither on the others nor on the lanes.
    """
    count, vocabulary, hidden = len(places), logits.shape[1], out.shape[1]
    begin, end = lane * hidden // lanes, (lane + 1) * hidden // lanes
    for i in range(count):
        tops[i] = -np.inf
        for token in range(vocabulary):
            tops[i] = max(tops[i], logits[places[i], token])
        totals[i] = 0.0
        for column in range(begin, end):
            out[i, column] = 0.0
    for first in range(0, vocabulary, BLOCK):
        size = min(BLOCK, vocabulary - first)
        for i in range(count):
            part, own = logits[places[i], first : first + size], weights[i]
            for j in range(size):
                own[j] = exp(part[j] - tops[i])
            for j in range(size):
                totals[i] += np.float64(own[j])
        for j in range(size):
            vector = embedding[first + j, begin:end]
            for i in range(count):
                weight, sums = weights[i, j], out[i, begin:end]
                for column in range(end - begin):
                    sums[column] += weight * widen(vector[column])
    for i in range(count):
        scale = np.float32(1.0 / totals[i])
        for column in range(begin, end):
            out[i, column] *= scale
