"""What a step's scores do to its rows: the unmasking decoder commits tokens, and answers are followed to their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gpuinfer.config import blame
from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Logprob
from gpuinfer.text.diffusion.canvas import CanvasRow, CanvasSlots, CanvasTurn
from gpuinfer.text.diffusion.scoring import Scored
from gpuinfer.text.diffusion.unmasking_decoder import MOST_IDLE, Decision, Edited, View
from gpuinfer.text.generator.adapter_versions import AdapterVersion
from gpuinfer.text.generator.answer import END_TOKEN, FULL, MOST_PARTS_S, Ending, completion, find_ending
from gpuinfer.text.generator.page_pool import Ints
from gpuinfer.text.generator.prompts import PromptWork
from gpuinfer.text.generator.slotted import AnswerTracker
from gpuinfer.text.language import Language


class UnmaskingApplier(AnswerTracker[CanvasRow]):
    """Takes canvases on, and follows their answers to the end."""

    def __init__(
        self,
        slots: CanvasSlots,
        language: Language,
        vocabulary: int,
        end_tokens: Sequence[int],
        most_parts_s: float = MOST_PARTS_S,
        give_back: Callable[[AdapterVersion], None] = lambda adapter: None,
    ) -> None:
        super().__init__(language, most_parts_s, give_back)
        self._slots = slots
        self._is_end = np.zeros(vocabulary, np.bool_)
        self._is_end[[token for token in end_tokens if 0 <= token < vocabulary]] = True

    def _has_begun(self, row: CanvasRow) -> bool:
        return row.understood > 0

    def _change_row(self, row: CanvasRow, work: PromptWork[CanvasRow]) -> None:
        row.change_version(len(work.versions) - 1)

    def _release(self, row: CanvasRow) -> None:
        self._slots.leave(row)

    def _release_all(self, work: PromptWork[CanvasRow]) -> None:
        for row in work.rows:
            self._slots.leave(row)

    def settle(self, rows: Sequence[CanvasRow], now: float) -> int:
        """Follow these rows' answers after a step. Returns how many tokens it has added to them."""
        useful = 0
        for row in rows:
            if self._slots.has(row):  # else another sample of its prompt has failed just now
                try:
                    useful += self._reveal(row, now)
                except Exception as error:  # noqa: BLE001  in what the prompt itself asked for: its neighbours go on
                    self.fail(row.work, error)
        if now >= self._parts_due:
            self._give_out(now)
        return useful

    def _reveal(self, row: CanvasRow, now: float) -> int:
        """Follow an answer as far as it will not change. Returns how many tokens that adds beside resumed ones."""
        work, planned = row.work, row.work.prepared
        before, to = row.revealed, min(row.known - row.layout.prompt, planned.limit)
        if to <= before:
            return 0
        tokens = self._slots.tokens[row.slot, row.layout.prompt : row.layout.prompt + to]
        watched = row.growing is not None or row.begun is not None or bool(planned.sampling.stop_token_ids)
        end = self._followed(row, tokens) if watched else self._looked_through(row, tokens)
        added = row.revealed - max(before, 0 if row.begun is None else len(row.begun.tokens))
        if added > 0 and work.first_token == work.started:
            work.first_token = now
            self._parts_due = now  # the first ones do not wait
        if end is not None:
            logprobs, drawn = cast(list[Logprob] | None, row.logprobs), tokens[: row.revealed].tolist()
            answer = completion(self._language, planned.sampling, row.growing, drawn, logprobs, end, row.versions)
            self.finish(row, answer, None if row.given is None else row.given.rest(answer), now)
        return max(0, added)

    def _looked_through(self, row: CanvasRow, tokens: Ints) -> Ending | None:
        """Why the answer ends, if it does, where nothing but end token and length can end it."""
        planned, before = row.work.prepared, row.revealed
        is_end = self._is_end[tokens[before:]]
        if not planned.sampling.ignore_eos and is_end.any():
            row.revealed = before + int(is_end.argmax()) + 1
            return END_TOKEN
        row.revealed = len(tokens)
        return FULL if row.revealed == planned.limit else None

    def _followed(self, row: CanvasRow, tokens: Ints) -> Ending | None:
        """The same token by token."""
        planned, begun = row.work.prepared, row.begun
        for count, token in enumerate(tokens[row.revealed :].tolist(), row.revealed + 1):
            row.revealed = count
            if begun is None or count > len(begun.tokens):
                if self._is_end[token] and not planned.sampling.ignore_eos:
                    return END_TOKEN
                end = find_ending(planned.sampling, row.growing, None, token, count, full=count == planned.limit)
            elif token != begun.tokens[count - 1]:
                raise BadPrompt(
                    f"the answer has come out otherwise than what sample {row.number} has begun with, from token "
                    f"{count} on. Ask for it anew, without `begun`."
                )
            else:
                end = begun.ending if count == len(begun.tokens) else None
            if end is not None:
                return end
        return None

    def _give_out(self, now: float) -> None:
        """Parts of what has become certain of the answers that are read while they grow."""
        rows = [row for row in self._slots.active if row.given is not None and row.given.tokens < row.revealed]
        for row in rows:
            tokens = self._slots.tokens[row.slot, row.layout.prompt : row.layout.prompt + row.revealed]
            logprobs = cast(list[Logprob] | None, row.logprobs)
            try:
                assert row.given is not None
                if (part := row.given.more(tokens, logprobs, None, row.versions)) is not None:
                    self.parts.append((row.work.ticket, part))
            except Exception as error:  # noqa: BLE001  in what the prompt itself asked for: its neighbours go on
                self.fail(row.work, error)
        self._parts_due = now + len(rows) / self._most_parts_s


