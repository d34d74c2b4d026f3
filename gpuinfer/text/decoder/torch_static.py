"""Batches of fixed shape: one token of each row, padded to one of few sizes, through the same memory each time.

Work of a fixed shape, launched as a CUDA graph when the shape comes again.

torch.compile for the parts of a layer that see each token for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.models.forward_cuda import bucket_for
from gpuinfer.models.memory import first_line, is_out_of_memory
from gpuinfer.text.decoder.segments import Integers
from gpuinfer.text.decoder.torch_batch import reach_buckets, row_buckets
from gpuinfer.text.decoder.torch_cache import SlotCache
from gpuinfer.text.decoder.torch_layers import Adapted, Group, StepBatch, Window, mask

logger = logging.getLogger("gpuinfer")

Shape = TypeVar("Shape", bound=Hashable)


class Replays(Generic[Shape]):
    """Does work that reads and writes the same memory each time for the same shape.

    The first time, and always on a device that has no graphs, it simply runs. The second time it is captured too, since
    a shape that came twice will come often; from then on the graph is launched. Graphs share their working memory: they
    never run at the same time.
    """

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self.device = device
        self.wanted = wanted and device.type == "cuda"
        self._seen: set[Shape] = set()
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.wanted else None

    def __call__(self, work: Callable[[Shape], None], shape: Shape) -> None:
        if (graph := self._graphs.get(shape)) is not None:
            graph.replay()
            return
        work(shape)
        if self.wanted and shape in self._seen:
            self._capture(work, shape)
        self._seen.add(shape)

    def _capture(self, work: Callable[[Shape], None], shape: Shape) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                    work(shape)
        except RuntimeError as error:
            self.wanted = False
            logger.warning(
                "%s, so that from here on each kernel is launched by itself. -B graphs=false silences this.",
                "there is no memory for a further CUDA graph"
                if is_out_of_memory(error)
                else f"this model cannot be captured in a CUDA graph ({first_line(error)})",
            )
            return
        self._graphs[shape] = graph


@dataclass(frozen=True)
class GraphForm:
    """The shape of a batch. `in_place`: row i is slot i, whose cache is read where it lies; else it is copied first."""

    rows: int
    reach: int
    in_place: bool
    answered: bool  # whether logits are computed


class StaticBatches:
    """Runs one-token rows through `hidden` and `logits`, launched as CUDA graphs where the device has them.

    Rows that only fill up have token 0 at position 0, see that, and write to the spare slot.
    """

    def __init__(
        self,
        cache: SlotCache,
        windows: Collection[Window],
        vocabulary: int,
        most: int,
        hidden: Callable[[StepBatch], Tensor],
        logits: Callable[[Tensor], Tensor],
        graphs: bool,
    ) -> None:
        self.cache, self.windows, self._hidden, self._logits = cache, windows, hidden, logits
        device = cache.keys.device
        self.row_buckets, self.reach_buckets = row_buckets(most), reach_buckets(cache.room)
        self._host = torch.zeros((4, most), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = torch.zeros((4, most), dtype=torch.int64, device=device)
        self._outputs = torch.zeros((most, vocabulary), device=device)
        self._run: Replays[GraphForm] = Replays(device, graphs)

    def decode(
        self, tokens: Integers, positions: Integers, slots: Integers, sees: Integers, answered: bool
    ) -> tuple[Tensor, Integers]:
        """Logits [padded rows, vocabulary] of one step for each slot, and where the slots' own are among them.

        The next call overwrites them; without `answered` they mean nothing.
        """
        reach = bucket_for(int(sees.max()), self.reach_buckets)
        few = bucket_for(len(slots), self.row_buckets)
        spread = bucket_for(int(slots.max()) + 1, self.row_buckets)
        in_place = spread <= 2 * few  # a copy of the cache costs more than rows that idle
        where = slots if in_place else np.arange(len(slots))
        form = GraphForm(spread if in_place else few, reach, in_place, answered)
        return self.compute(form, where, tokens, positions, slots, sees)

    def compute(
        self,
        form: GraphForm,
        where: Integers,
        tokens: Integers,
        positions: Integers,
        slots: Integers,
        sees: Integers,
        adapted: tuple[Adapted, ...] = (),
    ) -> tuple[Tensor, Integers]:
        """The same in a form that is given, with the rows at the places `where`. With adapters it is no graph."""
        inputs = self._host[:, : form.rows].numpy()
        inputs[:2], inputs[2], inputs[3] = 0, self.cache.spare, 1
        inputs[:, where] = tokens, positions, slots, sees
        self._inputs[:, : form.rows].copy_(self._host[:, : form.rows])
        if adapted:
            self._compute(form, adapted)
        else:
            self._run(self._compute, form)
        return self._outputs[: form.rows], where

    def nbytes(self) -> int:
        return self._inputs.nbytes + self._outputs.nbytes

    def masks(self, positions: Tensor, sees: Tensor, reach: int) -> dict[Window, Tensor | None]:
        """For rows of one token each, that read `reach` positions."""
        dtype = self.cache.keys.dtype
        return {window: mask(positions[:, None], sees[:, None], reach, window, dtype) for window in self.windows}

    def _compute(self, form: GraphForm, adapted: tuple[Adapted, ...] = ()) -> None:
        tokens, positions, slots, sees = self._inputs[:, : form.rows].unbind()
        reading = slice(0, form.rows) if form.in_place else slots
        group = Group(1, form.reach, reading, None, self.masks(positions, sees, form.reach))
        found = self._hidden(StepBatch(tokens, positions, slots * self.cache.room + positions, (group,), adapted))
        if form.answered:
            self._outputs[: form.rows].copy_(self._logits(found))


Result = TypeVar("Result")


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, compiled when it is first called, for all layers together."""
    result: Callable[..., Result] = torch.compile(function)
    return result


def tried(trial: Callable[[], object]) -> None:
    """Run `trial`, which calls compiled functions. Raises `UsageError` with the compiler's words when it cannot."""
    try:
        trial()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"torch.compile cannot compile this model here: {type(error).__name__}: {first_line(error)}. "
            "It needs a C++ compiler on the CPU and Triton on a GPU: install them, or leave out -B compile=true."
        ) from error
