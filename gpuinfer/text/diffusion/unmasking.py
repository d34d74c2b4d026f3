"""One row's decision: what its decoder sees, what it says to it, and what becomes of the canvas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.config import blame
from gpuinfer.text.diffusion.composing import Turn
from gpuinfer.text.diffusion.deciding import MOST_IDLE, Decision, Edited, View
from gpuinfer.text.diffusion.rows import Row
from gpuinfer.text.diffusion.scoring import Scored
from gpuinfer.text.diffusion.slots import Slots
from gpuinfer.text.generator.seams import Ints

NOTHING: Ints = np.zeros(0, np.int32)


class Unmasker:
    """Has decoders decide, and writes down what they say."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def unmask(self, turn: Turn, scored: Scored, number: int) -> int:
        """Decide on a row's block, whose scores are those of row `number`; go on to the next block if it is done.
        Returns how many masks have become tokens.

        Raises `WorkError` when its decoder raises, answers with what it may not, or commits nothing for too long.
        """
        row = turn.row
        view = self._view(turn, scored, number)
        decision = _decided(row, view)
        chosen, edited = np.flatnonzero(decision.commit), NOTHING
        committed = row.masks[chosen]
        self._write(turn, scored, committed)
        if view.edited is not None and decision.edit is not None:
            edited = view.edited.positions[decision.edit] + row.layout.prompt
            self._write(turn, scored, edited)
        row.masks = row.masks[~decision.commit]
        self._advance(row, view, len(committed), len(edited))
        return len(committed)

    def _view(self, turn: Turn, scored: Scored, number: int) -> View:
        row, plan = turn.row, turn.row.plan
        at: Any = slice(turn.logits, turn.logits + len(turn.asked))
        uniform, edited = partial(scored.uniform, number), None
        if plan.decoder.edits:
            places = row.masks - row.start
            at, uniform = turn.logits + places, partial(_some, uniform, places)
            edited = self._edited(turn, scored, places)
        return View(
            row.masks - row.layout.prompt,
            scored.tokens[at],
            scored.confidence[at],
            None if scored.margin is None else scored.margin[at],
            None if scored.entropy is None else scored.entropy[at],
            row.step,
            row.steps,
            row.block,
            row.layout.blocks,
            row.stop - row.start,
            plan.threshold,
            uniform,
            edited,
        )

    def _edited(self, turn: Turn, scored: Scored, places: Ints) -> Edited:
        """The block's tokens that are no masks any more."""
        is_token = np.ones(len(turn.asked), np.bool_)
        is_token[places] = False
        positions, at = turn.asked[is_token], turn.logits + np.flatnonzero(is_token)
        tokens = self._slots.tokens[turn.row.slot, positions]
        return Edited(positions - turn.row.layout.prompt, tokens, scored.tokens[at], scored.confidence[at])

    def _write(self, turn: Turn, scored: Scored, positions: Ints) -> None:
        """What has been drawn becomes the token at these positions of the canvas, and what is said of it is noted."""
        row = turn.row
        at = turn.logits + np.searchsorted(turn.asked, positions)
        for slot in row.slots:
            self._slots.tokens[slot, positions] = scored.tokens[at]
        wanted = row.work.planned.sampling.logprobs
        if row.logprobs is not None and wanted is not None:
            for position, index in zip((positions - row.layout.prompt).tolist(), at.tolist(), strict=True):
                row.logprobs[position] = scored.logprobs(index, wanted)
        if row.computed_by is not None:
            row.computed_by[positions - row.layout.prompt] = row.version

    def _advance(self, row: Row, view: View, committed: int, edited: int) -> None:
        row.step += 1
        row.steps_done += 1
        row.idle = 0 if committed else row.idle + 1
        if len(row.masks):
            if row.idle >= MOST_IDLE:
                raise blame.failure(
                    row.plan.decoder,
                    f"committed none of {len(row.masks)} masks in {MOST_IDLE} steps on end. Its row was given up",
                )
        elif not row.plan.decoder.edits or (not len(view.positions) and not edited) or row.idle >= MOST_IDLE:
            row.enter_block(row.block + 1)


def _some(uniform: Callable[[], NDArray[np.float64]], places: Ints) -> NDArray[np.float64]:
    return uniform()[places]


def _decided(row: Row, view: View) -> Decision:
    """What its decoder says, as far as it may be said. Raises `WorkError` that names decoder and package."""
    decoder = row.plan.decoder
    with blame.calling_within(decoder, "decide"):
        decision = decoder.decide(row.kept, view)
    commit, edit = getattr(decision, "commit", None), getattr(decision, "edit", None)
    if not _chooses(commit, len(view.positions)):
        raise blame.failure(decoder, f"decide has to say of each of {len(view.positions)} masks whether, and does not")
    if edit is not None and not (view.edited is not None and _chooses(edit, len(view.edited.positions))):
        raise blame.failure(decoder, "decide edits tokens that it was not shown")
    return decision


def _chooses(value: object, count: int) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.bool_ and value.shape == (count,)
