"""Attention as the kernels of a CUDA device answer it: each lays its results out in its own way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten
Attention = Callable[..., Tensor]


def with_whole_mask(kernel: Attention) -> Attention:
    """Of kernels that want a mask for each query and key."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        mask = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
        return kernel(query, key, value, mask, False, 0.0, is_causal)[0]

    return attention


memory_efficient = with_whole_mask(aten._scaled_dot_product_efficient_attention)


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


KERNELS = {
    "memory-efficient": memory_efficient,
    "cudnn": with_whole_mask(aten._scaled_dot_product_cudnn_attention),
    "flash": flash,
    "math": plain,
}
