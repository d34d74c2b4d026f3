"""A decoder whose layers are in stages, each a transformer of consecutive layers: a step is cut into micro-batches,
which go through the stages one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.pipeline.schedule import Pipeline
from gpuinfer.models.pipeline.stage import LaunchedValues
from gpuinfer.text.transformer import Adapter, Decoder, Linear, Norm, Shape, Step, Vectors, Weights


@dataclass(frozen=True)
class Portion:
    """The layers from `start` to before `stop` of a model of `shape`."""

    whole: Shape
    start: int
    stop: int

    @property
    def first(self) -> bool:
        return self.start == 0

    @property
    def last(self) -> bool:
        return self.stop == self.whole.layers

    @property
    def shape(self) -> Shape:
        whole, experts = self.whole, self.whole.experts
        if experts is not None:
            dense = (layer - self.start for layer in experts.dense if self.start <= layer < self.stop)
            experts = replace(experts, dense=tuple(dense))
        return replace(
            whole,
            layers=self.stop - self.start,
            windows=whole.windows[self.start : self.stop],
            vocabulary=whole.vocabulary if self.last else 1,
            learned_positions=whole.learned_positions and self.first,
            experts=experts,
        )

    def weights(self, whole: Weights) -> Weights:
        blank = torch.zeros_like(whole.embedding[:1])
        return Weights(
            embedding=whole.embedding if self.first else blank,
            layers=whole.layers[self.start : self.stop],
            norm=whole.norm if self.last else Norm(torch.ones_like(whole.norm.scale)),
            head=whole.head if self.last else Linear(blank),
            positions=whole.positions if self.first else None,
        )

    def adapter(self, whole: Adapter) -> Adapter:
        return Adapter(whole.layers[self.start : self.stop])


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens and segments of a step; arrays that steps of the same rows have in common."""

    tokens: tuple[int, int]
    segments: tuple[int, int]
    skipped: int  # tokens of the first of these segments that are in an earlier piece
    pages: NDArray[np.int32]
    lengths: NDArray[np.int32]
    adapters: NDArray[np.int32] | None


