"""Batches of fixed shape: one token of each row, or a short run, padded to one of few sizes, through the same memory
each time.

Work of a fixed shape, launched as a CUDA graph when the shape comes again.

torch.compile for the parts of a layer that see each token for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.models.capturing import captured
from gpuinfer.models.forward_cuda import bucket_for
from gpuinfer.models.memory import first_line, is_out_of_memory
from gpuinfer.text.decoder.segments import Integers, positions_of, sees_of
from gpuinfer.text.decoder.torch_batch import reach_buckets, row_buckets
from gpuinfer.text.decoder.torch_cache import SlotCache
from gpuinfer.text.decoder.torch_layers import Adapted, Group, StepBatch, Window, mask
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import Step

logger = logging.getLogger("gpuinfer")

MOST_WIDTH = 64  # tokens of a run that is padded: a block of a diffusion model. A longer one takes longer than a launch
MOST_RUN_TOKENS = 4096  # of all rows
Form = TypeVar("Form", bound=Hashable)


class Replays(Generic[Form]):
    """Does work that reads and writes the same memory each time for the same shape.

    The first time, and always on a device that has no graphs, it simply runs. The second time it is captured too, since
    a shape that came twice will come often; from then on the graph is launched. Graphs share their working memory: they
    never run at the same time.
    """

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self.device = device
        self.wanted = wanted and device.type == "cuda"
        self._seen: set[Form] = set()
        self._graphs: dict[Form, torch.cuda.CUDAGraph] = {}
        if self.wanted:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[Form], None], shape: Form) -> None:
        if (graph := self._graphs.get(shape)) is not None:
            graph.replay()
            return
        work(shape)
        if self.wanted and shape in self._seen:
            self._capture(work, shape)
        self._seen.add(shape)

    def _capture(self, work: Callable[[Form], None], shape: Form) -> None:
        try:
            with captured(self._stream, self._pool) as graph:
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
    answered: bool  # whether logits are computed; not of runs, of whose tokens few are asked for
    width: int = 1  # tokens of a row


class StaticBatches:
    """Runs rows of one token, or of short runs of tokens, through `hidden`, and of one token through `logits`, launched
    as CUDA graphs where the device has them.

    What only fills up is token 0 at position 0, sees that, and writes to the spare slot.
    """

    def __init__(
        self,
        cache: SlotCache,
        windows: Collection[Window],
        shape: Shape,
        most: int,
        hidden: Callable[[StepBatch], Tensor],
        logits: Callable[[Tensor], Tensor],
        graphs: bool,
    ) -> None:
        self.cache, self.windows, self._hidden, self._logits = cache, windows, hidden, logits
        device = cache.keys.device
        self.row_buckets, self.reach_buckets = row_buckets(most), reach_buckets(cache.room)
        self.run_tokens = MOST_RUN_TOKENS if shape.masking is not None else 0
        room = max(most, self.run_tokens)
        self._host = torch.zeros((4, room), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = torch.zeros((4, room), dtype=torch.int64, device=device)
        self._outputs = torch.zeros((most, shape.vocabulary), device=device)
        self._found = torch.zeros((self.run_tokens, shape.hidden), device=device, dtype=cache.keys.dtype)
        self._run: Replays[GraphForm] = Replays(device, graphs)

    def decode(
        self, tokens: Integers, positions: Integers, slots: Integers, sees: Integers, answered: bool
    ) -> tuple[Tensor, Integers]:
        """Logits [padded rows, vocabulary] of one step for each slot, and where the slots' own are among them.

        The next call overwrites them; without `answered` they mean nothing.
        """
        form, where = self._form(slots, sees, 1, answered)
        return self.compute(form, where, tokens, positions, slots, sees)

    def form_of_runs(self, step: Step) -> tuple[GraphForm, Integers] | None:
        """The form of a step of short runs, and the place of each of its rows; None when there is none that fits: one
        with far more tokens than the step has would not pay.
        """
        longest = int(step.lengths.max())
        if step.sees is None or longest > MOST_WIDTH:
            return None
        form, where = self._form(step.slots.astype(np.int64), step.sees, 1 << (longest - 1).bit_length(), False)
        tokens = form.rows * form.width
        return None if tokens > min(self.run_tokens, 2 * len(step.tokens) + MOST_WIDTH) else (form, where)

    def runs(self, step: Step, form: GraphForm, where: Integers) -> tuple[Tensor, Integers]:
        """What the last layer gives, [padded tokens, hidden], and where the step's own tokens are. The next call
        overwrites it.
        """
        positions, slots = positions_of(step), np.repeat(step.slots, step.lengths)
        places = np.repeat(where * form.width - step.starts, step.lengths) + positions
        return self.compute(form, places, step.tokens, positions, slots, sees_of(step))

    def compute(
        self,
        form: GraphForm,
        where: Integers,
        tokens: NDArray[Any],
        positions: Integers,
        slots: NDArray[Any],
        sees: Integers,
        adapted: tuple[Adapted, ...] = (),
    ) -> tuple[Tensor, Integers]:
        """The same in a form that is given, with the tokens at the places `where`. With adapters it is no graph."""
        size = form.rows * form.width
        inputs = self._host[:, :size].numpy()
        inputs[:2], inputs[2], inputs[3] = 0, self.cache.spare, 1
        inputs[:, where] = tokens, positions, slots, sees
        self._inputs[:, :size].copy_(self._host[:, :size])
        if adapted:
            self._compute(form, adapted)
        else:
            self._run(self._compute, form)
        return (self._outputs if form.width == 1 else self._found)[:size], where

    def nbytes(self) -> int:
        return self._inputs.nbytes + self._outputs.nbytes + self._found.nbytes

    def masks(self, positions: Tensor, sees: Tensor, reach: int) -> dict[Window, Tensor | None]:
        """For rows [rows, width] that read `reach` positions."""
        dtype, sharing = self.cache.keys.dtype, self.cache.sharing if positions.shape[1] > 1 else 1
        return {window: mask(positions, sees, reach, window, dtype, sharing) for window in self.windows}

    def _form(self, slots: Integers, sees: NDArray[Any], width: int, answered: bool) -> tuple[GraphForm, Integers]:
        """The form for rows of these slots, and each one's place."""
        reach = bucket_for(int(sees.max()), self.reach_buckets)
        few = bucket_for(len(slots), self.row_buckets)
        spread = bucket_for(int(slots.max()) + 1, self.row_buckets)
        in_place = spread <= 2 * few  # a copy of the cache costs more than rows that idle
        where = slots if in_place else np.arange(len(slots))
        return GraphForm(spread if in_place else few, reach, in_place, answered, width), where

    def _compute(self, form: GraphForm, adapted: tuple[Adapted, ...] = ()) -> None:
        size, rows = form.rows * form.width, (form.rows, form.width)
        tokens, positions, slots, sees = self._inputs[:, :size].unbind()
        reading = slice(0, form.rows) if form.in_place else slots.view(rows)[:, 0]
        masks = self.masks(positions.view(rows), sees.view(rows), form.reach)
        group = Group(form.width, form.reach, reading, None, masks)
        found = self._hidden(StepBatch(tokens, positions, slots * self.cache.room + positions, (group,), adapted))
        if form.width > 1:
            self._found[:size].copy_(found)
        elif form.answered:
            self._outputs[:size].copy_(self._logits(found))


Result = TypeVar("Result")


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, compiled when it is first called, for all layers together."""
    result: Callable[..., Result] = torch.compile(function)
    return result


def uncompiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, left as it is by compiled functions that call it: the compiler knows products of groups of rows for
    bfloat16 alone.
    """
    result: Callable[..., Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
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
