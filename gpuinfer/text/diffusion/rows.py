"""One prompt under way, and its rows: each a canvas that is filled in block by block."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.generation import Completion, Logprob
from gpuinfer.text.diffusion.caching import WARM_STEPS, reach
from gpuinfer.text.diffusion.layout import Layout
from gpuinfer.text.diffusion.planning import Planned
from gpuinfer.text.generator.adapters import Loaded
from gpuinfer.text.generator.begun import Begun
from gpuinfer.text.generator.ending import spelling
from gpuinfer.text.generator.giving import Given
from gpuinfer.text.generator.seams import Growing, Ints, Language
from gpuinfer.text.versions import Spans, then

NO_TOKENS: Ints = np.zeros(0, np.int32)


class Work:
    """One prompt. Each of its samples has a row of its own; nothing is shared between them."""

    __slots__ = (
        "adapter", "completions", "first_token", "left", "planned", "rows", "started", "ticket", "versions",
    )  # fmt: skip

    def __init__(self, ticket: Hashable, planned: Planned, started: float, adapter: Loaded | None) -> None:
        self.ticket, self.planned, self.started, self.adapter = ticket, planned, started, adapter
        self.rows: list[Row] = []  # those that compute
        self.left = planned.samples
        self.completions: list[Completion | None] = [None] * planned.samples
        self.first_token = started
        self.versions: tuple[str, ...] = ()  # of the weights that have computed it

    @property
    def adapter_number(self) -> int:
        """As steps name it; 0: none."""
        return 0 if self.adapter is None else self.adapter.number


class Row:
    """One sample. Positions are those of its canvas, but where they are said to be of the answer."""

    __slots__ = (
        "begun", "blended", "block", "computed_by", "given", "growing", "idle", "kept", "layout", "logprobs", "masks",
        "number", "plan", "revealed", "slot", "start", "step", "steps", "steps_done", "stop", "stored", "twin",
        "understood", "version", "waited", "work",
    )  # fmt: skip

    def __init__(self, work: Work, number: int, layout: Layout) -> None:
        planned = work.planned
        self.work, self.number, self.plan, self.layout = work, number, planned.plan, layout
        self.slot = self.twin = -1  # the twin's canvas has masks for a prompt: classifier-free guidance
        self.begun: Begun | None = planned.begun[number] if planned.begun else None
        self.kept: Any = None  # by its decoder
        self.growing: Growing | None = None  # for stop strings
        self.given: Given | None = None  # where the answer is given out while it grows
        self.logprobs: list[Logprob | None] | None = None  # of each token of the answer, as it was committed
        self.version = len(work.versions) - 1  # which of the work's computes it now
        self.computed_by: NDArray[np.int16] | None = None  # which has, by token of the answer; None: none but that one
        self.revealed = 0  # tokens of the answer that have no mask before them, and will stay
        self.steps_done = 0  # that decided something
        self.waited = False  # for pages
        self.stored = 0  # positions from the beginning that will not change and are in the cache
        self.understood = 0  # of the prompt, those that have been computed
        self.enter_block(0)

    def enter_block(self, number: int) -> None:
        self.block, end = number, self.layout.end
        self.start, self.stop = self.layout.bounds(number) if number < self.layout.blocks else (end, end)
        self.masks: Ints = np.arange(self.start, self.stop, dtype=np.int32)  # ascending
        self.blended: NDArray[np.float32] | None = None  # [masks, hidden] what these enter the next step with
        self.step = self.idle = 0
        self.steps = self.plan.steps_of(number, self.layout.blocks, self.stop - self.start)

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,) if self.twin < 0 else (self.slot, self.twin)

    @property
    def asks(self) -> Ints:
        """The positions whose logits its next decision is made from."""
        return np.arange(self.start, self.stop, dtype=np.int32) if self.plan.decoder.edits else self.masks

    @property
    def known(self) -> int:
        """So many positions from the beginning will stay as they are."""
        if self.plan.decoder.edits:
            return self.start
        return int(self.masks[0]) if len(self.masks) else self.stop

    @property
    def spans(self) -> Spans:
        """Which weights have computed which tokens of the answer."""
        if self.computed_by is None:
            return ((0, self.work.versions[self.version]),)
        found: Spans = ()
        changes = np.flatnonzero(np.diff(self.computed_by[: self.revealed], prepend=-1)).tolist()
        for at in changes:
            found = then(found, at, self.work.versions[self.computed_by[at]])
        return found

    def change_version(self, version: int) -> None:
        """Another of the work's versions computes it from now on."""
        if self.understood and self.computed_by is None:
            self.computed_by = np.full(self.layout.end - self.layout.prompt, self.version, np.int16)
        self.version = version

    def reach(self) -> tuple[int, int]:
        """What the next step computes of it."""
        first, last = reach(
            self.plan.cache,
            self.layout,
            self.start,
            self.stop,
            fresh=not self.step,
            warm=self.steps_done < WARM_STEPS,
            stored=self.stored,
        )
        return (max(0, min(first, self.start - 1)) if self.plan.shifted else first), last

    def passed(self, last: int, *, decided: bool) -> None:
        """A step has computed it up to `last`. Before it there is no block that is not done."""
        self.understood = max(self.understood, min(last, self.layout.prompt))
        if self.plan.cache == "exact" and self.layout.attention is not None:
            self.stored = self.start // self.layout.attention * self.layout.attention if decided else last


def row_of(language: Language, work: Work, number: int, layout: Layout) -> Row:
    """The sample of this number, with all that watches its answer. What has begun elsewhere is computed once more from
    its beginning, as what is ahead of it is not known; only what follows is given out.
    """
    row, planned = Row(work, number, layout), work.planned
    sampling, begun = planned.sampling, NO_TOKENS if row.begun is None else row.begun.tokens
    if sampling.stop or planned.parts:
        growing = language.growing(sampling.stop, not sampling.skip_special_tokens, planned.parts)
        characters = growing.begin(begun.tolist())
        row.growing = growing if sampling.stop else None
        if planned.parts:
            before, spell = (characters, len(begun)), spelling(language, sampling)
            row.given = Given(number, growing, pushed=bool(sampling.stop), before=before, spell=spell)
    row.logprobs = None if sampling.logprobs is None else [None] * (layout.end - layout.prompt)
    return row
