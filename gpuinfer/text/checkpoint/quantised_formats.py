"""From the tensors that a quantised matrix is stored as to its numbers: float32 [out, in].

Formats as their makers document them: GPTQ (Frantar et al. 2022; AutoGPTQ's and GPTQModel's files), AWQ (Lin et al.
2023; AutoAWQ's "gemm"), FP8 with scales of blocks (DeepSeek-AI 2024), compressed-tensors (Neural Magic), bitsandbytes
(Dettmers et al. 2022, 2023). Each function takes the stored tensors of one matrix by the ends of their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Parts = Mapping[str, Tensor]

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the eight values lie that follow one another
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1, without sign


def unpacked_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned numbers from a stream of bits along the first dimension, lowest bits first.

    `words`: int32 [any, columns]. Returns int32 [count, columns].
    """
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)[None, :, None]
        return ((words[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1, words.shape[1])[:count]
    wide = torch.cat([words.to(torch.int64) & 0xFFFFFFFF, words.new_zeros(1, words.shape[1], dtype=torch.int64)])
    starts = torch.arange(count) * bits
    place, shift = starts // 32, (starts % 32)[:, None]
    return (((wide[place] >> shift) | (wide[place + 1] << (32 - shift))) & ((1 << bits) - 1)).to(torch.int32)


def packed_bits(words: int, values: int) -> int:
    """Bits of one value, of as many as are packed into so many words of 32."""
    return 32 * words // values


def gptq_matrix(parts: Parts, *, old_zeros: bool, bits: int) -> Tensor:
    """`qweight` int32 [in × bits / 32, out], `qzeros` int32 [groups, out × bits / 32], `scales` [groups, out], and
    `g_idx` int32 [in], the group of each input. `old_zeros`: zero points are stored less one.
    """
    scales = parts["scales"].float()
    groups, outputs = scales.shape
    inputs = parts["qweight"].shape[0] * 32 // bits
    values = unpacked_words(parts["qweight"], bits, inputs)
    zeros = unpacked_words(parts["qzeros"].T.contiguous(), bits, outputs).T + int(old_zeros)
    given = parts.get("g_idx")
    group = torch.arange(inputs) // -(-inputs // groups) if given is None else given.long()
    return ((values - zeros[group]).float() * scales[group]).T


def awq_matrix(parts: Parts) -> Tensor:
    """`qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]; four bits."""
    scales = parts["scales"].float()
    groups = scales.shape[0]

    def nibbles(words: Tensor) -> Tensor:
        rows = words.shape[0]
        return (
            unpacked_words(words.reshape(1, -1), 4, 8)
            .view(8, rows, -1)[list(AWQ_ORDER)]
            .permute(1, 2, 0)
            .reshape(rows, -1)
        )

    values, zeros = nibbles(parts["qweight"]), nibbles(parts["qzeros"])
    size = values.shape[0] // groups
    return ((values - zeros.repeat_interleave(size, 0)).float() * scales.repeat_interleave(size, 0)).T


def scaled_matrix(parts: Parts, *, block: tuple[int, int] | None = None) -> Tensor:
    """`weight` int8 or float8 [out, in]; `weight_scale` or `weight_scale_inv`: one number, of each row [out, 1], or of
    each block [blocks, blocks]; and `weight_zero_point` of the same shape. `block`: sizes of blocks, the last of which
    may be smaller; None: they divide the matrix.
    """
    values = parts["weight"].float()
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    if "weight_zero_point" in parts:
        values = values - _spread(parts["weight_zero_point"].float(), values, block)
    return values * _spread(scale.float(), values, block)


def _spread(scale: Tensor, like: Tensor, block: tuple[int, int] | None) -> Tensor:
    """A scale for each value, or each row."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    for dimension in range(2):
        size, count = like.shape[dimension], scale.shape[dimension]
        if count not in (1, size):
            each = size // count if block is None else block[dimension]
            scale = scale.repeat_interleave(each, dimension).narrow(dimension, 0, size)
    return scale


def packed_matrix(parts: Parts, shape: tuple[int, ...], bits: int) -> Tensor:
    """compressed-tensors: `weight_packed` int32 [out, in × bits / 32], values plus half their range; `weight_scale`
    [out, groups]; `weight_zero_point` int32 [out × bits / 32, groups], packed alike; `weight_g_idx` [in].
    """
    outputs, inputs = shape
    half = 1 << (bits - 1)
    values = unpacked_words(parts["weight_packed"].T.contiguous(), bits, inputs).T - half
    scale = parts["weight_scale"].float()
    given, groups = parts.get("weight_g_idx"), scale.shape[1]
    group = torch.arange(inputs) // -(-inputs // groups) if given is None or (given < 0).any() else given.long()
    if "weight_zero_point" in parts:
        values = values - (unpacked_words(parts["weight_zero_point"], bits, outputs) - half)[:, group]
    return values.float() * scale[:, group]


def fp4_matrix(parts: Parts) -> Tensor:
    """compressed-tensors' NVFP4: `weight_packed` uint8 [out, in / 2], the first value in the low half; `weight_scale`
    float8 [out, in / 16]; `weight_global_scale`, by which is divided.
    """
    packed = parts["weight_packed"]
    codes = torch.stack([packed & 0xF, packed >> 4], -1).reshape(packed.shape[0], -1).long()
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    scale = parts["weight_scale"].float() / parts["weight_global_scale"].float()
    return table[codes] * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def bitsandbytes_4bit(parts: Parts, state: Mapping[str, Any]) -> Tensor:
    """`weight` uint8, two codes in each byte, the first in the high half; a table of 16 values; `absmax` of each block,
    which may be quantised itself, with a table and maxima of its own.
    """
    packed = parts["weight"].reshape(-1)
    codes = torch.stack([packed >> 4, packed & 0xF], -1).reshape(-1).long()
    largest = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        outer = parts["weight.nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))[: largest.numel()]
        largest = parts["weight.nested_quant_map"][largest.long()] * outer + float(state["nested_offset"])
    values = parts["weight.quant_map"][codes]
    return (values * largest.float().repeat_interleave(int(state["blocksize"]))[: values.numel()]).view(*state["shape"])


def bitsandbytes_8bit(parts: Parts) -> Tensor:
    """`weight` int8 [out, in], and `SCB`, the largest of each row, which is 127."""
    return parts["weight"].float() * (parts["SCB"].float()[:, None] / 127.0)
