"""Weights rounded to 8 or 4 bits, group by group along the terms of a product."""

from __future__ import annotations

from typing import Literal

import torch

GROUP, HALF = 64, 32  # terms that share a scale: of 8 bits, and of 4
HEAD_BITS: Literal[8] = 8
"""Of a model's head, and of the embedding that is tied to it, where other matrices have 4: of SmolLM2 135M a head of 4
bits costs 5 % of perplexity, all other matrices of 4 bits half a percent.
"""
LARGEST = 127  # of the whole numbers of 8 bits, which are as far below 0
TINY = 1e-30
FINER = 1 + 2**-8  # a scale is made larger by as much as bfloat16 may round it down


def rounded_to_8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups along the last axis of float32 as int8 from -127 to 127, and the scale of each, float32."""
    scales = values.abs().amax(-1) / LARGEST
    whole = (values / scales.clamp_min(TINY)[..., None]).round_()
    _clear_strange(whole, scales)
    return whole.to(torch.int8), scales


def rounded_to_4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Halves of groups along the last axis of float32 as uint8 from 0 to 15, and scale and minimum of each, bfloat16.
    The scale is rounded up, so that the highest value is within reach.
    """
    least = values.amin(-1).to(torch.bfloat16)
    span = values.amax(-1) - least.float()
    scales = (span * FINER / 15).to(torch.bfloat16)
    whole = ((values - least.float()[..., None]) / scales.float().clamp_min(TINY)[..., None]).round_()
    _clear_strange(whole, scales)
    return whole.clamp_(0, 15).to(torch.uint8), scales, least


def _clear_strange(whole: torch.Tensor, scales: torch.Tensor) -> None:
    """Whole numbers are 0 where a value was NaN or infinite; its group's scale, and so the product, still is. Another
    device than the CPU does so whatever there is: to ask it would be to wait for it.
    """
    if scales.device.type != "cpu" or not scales.isfinite().all():
        whole.nan_to_num_(0.0, 0.0, 0.0)
