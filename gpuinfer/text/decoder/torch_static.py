"""Batches of fixed shape: one token of each row, or a short run, padded to one of few sizes, through the same memory
each time.

Work of a fixed shape, launched as a CUDA graph when the shape comes again.

torch.compile for the parts of a layer that see each token for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.models.capturing import captured
from gpuinfer.models.forward_cuda import bucket_for
from gpuinfer.models.memory import first_line, is_out_of_memory
from gpuinfer.text.decoder.segments import Integers, firsts_of, sees_of
from gpuinfer.text.decoder.torch_batch import Uploads, of_tokens, reach_buckets, row_buckets
from gpuinfer.text.decoder.torch_cache import PageCache, table_of
from gpuinfer.text.decoder.torch_layers import Adapted, Group, StepBatch, Tiles, Window, mask
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import PAGE, Step

logger = logging.getLogger("gpuinfer")

MOST_WIDTH = 64  # tokens of a run that is padded: a block of a diffusion model. A longer one takes longer than a launch
MOST_RUN_TOKENS = 4096  # of all rows
FIRST_PAUSE = 256  # steps without a graph before one is tried again; twice as many each time
Form = TypeVar("Form", bound=Hashable)


class Replays(Generic[Form]):
    """Does work that reads and writes the same memory each time for the same shape.

    The first time, and always on a device that has no graphs, it simply runs. The second time it is captured too, since
    a shape that came twice will come often; from then on the graph is launched. Graphs share their working memory: they
    never run at the same time. Where there is no memory for one, it is tried again later, after more and more work.
    """

    def __init__(self, device: torch.device, wanted: bool) -> None:
        self.device = device
        self.wanted = wanted and device.type == "cuda"
        self._seen: set[Form] = set()
        self._graphs: dict[Form, torch.cuda.CUDAGraph] = {}
        self._wait, self._pause = 0, FIRST_PAUSE
        if self.wanted:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[Form], None], shape: Form) -> None:
        if (graph := self._graphs.get(shape)) is not None:
            graph.replay()
            return
        work(shape)
        if self._wait:
            self._wait -= 1
        elif self.wanted and shape in self._seen:
            self._capture(work, shape)
        self._seen.add(shape)

    def _capture(self, work: Callable[[Form], None], shape: Form) -> None:
        try:
            with captured(self._stream, self._pool) as graph:
                work(shape)
        except RuntimeError as error:
            if is_out_of_memory(error):
                if self._pause == FIRST_PAUSE:
                    logger.warning(
                        "there is no memory for a further CUDA graph: such steps launch each kernel by itself, and it "
                        "is tried again later. Fewer slots (--batch-size) or pages (-B pages) leave more."
                    )
                self._wait, self._pause = self._pause, 2 * self._pause
                return
            self.wanted = False
            logger.warning(
                "this model cannot be captured in a CUDA graph (%s), so that each kernel is launched by itself. "
                "-B graphs=false silences this.",
                first_line(error),
            )
            return
        self._graphs[shape] = graph


@dataclass(frozen=True)
class GraphForm:
    """The shape of a batch."""

    rows: int
    reach: int
    answered: bool  # whether logits are computed; not of runs, of whose tokens few are asked for
    width: int = 1  # tokens of a row


class StaticBatches:
    """Runs rows of one token, or of short runs of tokens, through `hidden`, and of one token through `logits`, launched
    as CUDA graphs where the device has them.

    What only fills up is token 0 at position 0, sees that position of the blank page, and writes to the spare one.
    Tokens, positions, places, what is seen and the table of pages lie one behind the other, so that they are sent over
    in one copy.
    """

    def __init__(
        self,
        cache: PageCache,
        uploads: Uploads,
        windows: Collection[Window],
        shape: Shape,
        most: int,
        hidden: Callable[[StepBatch], Tensor],
        logits: Callable[[Tensor], Tensor],
        graphs: bool,
        together: bool,
        tile_rows: int | None,
    ) -> None:
        """`most` rows at once; `together`: all rows of a batch go through attention together, so that what a row goes
        through does not depend on its place. `tile_rows`: how many of a segment a kernel for pages takes; None: there
        is none, and attention is over groups, padded.
        """
        self.cache, self.windows, self._hidden, self._logits = cache, windows, hidden, logits
        self._uploads, self._together, self._tile_rows = uploads, together, tile_rows
        device = cache.keys.device
        # A kernel for pages reads what each row sees, whatever the batch has room for.
        self.row_buckets, self.reach_buckets = (
            row_buckets(most),
            [cache.room] if tile_rows else reach_buckets(cache.room),
        )
        self.run_tokens = MOST_RUN_TOKENS if shape.masking is not None else 0
        room = max(most, self.run_tokens)
        size = 4 * room + room * cache.columns
        self._inputs = torch.zeros(size, dtype=torch.int64, device=device)
        self._outputs = torch.zeros((most, shape.vocabulary), device=device)
        self._found = torch.zeros((self.run_tokens, shape.hidden), device=device, dtype=cache.keys.dtype)
        self._run: Replays[GraphForm] = Replays(device, graphs)

    def decode(self, step: Step) -> Tensor:
        """Logits [padded rows, vocabulary] of a step that brings one token of each segment, in their order. The next
        call overwrites them. A step that asks for none is seldom, and no form of its own.
        """
        form = self._form(step, 1, answered=True)
        table = table_of(step, np.arange(len(step.lengths)), form.reach // PAGE, self.cache.blank)
        return self.compute(form, np.arange(len(table)), of_tokens(step), table)

    def form_of_runs(self, step: Step) -> GraphForm | None:
        """The form of a step of short runs; None when there is none that fits: one with far more tokens than the step
        has would not pay.
        """
        longest = int(step.lengths.max())
        if step.sees is None or longest > MOST_WIDTH:
            return None
        form = self._form(step, 1 << (longest - 1).bit_length(), False)
        tokens = form.rows * form.width
        return None if tokens > min(self.run_tokens, 2 * len(step.tokens) + MOST_WIDTH) else form

    def runs(self, step: Step, form: GraphForm) -> tuple[Tensor, Integers]:
        """What the last layer gives, [padded tokens, hidden], and where the step's own tokens are. The next call
        overwrites it.
        """
        segments = np.arange(len(step.lengths))
        where = np.repeat(segments * form.width - firsts_of(step), step.lengths) + np.arange(len(step.tokens))
        table = table_of(step, segments, form.reach // PAGE, self.cache.blank)
        return self.compute(form, where, of_tokens(step), table), where

    def compute(
        self, form: GraphForm, where: Integers, given: Integers, table: Integers, adapted: tuple[Adapted, ...] = ()
    ) -> Tensor:
        """The same for tokens [4, tokens] (`of_tokens`) at the places `where`, and the pages [rows, columns] that the
        first rows of the form read. With adapters it is no graph.
        """
        size, columns = form.rows * form.width, form.reach // PAGE
        used = 4 * size + form.rows * columns
        room = self._uploads.room(used)
        inputs, pages = room[: 4 * size].reshape(4, size), room[4 * size :].reshape(form.rows, columns)
        inputs[:2], inputs[2], inputs[3] = 0, self.cache.spare * PAGE, 1
        inputs[:, where] = given
        pages[: len(table)], pages[len(table) :] = table, self.cache.blank
        self._uploads.copy(self._inputs[:used])
        if adapted:
            self._compute(form, adapted)
        else:
            self._run(self._compute, form)
        return (self._outputs if form.width == 1 else self._found)[: form.rows * form.width]

    def nbytes(self) -> int:
        return self._inputs.nbytes + self._outputs.nbytes + self._found.nbytes

    def masks(self, positions: Tensor, sees: Tensor, reach: int) -> dict[Window, Tensor | None]:
        """For rows [rows, width] that read `reach` positions."""
        dtype, sharing = self.cache.keys.dtype, self.cache.sharing if positions.shape[1] > 1 else 1
        return {window: mask(positions, sees, reach, window, dtype, sharing) for window in self.windows}

    def _form(self, step: Step, width: int, answered: bool) -> GraphForm:
        reach = bucket_for(int(sees_of(step).max()), self.reach_buckets)
        return GraphForm(bucket_for(len(step.lengths), self.row_buckets), reach, answered, width)

    def _compute(self, form: GraphForm, adapted: tuple[Adapted, ...] = ()) -> None:
        size, width, columns = form.rows * form.width, form.width, form.reach // PAGE
        tokens, positions, into, sees = self._inputs[: 4 * size].view(4, size).unbind()
        table = self._inputs[4 * size :][: form.rows * columns].view(form.rows, columns)
        batch = StepBatch(tokens, positions, into, adapted=adapted)
        if self._tile_rows is None:
            batch = replace(batch, groups=tuple(self._groups(form, positions, sees, table)))
        else:
            batch = replace(batch, tiles=(self._tiles(form, table, min(self._tile_rows, width)),), sees=sees)
        found = self._hidden(batch)
        if width > 1:
            self._found[:size].copy_(found)
        elif form.answered:
            self._outputs[:size].copy_(self._logits(found))

    def _groups(self, form: GraphForm, positions: Tensor, sees: Tensor, table: Tensor) -> Iterator[Group]:
        width = form.width
        together = form.rows if self._together else max(1, self.cache.most_copied // form.reach)
        for first in range(0, form.rows, together):
            rows = slice(first * width, min(first + together, form.rows) * width)
            masks = self.masks(positions[rows].view(-1, width), sees[rows].view(-1, width), form.reach)
            yield Group(width, form.reach, table[first : first + together], rows, masks)

    def _tiles(self, form: GraphForm, table: Tensor, most: int) -> Tiles:
        """Widths of runs and rows of a tile are powers of two: no tile has rows of two runs."""
        if form.width == 1:
            return Tiles(table, None, 1, form.reach)
        firsts = torch.arange(0, form.rows * form.width, most, device=table.device)
        return Tiles(table, (firsts, torch.full_like(firsts, most), firsts // form.width), most, form.reach)


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
