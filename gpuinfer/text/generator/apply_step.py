"""What a step's tokens mean for its rows: finished prefills, complete answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BackendError, BadResult
from gpuinfer.generation import Logprob
from gpuinfer.text.generator.adapter_versions import AdapterVersion
from gpuinfer.text.generator.admission import SlotAdmission
from gpuinfer.text.generator.answer import END_TOKEN, MOST_PARTS_S, Ending, completion, find_ending, with_version
from gpuinfer.text.generator.composer import Echo, LaunchedStep, PromptChunk, StepComposer, StepPlan
from gpuinfer.text.generator.page_pool import Ints
from gpuinfer.text.generator.prompts import PromptWork, SampleRow
from gpuinfer.text.generator.slot_table import SlotTable
from gpuinfer.text.generator.slotted import AnswerTracker
from gpuinfer.text.language import Language
from gpuinfer.text.sampling import DrawnTokens

GOES_ON, COMPLETE, REFUSED = 0, 1, 2  # a list's outcome for a token


class StepApplier(AnswerTracker[SampleRow]):
    """Writes the tokens of steps down. Arrays do it for rows that go on; Python sees those that end or are watched."""

    def __init__(
        self,
        table: SlotTable,
        admission: SlotAdmission,
        composer: StepComposer,
        language: Language,
        enter: Callable[[str], None] = lambda station: None,
        most_parts_s: float = MOST_PARTS_S,
        give_back: Callable[[AdapterVersion], None] = lambda adapter: None,
    ) -> None:
        super().__init__(language, most_parts_s, give_back)
        self._table, self._admission, self._composer, self._enter = table, admission, composer, enter

    def _has_begun(self, row: SampleRow) -> bool:
        return row.resumed or bool(self._table.filled[row.slot])

    def _change_row(self, row: SampleRow, work: PromptWork[SampleRow]) -> None:
        if self._table.rows[row.slot] is row:
            known = self._table.known(row.slot) if self._table.decodes[row.slot] else len(row.known)
            row.versions = with_version(row.versions, known - len(work.prepared.tokens), work.versions[-1])

    def _release(self, row: SampleRow) -> None:
        if row.slot >= 0:
            self._admission.release(row)
            self._composer.changed()

    def _release_all(self, work: PromptWork[SampleRow]) -> None:
        self._admission.withdraw(work)
        self._composer.changed()

    def advance(self, plan: StepPlan) -> None:
        """Advance the rows of a step that has been launched, whatever it draws. The rows it draws for refer to their
        tokens by their places among those drawn.
        """
        table = self._table
        table.filled[plan.decoding] += 1
        for chunk in plan.chunks:
            table.filled[chunk.row.slot] = chunk.end
            self._admission.pages.computed(chunk.row)
            if not chunk.last:
                continue
            self._admission.prefilled(chunk.row)
            self._composer.changed()
            if chunk.row.resumed:
                chunk.row.resumed = False
                table.decodes[chunk.row.slot] = True
        if plan.chunks:
            table.decodes[plan.draws] = True
        table.unread[plan.draws] += 1
        table.last[plan.draws] = -1 - np.arange(len(plan.draws), dtype=np.int32)

    def settle(
        self, step: LaunchedStep, kept: NDArray[np.bool_], drawn: DrawnTokens | None, now: float, last: bool
    ) -> None:
        """Write a step's tokens down. `kept`, bool [draws]: rows whose tokens are still wanted; `last`: no other step
        has been launched since.
        """
        if step.plan.chunks:
            self._settle_chunks(step.plan.chunks, step.echoes, now)
        if drawn is not None:
            self._write(step.plan.draws, step.positions, kept, drawn, now, last)

    def settle_proposed(self, slots: Ints, drawn: DrawnTokens, now: float) -> None:
        """The last tokens of these rows are those that had been proposed: the cache holds them already. `drawn` are the
        tokens after them.
        """
        table = self._table
        table.filled[slots] += 1
        table.unread[slots] += 1
        self._write(slots, table.filled[slots], np.ones(len(slots), np.bool_), drawn, now, last=True)

    def _write(
        self, slots: Ints, at: Ints, kept: NDArray[np.bool_], drawn: DrawnTokens, now: float, last: bool
    ) -> None:
        """Write these rows' tokens down, which come `at` these positions, and end the rows that end with them."""
        table = self._table
        tokens, processed, logprobs = drawn.tokens, drawn.processed, drawn.logprobs
        bad = {slots[i]: error for i, error in drawn.bad.items() if kept[i]}
        if drawn.bad or not kept.all():
            good = np.setdiff1d(np.flatnonzero(kept), list(drawn.bad))
            slots, tokens, at, logprobs = slots[good], tokens[good], at[good], [logprobs[i] for i in good.tolist()]
            processed = None if processed is None else processed[good]
        table.unread[slots] -= 1
        table.flat[table.bases[slots] + at] = tokens
        if last:
            table.last[slots] = tokens
        if processed is not None and table.processed is not None:
            table.processed[slots, at] = processed
        ended = table.is_end[tokens] & table.ends[slots]
        full = at >= table.final[slots]
        if table.listed:
            self._enter("constrain")
        walked = table.walked(slots, tokens)
        if table.listed:
            self._enter("reply")
        for slot, error in bad.items():  # no token could be drawn
            if (row := table.rows[slot]) is not None:  # else another sample of its prompt has failed just now
                self.fail_row(row, error, error)
        seen = np.flatnonzero(ended | full | table.watched[slots] | (walked != GOES_ON))
        if len(seen):
            columns = (seen, slots[seen], at[seen], ended[seen], full[seen], walked[seen])
            for i, slot, place, is_end, is_full, outcome in zip(*(one.tolist() for one in columns), strict=True):
                row = table.rows[slot]
                if row is not None:  # else another sample of its prompt has failed just now
                    self._apply(row, place, is_end, is_full, outcome, logprobs[i], now)

    def give_out(self, now: float) -> None:
        """Emit parts of the answers that are read while they grow, if it is time."""
        if self._table.readers and now >= self._parts_due:
            self._parts_due = now + self._table.readers / self._most_parts_s
            self._give_out()

    def fail_row(self, row: SampleRow, error: Exception, found: Exception) -> None:
        """Fail the row's prompt with `error`, unless shared pages may be the cause of the failure that was `found`."""
        if isinstance(found, BadResult) and self._admission.distrust(row):
            self._composer.changed()
        else:
            self.fail(row.work, error)

    def _settle_chunks(self, chunks: Sequence[PromptChunk], echoes: Sequence[Echo], now: float) -> None:
        echo = iter(echoes)
        for chunk in chunks:
            work = chunk.row.work
            if chunk.echoes:
                self._note(chunk.row, *next(echo))
            if not chunk.last:
                continue
            if work.first_token == work.started:
                work.first_token = now
            if work.prepared.parts:
                self._parts_due = now
            if not chunk.draws and not chunk.resumes:
                for row in chunk.rows:
                    if self._table.rows[row.slot] is row:  # else it was cancelled
                        self.conclude(row, now)

    def _note(self, row: SampleRow, of_prompt: Sequence[Logprob], of_answer: Sequence[Logprob]) -> None:
        sampling = row.work.prepared.sampling
        if row.number == 0 and sampling.prompt_logprobs is not None:
            row.work.echo = row.work.echo or [None] * (row.echoed_from + 1)
            row.work.echo += of_prompt
        if row.logprobs is not None:
            row.logprobs += of_answer

    def _apply(
        self, row: SampleRow, at: int, ended: bool, full: bool, outcome: int, logprob: Logprob | None, now: float
    ) -> None:
        """Follow one row that may end with its token at position `at`. `outcome`: whether its list goes on."""
        try:
            if row.logprobs is not None and logprob is not None:
                row.logprobs.append(logprob)
            prompt = len(row.work.prepared.tokens)
            tokens, sampling = self._table.tokens[row.slot], row.work.prepared.sampling
            if row.matcher is not None:
                self._enter("constrain")
            end: Ending | None = END_TOKEN
            if not ended:
                token, count = int(tokens[at]), at + 1 - prompt
                if outcome == REFUSED:
                    raise BackendError(f"token {token} was drawn, which its list does not allow. Report it.")
                complete = outcome == COMPLETE
                end = find_ending(sampling, row.growing, row.matcher, token, count, full=full, complete=complete)
            if row.matcher is not None:
                self._enter("reply")
            if end is not None:
                drawn = tokens[prompt : at + 1].tolist()
                processed = self._processed(row, len(drawn))
                answer = completion(
                    self._language, sampling, row.growing, drawn, row.logprobs, end, row.versions, processed, row.walk
                )
                self.finish(row, answer, None if row.given is None else row.given.rest(answer), now)
        except Exception as error:  # noqa: BLE001  in what the prompt itself asked for: its neighbours go on
            self.fail(row.work, error)

    def _give_out(self) -> None:
        table = self._table
        for slot in np.flatnonzero(table.read & table.decodes).tolist():
            row = table.rows[slot]
            if row is None or row.given is None:
                continue
            try:
                answer = table.tokens[slot, table.prompt[slot] : table.known(slot)]
                processed = self._processed(row, len(answer))
                if (part := row.given.more(answer, row.logprobs, processed, row.versions)) is not None:
                    self.parts.append((row.work.ticket, part))
            except Exception as error:  # noqa: BLE001  as above
                self.fail(row.work, error)

    def _processed(self, row: SampleRow, count: int) -> list[float] | None:
        """Processed log-probabilities of the answer's first `count` tokens; None: not wanted."""
        if self._table.processed is None or not row.work.prepared.sampling.processed_logprobs:
            return None
        prompt = len(row.work.prepared.tokens)
        found: list[float] = self._table.processed[row.slot, prompt : prompt + count].tolist()
        return found
