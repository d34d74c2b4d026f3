"""What a step's tokens mean for its rows: prompts that are through, answers that are complete."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import cast

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from gpuinfer.errors import BackendError, BadResult, GpuinferError, RequestError
from gpuinfer.generation import Completion, Generation, Logprob, Part
from gpuinfer.models.out_of_memory import first_line
from gpuinfer.text.generator.adapter_versions import AdapterVersion, weights_name
from gpuinfer.text.generator.admission import SlotAdmission
from gpuinfer.text.generator.answer import (
    END_TOKEN,
    MOST_PARTS_S,
    NO_COMPLETION,
    Ending,
    completion,
    find_ending,
    versions_until,
    with_version,
)
from gpuinfer.text.generator.composer import Echo, LaunchedStep, PromptChunk, StepComposer, StepPlan
from gpuinfer.text.generator.interfaces import DrawnProtocol, LanguageProtocol
from gpuinfer.text.generator.prompts import PromptWork, SampleRow, row_of
from gpuinfer.text.generator.slot_table import SlotTable

GOES_ON, COMPLETE, REFUSED = 0, 1, 2  # what a list says to a token


class StepApplier:
    """Writes steps' tokens down. Arrays do it for rows that go on; Python sees those that end or are watched.

    `finished` gathers answers and failures until someone takes them, `parts` what rows give out before that.
    """

    def __init__(
        self,
        table: SlotTable,
        admission: SlotAdmission,
        composer: StepComposer,
        language: LanguageProtocol,
        enter: Callable[[str], None] = lambda station: None,
        most_parts_s: float = MOST_PARTS_S,
        give_back: Callable[[AdapterVersion], None] = lambda adapter: None,
    ) -> None:
        self._give_back = give_back  # told of each answer's adapter when it is complete, or wanted no more
        self._table, self._admission, self._composer, self._language = table, admission, composer, language
        self.version = ""  # of the weights: "" are those of the start
        self._enter, self._most_parts_s = enter, most_parts_s
        self._parts_due = 0.0  # when they are given out next
        self.works: dict[Hashable, PromptWork] = {}
        self.finished: list[tuple[Hashable, Generation | Exception]] = []
        self.parts: list[tuple[Hashable, Part]] = []

    def begin(self, work: PromptWork, now: float) -> None:
        """It is under way from now on. What there is of it that needs no step is complete at once."""
        work.versions = (weights_name(work.adapter, self.version),)
        self.works[work.ticket] = work
        for number in range(work.prepared.samples):
            if not work.prepared.computes(number):
                self._conclude(row_of(self._language, work, number), now)

    def change_version(self, version: str) -> None:
        """Other weights compute from the next step on. Of a prompt they have computed all if nothing has been yet."""
        self.version = version
        table = self._table
        for work in self.works.values():
            begun = any(row.resumed or table.filled[row.slot] for row in work.rows)
            name = weights_name(work.adapter, self.version)
            work.versions = (*work.versions, name) if begun else (name,)
            for row in work.rows:
                if table.rows[row.slot] is row:
                    row.versions = with_version(row.versions, self._drawn(row), name)

    def _drawn(self, row: SampleRow) -> int:
        """How many tokens of its answer are known."""
        known = self._table.known(row.slot) if self._table.decodes[row.slot] else len(row.known)
        return known - len(row.work.prepared.tokens)

    def advance(self, plan: StepPlan) -> None:
        """The step has been launched: what follows from that, whatever it draws. Rows that it draws for name their
        tokens by their places among those drawn.
        """
        table = self._table
        table.filled[plan.decoding] += 1
        for chunk in plan.chunks:
            table.filled[chunk.row.slot] = chunk.end
            self._admission.computed(chunk.row)
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
        self, step: LaunchedStep, kept: NDArray[np.bool_], drawn: DrawnProtocol | None, now: float, last: bool
    ) -> None:
        """What the step has found. `kept`, bool [draws]: rows whose tokens are still wanted; `last`: no other step has
        been launched since.
        """
        table, plan = self._table, step.plan
        if plan.chunks:
            self._settle_chunks(plan.chunks, step.echoes, now)
        if drawn is None:
            return
        slots, tokens, processed, logprobs = plan.draws, drawn.tokens, drawn.processed, drawn.logprobs
        at, bad = step.positions, {slots[i]: error for i, error in drawn.bad.items() if kept[i]}
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
        said = table.walked(slots, tokens)
        if table.listed:
            self._enter("reply")
        self._settle_bad(bad)
        looked = np.flatnonzero(ended | full | table.watched[slots] | (said != GOES_ON))
        if len(looked):
            columns = (looked, slots[looked], at[looked], ended[looked], full[looked], said[looked])
            for i, slot, place, is_end, is_full, outcome in zip(*(one.tolist() for one in columns), strict=True):
                row = table.rows[slot]
                if row is not None:  # else another sample of its prompt has failed just now
                    self._look(row, place, is_end, is_full, outcome, logprobs[i], now)
        if table.readers and now >= self._parts_due:
            self._parts_due = now + table.readers / self._most_parts_s
            self._give_out()

    def fail_row(self, row: SampleRow, error: Exception, found: Exception) -> None:
        """Give up on its prompt, which is told `error`, unless what was `found` may be the fault of what others have
        computed.
        """
        if isinstance(found, BadResult) and self._admission.distrust(row):
            self._composer.changed()
        else:
            self.fail(row.work, error)

    def fail(self, work: PromptWork, error: Exception) -> None:
        """Give up on all of a prompt's rows."""
        self.withdraw(work)
        known = isinstance(error, GpuinferError)
        self.finished.append((work.ticket, error if known else BackendError(_message(error))))

    def withdraw(self, work: PromptWork) -> None:
        """Nobody waits for it any more."""
        known = self.works.pop(work.ticket, None) is not None
        self._admission.withdraw(work)
        self._composer.changed()
        work.rows = []
        if known and work.adapter is not None:
            self._give_back(work.adapter)

    def complete(self, work: PromptWork, now: float) -> None:
        """All of its answers are there."""
        del self.works[work.ticket]
        work.rows = []  # a work and its rows name each other: without this only a collection would free them
        answer = Generation(
            completions=tuple(cast(list[Completion], work.completions)),
            prompt_tokens=len(work.prepared.tokens),
            cached_tokens=work.cached,
            prompt_logprobs=None if work.echo is None else tuple(work.echo),
            first_token_s=work.first_token - work.started,
            seconds=now - work.started,
            versions=work.versions,
        )
        self.finished.append((work.ticket, answer))
        if work.adapter is not None:
            self._give_back(work.adapter)

    def _settle_bad(self, bad: Mapping[int, RequestError]) -> None:
        """By slot, rows that no token could be drawn for."""
        for slot, error in bad.items():
            if (row := self._table.rows[slot]) is not None:  # else another sample of its prompt has failed just now
                self.fail_row(row, error, error)

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
                    if self._table.rows[row.slot] is row:  # else nobody waits for it any more
                        self._conclude(row, now)

    def _note(self, row: SampleRow, of_prompt: Sequence[Logprob], of_answer: Sequence[Logprob]) -> None:
        sampling = row.work.prepared.sampling
        if row.number == 0 and sampling.prompt_logprobs is not None:
            row.work.echo = row.work.echo or [None] * (row.echoed_from + 1)
            row.work.echo += of_prompt
        if row.logprobs is not None:
            row.logprobs += of_answer

    def _conclude(self, row: SampleRow, now: float) -> None:
        """One that draws no token: its answer is known, or none is wanted."""
        begun = row.begun
        nothing = () if _wants(row) else None
        nowhere = None if row.walk is None else ()
        answer = structs.replace(
            NO_COMPLETION, versions=versions_until(row.versions, 0), processed=nothing, nodes=nowhere
        )
        if begun is not None and begun.ending is not None:
            sampling, tokens = row.work.prepared.sampling, begun.tokens.tolist()
            processed = begun.processed if _wants(row) else None
            answer = completion(
                self._language,
                sampling,
                row.growing,
                tokens,
                row.logprobs,
                begun.ending,
                row.versions,
                processed,
                row.walk,
            )
        part = None if row.given is None else row.given.finish(answer)
        self._finish(row, answer, part, now)

    def _look(
        self, row: SampleRow, at: int, ended: bool, full: bool, outcome: int, logprob: Logprob | None, now: float
    ) -> None:
        """One row that may end with its token at position `at`. `outcome`: what its list says to it."""
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
                self._finish(row, answer, None if row.given is None else row.given.rest(answer), now)
        except Exception as error:  # noqa: BLE001  in what the prompt itself asked for: its neighbours go on
            self.fail(row.work, error)

    def _give_out(self) -> None:
        """What has become certain of the answers that are read while they grow."""
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
        """Of the first `count` tokens of its answer, if they are wanted."""
        if self._table.processed is None or not _wants(row):
            return None
        prompt = len(row.work.prepared.tokens)
        found: list[float] = self._table.processed[row.slot, prompt : prompt + count].tolist()
        return found

    def _finish(self, row: SampleRow, answer: Completion, last: Part | None, now: float) -> None:
        work = row.work
        work.completions[row.number] = answer
        if last is not None:
            self.parts.append((work.ticket, last))
        if row.slot >= 0:
            self._admission.release(row)
            self._composer.changed()
        work.left -= 1
        if not work.left:
            self.complete(work, now)


def _wants(row: SampleRow) -> bool:
    return row.work.prepared.sampling.processed_logprobs


def _message(error: Exception) -> str:
    return f"the model failed on this prompt ({type(error).__name__}: {first_line(error)}). Leave it out, or report it."
