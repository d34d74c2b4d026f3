"""From the logits of many rows' masks to the scores that unmasking decoders read: tokens, confidence, margin, entropy;
and the embeddings of masks that enter the next step with a share of the expected token (Ma et al. 2025, dInfer's
"iteration smoothing").

The scores of a position depend on its own logits, its row's settings and its random number alone: they are the same
bits with any number of rows and threads. On the CPU they are compiled (`cpu_scores.py`), elsewhere torch computes them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.errors import RequestError
from gpuinfer.generation import Logprob
from gpuinfer.text.decoder.torch_batch import Uploads
from gpuinfer.text.diffusion import cpu_scores, torch_scores
from gpuinfer.text.diffusion.torch_scores import CHOICES, Asked, FlatRequests, flattened_requests, units
from gpuinfer.text.diffusion.unmasking_decoder import Need
from gpuinfer.text.sampling import Sampler
from gpuinfer.text.sampling.compiled_path import Lanes, as_rows, scratch
from gpuinfer.text.sampling.cpu_values import BLOCK
from gpuinfer.text.sampling.sampler import draw_failure
from gpuinfer.text.sampling.slot_settings import hash_of
from gpuinfer.text.transformer import Decoder

__all__ = ["Asked", "Scored", "Scorer", "guided"]

NOT_NEEDED: NDArray[np.float64] = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of the n logits of a call; undefined for logits that no row asked about."""

    tokens: NDArray[np.int32]  # [n] what the mask becomes if it is committed; -1 in rows that are `bad`
    confidence: NDArray[np.float64]  # [n] probability of that token, without temperature and filters
    margin: NDArray[np.float64] | None  # [n] the likeliest token's probability less the second's; None: not needed
    entropy: NDArray[np.float64] | None  # [n] in nats
    bad: Mapping[int, RequestError] = field(default_factory=dict)  # by row of the call: why it cannot go on
    _rows: Sequence[Asked] = ()
    _flat: FlatRequests | None = None
    _logits: Tensor | None = None
    _sampler: Sampler | None = None

    def uniform(self, row: int) -> NDArray[np.float64]:
        """float64 [k] in [0, 1) for the masks of the row: other numbers than those that drew its tokens."""
        if self._flat is None:
            raise ValueError("these scores are of no call")
        return units(self._rows[row].positions, CHOICES, self._flat.rows[row])

    def logprobs(self, index: int, wanted: int) -> Logprob:
        """The log-probability of the token at this index of the logits, and of the `wanted` likeliest, before bias,
        temperature and filters. Only before the next step, which overwrites the logits.
        """
        if self._logits is None or self._sampler is None:
            raise ValueError("these scores are of no call")
        return self._sampler.given_logprobs(self._logits[index : index + 1], self.tokens[index : index + 1], wanted)[0]


class Scorer:
    """Scores logits of `vocabulary` tokens on `device`. All calls come from one thread.

    `end_tokens` cannot come at positions that `min_tokens` bars, `mask_token` nowhere.
    """

    def __init__(
        self,
        vocabulary: int,
        device: torch.device | str,
        *,
        threads: int,
        seed: int,
        end_tokens: Sequence[int] = (),
        mask_token: int | None = None,
    ) -> None:
        self._vocabulary, self._seed = vocabulary, seed
        self._ends = [token for token in end_tokens if 0 <= token < vocabulary]
        self._mask = -1 if mask_token is None or mask_token >= vocabulary else mask_token
        self._on_cpu = torch.device(device).type == "cpu"
        self._uploads = Uploads(torch.device(device))  # of no account on the CPU
        self._lanes = Lanes(threads, "scoring")
        self._work: list[tuple[Any, NDArray[np.float32]]] = []  # of each lane: its space, and room for edited logits
        for _ in range(self._lanes.threads if self._on_cpu else 0):
            blocks = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
            self._work.append(((*scratch(vocabulary), *blocks), np.zeros(vocabulary, np.float32)))
        self._sampler = Sampler(0, vocabulary, device, seed=seed, end_tokens=(), threads=1)  # for log-probabilities
        self._hash_of = functools.lru_cache(maxsize=4096)(hash_of)

    def score(self, logits: Tensor, rows: Sequence[Asked], needs: Collection[Need] = ()) -> Scored:
        """Of `logits` float32 [n, vocabulary], in which no two of `rows` share a place.

        The mask token's logits are overwritten with -inf. A row fails alone, in `Scored.bad`: with BadResult when
        logits of it hold NaN or +inf, with BadPrompt when no token may come.
        """
        if logits.ndim != 2 or logits.shape[1] != self._vocabulary:
            raise ValueError(f"logits {tuple(logits.shape)} are not of {self._vocabulary} tokens.")
        count = len(logits)
        flat = flattened_requests(rows, count, self._seed, self._ends, self._hash_of)
        out = (
            np.full(count, -1, np.int32),
            np.zeros(count),
            np.zeros(count) if "margin" in needs else NOT_NEEDED,
            np.zeros(count) if "entropy" in needs else NOT_NEEDED,
        )
        if self._on_cpu:
            self._compiled(logits, flat, out)
        else:
            torch_scores.score_rows(logits, flat, self._mask, out, self._uploads)
        tokens, confidence, margin, entropy = out
        found = margin if "margin" in needs else None, entropy if "entropy" in needs else None
        failed = np.flatnonzero((tokens < 0) & (flat.owners >= 0))  # the first of a row's logits that fails says why
        bad = {int(flat.owners[place]): draw_failure(int(tokens[place])) for place in failed[::-1]}
        tokens[failed] = -1
        return Scored(tokens, confidence, *found, bad, rows, flat, logits, self._sampler)

    def close(self) -> None:
        """Free threads."""
        self._lanes.close()
        self._sampler.close()

    def _compiled(self, logits: Tensor, flat: FlatRequests, out: tuple[NDArray[Any], ...]) -> None:
        values = as_rows(logits)
        arrays = flat.owners, flat.positions, flat.rows, flat.bias_ids, flat.bias_values, flat.stops

        def run(lane: int, lanes: int) -> None:
            work, edited = self._work[lane]
            cpu_scores.score_rows(lane, lanes, values, arrays, self._mask, work, edited, *out)

        self._lanes.share(run, values.size)


@torch.inference_mode()
def guided(conditional: Tensor, unconditional: Tensor, scale: float) -> None:
    """Classifier-free guidance in place: u + (scale + 1) (c - u) becomes the conditional logits [n, vocabulary] (Ho and
    Salimans 2022; as Nie et al. 2025, "LLaDA", scale it).
    """
    conditional.sub_(unconditional).mul_(scale + 1.0).add_(unconditional)


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
        """Free threads."""
        self._lanes.close()

    def _compiled(self, logits: Tensor, places: NDArray[np.int64], embedding: Tensor) -> NDArray[np.float32]:
        values, count = logits.numpy(), len(places)
        half = embedding.dtype == torch.bfloat16  # which kernels read as bits
        stored: NDArray[Any] = (embedding.view(torch.uint16) if half else embedding.float()).numpy()
        out = np.zeros((count, stored.shape[1]), np.float32)

        def run(lane: int, lanes: int) -> None:
            own = np.zeros(count, np.float32), np.zeros(count), np.zeros((count, BLOCK), np.float32)
            cpu_scores.expect(lane, lanes, values, places, stored, *own, out)

        self._lanes.share(run, count * stored.size // 16)
        return out
