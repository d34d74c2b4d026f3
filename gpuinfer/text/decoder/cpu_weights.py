"""A model's weights and its adapters as the compiled step reads them, packed for their products.

A step's segments are sorted by adapter, so that an adapter's rows lie side by side.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuinfer.host import machine
from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_math import inlined
from gpuinfer.text.decoder.cpu_panels import MemoryArena, panels_of
from gpuinfer.text.decoder.cpu_quantised import WeightBits
from gpuinfer.text.decoder.cpu_rounding import pack_quantised
from gpuinfer.text.decoder.rounding import HEAD_BITS
from gpuinfer.text.transformer import Adapter, Layer, Linear, Mixture, Norm, Shape, Step, Weights


@dataclass(frozen=True)
class PackedWeights:
    """`addresses` as `cpu_sizes` has them from FIRST_WEIGHT on; `kept` is what they point to, `model` the arrays that
    are read as they are.
    """

    addresses: list[int]
    kept: list[NDArray[Any]]
    model: tuple[NDArray[Any], ...]
    head: int  # the head's place in `kept`


@inlined
def panel_bytes(sizes, inner):  # type: ignore[no-untyped-def]  # compiled
    """Bytes of a panel of so many terms."""
    return (inner + sizes[at.ROUND] - 1) // sizes[at.ROUND] * sizes[at.ROUND_BYTES]


@inlined
def head_panel_bytes(sizes, inner):  # type: ignore[no-untyped-def]  # compiled
    """The same of the head."""
    return (inner + sizes[at.ROUND] - 1) // sizes[at.ROUND] * sizes[at.HEAD_ROUND_BYTES]


def packed(weights: Weights, shape: Shape, positions: int, bits: WeightBits | None = None) -> PackedWeights:
    """For rows of up to so many positions, matrices rounded to so many `bits`, and the head to HEAD_BITS. A head that
    is the embedding is kept once. Each layer is asked for once, and its matrices are let go once they are packed.
    """
    keep, rest, experts = _Keep(), [], shape.experts
    addresses, of_experts = [], []
    with ThreadPoolExecutor(machine.cores(), "gpuinfer-packing") as pool:
        add = partial(keep.add, pool, bits=bits)
        for number in range(shape.layers):
            layer, inner = weights.layers[number], shape.inner(number)
            addresses += [add(layer.qkv.weight), add(layer.out.weight), add(layer.up.weight[:inner])]
            addresses += [add(layer.up.weight[inner:] if shape.gated else None), add(layer.down.weight)]
            if layer.mixture is not None:
                of_experts.append(add(layer.mixture.router.float(), bits=None))
                for up, down in zip(layer.mixture.up, layer.mixture.down, strict=True):
                    gate, value = up[: len(up) // 2], up[len(up) // 2 :]
                    of_experts += [add(gate), add(value), add(down)] if shape.gated else [add(up), 0, add(down)]
            elif experts is not None:
                of_experts += [0] * (1 + at.EXPERT_WEIGHTS * experts.count)
            rest.append(_without_matrices(layer))
            del layer
        addresses.append(add(weights.head.weight, bits=HEAD_BITS if bits else None))
    head, model = len(keep.kept) - 1, _model_arrays(replace(weights, layers=rest), shape, positions)
    return PackedWeights(addresses + of_experts, keep.kept, model, head)


def _without_matrices(layer: Layer) -> Layer:
    """Its norms and biases, and of its matrices how many rows they have."""
    mixture, none = layer.mixture, layer.qkv.weight.new_empty(0)
    emptied: dict[str, Any] = {
        name: Linear(linear.weight.new_empty((len(linear.weight), 0)), linear.bias)
        for name, linear in (("qkv", layer.qkv), ("out", layer.out), ("up", layer.up), ("down", layer.down))
    }
    return replace(layer, **emptied, mixture=None if mixture is None else Mixture(none, mixture.bias, none, none))


def tied(weights: Weights) -> bool:
    """Whether the head is the embedding itself."""
    return weights.head.weight.data_ptr() == weights.embedding.data_ptr() and len(weights.embedding) > 0


def bias_of(linear: Linear) -> torch.Tensor:
    """A product's bias, float32 [out]; zeros when it has none."""
    if linear.bias is None:
        return torch.zeros(linear.weight.shape[0])
    return linear.bias.float()


