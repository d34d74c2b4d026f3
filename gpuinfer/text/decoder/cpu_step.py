"""The compiled forward step: threads that share out the lanes, each of which has a share of every layer's heads and
columns.

All lanes walk through the layers together. A lane computes the queries, keys and values of its own heads, and their
attention; its own columns of what all heads add to the rows; its own columns of the up projection; and its own columns
of what these add. The sums and norms between are divided by rows. Each value is one lane's from its first term to its
last, so that the number of lanes cannot show in it, nor that of threads. (Shoeybi et al. 2019 divide the terms as well,
which would save two of the six barriers a layer.)

There are as many lanes as threads may take part. A step with fewer of them has some threads compute several lanes, one
after the other between two barriers: so another model can have the other cores meanwhile.

Rows are the step's tokens, in order. Arrays end where their capacity does; how much of them counts is in `sizes`. What
is a lane's own has the lane for its first index.

The threads of a decoder: the caller's is number 0, the others wait for the next step that they take part in.
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
from gpuinfer.text.decoder.cpu_math import called, compiled, inlined, narrow, widen
from gpuinfer.text.decoder.cpu_product import multiply

SPINS_BEFORE_YIELD = 2000
SPINS_BEFORE_SLEEP = 40_000  # about a millisecond: longer than what lies between two steps


@compiled
def serve(thread, control, sizes, addresses, eps, step, model, cache, shared, own):
    """Thread 0: run one step, with the others that take part. Another: take part in steps until there has been none for
    a while (0) or STOP is set (1). One function for both, as whatever calls `run` is compiled with all of it.
    """
    while True:
        if thread and not wait_for_go(thread, control, addresses):
            return np.int64(0)
        if thread and atomic_load(control, at.STOP):
            return np.int64(1)
        threads = (control[at.ASLEEP + 8 * thread + 1] if thread else atomic_load(control, at.GO)) % at.MOST_THREADS
        run(thread, threads, control, sizes, addresses, eps, step, model, cache, shared, own)
        if not thread:
            return np.int64(0)


@compiled
def go(control, threads):
    """Have so many threads begin the next step."""
    atomic_swap(control, at.REST, 0)
    atomic_swap(control, at.GO, (control[at.GO] // at.MOST_THREADS + 1) * at.MOST_THREADS + threads)


@compiled
def rest(control):
    """Have threads that wait for the next step sleep at once: others need their cores."""
    atomic_swap(control, at.REST, 1)


@compiled
def take_asleep(control, thread):
    """Whether this thread has gone to sleep and must be woken. It is told so once."""
    return atomic_swap(control, at.ASLEEP + 8 * thread, 0) == 1


@inlined
def wait_for_go(thread, control, addresses):
    """Whether a step has begun in which this thread takes part. If not, it is to sleep until it is woken.

    Which step that is and how many take part is one number, so that nobody joins a step that is over.
    """
    asleep = at.ASLEEP + 8 * thread
    spins = 0
    while True:
        latest = atomic_load(control, at.GO)
        if latest != control[asleep + 1]:
            control[asleep + 1] = latest
            if thread < latest % at.MOST_THREADS:
                return True
        spins = spin(spins, addresses)
        if spins > SPINS_BEFORE_SLEEP or atomic_load(control, at.REST):
            atomic_swap(control, asleep, 1)
            # A step may have begun meanwhile: then its leader has seen the flag, and wakes us, or has not.
            if atomic_load(control, at.GO) == latest or atomic_swap(control, asleep, 0) == 0:
                return False


@inlined
def barrier(control, threads, addresses):
    """Wait until all threads of this step have come here."""
    phase = atomic_load(control, at.PHASE)
    if atomic_add(control, at.ARRIVED, 1) == threads - 1:
        atomic_add(control, at.ARRIVED, -threads)
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
        call_int(addresses[0, at.YIELD])
    return spins


@inlined
def run(thread, threads, control, sizes, addresses, eps, step, model, cache, shared, own):
    """One thread's share of one step: its lanes, and its rows."""
    tokens, slots, starts, lengths, wanted, every, positions, sees, vector_rows, turns, vectors, runs = step
    embedding, places, scales, shifts, query_scales, key_scales, cosines, sines = model[:8]
    out_biases, down_biases, windows, router_biases, router_scale = model[8:]
    keys, values = cache
    x, normed, mixed, inner, added, last, logits, chosen, shares, expert_inner = shared
    qkv, up, qkv_biases, up_biases, scores, query, mix, totals, asks, adapters, wide, low, delta, inners, experts = own
    gathered, begins, order, given, no_bias, wide_rows, router_scores, ranked = experts
    common, lanes = sizes[0], len(sizes)  # what is not of one lane is the same in all of them
    layers, rows, hidden, layer_norm = common[at.LAYERS], common[at.ROWS], common[at.HIDDEN], common[at.LAYER_NORM]
    first_lane, end_lane = lanes * thread // threads, lanes * (thread + 1) // threads
    first, end = rows * thread // threads, rows * (thread + 1) // threads
    product = addresses[0, at.PRODUCT]
    for row in range(first, end):
        embed(embedding[tokens[row]], x[row])
    for number in range(common[at.VECTORS]):
        if first <= vector_rows[number] < end:
            embed(vectors[number], x[vector_rows[number]])
    for row in range(first, end):
        if common[at.LEARNED_POSITIONS]:
            add_place(x[row], places[positions[row]])
        norm_row(x[row], scales[0], shifts[0], eps, layer_norm, normed[row])
    barrier(control, threads, addresses)
    going = every
    for layer in range(layers):
        weight = at.FIRST_WEIGHT + 4 * layer
        few = common[at.FEW] and layer == layers - 1
        if few:  # nobody asks for the others any more, once their keys and values are stored
            going = wanted
        for lane in range(first_lane, end_lane):
            mine, where, heads = sizes[lane], addresses[lane], qkv[lane]
            multiply(product, rows, heads.shape[1], normed, 0, hidden, where[weight], heads.ctypes.data, heads.shape[1])
            if common[at.RUNS]:
                adapt(
                    at.QKV, at.OUT, layer, normed, hidden, heads, 0, mine, where, runs, adapters[lane], wide[lane],
                    low[lane], delta[lane],
                )  # fmt: skip
            attend_step(
                layer, turns, slots, starts, lengths, going, few, sees, windows[layer], mine, eps, heads,
                qkv_biases[lane, layer], query_scales[layer], key_scales[layer], cosines, sines, keys[lane],
                values[lane], scores[lane], query[lane], mix[lane], totals[lane], asks[lane], mixed,
            )  # fmt: skip
        if few:
            rows = common[at.OUTPUTS]
            first, end = rows * thread // threads, rows * (thread + 1) // threads
        barrier(control, threads, addresses)
        for lane in range(first_lane, end_lane):
            mine, where = sizes[lane], addresses[lane]
            begin = mine[at.ADDED_BEGIN]
            into = added.ctypes.data + 4 * begin
            multiply(product, rows, mine[at.ADDED], mixed, 0, mixed.shape[1], where[weight + 1], into, hidden)
            if common[at.RUNS]:
                adapt(
                    at.OUT, at.UP, layer, mixed, mixed.shape[1], added, begin, mine, where, runs, adapters[lane],
                    wide[lane], low[lane], delta[lane],
                )  # fmt: skip
        barrier(control, threads, addresses)
        for row in range(first, end):
            if few:  # another thread may still have to read what stands where the row goes
                add_aside(x[going[row]], added[row], out_biases[layer])
            else:
                add(x[row], added[row], out_biases[layer])
            sums = added[row] if few else x[row]
            norm_row(sums, scales[2 * layer + 1], shifts[2 * layer + 1], eps, layer_norm, normed[row])
        barrier(control, threads, addresses)
        if few:
            for row in range(first, end):
                embed(added[row], x[row])
        for lane in range(first_lane, end_lane):
            mine, where, own_up = sizes[lane], addresses[lane], up[lane]
            begin, columns = inners[lane, layer, 0], inners[lane, layer, 1]
            outputs = 2 * columns if common[at.GATED] else columns
            multiply(
                product, rows, outputs, normed, 0, hidden, where[weight + 2], own_up.ctypes.data, own_up.shape[1]
            )  # fmt: skip
            if common[at.RUNS]:
                adapt(
                    at.UP, at.DOWN, layer, normed, hidden, own_up, 0, mine, where, runs, adapters[lane], wide[lane],
                    low[lane], delta[lane],
                )  # fmt: skip
            for row in range(rows):
                activate(
                    own_up[row], up_biases[lane, layer], common[at.ACTIVATION], common[at.GATED], columns,
                    inner[row, begin : begin + columns],
                )  # fmt: skip
        if inners[0, layer, 3]:
            choose(
                first, end, layer, normed, common, addresses[0], router_biases, router_scale, chosen, shares,
                wide_rows[first_lane], router_scores[first_lane], ranked[first_lane],
            )  # fmt: skip
            barrier(control, threads, addresses)
            for lane in range(first_lane, end_lane):
                into_experts(
                    rows, layer, normed, sizes[lane], addresses[lane], chosen, no_bias[lane], up[lane],
                    gathered[lane], begins[lane], order[lane], expert_inner,
                )  # fmt: skip
        barrier(control, threads, addresses)
        width = inners[0, layer, 2]
        for lane in range(first_lane, end_lane):
            mine, where = sizes[lane], addresses[lane]
            begin = mine[at.ADDED_BEGIN]
            into = added.ctypes.data + 4 * begin
            if width:
                multiply(product, rows, mine[at.ADDED], inner, 0, width, where[weight + 3], into, hidden)
            else:
                forget(added, rows, begin, mine[at.ADDED])
            if inners[0, layer, 3]:
                out_of_experts(
                    layer, expert_inner, mine, where, shares, begins[lane], order[lane], given[lane], added
                )  # fmt: skip
            if common[at.RUNS]:
                adapt(
                    at.DOWN, at.END, layer, inner, width, added, begin, mine, where, runs, adapters[lane], wide[lane],
                    low[lane], delta[lane],
                )  # fmt: skip
        barrier(control, threads, addresses)
        for row in range(first, end):
            add(x[row], added[row], down_biases[layer])
            norm_row(x[row], scales[2 * layer + 2], shifts[2 * layer + 2], eps, layer_norm, normed[row])
        barrier(control, threads, addresses)
    outputs = common[at.OUTPUTS]
    for row in range(outputs * thread // threads, outputs * (thread + 1) // threads):
        for i in range(hidden):
            last[row, i] = normed[row if common[at.FEW] else wanted[row], i]
    barrier(control, threads, addresses)
    for lane in range(first_lane, end_lane):
        mine = sizes[lane]
        head = addresses[lane, at.FIRST_WEIGHT + 4 * layers]
        target = logits.ctypes.data + 4 * mine[at.COLUMN]
        multiply(product, outputs, mine[at.COLUMNS], last, 0, hidden, head, target, mine[at.VOCABULARY])
    barrier(control, threads, addresses)


@called
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


class Threads:
    """Runs steps in up to as many threads as there are lanes: `arguments` go to the kernel after `control`."""

    def __init__(self, blas: Blas | None, lanes: int, arguments: tuple[Any, ...]) -> None:
        self._arguments, self._count = arguments, lanes
        self._control: NDArray[np.int64] = np.zeros(at.ASLEEP + 8 * (lanes + 1), np.int64)
        self._awake = [threading.Semaphore(0) for _ in range(lanes)]
        self._one_thread_here = nothing if blas is None else blas.one_thread_here
        self._threads = [
            threading.Thread(
                target=self._serve, args=(number, self._one_thread_here), name=f"lane {number}", daemon=True
            )
            for number in range(1, lanes)
        ]
        for thread in self._threads:
            thread.start()

    def step(self, threads: int) -> None:
        """Run one step, whose sizes and tokens are where the arguments point, in so many threads."""
        self._one_thread_here()  # whoever sets torch's threads, or is another thread than before, undoes it
        self._begin(threads)
        serve(0, self._control, *self._arguments)

    def rest(self) -> None:
        """Leave the cores to others until the next step."""
        rest(self._control)

    def close(self) -> None:
        self._control[at.STOP] = 1
        self._begin(self._count)
        for thread in self._threads:
            thread.join(JOIN_S)
        self._threads = []

    def _begin(self, threads: int) -> None:
        go(self._control, threads)
        for number in range(1, threads):
            if take_asleep(self._control, number):
                self._awake[number].release()

    def _serve(self, number: int, prepare: Callable[[], None]) -> None:
        prepare()
        while not serve(number, self._control, *self._arguments):
            self._awake[number].acquire()
