"""The compiled forward step of one lane: a thread that has its share of every layer's heads and columns.

All lanes walk through the layers together. A lane computes the queries, keys and values of its own heads, and their
attention; its own columns of what all heads add to the rows; its own columns of the up projection; and its own columns
of what these add. The sums and norms between are divided by rows. Each value is one lane's from its first term to its
last, so that the number of lanes cannot show in it. (Shoeybi et al. 2019 divide the terms as well, which would save two
of the six barriers a layer.)

Rows are the step's tokens, in order. Arrays end where their capacity does; how much of them counts is in `sizes`.

The threads of a decoder's lanes: the caller's is lane 0, the others wait for the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.blas import Blas
from gpuinfer.text.decoder.cpu_activation import activate
from gpuinfer.text.decoder.cpu_attention import attend_step
from gpuinfer.text.decoder.cpu_experts import choose, into_experts, out_of_experts
from gpuinfer.text.decoder.cpu_intrinsics import (
    atomic_add,
    atomic_load,
    atomic_swap,
    call_int,
    call_product,
    relax,
)
from gpuinfer.text.decoder.cpu_math import compiled, inlined, narrow, widen
from gpuinfer.text.decoder.cpu_product import multiply

SPINS_BEFORE_YIELD = 2000
SPINS_BEFORE_SLEEP = 40_000  # about a millisecond: longer than what lies between two steps


@compiled
def serve(lane, control, sizes, addresses, eps, step, model, cache, shared, own):
    """Lane 0: run one step, with all others. Another: take part in steps until there has been none for a while (0) or
    STOP is set (1). One function for both, as whatever calls `run` is compiled with all of it.
    """
    while True:
        if lane and not wait_for_go(lane, control, addresses):
            return np.int64(0)
        if lane and atomic_load(control, at.STOP):
            return np.int64(1)
        run(lane, control, sizes, addresses, eps, step, model, cache, shared, own)
        if not lane:
            return np.int64(0)


@compiled
def go(control):
    """Have the lanes begin the next step."""
    atomic_add(control, at.GO, 1)


@compiled
def take_asleep(control, lane):
    """Whether this lane has gone to sleep and must be woken. It is told so once."""
    return atomic_swap(control, at.ASLEEP + 8 * lane, 0) == 1


@inlined
def wait_for_go(lane, control, addresses):
    """Whether a step has begun since this lane's last one. If not, the lane is to sleep until it is woken."""
    asleep = at.ASLEEP + 8 * lane
    seen = control[asleep + 1]
    spins = 0
    while atomic_load(control, at.GO) == seen:
        spins = spin(spins, addresses)
        if spins > SPINS_BEFORE_SLEEP:
            atomic_swap(control, asleep, 1)
            # A step may have begun meanwhile: then its leader has seen the flag, and wakes us, or has not.
            if atomic_load(control, at.GO) == seen or atomic_swap(control, asleep, 0) == 0:
                return False
    control[asleep + 1] = seen + 1
    return True


@inlined
def barrier(control, lanes, addresses):
    """Wait until all lanes have come here."""
    phase = atomic_load(control, at.PHASE)
    if atomic_add(control, at.ARRIVED, 1) == lanes - 1:
        atomic_add(control, at.ARRIVED, -lanes)
        atomic_add(control, at.PHASE, 1)
        return
    spins = 0
    while atomic_load(control, at.PHASE) == phase:
        spins = spin(spins, addresses)


@inlined
def spin(spins, addresses):
    """Wait for a moment; how often one has. Now and then others may have the core."""
    relax()
    spins += 1
    if spins % SPINS_BEFORE_YIELD == 0:
        call_int(addresses[at.YIELD])
    return spins


