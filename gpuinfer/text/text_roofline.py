"""What a step costs at least, in floating point operations and bytes (Williams, Waterman and Patterson 2009), and what
this machine reaches with the bare decoder, measured with nothing else running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.api import TextRoofline
from gpuinfer.errors import UsageError
from gpuinfer.host.machine import cores, cpu_times
from gpuinfer.models.cuda_graphs import wait_for_device
from gpuinfer.models.roofline_measurement import SERVED, sustained
from gpuinfer.text.precision import FLOAT32
from gpuinfer.text.transformer import PAGE, Decoder, Shape, Step


class StepExtent(NamedTuple):
    """The size of a step."""

    rows: int  # segments
    tokens: int
    outputs: int  # tokens whose logits are wanted
    attended: int  # positions that a token sees, summed over tokens
    read: int  # positions whose keys and values are read, those of this step included: each once


class RooflineCost(NamedTuple):
    """`flops`: a multiplication and an addition are two. `attention` are those of `flops` that attention has."""

    flops: float
    bytes: float
    attention: float


def shared_positions(pages: NDArray[np.int32], starts: NDArray[np.int32]) -> int:
    """How many positions before `starts` a sum over the rows counts too often, since rows share full `pages`."""
    full = starts // PAGE
    columns = int(full.max(initial=0))
    if len(full) < 2 or not columns:
        return 0
    held = pages[:, :columns][np.arange(columns) < full[:, None]]
    return PAGE * (len(held) - int(np.count_nonzero(np.bincount(held))))


def step_extent(step: Step, again: int | None = None) -> StepExtent:
    """The extent of this step. `again` is what `counted_again` says, where that is known already."""
    lengths, starts = step.lengths.astype(np.int64), step.starts.astype(np.int64)
    if step.sees is None:
        attended = int((lengths * starts + lengths * (lengths + 1) // 2).sum())
        read = int((starts + lengths).sum())
    else:
        attended = int(step.sees.sum(dtype=np.int64))
        first = np.cumsum(lengths) - lengths
        read = int(np.maximum.reduceat(step.sees, first).sum(dtype=np.int64)) if len(lengths) else 0
    read -= shared_positions(step.pages, step.starts) if again is None else again
    return StepExtent(len(lengths), len(step.tokens), len(step.wanted), attended, read)


@dataclass(frozen=True)
class StepCost:
    """Counts for a model of this shape, whose weights and cache have values of `item_bytes` bytes.

    Norms, rotations and activations are left out, and rows whose logits are not wanted pass the last layer's attention
    input alone: what is counted is the least that any implementation does.
    """

    shape: Shape
    item_bytes: int

    def of(self, extent: StepExtent) -> RooflineCost:
        """The cost of a step of this extent."""
        shape, experts, hidden = self.shape, self.shape.experts, self.shape.hidden
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim * hidden
        out, head = shape.heads * shape.head_dim * hidden, hidden * shape.vocabulary
        flops, values = 2.0 * head * extent.outputs, float(extent.outputs > 0) * head
        attended = cached = 0.0
        for layer in range(shape.layers):
            passed = extent.outputs if layer == shape.layers - 1 else extent.tokens
            met = read = (3 if shape.gated else 2) * shape.inner(layer) * hidden  # values of weights
            if experts is not None and shape.mixed(layer):
                expert, router = 3 * experts.intermediate * hidden, experts.count * hidden
                met += experts.chosen * expert + router
                # All experts are read, once there are tokens enough to choose them.
                read += min(experts.count, experts.chosen * passed) * expert + router
            window = shape.windows[layer] if shape.windows else None
            left = math.inf if window is None else extent.tokens * window  # positions that it leaves, at the most
            attended, cached = attended + min(extent.attended, left), cached + min(extent.read, left)
            flops += 2.0 * (qkv * extent.tokens + (out + met) * passed)
            values += qkv + out + read
        # Queries by keys and weights by values: four operations for each value of a head and position seen.
        attention = 4.0 * shape.heads * shape.head_dim * attended
        values += 2.0 * shape.kv_heads * shape.head_dim * cached + extent.tokens * shape.cache_values
        return RooflineCost(flops + attention, self.item_bytes * values, attention)


SEGMENT = 256  # tokens of a prompt in a step of prompts, at most
LEAST_TOKENS = 32  # of such a step
MOST_LOOKS = 64
LOOK_S = 0.05  # at least, of one measurement: reading CPU times costs a millisecond
LIBRARY_BYTES = 96 << 20  # weights that the library's products go through: more than caches hold
STREAMED_BYTES = 256 << 20  # that are read from a device's memory
PIECE = 1 << 21  # values of 2 bytes that a core reads at once: a thread that is disturbed leaves the rest to others


def measure_roofline(decoder: Decoder, rows: int, step_tokens: int, seconds: float) -> TextRoofline:
    """Takes about `seconds`, and writes over the cache from its first page on. Call it in the thread that steps.

    rows: of a decode step, as the run had them; fewer where slots or pages are fewer
    step_tokens: the most that a step of prompts may have

    Raises `UsageError` for a model without layers.
    """
    shape = decoder.shape
    if not shape.layers:
        raise UsageError("this model computes nothing, so that there is nothing to measure. Use another model.")
    cost = StepCost(shape, 1)
    rows = max(1, min(rows, decoder.slots, decoder.pages))
    step = decode_step(rows, decoder.length)
    own = _rate(decoder, step, cost.of(step_extent(step)).flops, 0.3 * seconds)
    affordable = 0.15 * seconds * own / (cost.of(step_extent(step)).flops / rows)  # a prompt's token costs no more
    prompts = prefill_step(decoder, int(min(step_tokens, max(LEAST_TOKENS, affordable))))
    tokens = len(prompts.tokens)
    own_prompts = _rate(decoder, prompts, cost.of(step_extent(prompts)).flops, 0.3 * seconds)
    threads = torch.get_num_threads()
    try:
        if decoder.device.type == "cpu":
            torch.set_num_threads(cores())
        library = LibraryProducts(shape, decoder.computes_in, decoder.device)
        best = max(own, library.flops_per_s(rows, 0.15 * seconds))
        best_prompts = max(own_prompts, library.flops_per_s(tokens, 0.15 * seconds))
    finally:
        torch.set_num_threads(threads)
    return TextRoofline(
        flops_per_s=best,
        prompt_flops_per_s=max(best_prompts, best),
        bytes_per_s=bytes_per_s(decoder.weight_tensors(), decoder.device, 0.1 * seconds),
        at_rows=rows,
        at_tokens=tokens,
        own_flops_per_s=own,
    )


def decode_step(rows: int, length: int) -> Step:
    """A token further in each of so many rows, each with a page of its own, full but for that token."""
    at = min(PAGE, length) - 1
    return Step(
        tokens=np.zeros(rows, np.int32),
        pages=np.arange(rows, dtype=np.int32)[:, None].copy(),
        starts=np.full(rows, at, np.int32),
        lengths=np.ones(rows, np.int32),
        wanted=np.arange(rows, dtype=np.int32),
    )


def prefill_step(decoder: Decoder, tokens: int) -> Step:
    """About so many tokens of prompts that begin, of the last of each the logits."""
    each = min(tokens, SEGMENT, decoder.length, decoder.pages * PAGE)
    columns = -(-each // PAGE)
    segments = max(1, min(tokens // each, decoder.slots, decoder.pages // columns))
    lengths = np.full(segments, each, np.int32)
    return Step(
        tokens=np.zeros(segments * each, np.int32),
        pages=np.arange(segments * columns, dtype=np.int32).reshape(segments, columns),
        starts=np.zeros(segments, np.int32),
        lengths=lengths,
        wanted=(np.cumsum(lengths) - 1).astype(np.int32),
    )


class LibraryProducts:
    """The products of as many layers as are more than caches hold, by torch's library, in the decoder's format."""

    def __init__(self, shape: Shape, computes_in: str, device: torch.device) -> None:
        heads, hidden = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden
        inner = max(shape.intermediate, 1)
        sizes = [(heads, hidden), (hidden, shape.heads * shape.head_dim), ((1 + shape.gated) * inner, hidden)]
        sizes.append((hidden, inner))
        found = torch.float32 if computes_in == FLOAT32 else getattr(torch, computes_in, torch.float32)
        self._dtype = found if found.is_floating_point else torch.float32  # torch multiplies no rows of int8
        self._device = device
        self._values = sum(out * into for out, into in sizes)
        layers = min(shape.layers, max(1, LIBRARY_BYTES // (self._values * self._dtype.itemsize)))
        self._weights = [
            torch.full(size, 0.01, dtype=self._dtype, device=device) for _ in range(layers) for size in sizes
        ]
        self._values *= layers

    def flops_per_s(self, rows: int, seconds: float) -> float:
        """Of all products with so many rows, one after another on all cores."""
        inputs = {
            into: torch.full((rows, into), 0.01, dtype=self._dtype, device=self._device)
            for into in {weight.shape[1] for weight in self._weights}
        }

        def once() -> None:
            for weight in self._weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)

        with torch.inference_mode():
            return 2.0 * rows * self._values * _passes_per_s(once, self._device, seconds)


def bytes_per_s(weights: Sequence[Tensor], device: torch.device, seconds: float) -> float:
    """How fast all cores together read these weights where they lie; on another device, memory of its own."""
    if device.type != "cpu":
        there = torch.zeros(STREAMED_BYTES // 4, dtype=torch.float32, device=device)
        return there.nbytes * _passes_per_s(there.sum, device, seconds)
    found = [np.ravel(weight.detach().view(torch.int16).numpy()) for weight in weights]
    pieces = [one[start : start + PIECE] for one in found for start in range(0, len(one), PIECE)]
    with ThreadPoolExecutor(cores()) as pool:
        return sum(one.nbytes for one in found) * _passes_per_s(lambda: list(pool.map(np.max, pieces)), device, seconds)


def _rate(decoder: Decoder, step: Step, flops: float, seconds: float) -> float:
    return flops * _passes_per_s(lambda: decoder.forward(step), decoder.device, seconds)


def _passes_per_s(once: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The most that is sustained over some looks, each of them without what its threads waited for a core that others
    had. The first pass is not counted.
    """
    once()
    found = [_look(once, device)]
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends and len(found) < MOST_LOOKS:
        found.append(_look(once, device))
    fair = [rate for rate, served in found if served >= SERVED]
    return sustained(fair or [rate for rate, _ in found])


def _look(once: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Passes per second, and of the time in which threads of ours wanted a core the share in which they had one."""
    ran, waited = cpu_times()
    passes, started = 0, time.perf_counter()
    while passes == 0 or time.perf_counter() < started + LOOK_S:
        once()
        passes += 1
        if device.type == "cuda":
            wait_for_device(device)
    seconds = time.perf_counter() - started
    ran_now, waited_now = cpu_times()
    ran, waited = max(ran_now - ran, 0.0), max(waited_now - waited, 0.0)
    served = ran / (ran + waited) if ran > 0 and device.type == "cpu" else 1.0
    return passes / max(seconds * served, 1e-9), served
