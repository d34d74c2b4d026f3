"""The decoder for processors: the whole forward step is compiled, and shared out between threads."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.decoder import cpu_sizes, cpu_weights
from gpuinfer.text.decoder.attention_plan import StaleValues, positions_of
from gpuinfer.text.decoder.cpu_attention import SPAN
from gpuinfer.text.decoder.cpu_math import TILE
from gpuinfer.text.decoder.cpu_mlp import EXPERT_ROWS
from gpuinfer.text.decoder.cpu_panels import TERMS, CachePool, aligned, kind_of_bfloat16, weight_in
from gpuinfer.text.decoder.cpu_plan import AttentionPlanner, FewestThreads, most_members
from gpuinfer.text.decoder.cpu_product import Kind, product_with
from gpuinfer.text.decoder.cpu_quantised import (
    WeightBits,
    quantised_panel_bytes,
    quantised_product,
    row_kind,
    row_length,
)
from gpuinfer.text.decoder.cpu_rounding import weight_of_quantised
from gpuinfer.text.decoder.cpu_step import MOST_PANELS, ROW_BLOCK, ROWS_AT_ONCE, serve
from gpuinfer.text.decoder.cpu_threads import Threads
from gpuinfer.text.decoder.cpu_weights import LoadedAdapters, PackedAdapter, PackedWeights, SortedStep, packed, tied
from gpuinfer.text.decoder.rounding import GROUP, HEAD_BITS
from gpuinfer.text.decoder.torch_layers import normed
from gpuinfer.text.precision import FLOAT32, computes_in
from gpuinfer.text.transformer import PAGE, Adapter, Norm, Shape, Step, Weights

LEAST_CAPACITY = 64  # rows of a step for which there is room at first
NO_ROOM = (0, 0, 0, 0)
DOWN_PANELS = 4  # of an expert's down projection, in a piece


def cpu_available(dtype: torch.dtype) -> bool:
    """Whether this processor has what it takes."""
    return dtype in (torch.float32, torch.bfloat16) and bool(llvm.get_host_cpu_features().get("fma"))


class CpuDecoder:
    """`step.Decoder` for float32 and bfloat16, weights and cache.

    Sums and what lies between products are float32, and a row's logits depend neither on what shares its step nor on
    `threads`, bit by bit. Where the processor multiplies bfloat16 by itself, and `deterministic` is not set, such
    weights meet rows that are rounded to bfloat16; else rows of float32, with the same sums on any processor. With
    `bits` matrices are rounded to so many, the head to HEAD_BITS, and meet rows of 8 bits (`cpu_quantised`).
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        dtype: torch.dtype,
        *,
        slots: int,
        pages: int,
        length: int,
        threads: int,
        deterministic: bool = False,
        bits: WeightBits | None = None,
    ) -> None:
        if not cpu_available(dtype):
            raise RuntimeError(f"CpuDecoder needs a processor with FMA, and no {dtype}. Use TorchDecoder.")
        self.shape, self.slots, self.pages, self.length = shape, slots, pages, length
        self.device = torch.device("cpu")
        arithmetic = computes_in(dtype, self.device, deterministic=deterministic)
        self.computes_in = "int8" if bits else arithmetic
        self.reads_drawn, self.pages_go_back = False, True
        self._kind, self._bits = product_kind(dtype, arithmetic), bits
        self._operand = np.dtype(np.int8 if row_kind() == "bytes" else np.float32)  # of quantised weights' rows
        self._multiplied = np.dtype(np.uint16 if self._kind in ("amx", "avx512") else np.float32)
        self._dtype, self._padded = dtype, -(-shape.head_dim // TILE) * TILE
        self._columns = -(-length // PAGE)
        self._tied = tied(weights)
        self._packed = self.pack(weights)
        self._sizes = self._sizes_of_model()
        self._pool = CachePool(pages, int(self._sizes[cpu_sizes.PAGE_BYTES]))
        self._adapters = LoadedAdapters(shape.layers)
        self._planners = [AttentionPlanner(shape.heads // shape.kv_heads) for _ in range(2)]
        self._stale = StaleValues()
        self._room = NO_ROOM
        self._step: tuple[NDArray[Any], ...] = ()
        self._threads: Threads | None = None
        self._most_threads = self._taking_part = threads
        self._fewest = FewestThreads()
        self._used = {"threads": threads, "busy_s": 0.0, "waited_s": 0.0}  # by threads that have been closed

    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        self._compute(step)
        return self._logits[: len(step.wanted)]

    def hidden(self, step: Step) -> Tensor:
        """What the last layer gives of each token, float32 [tokens, hidden], for a decoder that has those after it."""
        by_adapter = self._compute(replace(step, wanted=step.wanted[:0]), all_rows=True)
        found = self._x[: len(step.tokens)]
        return torch.from_numpy(found.copy() if by_adapter.back is None else found[by_adapter.back])

    def states(self, step: Step) -> NDArray[np.float32]:
        """What the last norm gives of each token, [tokens, hidden]."""
        scales, shifts = self._packed.model[2][-1], self._packed.model[3][-1]
        norm = Norm(torch.from_numpy(scales), torch.from_numpy(shifts))
        found = normed(self.hidden(step), norm, self.shape.norm, self.shape.norm_eps)
        return np.asarray(found.numpy(), np.float32)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `step.Decoder.copy_pages`."""
        self._pool.copy(sources, targets)
        self._stale.copied(targets)

    def give_back(self, pages: Sequence[int]) -> None:
        """See `step.Decoder.give_back`."""
        self._pool.give_back(pages)

    def resize(self, slots: int, pages: int) -> None:
        """See `step.Decoder.resize`: its pages go back one by one."""
        raise NotImplementedError

    def drop_graphs(self) -> None:
        """There are none."""

    def embedding(self) -> Tensor:
        """See `step.Decoder.embedding`. Of a head that is the embedding it is a copy."""
        if not self._tied:
            stored = torch.from_numpy(self._packed.model[0])
            return stored if self._dtype == torch.float32 else stored.view(torch.int16).view(torch.bfloat16)
        head, sizes = self._packed.kept[self._packed.head], (self.shape.vocabulary, self.shape.hidden)
        return weight_of_quantised(head, *sizes, HEAD_BITS) if self._bits else weight_in(head, *sizes)

    def weight_tensors(self) -> Sequence[Tensor]:
        """See `step.Decoder.weight_tensors`. bfloat16 is there as its bits in int16, what is quantised as bytes."""
        kept = self._packed.kept
        return [torch.from_numpy(one.view(np.int16) if one.dtype == np.uint16 else one) for one in kept]

    def pack(self, weights: Weights) -> PackedWeights:
        """See `step.Decoder.pack`."""
        return packed(weights, self.shape, self._columns * PAGE, self._bits)

    def swap(self, packed: object) -> None:
        """See `step.Decoder.swap`. The threads are made anew with the next step: they hold addresses of weights."""
        assert isinstance(packed, PackedWeights)
        self.close()
        self._packed = packed

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter:
        """See `step.Decoder.pack_adapter`."""
        return cpu_weights.pack(adapter, self.shape)

    def load(self, number: int, packed: object) -> None:
        """See `step.Decoder.load`. The threads are made anew where there is no room for it."""
        assert isinstance(packed, PackedAdapter)
        if self._adapters.load(number, packed):
            self.close()

    def unload(self, number: int) -> None:
        """See `step.Decoder.unload`."""
        self._adapters.unload(number)

    def use(self, threads: int) -> None:
        """See `step.Decoder.use`."""
        self._taking_part = max(1, min(threads, self._most_threads))

    def rest(self) -> None:
        """See `step.Decoder.rest`."""
        if self._threads is not None:
            self._threads.rest()

    def empty(self) -> None:
        """Forget what all pages hold. All of the cache is resident from here on."""
        self._pool.fill()

    def cache_bytes(self) -> int:
        return self._pool.nbytes

    def usage(self) -> Mapping[str, float]:
        """Seconds that the threads have computed (`busy_s`) and waited for one another (`waited_s`) in all steps until
        now, summed over `threads` threads.
        """
        now = {} if self._threads is None else self._threads.usage()
        return {name: value if name == "threads" else value + now.get(name, 0.0) for name, value in self._used.items()}

    def close(self) -> None:
        self._used = dict(self.usage())
        threads, self._threads = self._threads, None
        self._room = NO_ROOM
        if threads is not None:
            threads.close()

    def _compute(self, step: Step, all_rows: bool = False) -> SortedStep:
        """Through all layers, and of wanted rows to logits; `all_rows`: the others go through the last layer too."""
        rows, segments, outputs = len(step.tokens), len(step.lengths), len(step.wanted)
        vectors = 0 if step.vectors is None else len(step.vectors.places)
        needed = rows, segments, outputs, vectors
        if any(count > room for count, room in zip(needed, self._room, strict=True)):
            self._make_room(needed)
        by_adapter = self._adapters.sorted(step)
        step = by_adapter.step
        tokens, wanted, every, positions, sees, owners, clears, vector_rows, own_vectors, runs, pages = self._step
        runs[: len(by_adapter.runs)] = by_adapter.runs
        tokens[:rows], wanted[:outputs] = step.tokens, step.wanted
        if rows == segments:
            positions[:rows], owners[:rows] = step.starts, every[:rows]
        else:
            positions[:rows], owners[:rows] = positions_of(step), np.repeat(every[:segments], step.lengths)
        sees[:rows] = positions[:rows] + 1 if step.sees is None else step.sees
        clears[:rows] = self._stale.of(step, positions[:rows], sees[:rows])
        columns = min(pages.shape[1], step.pages.shape[1])
        pages[:segments, :columns] = step.pages[:, :columns]
        if step.vectors is not None:
            vector_rows[:vectors], own_vectors[:vectors] = step.vectors.places, np.asarray(step.vectors.values)
        # Adapters know their rows by where they stand among all of them.
        few = self.shape.layers > 0 and outputs < rows and not len(by_adapter.runs) and not all_rows
        self._attend_to(0, step, every[:rows], owners, sees)
        if few:
            self._attend_to(1, step, wanted[:outputs], owners, sees)
        picked = not few and (outputs < rows or by_adapter.back is not None)
        counts = rows, segments, outputs, len(by_adapter.runs), vectors, few, picked
        self._sizes[cpu_sizes.ROWS : cpu_sizes.PICKED + 1] = counts
        assert self._threads is not None  # made with the room
        threads, began = self._fewest.threads_for(rows, self._taking_part), time.perf_counter()
        self._threads.step(threads)
        self._fewest.took(rows, threads, time.perf_counter() - began)
        return by_adapter

    def _attend_to(
        self, which: int, step: Step, going: NDArray[np.int32], owners: NDArray[np.int32], sees: NDArray[np.int32]
    ) -> None:
        """Write down the pieces of attention of the rows that go on."""
        plan = self._planners[which].plan(step, going, owners, sees)
        pieces, members, waves = (array[which] for array in self._attention)
        pieces[: len(plan.pieces)], members[: len(plan.members)] = plan.pieces, plan.members
        waves[0], waves[1 : len(plan.waves) + 1] = len(plan.waves) - 1, plan.waves

    def _sizes_of_model(self) -> NDArray[np.int64]:
        shape, stored = self.shape, self._dtype.itemsize
        pair, together = (2, TERMS) if stored == 2 else (1, 1)
        keys = -(-self._padded // together) * together * PAGE * stored
        head = keys + self._padded * PAGE * stored
        found = {
            cpu_sizes.LAYERS: shape.layers,
            cpu_sizes.HEADS: shape.heads,
            cpu_sizes.KV_HEADS: shape.kv_heads,
            cpu_sizes.HEAD_DIM: shape.head_dim,
            cpu_sizes.PADDED_DIM: self._padded,
            cpu_sizes.HALF_ROPE: len(shape.rope.inverse_frequencies) if shape.rope else 0,
            cpu_sizes.QK_NORM: shape.qk_norm,
            cpu_sizes.HIDDEN: shape.hidden,
            cpu_sizes.ACTIVATION: cpu_sizes.ACTIVATIONS[shape.activation],
            cpu_sizes.GATED: shape.gated,
            cpu_sizes.LAYER_NORM: shape.norm == "layer",
            cpu_sizes.LEARNED_POSITIONS: shape.learned_positions,
            cpu_sizes.VOCABULARY: shape.vocabulary,
            cpu_sizes.TIED: self._tied,
            cpu_sizes.PAIR: pair,
            cpu_sizes.ROUND: GROUP if self._bits else together,
            cpu_sizes.ROUND_BYTES: (
                quantised_panel_bytes(GROUP, self._bits) if self._bits else together * TILE * stored
            ),
            cpu_sizes.WEIGHT_BITS: self._bits or 0,
            cpu_sizes.HEAD_ROUND_BYTES: (
                quantised_panel_bytes(GROUP, HEAD_BITS) if self._bits else together * TILE * stored
            ),
            cpu_sizes.HEAD_BITS: HEAD_BITS if self._bits else 0,
            cpu_sizes.OPERAND: self._operand.itemsize if self._bits else self._multiplied.itemsize,
            cpu_sizes.STORED: stored,
            cpu_sizes.MULTIPLIED: self._multiplied.itemsize,
            cpu_sizes.KEY_BYTES: keys,
            cpu_sizes.HEAD_BYTES: head,
            cpu_sizes.LAYER_BYTES: head * shape.kv_heads,
            cpu_sizes.PAGE_BYTES: -(-head * shape.kv_heads * shape.layers // 64) * 64,
        }
        if (experts := shape.experts) is not None:
            found |= {
                cpu_sizes.EXPERTS: experts.count,
                cpu_sizes.EXPERT: experts.intermediate,
                cpu_sizes.SIGMOID: experts.scores == "sigmoid",
                cpu_sizes.NORMALISED: experts.normalised,
                cpu_sizes.GROUPS: experts.groups,
                cpu_sizes.GROUPS_CHOSEN: experts.groups_chosen,
            }
        return np.array([found.get(place, 0) for place in range(cpu_sizes.SIZES)], np.int64)

    def _make_room(self, needed: tuple[int, int, int, int]) -> None:
        """Buffers for steps of so many rows, segments, outputs and vectors, doubled so that this happens seldom."""
        rows, segments, outputs, vectors = (
            max(least, old, 1 << (new - 1).bit_length() if new else 0)
            for least, old, new in zip((*[LEAST_CAPACITY] * 3, 0), self._room, needed, strict=True)
        )
        self.close()
        self._room = rows, segments, outputs, vectors
        shape, multiplied = self.shape, self._multiplied
        integers = {name: np.zeros(rows, np.int32) for name in ("tokens", "positions", "sees", "owners", "clears")}
        self._step = (
            integers["tokens"],
            np.zeros(outputs, np.int32),
            np.arange(rows, dtype=np.int32),
            *(integers[name] for name in ("positions", "sees", "owners", "clears")),
            np.zeros(vectors, np.int32),
            np.zeros((vectors, shape.hidden), np.float32),
            np.zeros((segments, cpu_weights.RUN), np.int64),
            np.zeros((segments, self._columns), np.int32),
        )
        depth = self._columns * PAGE // SPAN + 1  # waves, at most
        self._attention = (  # of all rows, and of those that go through the last layer
            np.zeros((2, rows * (depth + 1), cpu_sizes.PIECE), np.int64),
            np.zeros((2, rows * (depth + 1)), np.int32),
            np.zeros((2, depth + 4), np.int64),
        )
        self._sizes[cpu_sizes.RANKS] = self._adapters.rank
        logits = aligned((outputs, shape.vocabulary), np.float32)
        self._logits = torch.from_numpy(logits)
        self._x = aligned((rows, shape.hidden), np.float32)
        widest, mixed = _widest_inner(shape), shape.heads * shape.head_dim
        queries = aligned((rows, shape.heads * self._padded), multiplied)
        operands = self._row_length(max(shape.hidden, widest, mixed))
        chosen = rows * shape.experts.chosen if shape.experts else 0
        shared = (
            self._x,
            aligned((outputs, shape.hidden), np.float32),
            aligned((rows, shape.hidden), multiplied),
            aligned((rows, mixed + 2 * shape.kv_heads * shape.head_dim), np.float32),
            queries,
            aligned((rows, mixed), multiplied),
            aligned((rows if self._adapters.rank else 0, (2 if shape.gated else 1) * widest), np.float32),
            aligned((rows, widest), multiplied),
            aligned((rows, shape.hidden), np.float32),
            aligned((outputs, shape.hidden), multiplied),
            logits,
            aligned((rows * shape.heads, self._padded), np.float32),
            aligned((rows * shape.heads, 2), np.float32),
            *_chosen(shape, rows, multiplied),
            aligned((max(rows, outputs), operands), self._operand),
            aligned((chosen, self._row_length(shape.experts.intermediate if shape.experts else 0)), self._operand),
        )
        own = (self._scratch(rows), self._adapters.tables)
        widened = self._adapters.rank or shape.experts is not None
        wide, product = product_with("float32").address if widened else 0, product_with(self._kind).address
        of_weights = product if self._bits is None else quantised_product(self._bits).address
        of_head = product if self._bits is None else quantised_product(HEAD_BITS).address
        sched_yield = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
        first = (product, sched_yield, wide, self._pool.address, of_weights, of_head)
        addresses = np.array([*first, *self._packed.addresses], np.int64)
        eps, model = float(shape.norm_eps), self._packed.model
        arguments = (self._sizes, addresses, eps, self._step, self._attention, model, shared, own)
        self._threads = Threads(self._most_threads, serve, arguments)

    def _scratch(self, rows: int) -> tuple[NDArray[Any], ...]:
        """Each thread's own: the thread is the first index. Whole cache lines, so that no two threads write to one."""
        shape, threads, multiplied, experts = self.shape, self._most_threads, self._multiplied, self.shape.experts
        group = shape.heads // shape.kv_heads
        queries = max(most_members(group) * group, group)
        widest = max(shape.hidden, _widest_inner(shape), shape.heads * shape.head_dim)
        rank, count, chosen = self._adapters.rank, experts.count if experts else 0, experts.chosen if experts else 0
        piece = min(ROW_BLOCK, -(-rows // 32) * 32) * MOST_PANELS * TILE
        piece = max(piece, EXPERT_ROWS * experts.intermediate if experts else 0)
        added = ROWS_AT_ONCE * max((2 if shape.gated else 1) * _widest_inner(shape), shape.hidden, _qkv(shape))
        delta = max(added if rank else 0, EXPERT_ROWS * DOWN_PANELS * TILE if experts else 0)
        narrow = multiplied.itemsize == 2 and (rank or experts)

        def room(size: int, dtype: Any = np.float32) -> NDArray[Any]:
            return aligned((threads, -(-size // TILE) * TILE), dtype)

        head = room(self._padded)
        head[...] = 0  # what lies behind a narrow head's values is multiplied with the cache's zeros there
        return (
            head,
            room(queries * self._padded, multiplied),
            room(queries * SPAN),
            room(queries * SPAN, multiplied),
            room(2 * queries),
            room(queries * self._padded),
            room(queries * self._padded),
            room(piece),
            room(piece),
            room(ROWS_AT_ONCE * rank),
            room(delta),
            room(ROWS_AT_ONCE * widest if narrow else 0),
            aligned((threads, EXPERT_ROWS if experts else 0, shape.hidden), multiplied),
            np.zeros((threads, count + 1), np.int64),
            np.zeros((threads, rows * chosen), np.int32),
            aligned((threads, ROWS_AT_ONCE, count), np.float32),
            np.zeros((threads, count), np.float32),
            aligned((threads, EXPERT_ROWS if experts else 0, self._row_length(shape.hidden)), self._operand),
        )

    def _row_length(self, inner: int) -> int:
        return row_length(inner, row_kind()) if self._bits else 0


def product_kind(dtype: torch.dtype, compute: str) -> Kind:
    """The products of weights of this format with rows of the other."""
    if dtype == torch.float32:
        return "float32"
    found = kind_of_bfloat16()
    return "widened" if compute == FLOAT32 or found == "none" else found


def _widest_inner(shape: Shape) -> int:
    return max((shape.inner(layer) for layer in range(shape.layers)), default=0)


def _qkv(shape: Shape) -> int:
    return (shape.heads + 2 * shape.kv_heads) * shape.head_dim


def _chosen(shape: Shape, rows: int, multiplied: np.dtype[Any]) -> tuple[NDArray[Any], ...]:
    """Who goes through which expert, with what share of the sum, and what there is between experts' products."""
    experts = shape.experts
    if experts is None:
        return np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32), aligned((0, 0), multiplied)
    inner = aligned((rows * experts.chosen, experts.intermediate), multiplied)
    return np.zeros((rows, experts.chosen), np.int32), np.zeros((rows, experts.chosen), np.float32), inner