@inlined
def run(lane, control, sizes, addresses, eps, step, model, cache, shared, own):
    """One lane's share of one step."""
    tokens, slots, starts, lengths, wanted, every, positions, sees, vector_rows, turns, vectors, runs = step
    embedding, places, scales, shifts, query_scales, key_scales, cosines, sines = model[:8]
    out_biases, down_biases, windows, router_biases, router_scale = model[8:]
    keys, values = cache
    x, normed, mixed, inner, added, last, logits, chosen, shares, expert_inner = shared
    qkv, up, qkv_biases, up_biases, scores, query, mix, totals, asks, adapters, wide, low, delta, inners, experts = own
    lanes, layers, rows, hidden = sizes[at.LANES], sizes[at.LAYERS], sizes[at.ROWS], sizes[at.HIDDEN]
    first, end = rows * lane // lanes, rows * (lane + 1) // lanes
    product = addresses[at.PRODUCT]
    added_begin = sizes[at.ADDED_BEGIN]
    into = added.ctypes.data + 4 * added_begin
    for row in range(first, end):
        embed(embedding[tokens[row]], x[row])
    for number in range(sizes[at.VECTORS]):
        if first <= vector_rows[number] < end:
            embed(vectors[number], x[vector_rows[number]])
    for row in range(first, end):
        if sizes[at.LEARNED_POSITIONS]:
            add_place(x[row], places[positions[row]])
        norm_row(x[row], scales[0], shifts[0], eps, sizes[at.LAYER_NORM], normed[row])
    barrier(control, lanes, addresses)
    going = every
    for layer in range(layers):
        weight = at.FIRST_WEIGHT + 4 * layer
        multiply(product, rows, qkv.shape[1], normed, 0, hidden, addresses[weight], qkv.ctypes.data, qkv.shape[1])
        if sizes[at.RUNS]:
            adapt(at.QKV, at.OUT, layer, normed, hidden, qkv, 0, sizes, addresses, runs, adapters, wide, low, delta)
        few = sizes[at.FEW] and layer == layers - 1
        if few:  # nobody asks for the others any more, once their keys and values are stored
            going = wanted
        attend_step(
            layer, turns, slots, starts, lengths, going, few, sees, windows[layer], sizes, eps, qkv, qkv_biases[layer],
            query_scales[layer], key_scales[layer], cosines, sines, keys, values, scores, query, mix, totals, asks,
            mixed,
        )  # fmt: skip
        if few:
            rows = sizes[at.OUTPUTS]
            first, end = rows * lane // lanes, rows * (lane + 1) // lanes
        barrier(control, lanes, addresses)
        multiply(product, rows, sizes[at.ADDED], mixed, 0, mixed.shape[1], addresses[weight + 1], into, hidden)
        if sizes[at.RUNS]:
            adapt(
                at.OUT, at.UP, layer, mixed, mixed.shape[1], added, added_begin, sizes, addresses, runs, adapters,
                wide, low, delta,
            )  # fmt: skip
        barrier(control, lanes, addresses)
        for row in range(first, end):
            if few:  # another lane may still have to read what stands where the row goes
                add_aside(x[going[row]], added[row], out_biases[layer])
            else:
                add(x[row], added[row], out_biases[layer])
            sums = added[row] if few else x[row]
            norm_row(sums, scales[2 * layer + 1], shifts[2 * layer + 1], eps, sizes[at.LAYER_NORM], normed[row])
        barrier(control, lanes, addresses)
        if few:
            for row in range(first, end):
                embed(added[row], x[row])
        begin, columns, width = inners[layer, 0], inners[layer, 1], inners[layer, 2]
        outputs = 2 * columns if sizes[at.GATED] else columns
        multiply(product, rows, outputs, normed, 0, hidden, addresses[weight + 2], up.ctypes.data, up.shape[1])
        if sizes[at.RUNS]:
            adapt(at.UP, at.DOWN, layer, normed, hidden, up, 0, sizes, addresses, runs, adapters, wide, low, delta)
        for row in range(rows):
            activate(
                up[row], up_biases[layer], sizes[at.ACTIVATION], sizes[at.GATED], columns,
                inner[row, begin : begin + columns],
            )  # fmt: skip
        if inners[layer, 3]:
            gathered, begins, order, given, no_bias, wide_rows, router_scores, ranked = experts
            choose(
                first, end, layer, normed, sizes, addresses, router_biases, router_scale, chosen, shares,
                wide_rows, router_scores, ranked,
            )  # fmt: skip
            barrier(control, lanes, addresses)
            into_experts(
                rows, layer, normed, sizes, addresses, chosen, no_bias, up, gathered, begins, order, expert_inner
            )  # fmt: skip
        barrier(control, lanes, addresses)
        if width:
            multiply(product, rows, sizes[at.ADDED], inner, 0, width, addresses[weight + 3], into, hidden)
        else:
            forget(added, rows, added_begin, sizes[at.ADDED])
        if inners[layer, 3]:
            out_of_experts(layer, expert_inner, sizes, addresses, shares, begins, order, given, added)
        if sizes[at.RUNS]:
            adapt(
                at.DOWN, at.END, layer, inner, width, added, added_begin, sizes, addresses, runs, adapters, wide,
                low, delta,
            )  # fmt: skip
        barrier(control, lanes, addresses)
        for row in range(first, end):
            add(x[row], added[row], down_biases[layer])
            norm_row(x[row], scales[2 * layer + 2], shifts[2 * layer + 2], eps, sizes[at.LAYER_NORM], normed[row])
        barrier(control, lanes, addresses)
    outputs = sizes[at.OUTPUTS]
    for row in range(outputs * lane // lanes, outputs * (lane + 1) // lanes):
        for i in range(hidden):
            last[row, i] = normed[row if sizes[at.FEW] else wanted[row], i]
    barrier(control, lanes, addresses)
    head = addresses[at.FIRST_WEIGHT + 4 * layers]
    target = logits.ctypes.data + 4 * sizes[at.COLUMN]
    multiply(product, outputs, sizes[at.COLUMNS], last, 0, hidden, head, target, sizes[at.VOCABULARY])
    barrier(control, lanes, addresses)


@compiled
def adapt(part, end, layer, a, inner, c, column, sizes, addresses, runs, adapters, wide, low, delta):
    """Add what adapters add to rows of a product, c [rows, columns from `column` on] += a[:, :inner] · downᵀ · upᵀ, in
    float32.

    `runs` [runs, 3]: rows from the second to before the third number have the adapter at the first's place. Its parts
    of this product are those from `part` to before `end`. A row's bits depend on it and its adapter alone, as those of
    any product. `wide`, `low` and `delta` are room for rows.
    """
    product, stride, ranks = addresses[at.WIDE_PRODUCT], a.shape[1], sizes[at.RANKS]
    for number in range(sizes[at.RUNS]):
        place, first, last = runs[number, 0], runs[number, 1], runs[number, 2]
        rows = last - first
        source = a.ctypes.data + 4 * first * stride
        if a.itemsize == 2:
            source, stride = wide.ctypes.data, inner
            for row in range(rows):
                for i in range(inner):
                    wide[row * inner + i] = widen(a[first + row, i])
        for which in range(part, end):
            facts = adapters[place, layer, which]
            rank, count = facts[at.RANK], facts[at.COUNT]
            if rank == 0 or count == 0:
                continue
            call_product(product, rows, rank, inner, source, stride, facts[at.DOWNWARDS], low.ctypes.data, ranks)
            upwards, begin = facts[at.UPWARDS], column + facts[at.FIRST]
            call_product(product, rows, count, rank, low.ctypes.data, ranks, upwards, delta.ctypes.data, count)
            for row in range(rows):
                for i in range(count):
                    c[first + row, begin + i] += delta[row * count + i]


@inlined
def forget(added, rows, begin, columns):
    for row in range(rows):
        for i in range(begin, begin + columns):
            added[row, i] = np.float32(0)


@inlined
def embed(vector, out):
    for i in range(len(out)):
        out[i] = widen(vector[i])


@inlined
def add_place(x, place):
    for i in range(len(x)):
        x[i] += widen(place[i])


@inlined
def add(x, added, bias):
    """What attention or the MLP adds to a row, and the bias."""
    for i in range(len(x)):
        x[i] += added[i] + bias[i]


@inlined
def add_aside(x, added, bias):
    """The same sum, in `added`."""
    for i in range(len(x)):
        added[i] = x[i] + (added[i] + bias[i])


@inlined
def norm_row(x, scale, shift, eps, layer_norm, out):
    """RMSNorm, or LayerNorm with its shift."""
    n = len(x)
    mean = np.float32(0)
    if layer_norm:
        for i in range(n):
            mean += x[i]
        mean /= np.float32(n)
    squares = np.float32(0)
    for i in range(n):
        squares += (x[i] - mean) * (x[i] - mean)
    factor = np.float32(1) / np.sqrt(squares / np.float32(n) + np.float32(eps))
    for i in range(n):
        out[i] = narrow((x[i] - mean) * factor * scale[i] + shift[i], out)


JOIN_S = 10.0


def nothing() -> None:
    """What there is to prepare where no library computes."""


class Lanes:
    """Runs steps in `len(arguments)` threads. `arguments[lane]` go to the kernel after `control`."""

    def __init__(self, blas: Blas | None, arguments: list[tuple[Any, ...]]) -> None:
        self._arguments = arguments
        self._control: NDArray[np.int64] = np.zeros(at.ASLEEP + 8 * (len(arguments) + 1), np.int64)
        self._awake = [threading.Semaphore(0) for _ in arguments]
        self._one_thread_here = nothing if blas is None else blas.one_thread_here
        self._threads = [
            threading.Thread(target=self._serve, args=(lane, self._one_thread_here), name=f"lane {lane}", daemon=True)
            for lane in range(1, len(arguments))
        ]
        for thread in self._threads:
            thread.start()

    def step(self) -> None:
        """Run one step, whose sizes and tokens are where the arguments point."""
        self._one_thread_here()  # whoever sets torch's threads, or is another thread than before, undoes it
        if self._threads:
            self._begin()
        serve(0, self._control, *self._arguments[0])

    def close(self) -> None:
        self._control[at.STOP] = 1
        self._begin()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._threads = []

    def _begin(self) -> None:
        go(self._control)
        for lane in range(1, len(self._arguments)):
            if take_asleep(self._control, lane):
                self._awake[lane].release()

    def _serve(self, lane: int, prepare: Callable[[], None]) -> None:
        prepare()
        while not serve(lane, self._control, *self._arguments[lane]):
            self._awake[lane].acquire()
