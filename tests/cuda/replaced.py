"""What replaces parts of gpuinfer and torch on a fake device: stages in this thread, one after the other, since torch's
modes, and so fake tensors, are a thread's own; and attention, whose kernels lay their results out each in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpuinfer.api import Lane
from gpuinfer.models.pipeline.stage import CpuStage, CudaStage

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


class Inline:
    """In the place of `stages.pipeline.Pipeline`. Raises what a stage raises."""

    under_way = 0

    def __init__(self, stages: Sequence[CpuStage | CudaStage], lane: Callable[[str], Lane]) -> None:
        self.stages, self._lane = stages, lane("inline")

    def run(self, values: Iterable[Any], count: int) -> list[Any]:
        outcomes = list(map(self._through, values))
        for stage in self.stages:
            stage.settle()
        return outcomes

    def _through(self, value: Any) -> Any:
        for stage in self.stages:
            with stage.at_work():
                value = stage.compute(value, self._lane)
        return value

    def counts(self) -> Mapping[str, Any]:
        return {}

    def waits_for(self) -> str:
        return ""

    def close(self) -> None:
        pass


def at_once(measure: Callable[[], Any], threads: int) -> Any:
    """In the place of `stages.timing.in_thread`."""
    return measure()