class MicroBatchCutter:
    """Cuts steps into micro-batches of about `rows` tokens; None: into `most`, or fewer where each would have fewer
    than `least` tokens.

    Steps of the same rows, by the identity of their arrays, give micro-batches of the same arrays, as decoders expect.
    """

    def __init__(self, rows: int | None, least: int, most: int) -> None:
        self._rows, self._least, self._most = rows, least, most
        self._known: tuple[Any, Any, Any, bool] | None = None
        self._pieces: list[_Piece] = []

    def cut(self, step: Step) -> list[Step]:
        """Their wanted tokens, one behind the other, are those of the step. They hold on to none of its arrays that
        change from step to step.
        """
        count = self.count(len(step.tokens))
        known = step.pages, step.lengths, step.adapters, step.sees is None
        same = self._known is not None and all(a is b for a, b in zip(known, self._known, strict=True))
        if not same:
            self._pieces, self._known = _pieces(step, count), known
        return [_part(step, piece) for piece in self._pieces]

    def count(self, tokens: int) -> int:
        """Into how many a step of so many is cut, of models whose tokens see only what comes before them."""
        if self._rows is not None:
            return math.ceil(tokens / self._rows)
        return max(1, min(self._most, tokens // self._least))


def _pieces(step: Step, count: int) -> list[_Piece]:
    """About as many tokens in each; whole segments where tokens say what they see."""
    ends, total = np.cumsum(step.lengths, dtype=np.int64), len(step.tokens)
    places = {round(total * number / count) for number in range(1, count)}
    if step.sees is not None:
        places = {int(ends[np.searchsorted(ends, place)]) for place in places}
    found = []
    for first, last in pairwise(sorted({0, *places, total})):
        one, other = np.searchsorted(ends, [first, last - 1], "right").tolist()
        segments = slice(one, other + 1)
        lengths = step.lengths[segments].copy()
        skipped = first - int(ends[one] - step.lengths[one])
        lengths[-1] -= ends[other] - last
        lengths[0] -= skipped
        adapters = None if step.adapters is None else step.adapters[segments].copy()
        found.append(_Piece((first, last), (one, other + 1), skipped, step.pages[segments].copy(), lengths, adapters))
    return found


def _part(step: Step, piece: _Piece) -> Step:
    (first, last), (one, other) = piece.tokens, piece.segments
    starts, vectors = step.starts[one:other].copy(), None
    starts[0] += piece.skipped
    low, high = np.searchsorted(step.wanted, [first, last]).tolist()
    if step.vectors is not None:
        begin, end = np.searchsorted(step.vectors.places, [first, last]).tolist()
        if begin < end:
            places = step.vectors.places[begin:end] - np.int32(first)
            vectors = replace(step.vectors, places=places, values=step.vectors.values[begin:end])
    return Step(
        step.tokens[first:last].copy(),
        piece.pages,
        starts,
        piece.lengths,
        step.wanted[low:high] - np.int32(first),
        piece.adapters,
        None if step.sees is None else step.sees[first:last].copy(),
        vectors,
    )


class PortionDecoder(Decoder, Protocol):
    """A decoder of a `Portion` that can also stop before the head."""

    def hidden(self, step: Step) -> Tensor:
        """What the last layer gives of each token, [tokens, hidden], in memory of its own."""
        ...

    def empty(self) -> None:
        """Clear all pages; all of the cache is resident from then on."""
        ...


Task = Callable[[int, PortionDecoder], object]
"""What is done to the decoder of each stage, by its number, in the stage's own thread."""


class LogitRoom:
    """Where the last stage puts the logits of a micro-batch, [outputs, vocabulary]; not a value that travels."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class PortionSegment:
    """What a stage calls: from (step, None, room) in the first one and (step, hidden, room) in the others to the same
    for the next stage, in the last one to logits. Or a `Task`, which is passed on.
    """

    def __init__(self, number: int, portion: Portion, decoder: PortionDecoder) -> None:
        self._number, self._portion, self._decoder = number, portion, decoder
        self._blank, self._places = np.zeros(0, np.int32), np.zeros(0, np.int32)

    def __call__(self, value: Any) -> Any:
        if callable(value):
            value(self._number, self._decoder)
            return value
        step, entering, room = value
        given, count = step, len(step.tokens)
        if entering is not None:  # in the place of each token a vector: a later portion's embedding knows no tokens
            if count > len(self._places):
                self._blank, self._places = np.zeros(2 * count, np.int32), np.arange(2 * count, dtype=np.int32)
            given = replace(step, tokens=self._blank[:count], vectors=Vectors(self._places[:count], entering))
        if not self._portion.last:
            return step, self._decoder.hidden(given), room
        logits = self._decoder.forward(given)
        return logits if room is None else room.logits.copy_(logits)


class StagedDecoder:
    """`step.Decoder` over `pipeline`, whose stages call `PortionSegment`s of these portions and decoders.

    `cutter` cuts steps into micro-batches; with `alone` one enters only once the one before it is through. All that is
    done to the stages' decoders is done in their threads, behind the micro-batches that came before it. `described` is
    what `reading` has beside the counters, `in_force` the values of options in force.
    """

    def __init__(
        self,
        shape: Shape,
        portions: Sequence[Portion],
        decoders: Sequence[PortionDecoder],
        pipeline: Pipeline,
        cutter: MicroBatchCutter,
        alone: bool = False,
        described: Callable[[], Mapping[str, Any]] = dict,
        in_force: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.in_force = in_force
        self.shape, self.slots, self.length = shape, decoders[0].slots, decoders[0].length
        self.pages = decoders[0].pages  # every stage has as many, and a page's number is the same in all of them
        self.device, self.computes_in = decoders[-1].device, decoders[-1].computes_in
        self.pages_go_back = all(decoder.pages_go_back for decoder in decoders)
        self.reads_drawn = False  # each stage's work is waited for
        self._portions, self._decoders, self._pipeline = portions, decoders, pipeline
        self._cutter, self._alone, self._described = cutter, alone, described
        self._room = torch.empty((0, shape.vocabulary))

    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        parts = self._cutter.cut(step)
        rooms = self._rooms(parts)
        values = [(part, None, room) for part, room in zip(parts, rooms, strict=True)]
        outcomes = [self._here(outcome) for outcome in self._through(values)]
        if len(parts) == 1:
            return outcomes[0]
        return torch.cat(outcomes) if rooms[0] is None else self._room[: len(step.wanted)]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `step.Decoder.copy_pages`."""
        self._on_each(lambda number, decoder: decoder.copy_pages(sources, targets))

    def empty(self) -> None:
        """Clear all pages; all of the cache is resident from then on."""
        self._on_each(lambda number, decoder: decoder.empty())

    def give_back(self, pages: Sequence[int]) -> None:
        """See `step.Decoder.give_back`."""
        self._on_each(lambda number, decoder: decoder.give_back(pages))

    def resize(self, slots: int, pages: int) -> None:
        """See `step.Decoder.resize`."""
        self._on_each(lambda number, decoder: decoder.resize(slots, pages))
        self.slots, self.pages = slots, pages

    def drop_graphs(self) -> None:
        """See `step.Decoder.drop_graphs`: stages have none."""

    def embedding(self) -> Tensor:
        """See `step.Decoder.embedding`."""
        found = self._decoders[0].embedding()
        return found if found.device == self.device else found.to(self.device)

    def weight_tensors(self) -> Sequence[Tensor]:
        """See `step.Decoder.weight_tensors`. Of all stages, each on its device."""
        return [tensor for decoder in self._decoders for tensor in decoder.weight_tensors()]

    def pack(self, weights: Weights) -> Sequence[object]:
        """See `step.Decoder.pack`."""
        return [
            decoder.pack(portion.weights(weights))
            for portion, decoder in zip(self._portions, self._decoders, strict=True)
        ]

    def swap(self, packed: object) -> None:
        """See `step.Decoder.swap`."""
        assert isinstance(packed, Sequence)
        self._on_each(lambda number, decoder: decoder.swap(packed[number]))

    def pack_adapter(self, adapter: Adapter) -> Sequence[object]:
        """See `step.Decoder.pack_adapter`."""
        return [
            decoder.pack_adapter(portion.adapter(adapter))
            for portion, decoder in zip(self._portions, self._decoders, strict=True)
        ]

    def load(self, number: int, packed: object) -> None:
        """See `step.Decoder.load`."""
        assert isinstance(packed, Sequence)
        self._on_each(lambda stage, decoder: decoder.load(number, packed[stage]))

    def unload(self, number: int) -> None:
        """See `step.Decoder.unload`."""
        self._on_each(lambda stage, decoder: decoder.unload(number))

    def cache_bytes(self) -> int:
        return sum(decoder.cache_bytes() for decoder in self._decoders)

    @property
    def devices(self) -> Sequence[torch.device]:
        """Of the stages, each once."""
        return list(dict.fromkeys(decoder.device for decoder in self._decoders))

    def reading(self) -> Mapping[str, Any]:
        """Of `Backend.device`: the devices, how the model is cut, and what went through the stages."""
        return {**self._described(), "stages": self._pipeline.counts()}

    def use(self, threads: int) -> None:
        """Stages have cores of their own."""

    def rest(self) -> None:
        for decoder in self._decoders:
            decoder.rest()

    def waits_for(self) -> str:
        """As `Backend.waits_for`."""
        return self._pipeline.waits_for()

    def close(self) -> None:
        self._pipeline.close()
        for decoder in self._decoders:
            decoder.close()

    def _rooms(self, parts: Sequence[Step]) -> Sequence[LogitRoom | None]:
        """Places side by side for the logits of several micro-batches; on other devices they are joined there."""
        if len(parts) == 1 or self.device.type != "cpu":
            return [None] * len(parts)
        counts = [len(part.wanted) for part in parts]
        if sum(counts) > len(self._room):
            self._room = torch.empty((sum(counts), self.shape.vocabulary))
        return [LogitRoom(logits) for logits in torch.split(self._room[: sum(counts)], counts)]

    def _on_each(self, task: Task) -> None:
        self._through([task])

    def _through(self, values: Sequence[Any]) -> list[Any]:
        """What comes out of the last stage. Raises what the first of them raised that failed."""
        together = [[value] for value in values] if self._alone else [values]
        outcomes = [outcome for some in together for outcome in self._pipeline.run(some, len(some))]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def _here(self, outcome: Any) -> Tensor:
        """Logits as this thread may use them."""
        if isinstance(outcome, LaunchedValues):
            outcome = outcome.for_stream(torch.cuda.current_stream(self.device))
        found: Tensor = outcome
        return found