NO_POSITIONS: Ints = np.zeros(0, np.int32)


class Unmasker:
    """Calls unmasking decoders, and writes their decisions to the canvases."""

    def __init__(self, slots: CanvasSlots) -> None:
        self._slots = slots

    def unmask(self, turn: CanvasTurn, scored: Scored, number: int) -> int:
        """Decide on a row's block, whose scores are those of row `number`; go on to the next block if it is done.
        Returns how many masks have become tokens.

        Raises `WorkError` when its decoder raises, answers with what it may not, or commits nothing for too long.
        """
        row = turn.row
        view = self._view(turn, scored, number)
        decision = _decided(row, view)
        chosen, edited = np.flatnonzero(decision.commit), NO_POSITIONS
        committed = row.masks[chosen]
        self._write(turn, scored, committed)
        if view.edited is not None and decision.edit is not None:
            edited = view.edited.positions[decision.edit] + row.layout.prompt
            self._write(turn, scored, edited)
        row.masks = row.masks[~decision.commit]
        self._advance(row, view, len(committed), len(edited))
        return len(committed)

    def _view(self, turn: CanvasTurn, scored: Scored, number: int) -> View:
        row, plan = turn.row, turn.row.plan
        at: Any = slice(turn.logits, turn.logits + len(turn.asked))
        uniform: Callable[[], NDArray[np.float64]] = partial(scored.uniform, number)
        edited = None
        if plan.decoder.edits:
            places = row.masks - row.start
            at, uniform = turn.logits + places, lambda: scored.uniform(number)[places]
            is_token = np.ones(len(turn.asked), np.bool_)
            is_token[places] = False
            positions, others = turn.asked[is_token], turn.logits + np.flatnonzero(is_token)
            tokens = self._slots.tokens[row.slot, positions]
            edited = Edited(positions - row.layout.prompt, tokens, scored.tokens[others], scored.confidence[others])
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

    def _write(self, turn: CanvasTurn, scored: Scored, positions: Ints) -> None:
        """Write drawn tokens to these positions of the canvas, with their log-probabilities."""
        row = turn.row
        at = turn.logits + np.searchsorted(turn.asked, positions)
        for slot in row.slots:
            self._slots.tokens[slot, positions] = scored.tokens[at]
        wanted = row.work.prepared.sampling.logprobs
        if row.logprobs is not None and wanted is not None:
            for position, index in zip((positions - row.layout.prompt).tolist(), at.tolist(), strict=True):
                row.logprobs[position] = scored.logprobs(index, wanted)
        if row.computed_by is not None:
            row.computed_by[positions - row.layout.prompt] = row.version

    def _advance(self, row: CanvasRow, view: View, committed: int, edited: int) -> None:
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


def _decided(row: CanvasRow, view: View) -> Decision:
    """The decision of the row's decoder. Raises `WorkError`, which names decoder and package, for an invalid one."""
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
