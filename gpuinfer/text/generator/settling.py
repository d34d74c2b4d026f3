"""What a step's tokens mean for its rows: prompts that are through, answers that are complete.

When an answer ends, and what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from gpuinfer.errors import BackendError, GpuinferError
from gpuinfer.generation import Completion, Generation, Logprob, Part
from gpuinfer.models.memory import first_line
from gpuinfer.text.generator.admission import Admission
from gpuinfer.text.generator.cache import SlotTable
from gpuinfer.text.generator.composing import Chunk, Composer, StepPlan
from gpuinfer.text.generator.giving import MOST_PARTS_S, Given
from gpuinfer.text.generator.prepared import Drawn, Language, PromptWork, Row


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer is complete."""

    reason: Literal["stop", "length"]
    cause: int | str | None = None  # the stop token or string
    silent: bool = False  # its last token is no part of the text


END_TOKEN = Ending("stop", silent=True)
COMPLETE = Ending("stop")
FULL = Ending("length")
NOTHING = Completion(text="", tokens=(), finish_reason="length")


def ending(row: Row, token: int, count: int, *, full: bool) -> Ending | None:
    """Whether the answer ends with `token`, its `count`-th, which is not the model's own end token."""
    sampling = row.work.prepared.sampling
    if token in sampling.stop_token_ids:
        return Ending("stop", token, silent=True)
    if row.growing is not None:
        stop = row.growing.push(token)
        if stop is not None and count >= sampling.min_tokens:
            return Ending("stop", stop)
    if row.matcher is not None:
        row.matcher.advance(token)
        if row.matcher.complete:
            return COMPLETE
    return FULL if full else None


def completion(language: Language, row: Row, tokens: list[int], end: Ending) -> Completion:
    """The answer as it is delivered."""
    if isinstance(end.cause, str) and row.growing is not None:
        text = row.growing.text
        tokens = tokens[: row.growing.kept]
    else:
        special = not row.work.prepared.sampling.skip_special_tokens
        text = language.decode(tokens[:-1] if end.silent else tokens, special)
    logprobs = None if row.logprobs is None else tuple(row.logprobs[: len(tokens)])
    return Completion(
        text=text, tokens=tuple(tokens), finish_reason=end.reason, stop_reason=end.cause, logprobs=logprobs
    )


Echo = Sequence[Logprob]


