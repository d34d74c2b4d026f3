"""Masks that enter the next step with a hint of what the model expects there (Ma et al. 2025, dInfer's "iteration
smoothing"): their own embedding, and a share of the expected one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.decoder.torch_batch import Uploads
from gpuinfer.text.diffusion import cpu_blend
from gpuinfer.text.sampling.cpu_values import BLOCK
from gpuinfer.text.sampling.lanes import Lanes
from gpuinfer.text.step import Decoder


class Blender:
    """All calls come from one thread. A mask's vector depends on its own logits alone, on the CPU to the bit."""

    def __init__(self, decoder: Decoder, mask_token: int, threads: int) -> None:
        self._decoder, self._mask_token = decoder, mask_token
        self._lanes = Lanes(threads, "blending")
        self._uploads: Uploads | None = None

    def blended(self, logits: Tensor, places: NDArray[np.int64], share: float) -> NDArray[np.float32]:
        """float32 [n, hidden]: the mask's embedding + `share` × Σ probability × embedding, of the logits at `places` of
        float32 [all, vocabulary].
        """
        embedding = self._decoder.embedding()
        own = embedding[self._mask_token].float()
        if embedding.device.type == "cpu":
            of_mask: NDArray[np.float32] = own.numpy()
            return of_mask + np.float32(share) * self._compiled(logits, places, embedding)
        self._uploads = self._uploads or Uploads(embedding.device)
        (there,) = self._uploads.sent([places])
        chances = logits.index_select(0, there).softmax(-1)
        found: NDArray[np.float32] = (own + share * (chances.to(embedding.dtype) @ embedding).float()).cpu().numpy()
        return found

    def close(self) -> None:
        """Let go of threads."""
        self._lanes.close()

    def _compiled(self, logits: Tensor, places: NDArray[np.int64], embedding: Tensor) -> NDArray[np.float32]:
        values, count = logits.numpy(), len(places)
        stored = _stored(embedding)
        out = np.zeros((count, stored.shape[1]), np.float32)

        def run(lane: int, lanes: int) -> None:
            own = np.zeros(count, np.float32), np.zeros(count), np.zeros((count, BLOCK), np.float32)
            cpu_blend.expect(lane, lanes, values, places, stored, *own, out)

        self._lanes.share(run, count * stored.size // 16)
        return out


def _stored(embedding: Tensor) -> NDArray[Any]:
    """As kernels read it."""
    if embedding.dtype == torch.bfloat16:
        return embedding.view(torch.uint16).numpy()  # type: ignore[no-any-return]
    return embedding.float().numpy()  # type: ignore[no-any-return]
