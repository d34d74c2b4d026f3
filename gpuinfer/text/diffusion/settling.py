"""What has become of the rows: how far each answer is known from its beginning, what of it is told, and its end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import cast

import numpy as np
from msgspec import structs

from gpuinfer.errors import BackendError, BadPrompt, GpuinferError
from gpuinfer.generation import Completion, Generation, Logprob, Part
from gpuinfer.models.memory import first_line
from gpuinfer.text.diffusion.rows import Row, Work
from gpuinfer.text.diffusion.slots import Slots
from gpuinfer.text.generator.adapters import Loaded, weights_name
from gpuinfer.text.generator.ending import END_TOKEN, FULL, NOTHING, Ending, completion, ending
from gpuinfer.text.generator.giving import MOST_PARTS_S
from gpuinfer.text.generator.seams import Ints, Language
from gpuinfer.text.versions import until


class Settling:
    """Takes rows on, and follows them to their ends. `finished` gathers answers and failures until someone takes them,
    `parts` what is given out before that.
    """

    def __init__(
        self,
        slots: Slots,
        language: Language,
        vocabulary: int,
        end_tokens: Sequence[int],
        most_parts_s: float = MOST_PARTS_S,
        give_back: Callable[[Loaded], None] = lambda adapter: None,
    ) -> None:
        self._give_back = give_back  # told of each answer's adapter when it is complete, or wanted no more
        self._slots, self._language, self._most_parts_s = slots, language, most_parts_s
        self._is_end = np.zeros(vocabulary, np.bool_)
        self._is_end[[token for token in end_tokens if 0 <= token < vocabulary]] = True
        self._parts_due = 0.0  # when they are given out next
        self.version = ""  # of the weights: "" are those of the start
        self.works: dict[Hashable, Work] = {}
        self.finished: list[tuple[Hashable, Generation | Exception]] = []
        self.parts: list[tuple[Hashable, Part]] = []

    def begin(self, work: Work, row: Callable[[int], Row], now: float) -> None:
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

    def settle(self, rows: Sequence[Row], now: float) -> int:
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

    def fail(self, work: Work, error: Exception) -> None:
        """Give up on all of a prompt's rows."""
        if self.withdraw(work):
            known = isinstance(error, GpuinferError)
            self.finished.append((work.ticket, error if known else BackendError(_message(error))))

    def withdraw(self, work: Work) -> bool:
        """Nobody waits for it any more. False when nobody has."""
        known = self.works.pop(work.ticket, None) is not None
        for row in work.rows:
            self._slots.leave(row)
        work.rows = []
        if known and work.adapter is not None:
            self._give_back(work.adapter)
        return known

    def _reveal(self, row: Row, now: float) -> int:
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

    def _looked_through(self, row: Row, tokens: Ints) -> Ending | None:
        """Whether it ends, where nothing but end token and length can end it."""
        planned, before = row.work.planned, row.revealed
        is_end = self._is_end[tokens[before:]]
        if not planned.sampling.ignore_eos and is_end.any():
            row.revealed = before + int(is_end.argmax()) + 1
            return END_TOKEN
        row.revealed = len(tokens)
        return FULL if row.revealed == planned.limit else None

    def _followed(self, row: Row, tokens: Ints) -> Ending | None:
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

    def _ending(self, row: Row, token: int, count: int) -> Ending | None:
        planned = row.work.planned
        if self._is_end[token] and not planned.sampling.ignore_eos:
            return END_TOKEN
        return ending(planned.sampling, row.growing, None, token, count, full=count == planned.limit)

    def _answer(self, row: Row, tokens: Ints, end: Ending) -> Completion:
        logprobs, sampling = cast(list[Logprob] | None, row.logprobs), row.work.planned.sampling
        return completion(self._language, sampling, row.growing, tokens.tolist(), logprobs, end, row.spans)

    def _conclude(self, row: Row, now: float) -> None:
        """One that needs no step: its answer is known, or none is wanted."""
        answer, begun = structs.replace(NOTHING, versions=until(row.spans, 0)), row.begun
        if begun is not None and begun.ending is not None:
            sampling, ended = row.work.planned.sampling, begun.ending
            answer = completion(
                self._language, sampling, row.growing, begun.tokens.tolist(), None, ended, begun.versions
            )
        self._finish(row, answer, now)

    def _finish(self, row: Row, answer: Completion, now: float) -> None:
        work = row.work
        work.completions[row.number] = answer
        if row.given is not None:
            ended = row.begun is not None and row.begun.ending is not None
            self.parts.append((work.ticket, row.given.finish(answer) if ended else row.given.rest(answer)))
        self._slots.leave(row)
        work.left -= 1
        if not work.left:
            self._complete(work, now)

    def _complete(self, work: Work, now: float) -> None:
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

    def _give(self, row: Row) -> None:
        assert row.given is not None
        tokens = self._slots.tokens[row.slot, row.layout.prompt : row.layout.prompt + row.revealed]
        logprobs = cast(list[Logprob] | None, row.logprobs)
        if (part := row.given.more(tokens, logprobs, None, row.spans)) is not None:
            self.parts.append((row.work.ticket, part))


def _is_watched(row: Row) -> bool:
    return row.growing is not None or row.begun is not None or bool(row.work.planned.sampling.stop_token_ids)


def _message(error: Exception) -> str:
    return f"the model failed on this prompt ({type(error).__name__}: {first_line(error)}). Leave it out, or report it."
