"""The tokens of the next step: one of each row that answers, and what room is left for prompts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gpuinfer.models.text.generator.parts import Ints
from gpuinfer.models.text.generator.table import Table
from gpuinfer.models.text.generator.work import Row
from gpuinfer.models.text.step import Step

ECHO_BYTES = 64 * 2**20  # of logits of prompt tokens, in one step


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of a row's prompt from `start` to `end`, and where their logits begin among those asked for."""

    row: Row
    start: int
    end: int
    logits: int

    @property
    def last(self) -> bool:
        return self.end == len(self.row.work.prepared.tokens)

    @property
    def echoes(self) -> bool:
        """Whether the logits of all its tokens are asked for."""
        return self.row.work.prepared.sampling.prompt_logprobs is not None

    @property
    def draws(self) -> bool:
        """Whether its last token's logits give the first tokens of answers."""
        return self.last and self.row.work.prepared.limit > 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A step, and what its logits are for."""

    step: Step
    decoding: Ints  # slots of the rows that are past their prompts
    chunks: Sequence[Chunk]
    draws: Ints  # slots that a token is drawn for
    picks: Ints | None = None  # which logits each of them draws from; None: as they come

    @property
    def rows(self) -> int:
        return len(self.step.slots)

    @property
    def prompt_tokens(self) -> int:
        return len(self.step.tokens) - len(self.decoding)


class Composer:
    """Composes steps of at most `step_tokens` tokens, rows that answer aside: these go in each step, all of them.

    While the rows stay the same the same arrays serve step after step, with new tokens and positions in them.
    """

    def __init__(self, table: Table, step_tokens: int) -> None:
        self._table = table
        self.step_tokens = step_tokens
        self._tokens, self._starts = np.zeros(table.slots, np.int32), np.zeros(table.slots, np.int32)
        self._ones, self._counting = np.ones(table.slots, np.int32), np.arange(table.slots, dtype=np.int32)
        self._echo_tokens = max(1, ECHO_BYTES // (4 * len(table.is_end)))
        self._steady: Plan | None = None
        self._turn = 0

    def changed(self) -> None:
        """Other rows answer than in the last step."""
        self._steady = None

    def compose(self, prefilling: Sequence[Row], most: int | None, only: Collection[Row] | None) -> Plan | None:
        """The next step; None when there is nothing to compute.

        `most`: no more tokens than that fit in memory, rows that answer included. `only`: none but these rows.
        """
        if self._steady is None or prefilling or most is not None or only is not None:
            decoding = self._decoding(most, only)
            chunks = self._chunks(prefilling, len(decoding), most, only)
            if chunks:
                self._steady = None
                return self._mixed(decoding, chunks)
            if not len(decoding):
                return None
            plan = self._plain(decoding)
            self._steady = plan if most is None and only is None else None
        else:
            plan = self._steady
        self._refresh(plan.step)
        return plan

    def _decoding(self, most: int | None, only: Collection[Row] | None) -> Ints:
        """Slots of the rows that answer; in turns when not all may go."""
        table = self._table
        if only is None:
            slots = np.flatnonzero(table.decodes).astype(np.int32)
        else:
            slots = np.array(sorted(row.slot for row in only if table.decodes[row.slot]), np.int32)
        if most is None or len(slots) <= most:
            return slots
        self._turn = (self._turn + most) % len(slots)
        return np.roll(slots, -self._turn)[:most].copy()

    def _chunks(
        self, prefilling: Sequence[Row], decoding: int, most: int | None, only: Collection[Row] | None
    ) -> list[Chunk]:
        """In order of arrival, as much of each prompt as there is room for."""
        room = max(1, self.step_tokens - decoding)
        if most is not None:
            room = min(room, most - decoding)
        echo_room, logits, chunks = self._echo_tokens, decoding, []
        for row in prefilling:
            if room <= 0:
                break
            if row.owner is not None or (only is not None and row not in only):
                continue
            start = int(self._table.filled[row.slot])
            count = min(room, len(row.work.prepared.tokens) - start)
            chunk = Chunk(row, start, start + count, logits)
            if chunk.echoes:
                if not echo_room:
                    continue
                count = min(count, echo_room)
                echo_room -= count
                chunk = Chunk(row, start, start + count, logits)
                logits += count
            else:
                logits += chunk.draws
            chunks.append(chunk)
            room -= count
        return chunks

    def _plain(self, decoding: Ints) -> Plan:
        rows = len(decoding)
        counting = self._counting[:rows]
        step = Step(self._tokens[:rows], decoding, self._starts[:rows], self._ones[:rows], counting)
        return Plan(step, decoding, (), draws=decoding)

    def _refresh(self, step: Step) -> None:
        np.take(self._table.last, step.slots, out=step.tokens, mode="clip")
        np.take(self._table.filled, step.slots, out=step.starts, mode="clip")

    def _mixed(self, decoding: Ints, chunks: Sequence[Chunk]) -> Plan:
        table, rows = self._table, len(decoding)
        slots = np.array([chunk.row.slot for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        lengths = np.array([chunk.end - chunk.start for chunk in chunks], np.int32)
        step = Step(
            np.concatenate(
                [table.last[decoding]] + [table.tokens[chunk.row.slot, chunk.start : chunk.end] for chunk in chunks]
            ),
            np.concatenate([decoding, slots]),
            np.concatenate([table.filled[decoding], starts]),
            np.concatenate([self._ones[:rows], lengths]),
            self._wanted(rows, chunks),
        )
        draws, picks = self._drawing(decoding, chunks)
        plain = len(picks) == len(step.wanted) and bool((picks[1:] > picks[:-1]).all())
        return Plan(step, decoding, chunks, draws, None if plain else picks)

    def _wanted(self, rows: int, chunks: Sequence[Chunk]) -> Ints:
        parts, first = [self._counting[:rows]], rows
        for chunk in chunks:
            end = first + chunk.end - chunk.start
            if chunk.echoes:
                parts.append(np.arange(first, end, dtype=np.int32))
            elif chunk.draws:
                parts.append(np.array([end - 1], np.int32))
            first = end
        return np.concatenate(parts)

    def _drawing(self, decoding: Ints, chunks: Sequence[Chunk]) -> tuple[Ints, Ints]:
        """Slots that draw, and which of the wanted logits they draw from: all samples of a prompt from the same."""
        slots: list[int] = []
        picks: list[int] = []
        for chunk in chunks:
            if chunk.draws:
                samples = chunk.row.work.rows
                slots += [row.slot for row in samples]
                picks += [chunk.logits + (chunk.end - chunk.start - 1) * chunk.echoes] * len(samples)
        return (
            np.concatenate([decoding, np.array(slots, np.int32)]),
            np.concatenate([self._counting[: len(decoding)], np.array(picks, np.int32)]),
        )
