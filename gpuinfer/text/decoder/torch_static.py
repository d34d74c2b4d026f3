"""Batches of fixed shape: one token of each row, or a short run, padded to one of few sizes, in the same memory each
time; their CUDA graphs; and torch.compile for the token-wise parts of a layer.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.models.cuda_graphs import captured, new_stream
from gpuinfer.models.forward_cuda import bucket_for
from gpuinfer.models.out_of_memory import first_line, is_out_of_memory
from gpuinfer.text.decoder.attention_plan import (
    FIELDS,
    LEAST_SLOTS,
    Integers,
    PrefixPlan,
    PrefixPlanner,
    firsts_of,
    sees_of,
    whole_pages,
)
from gpuinfer.text.decoder.torch_batch import Uploads, attention_tiles, reach_buckets, row_buckets, token_columns
from gpuinfer.text.decoder.torch_cache import PageCache, table_of
from gpuinfer.text.decoder.torch_layers import AdaptedRows, PaddedGroup, SharedPrefixes, StepBatch, Tiles, Window, mask
from gpuinfer.text.transformer import PAGE, Shape, Step

logger = logging.getLogger("gpuinfer")

MOST_WIDTH = 64  # tokens of a run that is padded: a block of a diffusion model. A longer one takes longer than a launch
MOST_RUN_TOKENS = 4096  # of all rows
# What a step with prompts is padded to: more tokens take longer than launches.
PROMPT_TOKENS = (128, 192, 256, 384, 512, 768, 1024)
LEAST_SHARING = 4  # rows of a form at least, for prefixes that rows share to be read once
LEAST_ITEMS = 32  # of shared prefixes in a step at least: enough for a device to read as fast as it can
MOST_SLOTS, SHARED_PARTS = 32, 2048  # of a row, and of all together: partial results for which there is room
FIRST_PAUSE = 256  # steps without a graph before one is tried again; twice as many each time
Form = TypeVar("Form", bound=Hashable)
Memory = TypeVar("Memory", Tensor, NDArray[np.int64])
Shapes = tuple[tuple[int, int], ...]


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
            self._stream = new_stream(device)

    def drop(self) -> None:
        """Let go of the graphs, none of which may be at work, and of their working memory."""
        self._graphs.clear()
        self._seen.clear()
        self._wait, self._pause = 0, FIRST_PAUSE
        if self.wanted:
            self._pool = torch.cuda.graph_pool_handle()

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


@dataclass(frozen=True)
class PromptForm:
    """The shape of a step of prompts, or chunks of them, beside rows that decode one token each."""

    tokens: int  # one more than the step's at least


class StaticBatches:
    """Runs rows of one token, or of short runs of tokens, through `hidden`, and of one token through `logits`, launched
    as CUDA graphs where the device has them. With a kernel for pages, steps with prompts too, unless `together`.

    What only fills up is token 0 at position 0, sees that position of the blank page, and writes to the spare one.
    Tokens, positions, places, what is seen, which prefixes are shared and the table of pages lie one behind the other,
    so that they are sent over in one copy.

    With `prefixes` the keys and values that rows of one token share are read once for many of them, beside prompts too.
    In which parts such a row is summed up depends on where others cease to share with it; beside rows of one token, one
    that shares nothing is answered with the same bits as without.
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
        prefixes: PrefixPlanner | None = None,
    ) -> None:
        """`most` rows at once; `together`: all rows of a batch go through attention together, so that what a row goes
        through does not depend on its place. `tile_rows`: how many of a segment a kernel for pages takes; None: there
        is none, and attention is over groups, padded. `prefixes` needs that kernel.
        """
        self.cache, self.windows, self._hidden, self._logits = cache, windows, hidden, logits
        self._uploads, self._together, self._tile_rows = uploads, together, tile_rows
        self._prefixes = prefixes if tile_rows is not None and not together and None in windows else None
        self._planned: tuple[NDArray[np.int32], Integers, PrefixPlan] | None = None
        device = cache.keys.device
        # A kernel for pages reads what each row sees, whatever the batch has room for.
        self.row_buckets, self.reach_buckets = (
            row_buckets(most),
            [cache.room] if tile_rows else reach_buckets(cache.room),
        )
        self.rows, self.run_tokens = most, MOST_RUN_TOKENS if shape.masking is not None else 0
        of_prompts = graphs and not together and tile_rows is not None and shape.masking is None
        self.prompt_tokens = PROMPT_TOKENS if of_prompts else ()
        size = max(self.run_tokens, most) * (4 + cache.columns) + size_of(self._shared_shapes(most))
        if self.prompt_tokens:
            size = max(size, size_of(self._prompt_shapes(self.prompt_tokens[-1])))
        self._inputs = torch.zeros(size, dtype=torch.int64, device=device)
        self._outputs = torch.zeros((most, shape.vocabulary), device=device)
        found = max(self.run_tokens, *self.prompt_tokens, 0)
        self._found = torch.zeros((found, shape.hidden), device=device, dtype=cache.keys.dtype)
        self._run: Replays[GraphForm | PromptForm] = Replays(device, graphs)

    def decode(self, step: Step) -> Tensor:
        """Logits [padded rows, vocabulary] of a step that brings one token of each segment, in their order. The next
        call overwrites them. A step that asks for none is seldom, and no form of its own.
        """
        form = self._form(step, 1, answered=True)
        table = table_of(step, np.arange(len(step.lengths)), form.reach // PAGE, self.cache.blank)
        return self.compute(
            form, np.arange(len(table)), token_columns(step), table, shared=self.shared_by(step, form.rows)
        )

    def shared_by(self, step: Step, rows: int) -> PrefixPlan | None:
        """Which prefixes are read once in a step that brings one token of each segment, in a form of so many rows.
        Steps in the very same pages have the same plan.
        """
        items, slots = self._shared_room(rows)
        if self._prefixes is None or not items:
            return None
        whole, known = whole_pages(step.starts, sees_of(step)), self._planned
        if known is None or known[0] is not step.pages or len(known[1]) != len(whole) or (whole < known[1]).any():
            self._planned = known = step.pages, whole, self._prefixes.plan(step.pages, whole, items, slots)
        return known[2]

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
        return self.compute(form, where, token_columns(step), table), where

    def compute(
        self,
        form: GraphForm,
        where: Integers,
        given: Integers,
        table: Integers,
        adapted: tuple[AdaptedRows, ...] = (),
        shared: PrefixPlan | None = None,
    ) -> Tensor:
        """The same for tokens [4, tokens] (`of_tokens`) at the places `where`, and the pages [rows, columns] that the
        first rows of the form read, of which they share what `shared` says. With adapters it is no graph.
        """
        used = size_of(self._shapes(form))
        inputs, items, prefixes, pages = fields(self._uploads.room(used), self._shapes(form))
        inputs[:2], inputs[2], inputs[3] = 0, self.cache.spare * PAGE, 1
        inputs[:, where] = given
        pages[: len(table)], pages[len(table) :] = table, self.cache.blank
        write_plan(shared, items, prefixes)
        self._uploads.copy(self._inputs[:used])
        if adapted:
            self._compute(form, adapted)
        else:
            self._run(self._work, form)
        return (self._outputs if form.width == 1 else self._found)[: form.rows * form.width]

    def form_of_prompts(self, step: Step) -> PromptForm | None:
        """The form of a step with prompts; None where they have none, and for more tokens than any form has."""
        if step.sees is not None or not self.prompt_tokens or len(step.tokens) >= self.prompt_tokens[-1]:
            return None
        return PromptForm(bucket_for(len(step.tokens) + 1, self.prompt_tokens))

    def prompts(self, step: Step, form: PromptForm) -> tuple[Tensor, Tensor]:
        """What the last layer gives, [padded tokens, hidden], and which of them are wanted, int64 [wanted] on the
        device. The next call overwrites both.
        """
        assert self._tile_rows is not None
        segments, count = len(step.lengths), len(step.tokens)
        shapes = self._prompt_shapes(form.tokens)
        used = size_of(shapes)
        inputs, table, lone, runs, wanted, items, prefixes = fields(self._uploads.room(used), shapes)
        inputs[:2], inputs[2], inputs[3] = 0, self.cache.spare * PAGE, 1
        inputs[:, :count] = token_columns(step)
        table[:segments] = table_of(step, np.arange(segments), self.cache.columns, self.cache.blank)
        table[segments:] = self.cache.blank
        # What fills up is one more segment, of the blank page, and tiles that do are its last token once more.
        filled = replace(step, lengths=np.append(step.lengths, np.int32(form.tokens - count)))
        alone = filled.lengths == 1
        for room, members, most in ((lone, alone, 1), (runs, ~alone, self._tile_rows)):
            tiles = np.stack(attention_tiles(filled, np.flatnonzero(members), most))
            room[:, : tiles.shape[1]] = tiles
            room[:, tiles.shape[1] :] = [[form.tokens - 1], [1], [segments]]
        wanted[0, : len(step.wanted)] = step.wanted
        # What segments of one token share is read once; and programs beside one another read parts of a long one,
        # which a form for as many rows as there may be has no other for.
        (most, slots), single = self._shared_room(self.rows), np.flatnonzero(step.lengths == 1)
        plan = None
        if self._prefixes is not None and most and len(single):
            whole = step.starts[single].astype(np.int64) // PAGE
            plan = self._prefixes.plan(step.pages[single], whole, most, slots, apart=True)
        write_plan(plan, items, prefixes)
        self._uploads.copy(self._inputs[:used])
        self._run(self._work, form)
        on_device = fields(self._inputs, shapes)[4]
        return self._found[: form.tokens], on_device[0, : len(step.wanted)]

    def _shapes(self, form: GraphForm) -> Shapes:
        """`of_tokens` [4, tokens]; which prefixes are shared; the table [rows, columns]."""
        shared = self._shared_shapes(form.rows if form.width == 1 else 0)
        return (4, form.rows * form.width), *shared, (form.rows, form.reach // PAGE)

    def _prompt_shapes(self, tokens: int) -> Shapes:
        """`of_tokens` [4, tokens]; the table [rows + 1, columns], whose last row is blank; tiles [3, tiles] of segments
        of one token, and of longer ones; which tokens are wanted [1, tokens]; which prefixes are shared.
        """
        assert self._tile_rows is not None
        of_runs = even(tokens // self._tile_rows + self.rows + 1)  # each of the segments may end within a tile
        table, tiles = (self.rows + 1, self.cache.columns), ((3, self.rows), (3, of_runs))
        return (4, tokens), table, *tiles, (1, tokens), *self._shared_shapes(self.rows)

    def _shared_shapes(self, rows: int) -> Shapes:
        """Items [FIELDS, items]; members, begins and slots [3, rows], as `PrefixPlan` has them."""
        items, _ = self._shared_room(rows)
        return (FIELDS, items), (3, even(rows) if items else 0)

    def _shared_room(self, rows: int) -> tuple[int, int]:
        """Items of a form of so many rows, and partial results of each of them, at most. 0: nothing is shared."""
        if self._prefixes is None or rows < LEAST_SHARING:
            return 0, 0
        return even(max(LEAST_ITEMS, rows // 2)), min(MOST_SLOTS, max(LEAST_SLOTS, SHARED_PARTS // rows))

    def drop_graphs(self) -> None:
        """See `step.Decoder.drop_graphs`."""
        self._run.drop()

    def nbytes(self) -> int:
        return self._inputs.nbytes + self._outputs.nbytes + self._found.nbytes

    def masks(self, positions: Tensor, sees: Tensor, reach: int) -> dict[Window, Tensor | None]:
        """For rows [rows, width] that read `reach` positions."""
        dtype, sharing = self.cache.keys.dtype, self.cache.sharing if positions.shape[1] > 1 else 1
        return {window: mask(positions, sees, reach, window, dtype, sharing) for window in self.windows}

    def _form(self, step: Step, width: int, answered: bool) -> GraphForm:
        reach = bucket_for(int(sees_of(step).max()), self.reach_buckets)
        return GraphForm(bucket_for(len(step.lengths), self.row_buckets), reach, answered, width)

    def _work(self, form: GraphForm | PromptForm) -> None:
        if isinstance(form, GraphForm):
            self._compute(form)
            return
        assert self._tile_rows is not None
        inputs, table, lone, runs, _, items, prefixes = fields(self._inputs, self._prompt_shapes(form.tokens))
        tokens, positions, into, sees = inputs.unbind()
        shared, room = self._shared_on_device(items, prefixes, self.rows), self.cache.room
        (a, b, c), (d, e, f) = lone.unbind(), runs.unbind()
        tiles = Tiles(table, (a, b, c), 1, room, shared), Tiles(table, (d, e, f), self._tile_rows, room)
        self._found[: form.tokens].copy_(self._hidden(StepBatch(tokens, positions, into, tiles=tiles, sees=sees)))

    def _shared_on_device(self, items: Tensor, prefixes: Tensor, rows: int) -> SharedPrefixes | None:
        _, slots = self._shared_room(rows)
        members, begins, used = (line[:rows] for line in prefixes.unbind())
        return SharedPrefixes(items, members, begins, used, slots) if slots else None

    def _compute(self, form: GraphForm, adapted: tuple[AdaptedRows, ...] = ()) -> None:
        size, width = form.rows * form.width, form.width
        inputs, items, prefixes, table = fields(self._inputs, self._shapes(form))
        tokens, positions, into, sees = inputs.unbind()
        batch = StepBatch(tokens, positions, into, adapted=adapted)
        if self._tile_rows is None:
            batch = replace(batch, groups=tuple(self._groups(form, positions, sees, table)))
        else:
            tiles = self._tiles(form, table, min(self._tile_rows, width))
            if width == 1:
                tiles = replace(tiles, shared=self._shared_on_device(items, prefixes, form.rows))
            batch = replace(batch, tiles=(tiles,), sees=sees)
        found = self._hidden(batch)
        if width > 1:
            self._found[:size].copy_(found)
        elif form.answered:
            self._outputs[:size].copy_(self._logits(found))

    def _groups(self, form: GraphForm, positions: Tensor, sees: Tensor, table: Tensor) -> Iterator[PaddedGroup]:
        width = form.width
        together = form.rows if self._together else max(1, self.cache.most_copied // form.reach)
        for first in range(0, form.rows, together):
            rows = slice(first * width, min(first + together, form.rows) * width)
            masks = self.masks(positions[rows].view(-1, width), sees[rows].view(-1, width), form.reach)
            yield PaddedGroup(width, form.reach, table[first : first + together], rows, masks)

    def _tiles(self, form: GraphForm, table: Tensor, most: int) -> Tiles:
        """Widths of runs and rows of a tile are powers of two: no tile has rows of two runs."""
        if form.width == 1:
            return Tiles(table, None, 1, form.reach)
        firsts = torch.arange(0, form.rows * form.width, most, device=table.device)
        return Tiles(table, (firsts, torch.full_like(firsts, most), firsts // form.width), most, form.reach)


def even(count: int) -> int:
    """At least so many: arrays one behind another are aligned alike in all forms, and one compiled kernel serves."""
    return count + count % 2


def size_of(shapes: Shapes) -> int:
    return sum(lines * length for lines, length in shapes)


def fields(memory: Memory, shapes: Shapes) -> tuple[Memory, ...]:
    """Arrays of these shapes, one behind another."""
    ends = itertools.accumulate(lines * length for lines, length in shapes)
    return tuple(memory[end - a * b : end].reshape(a, b) for end, (a, b) in zip(ends, shapes, strict=True))


def write_plan(plan: PrefixPlan | None, items: Integers, prefixes: Integers) -> None:
    """`plan` into items [FIELDS, items] and members, begins and slots [3, rows]; what is left over is of no rows."""
    items[:], prefixes[:] = 0, 0
    if plan is not None:
        items[:, : plan.items.shape[1]] = plan.items
        prefixes[:, : len(plan.members)] = plan.members, plan.begins, plan.slots


Result = TypeVar("Result")


def compile_on_call(function: Callable[..., Result], mode: str) -> Callable[..., Result]:
    """`function`, compiled in this mode of torch.compile when it is first called, for all layers together."""
    result: Callable[..., Result] = torch.compile(function, mode=mode)
    return result


def left_uncompiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, left as it is by compiled functions that call it: the compiler knows products of groups of rows for
    bfloat16 alone.
    """
    result: Callable[..., Result] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return result


def try_compiled(trial: Callable[[], object]) -> None:
    """Run `trial`, which calls compiled functions. Raises `UsageError` with the compiler's words when it cannot."""
    try:
        trial()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"torch.compile cannot compile this model here: {type(error).__name__}: {first_line(error)}. "
            "It needs a C++ compiler on the CPU and Triton on a GPU: install them, or leave out -B compile."
        ) from error
