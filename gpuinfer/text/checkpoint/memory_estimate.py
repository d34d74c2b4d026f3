"""How much memory a model takes, estimated before it is loaded.

`own` in all functions: our own kernels for the CPU, which read the cache in place and sample from the logits in place.
Torch copies keys, values and logits, and keeps a mask in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.tensor_layout import TensorLayout, TensorPart, all_weights, joined_size
from gpuinfer.text.text_options import WeightFormat
from gpuinfer.text.transformer import PAGE, Adapter, Shape, Weights

STEP_TOKENS = 2048  # of one step: a chunk of prompt, and a token for each row in decode
SAMPLING_COPIES = 6  # of the logits, while they are filtered and sorted
LOGIT_BYTES = 512 * 2**20  # of one step of a diffusion model, which needs the logits of many positions
SCORED_ROWS = 64  # of them that are scored at once, in float64
CPU_COPIED = 1 << 20  # values of keys that torch copies for attention at once, unless one row has more: what processors
CUDA_COPIED = 1 << 26  # cache; and on CUDA what fills the device
SPARE_PAGES = 2  # of torch's cache: one that only padding writes, and one of zeros
TILE = 16  # values of a head are a multiple of it in the cache of our own kernels
GB = 1e9


@dataclass(frozen=True)
class Estimate:
    """Bytes. The peak is weights, cache and the working memory of one step."""

    weights_bytes: int
    cache_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class WorkingMemory:
    """Bytes of one step besides weights and cache: a layer's activations, and copies (keys and values for attention,
    masks, logits).
    """

    activations: int
    copies: int

    @property
    def total(self) -> int:
        return self.activations + self.copies


def estimate_memory(
    shape: Shape, weights_bytes: int, slots: int, pages: int, length: int, dtype: torch.dtype, own: bool = False
) -> Estimate:
    """With `slots` rows in a step, `pages` in the cache and rows of `length` positions at most."""
    cache = pages * page_bytes(shape, dtype, own)
    step = working(shape, max(slots, STEP_TOKENS), slots, length, dtype, own)
    return Estimate(weights_bytes, cache, weights_bytes + cache + step.total)


def model_weight_bytes(
    layout: TensorLayout, dtype: torch.dtype, quantised: WeightFormat | None = None, own: bool = False
) -> int:
    """Matrices and biases in `dtype`, norms in float32; with `quantised` matrices in that, the head in int8, but for
    embeddings, of which a head of its own remains besides in torch.
    """
    total = 0

    def take(parts: Sequence[TensorPart], wide: bool) -> Tensor:
        nonlocal total
        total += sum(prod(part.shape) for part in parts) * (4 if wide else dtype.itemsize)
        return torch.empty(joined_size(parts), device="meta")

    weights = all_weights(layout, take)
    if quantised is None:
        return total
    of_layers = [
        tensor
        for layer in weights.layers
        for tensor in (layer.qkv.weight, layer.out.weight, layer.up.weight, layer.down.weight)
    ]
    experts = [one for layer in weights.layers if layer.mixture for one in (layer.mixture.up, layer.mixture.down)]
    head, kept = weights.head.weight, layout.shape.tied and not own
    before = sum(one.numel() for one in (*of_layers, *experts, *([] if kept else [head]))) * dtype.itemsize
    after = sum(quantised_bytes(one.shape, quantised) for one in (*of_layers, *experts))
    return total - before + after + quantised_bytes(head.shape, "int8")


def quantised_bytes(size: Sequence[int], quantised: WeightFormat) -> int:
    """Of matrices [..., out, in]: whole groups of 64 terms with their scales, rows up to a multiple of 16."""
    *many, out, terms = size
    groups = prod(many) * -(-out // 16) * 16 * -(-terms // 64)
    return groups * (64 + 4 if quantised == "int8" else 32 + 8)


def empty_weights(layout: TensorLayout, dtype: torch.dtype) -> Weights:
    """Weights of the shapes and formats of `Checkpoint.weights`, without memory (on the device `meta`)."""

    def take(parts: Sequence[TensorPart], wide: bool) -> Tensor:
        return torch.empty(joined_size(parts), device="meta", dtype=torch.float32 if wide else dtype)

    return all_weights(layout, take)


def adapter_bytes(adapter: Adapter) -> int:
    """Bytes of an adapter in a decoder: float32, ranks and outputs rounded up to multiples of 16."""

    def portions(count: int) -> int:
        return -(-count // 16) * 16

    sizes = [(low.rank, low.down.shape[1], low.up.shape[0]) for layer in adapter.layers for low in layer]
    return 4 * sum(portions(rank) * inputs + rank * portions(outputs) for rank, inputs, outputs in sizes)


def row_pages(length: int) -> int:
    """Pages of a row of `length` positions."""
    return -(-length // PAGE)


def page_bytes(shape: Shape, dtype: torch.dtype, own: bool = False) -> int:
    """Keys and values of all layers at the positions of one page."""
    if not own:
        return shape.cache_values * PAGE * dtype.itemsize
    width = -(-shape.head_dim // TILE) * TILE
    return 2 * shape.layers * shape.kv_heads * width * PAGE * dtype.itemsize


def most_copied(device: torch.device) -> int:
    """Values of keys that torch copies for attention at once on the device, unless one row has more."""
    return CUDA_COPIED if device.type == "cuda" else CPU_COPIED


def working(
    shape: Shape,
    rows: int,
    slots: int,
    length: int,
    dtype: torch.dtype,
    own: bool = False,
    copied: int = CPU_COPIED,
) -> WorkingMemory:
    """Memory of a step of `rows` tokens in `slots` segments besides weights and cache: the widest activations of a
    layer, keys and values copied for attention (of `copied` values of keys at once), masks, and sampling's copies of
    the logits.

    A diffusion model's step has at least a whole canvas and its unconditional twin.
    """
    rows = rows if shape.masking is None else max(rows, 2 * length)
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    each, experts = 3 if shape.gated else 2, shape.experts  # values of one token between the products of an MLP …
    inner = each * shape.intermediate
    if experts is not None:  # … or those of its experts, with the input and output of each
        chosen = experts.chosen * (2 * shape.hidden + each * experts.intermediate)
        inner = max(inner, chosen + each * experts.shared)
    activations = rows * (4 * shape.hidden + max(3 * heads, inner)) * (dtype.itemsize + 4)
    if shape.masking is None:
        logits = slots * shape.vocabulary * 4 * (1 if own else SAMPLING_COPIES)
    else:
        outputs = max(length, min(rows, most_outputs(shape)))
        logits = shape.vocabulary * (outputs * 4 + min(outputs, SCORED_ROWS) * 8 * SAMPLING_COPIES)
    if own:
        return WorkingMemory(activations, logits)
    keys = length * shape.kv_heads * shape.head_dim  # of one row in one layer
    attention = 2 * dtype.itemsize * min(slots * keys, max(keys, copied))
    masks = rows * length * (dtype.itemsize + 1)
    return WorkingMemory(activations, attention + masks + logits)


def most_outputs(shape: Shape) -> int:
    """How many positions a diffusion model's step computes logits of, unless a single row needs more."""
    return max(1, LOGIT_BYTES // (4 * shape.vocabulary))


def refuse_short(pages: int | None, length: int) -> None:
    """Raises `UsageError` if the user's `pages` do not hold one row of `length` positions."""
    if pages is None or pages >= row_pages(length):
        return
    raise UsageError(
        f"{pages:,} pages of {PAGE} tokens hold {pages * PAGE:,}, and one row of {length:,} tokens takes "
        f"{row_pages(length):,} pages. Use -B pages={row_pages(length)}, or --context {pages * PAGE}."
    )


def refuse_oversized(
    name: str, estimated: Estimate, free_bytes: int, *, pages: int, length: int, dtype: torch.dtype
) -> None:
    """Raises `UsageError` with the numbers and the cure if the peak is over `free_bytes`: fewer pages only if they hold
    one row.
    """
    if estimated.peak_bytes <= free_bytes:
        return
    narrow = "" if dtype.itemsize <= 2 else "--dtype bfloat16, which halves both"
    spare = free_bytes - (estimated.peak_bytes - estimated.cache_bytes)
    fitting = spare * pages // estimated.cache_bytes if estimated.cache_bytes else 0
    if fitting >= 1:
        enough = fitting >= row_pages(length)
        choices = [f"-B pages={fitting}" if enough else f"--context {fitting * PAGE}", *([narrow] if narrow else [])]
        cure = f"Use {' or '.join(choices)}."
    elif estimated.weights_bytes + estimated.cache_bytes <= free_bytes:
        cure = "A step takes more than is left: use a smaller --batch-size, or a smaller -B step_tokens."
    elif narrow and estimated.weights_bytes // 2 < free_bytes:
        cure = f"Not even one page fits beside the weights: use {narrow}, or a larger device."
    else:
        cure = "The weights alone are too large: use a smaller model, or a larger device."
    weights, cache, peak, free = (
        f"{size / GB:.3g} GB"
        for size in (estimated.weights_bytes, estimated.cache_bytes, estimated.peak_bytes, free_bytes)
    )
    kind = str(dtype).removeprefix("torch.")
    raise UsageError(
        f"model '{name}' does not fit: weights {weights} in {kind}, {pages:,} pages of {PAGE} tokens {cache}, "
        f"{peak} at the peak; {free} are free. One row of {length:,} tokens takes {row_pages(length):,} pages.\n{cure}"
    )
