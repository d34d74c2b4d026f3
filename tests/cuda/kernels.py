"""Attention as the kernels of a CUDA device answer it: each lays its results out in its own way."""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten


def memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, _whole(attn_mask, query, key), False, 0.0, is_causal
    )[0]


def cudnn(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    return aten._scaled_dot_product_cudnn_attention(
        query, key, value, _whole(attn_mask, query, key), False, 0.0, is_causal
    )[0]


def flash(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """It takes no masks: those go to the next kernel, as on a device."""
    if attn_mask is not None:
        return memory_efficient(query, key, value, attn_mask, is_causal)
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]


def plain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, 0.0, is_causal)[0]


KERNELS = {"memory-efficient": memory_efficient, "cudnn": cudnn, "flash": flash, "math": plain}


def _whole(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(*query.shape[:3], key.shape[2])
