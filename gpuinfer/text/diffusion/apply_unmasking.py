"""One row's decision, as its unmasking decoder makes it of the scores; and what it means for the answer: how far it is
known, what of it is given out, and its end.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from gpuinfer.config import blame
from gpuinfer.errors import BackendError, BadPrompt, GpuinferError
from gpuinfer.generation import Completion, Generation, Logprob, Part
from gpuinfer.models.out_of_memory import first_line
from gpuinfer.text.diffusion.canvas import CanvasRow, CanvasSlots, CanvasTurn, CanvasWork
from gpuinfer.text.diffusion.scoring import Scored
from gpuinfer.text.diffusion.unmasking_decoder import MOST_IDLE, Decision, Edited, View
from gpuinfer.text.generator.adapter_versions import AdapterVersion, weights_name
from gpuinfer.text.generator.answer import (
    END_TOKEN,
    FULL,
    MOST_PARTS_S,
    NO_COMPLETION,
    Ending,
    completion,
    find_ending,
    versions_until,
)
from gpuinfer.text.generator.interfaces import Ints, LanguageProtocol


class UnmaskingApplier:
    """Takes rows on, and follows them to their ends. `finished` gathers answers and failures until someone takes them,
    `parts` what is given out before that.
    """

    def __init__(
        self,
        slots: CanvasSlots,
        language: LanguageProtocol,
        vocabulary: int,
        end_tokens: Sequence[int],
        most_parts_s: float = MOST_PARTS_S,
        give_back: Callable[[AdapterVersion], None] = lambda adapter: None,
    ) -> None:
        self._give_back = give_back  # told of each answer's adapter when it is complete, or wanted no more
        self._slots, self._language, self._most_parts_s = slots, language, most_parts_s
        self._is_end = np.zeros(vocabulary, np.bool_)
        self._is_end[[token for token in end_tokens if 0 <= token < vocabulary]] = True
        self._parts_due = 0.0  # when they are given out next
        self.version = ""  # of the weights: "" are those of the start
        self.works: dict[Hashable, CanvasWork] = {}
        self.finished: list[tuple[Hashable, Generation | Exception]] = []
        self.parts: list[tuple[Hashable, Part]] = []

    def begin(self, work: CanvasWork, row: Callable[[int], CanvasRow], now: float) -> None:
        """It is under way from now on; `row` makes that of a sample. What needs no step is complete at once."""
        work.versions = (weights_name(work.adapter, self.version),)
        self.works[work.ticket] = work
        for number in range(work.planned.samples):
            one = row(number)
            if work.planned.computes(number):
                work.rows.append(one)
                self._slots.add(one)
            else:
                self._conclude(one, now)

    def change_version(self, version: str) -> None:
        """Other weights compute from the next step on. Of a prompt they have computed all if nothing has been yet."""
        self.version = version
        for work in self.works.values():
            name = weights_name(work.adapter, version)
            begun = any(row.understood for row in work.rows)
            work.versions = (*work.versions, name) if begun else (name,)
            for row in work.rows:
                row.change_version(len(work.versions) - 1)

    def settle(self, rows: Sequence[CanvasRow], now: float) -> int:
        """After a step of these rows: how many tokens it has added to answers."""
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

    def fail(self, work: CanvasWork, error: Exception) -> None:
        """Give up on all of a prompt's rows."""
        if self.withdraw(work):
            known = isinstance(error, GpuinferError)
            self.finished.append((work.ticket, error if known else BackendError(_message(error))))

    def withdraw(self, work: CanvasWork) -> bool:
        """Nobody waits for it any more. False when nobody has."""
        known = self.works.pop(work.ticket, None) is not None
        for row in work.rows:
            self._slots.leave(row)
        work.rows = []
        if known and work.adapter is not None:
            self._give_back(work.adapter)
        return known

    def _reveal(self, row: CanvasRow, now: float) -> int:
        """Follow its answer as far as it will stay. Returns how many tokens that adds, but those it had begun with."""
        work, planned = row.work, row.work.planned
        before, to = row.revealed, min(row.known - row.layout.prompt, planned.limit)
        if to <= before:
            return 0
        tokens = self._slots.tokens[row.slot, row.layout.prompt : row.layout.prompt + to]
        end = self._followed(row, tokens) if _is_watched(row) else self._looked_through(row, tokens)
        added = row.revealed - max(before, 0 if row.begun is None else len(row.begun.tokens))
        if added > 0 and work.first_token == work.started:
            work.first_token = now
            self._parts_due = now  # the first ones do not wait
        if end is not None:
            self._finish(row, self._answer(row, tokens[: row.revealed], end), now)
        return max(0, added)

    def _looked_through(self, row: CanvasRow, tokens: Ints) -> Ending | None:
        """Whether it ends, where nothing but end token and length can end it."""
        planned, before = row.work.planned, row.revealed
        is_end = self._is_end[tokens[before:]]
        if not planned.sampling.ignore_eos and is_end.any():
            row.revealed = before + int(is_end.argmax()) + 1
            return END_TOKEN
        row.revealed = len(tokens)
        return FULL if row.revealed == planned.limit else None

    def _followed(self, row: CanvasRow, tokens: Ints) -> Ending | None:
        """The same token by token."""
        begun = row.begun
        for count, token in enumerate(tokens[row.revealed :].tolist(), row.revealed + 1):
            row.revealed = count
            if begun is None or count > len(begun.tokens):
                end = self._ending(row, token, count)
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

    def _ending(self, row: CanvasRow, token: int, count: int) -> Ending | None:
        planned = row.work.planned
        if self._is_end[token] and not planned.sampling.ignore_eos:
            return END_TOKEN
        return find_ending(planned.sampling, row.growing, None, token, count, full=count == planned.limit)

    def _answer(self, row: CanvasRow, tokens: Ints, end: Ending) -> Completion:
        logprobs, sampling = cast(list[Logprob] | None, row.logprobs), row.work.planned.sampling
        return completion(self._language, sampling, row.growing, tokens.tolist(), logprobs, end, row.spans)

    def _conclude(self, row: CanvasRow, now: float) -> None:
        """One that needs no step: its answer is known, or none is wanted."""
        answer, begun = structs.replace(NO_COMPLETION, versions=versions_until(row.spans, 0)), row.begun
        if begun is not None and begun.ending is not None:
            sampling, ended = row.work.planned.sampling, begun.ending
            answer = completion(
                self._language, sampling, row.growing, begun.tokens.tolist(), None, ended, begun.versions
            )
        self._finish(row, answer, now)

    def _finish(self, row: CanvasRow, answer: Completion, now: float) -> None:
        work = row.work
        work.completions[row.number] = answer
        if row.given is not None:
            ended = row.begun is not None and row.begun.ending is not None
            self.parts.append((work.ticket, row.given.finish(answer) if ended else row.given.rest(answer)))
        self._slots.leave(row)
        work.left -= 1
        if not work.left:
            self._complete(work, now)

    def _complete(self, work: CanvasWork, now: float) -> None:
        """All of its answers are there."""
        del self.works[work.ticket]
        work.rows = []  # a work and its rows name each other: without this only a collection would free them
        answer = Generation(
            completions=tuple(cast(list[Completion], work.completions)),
            prompt_tokens=len(work.planned.tokens),
            first_token_s=work.first_token - work.started,
            seconds=now - work.started,
            versions=work.versions,
        )
        self.finished.append((work.ticket, answer))
        if work.adapter is not None:
            self._give_back(work.adapter)

    def _give_out(self, now: float) -> None:
        """What has become certain of the answers that are read while they grow."""
        rows = [row for row in self._slots.active if row.given is not None and row.given.tokens < row.revealed]
        for row in rows:
            try:
                self._give(row)
            except Exception as error:  # noqa: BLE001  as above
                self.fail(row.work, error)
        self._parts_due = now + len(rows) / self._most_parts_s

    def _give(self, row: CanvasRow) -> None:
        assert row.given is not None
        tokens = self._slots.tokens[row.slot, row.layout.prompt : row.layout.prompt + row.revealed]
        logprobs = cast(list[Logprob] | None, row.logprobs)
        if (part := row.given.more(tokens, logprobs, None, row.spans)) is not None:
            self.parts.append((row.work.ticket, part))


def _is_watched(row: CanvasRow) -> bool:
    return row.growing is not None or row.begun is not None or bool(row.work.planned.sampling.stop_token_ids)


def _message(error: Exception) -> str:
    return f"the model failed on this prompt ({type(error).__name__}: {first_line(error)}). Leave it out, or report it."


NO_POSITIONS: Ints = np.zeros(0, np.int32)


class Unmasker:
    """Has decoders decide, and writes down what they say."""

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

    def _edited(self, turn: CanvasTurn, scored: Scored, places: Ints) -> Edited:
        """The block's tokens that are no masks any more."""
        is_token = np.ones(len(turn.asked), np.bool_)
        is_token[places] = False
        positions, at = turn.asked[is_token], turn.logits + np.flatnonzero(is_token)
        tokens = self._slots.tokens[turn.row.slot, positions]
        return Edited(positions - turn.row.layout.prompt, tokens, scored.tokens[at], scored.confidence[at])

    def _write(self, turn: CanvasTurn, scored: Scored, positions: Ints) -> None:
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


def _some(uniform: Callable[[], NDArray[np.float64]], places: Ints) -> NDArray[np.float64]:
    return uniform()[places]


def _decided(row: CanvasRow, view: View) -> Decision:
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