def as_stored(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor for compiled code: float32 as it is, bfloat16 as its bits in uint16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def angles(shape: Shape, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines [length, half] of the rotary embedding; without one [length, 0]."""
    frequencies = torch.tensor(shape.rope.inverse_frequencies if shape.rope else (), dtype=torch.float32)
    turned = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    factor = shape.rope.attention_factor if shape.rope else 1.0
    return (turned.cos() * factor).numpy(), (turned.sin() * factor).numpy()


def _model_arrays(weights: Weights, shape: Shape, positions: int) -> tuple[NDArray[Any], ...]:
    """Embeddings; scales and shifts of norms [2 × layers + 1, hidden] in the order in which rows pass them; angles,
    biases, what layers differ in; and what is added to the scores of experts where they are chosen, [layers, experts],
    and what all are scaled by.
    """
    embedding = weights.embedding[:0] if tied(weights) else weights.embedding
    places = weights.positions if weights.positions is not None else weights.embedding[:0]
    passed = [norm for layer in weights.layers for norm in (layer.attention_norm, layer.mlp_norm)]
    norms: list[Norm] = [*passed, weights.norm]
    ones = torch.ones(shape.head_dim)
    query, key = (
        _stack([ones if norm is None else norm.scale for norm in found])
        for found in zip(*((layer.query_norm, layer.key_norm) for layer in weights.layers), strict=True)
    )
    ups = [bias_of(layer.up) for layer in weights.layers]
    width = max(len(row) for row in ups)
    experts = shape.experts
    biases = np.zeros((shape.layers, experts.count if experts else 0), np.float32)
    for number, layer in enumerate(weights.layers):
        if layer.mixture is not None and layer.mixture.bias is not None:
            biases[number] = layer.mixture.bias.float().numpy()
    return (
        as_stored(embedding).copy(),
        as_stored(places).copy(),
        _stack([norm.scale for norm in norms]),
        _stack([torch.zeros_like(norm.scale) if norm.shift is None else norm.shift for norm in norms]),
        query,
        key,
        *angles(shape, positions),
        _stack([bias_of(layer.qkv) for layer in weights.layers]),
        _stack([bias_of(layer.out) for layer in weights.layers]),
        _stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in ups]),  # zeros behind the shorter ones
        _stack([bias_of(layer.down) for layer in weights.layers]),
        np.array([window or 0 for window in shape.layer_windows], np.int64),
        np.array([(shape.inner(layer), shape.mixed(layer)) for layer in range(shape.layers)], np.int64),
        biases,
        np.array([experts.scale if experts else 1.0], np.float32),
    )


class _Keep:
    def __init__(self) -> None:
        self._arena = MemoryArena()
        self.kept: list[NDArray[Any]] = []

    def add(self, pool: Executor, weight: torch.Tensor | None, *, bits: WeightBits | None) -> int:
        """The address of its panels, or 0 where there is no weight."""
        if weight is None:
            return 0
        if bits is None:
            self.kept.append(panels_of(weight, self._arena, pool))
        else:
            self.kept.append(pack_quantised(weight, bits, self._arena, pool))
        return int(self.kept[-1].ctypes.data)


def _stack(rows: list[torch.Tensor]) -> NDArray[np.float32]:
    return torch.stack([row.float() for row in rows]).contiguous().numpy()


RUN = 3  # numbers that say a run: place, first row, row after the last
LEAST_PLACES = 8
NO_RUNS: NDArray[np.int64] = np.zeros((0, RUN), np.int64)
FIRST_PART = {"qkv": at.QKV, "out": at.OUT, "up": at.UP, "down": at.DOWN}


@dataclass(frozen=True)
class PackedAdapter:
    """`table` int64 [layers, PARTS, FACTS]; `kept` is what its addresses point to."""

    table: NDArray[np.int64]
    kept: list[NDArray[Any]]
    rank: int


@dataclass(frozen=True)
class SortedStep:
    """A step whose segments are in the order of their adapters, and `runs` int64 [runs, RUN] of rows that have one.
    `back` [tokens]: where each of the step's tokens is then; None where it has stayed.
    """

    step: Step
    runs: NDArray[np.int64]
    back: NDArray[np.int32] | None = None


def pack(adapter: Adapter, shape: Shape) -> PackedAdapter:
    """In float32, whatever the model computes in: low ranks are little work."""
    table = np.zeros((shape.layers, at.PARTS, at.FACTS), np.int64)
    kept: list[NDArray[Any]] = []
    for number, layer in enumerate(adapter.layers):
        parts = dict(FIRST_PART)
        for low in layer:
            down, up = panels_of(low.down.float()), panels_of(low.up.float())
            kept += [down, up]
            table[number, parts[low.product]] = down.ctypes.data, up.ctypes.data, low.rank, low.first, len(low.up)
            parts[low.product] += 1
    return PackedAdapter(table, kept, adapter.rank)


@dataclass(frozen=True)
class _Order:
    """How the segments of one step are sorted: `order` of segments, `rows` of tokens, and `back` where each of these is
    then. Steps of the same rows have the very same arrays, and are sorted once.
    """

    step: Step
    order: NDArray[np.int64]
    rows: NDArray[np.int64]
    back: NDArray[np.int32]
    runs: NDArray[np.int64]


class LoadedAdapters:
    """The adapters that steps may name, in `tables` [places, layers, PARTS, FACTS]: place 0 has none."""

    def __init__(self, layers: int) -> None:
        self.tables = np.zeros((LEAST_PLACES, layers, at.PARTS, at.FACTS), np.int64)
        self._places: dict[int, int] = {}
        self._kept: dict[int, PackedAdapter] = {}
        self.rank = 0  # the largest until now
        self._order: _Order | None = None  # of the latest step

    def load(self, number: int, packed: PackedAdapter) -> bool:
        """Whether there is more room needed than there was."""
        taken = set(self._places.values())
        places, grows = len(self.tables), packed.rank > self.rank
        place = next((place for place in range(1, places) if place not in taken), places)
        if place == places:
            grows = True
            self.tables = np.concatenate([self.tables, np.zeros_like(self.tables)])
        self.tables[place] = packed.table
        self._places[number], self._kept[number] = place, packed
        self._order = None
        self.rank = max(self.rank, packed.rank)
        return grows

    def unload(self, number: int) -> None:
        place = self._places.pop(number)
        del self._kept[number]
        self.tables[place] = 0

    def sorted(self, step: Step) -> SortedStep:
        """The same step, with the rows of each adapter side by side; wanted logits stay in their order."""
        if step.adapters is None:
            return SortedStep(step, NO_RUNS)
        if (one := self._order) is not None:
            own = one.step
            same = step.adapters is own.adapters and step.lengths is own.lengths
            one = one if same and len(step.tokens) == len(own.tokens) else None
        if one is None:
            one = self._order = self._ordered(step)
        moved = replace(
            step,
            tokens=step.tokens[one.rows],
            pages=step.pages[one.order],
            starts=step.starts[one.order],
            lengths=step.lengths[one.order],
            wanted=one.back[step.wanted],
            sees=None if step.sees is None else step.sees[one.rows],
            vectors=None if step.vectors is None else replace(step.vectors, places=one.back[step.vectors.places]),
        )
        return SortedStep(moved, one.runs, one.back)

    def _ordered(self, step: Step) -> _Order:
        assert step.adapters is not None
        places = np.array([self._places[number] if number else 0 for number in step.adapters.tolist()])
        order = np.argsort(places, kind="stable")
        places, lengths = places[order], step.lengths[order]
        ends = np.cumsum(lengths, dtype=np.int64)
        last = np.flatnonzero(np.append(places[1:] != places[:-1], True))
        until = ends[last]
        runs = np.stack([places[last], np.concatenate([[0], until[:-1]]), until], axis=1)
        firsts = np.cumsum(step.lengths, dtype=np.int64) - step.lengths
        rows = np.repeat(firsts[order] - (ends - lengths), lengths) + np.arange(len(step.tokens))
        back = np.empty(len(rows), np.int32)
        back[rows] = np.arange(len(rows), dtype=np.int32)
        return _Order(step, order, rows, back, runs[runs[:, 0] > 0])
