"""Draws on a CUDA device in kernels of our own: three launches, where plain torch takes up to two hundred."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuinfer.text.decoder.triton_layers import has_triton, tried_out
from gpuinfer.text.sampling import torch_path
from gpuinfer.text.sampling.slot_settings import SETTINGS
from gpuinfer.text.sampling.torch_path import WantedDraws, to_host

BLOCK, WARPS = 4096, 16  # logits that a program looks at at once: as many as one has registers for
COMPARED_TOKENS = 5000  # of each row that both ways draw for when the kernels are chosen


class TritonDraws:
    """The same as `torch_path.drawn` and `torch_path.weights`, to the bit."""

    logit_bytes = 4  # that a draw takes for each logit beside the logits

    def __init__(self) -> None:
        from gpuinfer.text.sampling import triton_draw_kernels

        self._kernels = triton_draw_kernels

    def weights(self, values: Tensor, best: Tensor, inverse: Tensor) -> Tensor:
        """int64 [rows, vocabulary]."""
        return self._weighed(values, best, inverse).long()

    def drawn(self, values: Tensor, best: Tensor, wanted: WantedDraws) -> tuple[Tensor, Tensor]:
        """Tokens int64 [rows], and the sums of the weights that they were drawn by, int64 [rows]."""
        rows, vocabulary = values.shape
        values, best = values.contiguous(), best.contiguous()
        weighed = self._weighed(values, best, wanted.inverse)
        tokens, totals = (torch.empty(rows, dtype=torch.int64, device=values.device) for _ in range(2))
        columns = wanted.columns
        self._launch(
            self._kernels.pick,
            (rows,),
            values, weighed, best, columns, tokens, totals, columns.stride(0), vocabulary,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return tokens, totals

    def _weighed(self, values: Tensor, best: Tensor, inverse: Tensor) -> Tensor:
        """float32 [rows, vocabulary]: weights before their fraction is dropped."""
        rows, vocabulary = values.shape
        values = values.contiguous()
        found = torch.empty_like(values)
        self._launch(
            self._kernels.weigh,
            (rows, -(-vocabulary // BLOCK)),
            values, best.contiguous(), inverse.contiguous(), found, vocabulary,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
        return found

    def _launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **sizes: Any) -> None:
        """Products and sums are not contracted, so that they are the bits of torch's."""
        # Triton launches on the current device, wherever its arguments are.
        with torch.cuda.device_of(given[0]):  # type: ignore[no-untyped-call]
            kernel[grid](*given, **sizes, enable_fp_fusion=False)


def draws_for(device: torch.device) -> TritonDraws | None:
    """The kernels where they can be had and answer as torch does."""
    if device.type != "cuda" or not has_triton():
        return None

    def own_draws() -> TritonDraws:
        own = TritonDraws()
        compare(own, device)
        return own

    return tried_out(own_draws, "the kernels that draw on this device", "do, which take longer")


@torch.inference_mode()
def compare(own: TritonDraws, device: torch.device) -> None:
    """Have both draw for rows of all kinds. Raises `RuntimeError` when they do not draw alike, and what the compiler
    raises.
    """
    cases = [  # temperature's inverse, min-p's floor, top-p, top-k
        (1.0, -np.inf, 1.0, 0),
        (1.25, -np.inf, 0.9, 0),
        (0.8, -np.inf, 1.0, 50),
        (2.0, -3.0, 0.7, 1000),
        (0.0, -np.inf, 1.0, 0),
    ]
    records = np.zeros(len(cases), np.dtype(SETTINGS))
    for name, column in zip(("inverse", "floor", "top_p", "top_k"), zip(*cases, strict=True), strict=True):
        records[name] = column
    random = np.random.default_rng(1)
    logits = random.standard_normal((len(cases), COMPARED_TOKENS), np.float32) * 2
    logits[:, ::3] = np.round(logits[:, ::3])
    values = torch.from_numpy(logits).to(device)
    wanted, best = WantedDraws.of(records, random.random(len(cases)), device), values.amax(1)
    both = [torch.stack(way.drawn(values, best, wanted)) for way in (own, torch_path)]
    ours, theirs = to_host(torch.stack(both))
    if (ours != theirs).any():
        raise RuntimeError(f"tokens {ours[0].tolist()} are drawn, and {theirs[0].tolist()} by torch")
