"""The decoder for processors: the whole forward step is compiled, and shared out between threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.arithmetic import FLOAT32, computes_in
from gpuinfer.text.decoder import blas, cpu_adapters, cpu_product, cpu_sizes
from gpuinfer.text.decoder.cpu_adapters import LoadedAdapters, PackedAdapter, SortedStep, pack
from gpuinfer.text.decoder.cpu_attention import ASKED, BLOCK, QUERIES
from gpuinfer.text.decoder.cpu_experts import AT_ONCE
from gpuinfer.text.decoder.cpu_product import aligned
from gpuinfer.text.decoder.cpu_sharing import Sharing
from gpuinfer.text.decoder.cpu_step import Threads
from gpuinfer.text.decoder.cpu_vectors import TILE
from gpuinfer.text.decoder.cpu_weights import (
    LaneWeights,
    Share,
    as_stored,
    bias_of,
    lane_weights,
    lanes_for,
    norms,
    share_of,
)
from gpuinfer.text.decoder.segments import positions_of
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import Step
from gpuinfer.text.weights import Adapter, Weights

LEAST_CAPACITY = 64  # rows of a step for which there is room at first
NO_ROOM = (0, 0, 0, 0)


def available(dtype: torch.dtype) -> bool:
    """Whether this processor has what it takes."""
    return dtype in (torch.float32, torch.bfloat16) and bool(llvm.get_host_cpu_features().get("fma"))


@dataclass(frozen=True)
class PackedWeights:
    """All weights as the compiled step reads them."""

    lanes: list[LaneWeights]
    model: tuple[NDArray[Any], ...]  # what all lanes read


class CpuDecoder:
    """`step.Decoder` for float32 and bfloat16, weights and cache.

    Sums and what lies between products are float32, and a row's logits depend neither on what shares its step nor on
    `threads`, bit by bit. Where the processor multiplies bfloat16 by itself, and `deterministic` is not set, such
    weights meet rows that are rounded to bfloat16, in a library whose rounding may depend on both: see `computes_in`.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        dtype: torch.dtype,
        *,
        slots: int,
        length: int,
        threads: int,
        deterministic: bool = False,
    ) -> None:
        if not available(dtype):
            raise RuntimeError(f"CpuDecoder needs a processor with FMA, and no {dtype}. Use TorchDecoder.")
        self.shape, self.slots, self.length = shape, slots, length
        self.device = torch.device("cpu")
        self.computes_in = computes_in(dtype, self.device, deterministic=deterministic)
        self._stored = np.dtype(np.uint16 if dtype == torch.bfloat16 else np.float32)
        self._blas = None if self.computes_in == FLOAT32 else blas.find()
        self._multiplied = np.dtype(np.float32 if self._blas is None else np.uint16)  # rows, as products take them
        self._shares = [share_of(shape, lane, lanes) for lanes in [lanes_for(shape, threads)] for lane in range(lanes)]
        self._padded = -(-shape.head_dim // TILE) * TILE
        self._tiles = -(-length // TILE)
        self._keys, self._values = self._cache(), self._cache()
        self._packed = self.pack(weights)
        self._sizes = np.stack([self._lane_sizes(share) for share in self._shares])
        self._adapters = LoadedAdapters(len(self._shares), shape.layers)
        self._sharing = Sharing(slots, BLOCK)
        self._room = NO_ROOM
        self._step: tuple[NDArray[Any], ...] = ()
        self._threads: Threads | None = None
        self._taking_part = len(self._shares)

    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        self._compute(step)
        return self._logits[: len(step.wanted)]

    def hidden(self, step: Step) -> Tensor:
        """What the last layer gives of each token, float32 [tokens, hidden], for a decoder that has those after it."""
        by_adapter = self._compute(replace(step, wanted=step.wanted[:0]), all_rows=True)
        found = self._x[: len(step.tokens)]
        return torch.from_numpy(found.copy() if by_adapter.back is None else found[by_adapter.back])

    def _compute(self, step: Step, all_rows: bool = False) -> SortedStep:
        """Through all layers, and of wanted rows to logits; `all_rows`: the others go through the last layer too."""
        rows, segments, outputs = len(step.tokens), len(step.slots), len(step.wanted)
        vectors = 0 if step.vectors is None else len(step.vectors.places)
        needed = rows, segments, outputs, vectors
        if any(count > room for count, room in zip(needed, self._room, strict=True)):
            self._make_room(needed)
        by_adapter = self._adapters.sorted(step)
        step = by_adapter.step
        tokens, slots, starts, lengths, wanted, _, positions, sees, vector_rows, turns, own_vectors, runs = self._step
        runs[: len(by_adapter.runs)] = by_adapter.runs
        tokens[:rows], wanted[:outputs] = step.tokens, step.wanted
        slots[:segments], starts[:segments], lengths[:segments] = step.slots, step.starts, step.lengths
        positions[:rows] = step.starts if rows == segments else positions_of(step)
        sees[:rows] = positions[:rows] + 1 if step.sees is None else step.sees
        turns[:segments] = self._sharing.turns(step)
        if step.vectors is not None:
            vector_rows[:vectors], own_vectors[:vectors] = step.vectors.places, np.asarray(step.vectors.values)
        # Adapters know their rows by where they stand among all of them.
        few = self.shape.layers > 0 and outputs < rows and not len(by_adapter.runs) and not all_rows
        counts = rows, segments, outputs, len(by_adapter.runs), vectors, few
        self._sizes[:, cpu_sizes.ROWS : cpu_sizes.FEW + 1] = counts
        assert self._threads is not None  # made with the room
        self._threads.step(self._taking_part)
        return by_adapter

    def use(self, threads: int) -> None:
        """See `step.Decoder.use`. So many as share out the lanes evenly."""
        lanes = len(self._shares)
        self._taking_part = next(count for count in range(max(1, min(threads, lanes)), 0, -1) if lanes % count == 0)

    def rest(self) -> None:
        """See `step.Decoder.rest`."""
        if self._threads is not None:
            self._threads.rest()

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        tiles = -(-length // TILE)
        into = list(targets)
        heads = len(self._shares[0].kv_heads)
        for cache in (self._keys, self._values):
            view = cache.reshape(-1, self.shape.layers, self.slots, heads, self._tiles, TILE * self._padded)
            for target in into:
                view[:, :, target, :, :tiles] = view[:, :, source, :, :tiles]
        self._sharing.copied(source, into, length)

    def embedding(self) -> Tensor:
        """See `step.Decoder.embedding`."""
        stored = torch.from_numpy(self._packed.model[0])
        return stored if self._stored == np.float32 else stored.view(torch.bfloat16)

    def pack(self, weights: Weights) -> PackedWeights:
        """See `step.Decoder.pack`."""
        own = [lane_weights(weights, self.shape, share, panels=self._blas is None) for share in self._shares]
        return PackedWeights(own, self._model_arrays(weights))

    def swap(self, packed: object) -> None:
        """See `step.Decoder.swap`. The threads are made anew with the next step: they hold addresses of weights."""
        assert isinstance(packed, PackedWeights)
        self.close()
        self._packed = packed

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter:
        """See `step.Decoder.pack_adapter`."""
        return pack(adapter, self.shape, self._shares)

    def load(self, number: int, packed: object) -> None:
        """See `step.Decoder.load`. The threads are made anew where there is no room for it."""
        assert isinstance(packed, PackedAdapter)
        if self._adapters.load(number, packed):
            self.close()

    def unload(self, number: int) -> None:
        """See `step.Decoder.unload`."""
        self._adapters.unload(number)

    def empty(self) -> None:
        """Forget what all slots hold. All of the cache is resident from here on."""
        self._keys.fill(0)
        self._values.fill(0)
        self._sharing = Sharing(self.slots, BLOCK)

    def cache_bytes(self) -> int:
        return int(self._keys.nbytes + self._values.nbytes)

    def close(self) -> None:
        threads, self._threads = self._threads, None
        self._room = NO_ROOM
        if threads is not None:
            threads.close()

    def _cache(self) -> NDArray[Any]:
        """Keys, or values, of each lane's heads: zeros, which take no memory until they are written over."""
        heads = len(self._shares[0].kv_heads)  # as many in each lane
        size = self.shape.layers * self.slots * heads * self._tiles * TILE * self._padded
        return np.zeros((len(self._shares), size), self._stored)

    def _model_arrays(self, weights: Weights) -> tuple[NDArray[Any], ...]:
        """What all lanes read: embeddings, norms, angles, biases of what they add up."""
        shape = self.shape
        places = weights.positions if weights.positions is not None else weights.embedding[:0]
        ones = torch.ones(shape.head_dim)
        query, key = (
            torch.stack([ones if norm is None else norm.scale.float() for norm in found])
            for found in zip(*((layer.query_norm, layer.key_norm) for layer in weights.layers), strict=True)
        )
        windows = np.array([window or 0 for window in shape.windows or [None] * shape.layers], np.int64)
        return (
            as_stored(weights.embedding),
            as_stored(places),
            *norms(weights),
            query.numpy(),
            key.numpy(),
            *angles(shape, self._tiles * TILE),
            torch.stack([bias_of(layer.out) for layer in weights.layers]).numpy(),
            torch.stack([bias_of(layer.down) for layer in weights.layers]).numpy(),
            windows,
            *_routing(shape, weights),
        )

    def _lane_sizes(self, share: Share) -> NDArray[np.int64]:
        shape = self.shape
        found = {
            cpu_sizes.LAYERS: shape.layers,
            cpu_sizes.SLOTS: self.slots,
            cpu_sizes.HEADS: len(share.heads),
            cpu_sizes.KV_HEADS: len(share.kv_heads),
            cpu_sizes.HEAD_DIM: shape.head_dim,
            cpu_sizes.PADDED_DIM: self._padded,
            cpu_sizes.TILES: self._tiles,
            cpu_sizes.HALF_ROPE: len(shape.rope.inverse_frequencies) if shape.rope else 0,
            cpu_sizes.QK_NORM: shape.qk_norm,
            cpu_sizes.HIDDEN: shape.hidden,
            cpu_sizes.MIXED: share.heads.start * shape.head_dim,
            cpu_sizes.ADDED: len(share.added),
            cpu_sizes.ADDED_BEGIN: share.added.start,
            cpu_sizes.ACTIVATION: cpu_sizes.ACTIVATIONS[shape.activation],
            cpu_sizes.GATED: shape.gated,
            cpu_sizes.LAYER_NORM: shape.norm == "layer",
            cpu_sizes.LEARNED_POSITIONS: shape.learned_positions,
            cpu_sizes.COLUMN: share.columns.start,
            cpu_sizes.COLUMNS: len(share.columns),
            cpu_sizes.VOCABULARY: shape.vocabulary,
        }
        if (experts := shape.experts) is not None:
            found |= {
                cpu_sizes.EXPERTS: experts.count,
                cpu_sizes.EXPERT: len(share.expert),
                cpu_sizes.EXPERT_BEGIN: share.expert.start,
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
        counts = (rows, segments, segments, segments, outputs, rows, rows, vectors)
        step = [np.zeros(count, np.int32) for count in counts]
        step.insert(5, np.arange(rows, dtype=np.int32))
        turns, own_vectors = np.zeros((segments, 4), np.int64), np.zeros((vectors, shape.hidden), np.float32)
        self._step = (*step, turns, own_vectors, np.zeros((segments, cpu_adapters.RUN), np.int64))
        self._sizes[:, cpu_sizes.RANKS] = self._adapters.rank
        logits = aligned((outputs, shape.vocabulary), np.float32)
        self._logits = torch.from_numpy(logits)
        self._x = aligned((rows, shape.hidden), np.float32)
        shared = (
            self._x,
            aligned((rows, shape.hidden), multiplied),
            aligned((rows, shape.heads * shape.head_dim), multiplied),
            aligned((rows, _widest_inner(shape)), multiplied),
            aligned((rows, shape.hidden), np.float32),
            aligned((outputs, shape.hidden), multiplied),
            logits,
            *_chosen(shape, rows, multiplied),
        )
        self._threads = Threads(self._blas, len(self._shares), self._arguments(rows, shared))

    def _widest(self, qkv: int, up: int) -> tuple[int, int]:
        """The most inputs of a product, and the most outputs of a lane's."""
        shape = self.shape
        inputs = max(shape.hidden, shape.heads * shape.head_dim, _widest_inner(shape))
        return inputs, max(shape.hidden, qkv, up)

    def _arguments(self, rows: int, shared: tuple[NDArray[Any], ...]) -> tuple[Any, ...]:
        """What is a lane's own has the lane for its first index."""
        lanes, shape, multiplied = len(self._shares), self.shape, self._multiplied
        qkv_biases = np.stack([own.qkv_biases for own in self._packed.lanes])
        up_biases = _stacked([own.up_biases for own in self._packed.lanes])
        expert = max(len(share.expert) for share in self._shares)
        widest = max(up_biases.shape[2], (2 if shape.gated else 1) * expert)
        qkv, up = (aligned((lanes, rows, width), np.float32) for width in (qkv_biases.shape[2], widest))
        room = self._adapters.room(rows, self._widest(qkv_biases.shape[2], up_biases.shape[2]), self._blas is not None)
        experts = _expert_room(shape, self._shares, rows, multiplied)
        inners = np.stack([_inners(shape, share) for share in self._shares])
        scratch = _scratch(lanes, self._tiles, self._padded)
        mine = (qkv, up, qkv_biases, up_biases, *scratch, *room, inners, experts)
        product = cpu_product.product_with(self._stored).address if self._blas is None else self._blas.gemm_bfloat16
        needed = self._adapters.rank or shape.experts is not None
        wide_product = cpu_product.product_with(np.dtype(np.float32)).address if needed else 0
        common = [product, _sched_yield(), wide_product]
        addresses = np.array([[*common, *own.addresses] for own in self._packed.lanes], np.int64)
        eps, cache = np.float32(shape.norm_eps), (self._keys, self._values)
        return self._sizes, addresses, eps, self._step, self._packed.model, cache, shared, mine


def _stacked(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Arrays [layers, columns], with zeros behind the columns of narrower ones."""
    width = max(part.shape[1] for part in parts)
    return np.stack([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])


def angles(shape: Shape, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [length, half] of the rotary embedding; without one [length, 0]."""
    frequencies = torch.tensor(shape.rope.inverse_frequencies if shape.rope else (), dtype=torch.float32)
    turned = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    factor = shape.rope.attention_factor if shape.rope else 1.0
    return (turned.cos() * factor).numpy(), (turned.sin() * factor).numpy()


def _widest_inner(shape: Shape) -> int:
    return max(shape.inner(layer) for layer in range(shape.layers))


def _inners(shape: Shape, share: Share) -> NDArray[np.int64]:
    """Of each layer where the lane's columns between up and down projection begin, how many there are, how many all
    lanes have; and whether there are experts besides.
    """
    ranges = enumerate(share.inner)
    rows = [(inner.start, len(inner), shape.inner(layer), shape.mixed(layer)) for layer, inner in ranges]
    return np.array(rows, np.int64)


def _routing(shape: Shape, weights: Weights) -> tuple[NDArray[np.float32], ...]:
    """What is added to the scores of experts where they are chosen, [layers, experts], and what all are scaled by."""
    experts = shape.experts
    biases = np.zeros((shape.layers, experts.count if experts else 0), np.float32)
    for number, layer in enumerate(weights.layers):
        if layer.mixture is not None and layer.mixture.bias is not None:
            biases[number] = layer.mixture.bias.float().numpy()
    return biases, np.array([experts.scale if experts else 1.0], np.float32)


def _chosen(shape: Shape, rows: int, multiplied: np.dtype[Any]) -> tuple[NDArray[Any], ...]:
    """Who goes through which expert, with what share of the sum, and what there is between experts' products."""
    experts = shape.experts
    if experts is None:
        return np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32), aligned((0, 0), multiplied)
    inner = aligned((rows * experts.chosen, experts.intermediate), multiplied)
    return np.zeros((rows, experts.chosen), np.int32), np.zeros((rows, experts.chosen), np.float32), inner


def _expert_room(
    shape: Shape, shares: Sequence[Share], rows: int, multiplied: np.dtype[Any]
) -> tuple[NDArray[Any], ...]:
    """Each lane's room for experts: rows gathered for one, how they are sorted, what one gives; for choosing."""
    experts, lanes = shape.experts, len(shares)
    count, chosen, rows = (experts.count, experts.chosen, rows) if experts else (0, 0, 0)
    added, expert = (max(map(len, parts)) for parts in zip(*((one.added, one.expert) for one in shares), strict=True))
    return (
        aligned((lanes, rows, shape.hidden), multiplied),
        np.zeros((lanes, count + 1), np.int64),
        np.zeros((lanes, rows * chosen), np.int32),
        aligned((lanes, rows * added), np.float32),
        np.zeros((lanes, 2 * expert), np.float32),
        aligned((lanes, AT_ONCE, shape.hidden if experts else 0), np.float32),
        aligned((lanes, AT_ONCE, count), np.float32),
        np.zeros((lanes, count), np.float32),
    )


def _scratch(lanes: int, tiles: int, padded: int) -> tuple[NDArray[Any], ...]:
    """Of the queries that a lane computes together the scores, themselves, their mixes of values, the sums of weights,
    and what they ask for; whole cache lines each, so that no two lanes write to one.
    """
    counts = (QUERIES * tiles * TILE, QUERIES * padded, QUERIES * padded, TILE)
    asks = aligned((lanes, 2 * QUERIES * ASKED), np.float32).view(np.int64).reshape(lanes, QUERIES, ASKED)
    scores, query, mix, totals = (aligned((lanes, count), np.float32) for count in counts)
    query[...] = 0  # nobody writes behind a narrow head's values, and they are multiplied with the cache's zeros there
    return scores, query, mix, totals, asks


def _sched_yield() -> int:
    return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