class Settling:
    """Writes steps' tokens down. Arrays do it for rows that go on; Python sees those that end or are watched.

    `finished` gathers answers and failures until someone takes them, `parts` what rows give out before that.
    """

    def __init__(
        self,
        table: SlotTable,
        admission: Admission,
        composer: Composer,
        language: Language,
        enter: Callable[[str], None] = lambda station: None,
        most_parts_s: float = MOST_PARTS_S,
    ) -> None:
        self._table, self._admission, self._composer, self._language = table, admission, composer, language
        self.version = ""  # of the weights: "" are those of the start
        self._enter, self._most_parts_s = enter, most_parts_s
        self._parts_due = 0.0  # when they are given out next
        self.works: dict[Hashable, PromptWork] = {}
        self.finished: list[tuple[Hashable, Generation | Exception]] = []
        self.parts: list[tuple[Hashable, Part]] = []

    def begin(self, work: PromptWork) -> None:
        """It is under way from now on."""
        work.versions = (self.version,)
        self.works[work.ticket] = work

    def change_version(self, version: str) -> None:
        """Other weights compute from the next step on. Of a prompt they have computed all if nothing has been yet."""
        self.version = version
        for work in self.works.values():
            begun = any(self._table.filled[row.slot] for row in work.rows)
            work.versions = (*work.versions, version) if begun else (version,)

    def settle(self, plan: StepPlan, drawn: Drawn | None, echoes: Sequence[Echo], now: float) -> None:
        """After a step: `echoes` are the prompt's log-probabilities of the chunks that want them, in order."""
        table = self._table
        table.filled[plan.decoding] += 1
        if plan.chunks:
            self._settle_chunks(plan.chunks, echoes, now)
            table.decodes[plan.draws] = True
        if drawn is None:
            return
        slots, tokens = plan.draws, drawn.tokens
        at = table.filled[slots]
        table.flat[table.bases[slots] + at] = tokens
        table.last[slots] = tokens
        ended = table.is_end[tokens] & table.ends[slots]
        full = at >= table.final[slots]
        for i, error in drawn.bad.items():
            if (row := table.rows[slots[i]]) is not None:
                self.fail(row.work, error)
        looked = np.flatnonzero(ended | full | table.watched[slots])
        if len(looked):
            columns = (looked, slots[looked], at[looked], ended[looked], full[looked])
            for i, slot, place, is_end, is_full in zip(*(column.tolist() for column in columns), strict=True):
                row = table.rows[slot]
                if row is not None:  # else another sample of its prompt has failed just now
                    self._look(row, place, is_end, is_full, drawn.logprobs[i], now)
        if table.readers and now >= self._parts_due:
            self._parts_due = now + table.readers / self._most_parts_s
            self._give_out()

    def fail(self, work: PromptWork, error: Exception) -> None:
        """Give up on all of a prompt's rows."""
        self.withdraw(work)
        known = isinstance(error, GpuinferError)
        self.finished.append((work.ticket, error if known else BackendError(_message(error))))

    def withdraw(self, work: PromptWork) -> None:
        """Nobody waits for it any more."""
        self.works.pop(work.ticket, None)
        self._admission.withdraw(work)
        self._composer.changed()
        work.rows = []

    def answer_nothing(self, work: PromptWork, now: float) -> None:
        """A prompt of which nothing is wanted: its answers are empty."""
        work.completions = [NOTHING] * work.prepared.samples
        for sample in range(work.prepared.samples) if work.prepared.parts else ():
            self.parts.append((work.ticket, Given(sample, self._language.growing(())).rest(NOTHING)))
        self.complete(work, now)

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

    def _settle_chunks(self, chunks: Sequence[Chunk], echoes: Sequence[Echo], now: float) -> None:
        echo = iter(echoes)
        for chunk in chunks:
            work = chunk.row.work
            self._table.filled[chunk.row.slot] = chunk.end
            if chunk.echoes:
                work.echo = [*(work.echo or [None]), *next(echo)]
            if not chunk.last:
                continue
            work.first_token = now
            if work.prepared.parts:
                self._parts_due = now
            self._admission.prefilled(chunk.row)
            self._composer.changed()
            if not chunk.draws:
                for row in work.rows:
                    self._finish(row, NOTHING, now)

    def _look(self, row: Row, at: int, ended: bool, full: bool, logprob: Logprob | None, now: float) -> None:
        """One row that may end with its token at position `at`."""
        try:
            if row.logprobs is not None and logprob is not None:
                row.logprobs.append(logprob)
            prompt = len(row.work.prepared.tokens)
            tokens = self._table.tokens[row.slot]
            if row.matcher is not None:
                self._enter("constrain")
            end = END_TOKEN if ended else ending(row, int(tokens[at]), at + 1 - prompt, full=full)
            if row.matcher is not None:
                self._enter("reply")
            if end is not None:
                self._finish(row, completion(self._language, row, tokens[prompt : at + 1].tolist(), end), now)
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
                answer = table.tokens[slot, table.prompt[slot] : table.filled[slot] + 1]
                if (part := row.given.more(answer, row.logprobs)) is not None:
                    self.parts.append((row.work.ticket, part))
            except Exception as error:  # noqa: BLE001  as above
                self.fail(row.work, error)

    def _finish(self, row: Row, answer: Completion, now: float) -> None:
        work = row.work
        work.completions[row.number] = answer
        if row.given is not None:
            self.parts.append((work.ticket, row.given.rest(answer)))
        self._admission.release(row)
        self._composer.changed()
        work.left -= 1
        if not work.left:
            self.complete(work, now)


def _message(error: Exception) -> str:
    return f"the model failed on this prompt ({type(error).__name__}: {first_line(error)}). Leave it out, or report it."
