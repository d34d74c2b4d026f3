"""What proposes tokens to generators under test, and step times that make them try as many as they may."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from text.toy import VOCABULARY, plain_answer

from gpuinfer.generation import Prompt
from gpuinfer.text.generator.slot_table import SlotTable
from gpuinfer.text.generator.speculation import Proposal, Proposer, StepTimes


class FreeTokens(StepTimes):
    """All steps take as long: the more tokens go along, the better."""

    def of(self, tokens):
        return np.ones(len(tokens))


class Guesser(Proposer):
    """Proposes what a plain loop answers, each token wrong now and then, and any tokens behind its end."""

    def __init__(self, table: SlotTable, length: int, right: float, seed: int) -> None:
        self.table, self.length, self.right, self.dice = table, length, right, random.Random(seed)
        self.answers: dict[tuple[object, int], tuple[int, ...]] = {}

    def propose(self, slots: Sequence[int], rooms: Sequence[int]) -> list[Proposal]:
        return [self.of(int(slot), int(room)) for slot, room in zip(slots, rooms, strict=True)]

    def of(self, slot: int, room: int) -> Proposal:
        row = self.table.rows[slot]
        prepared, number = row.work.prepared, row.number
        known = self.answers.get((prepared, number))
        if known is None:
            prompt = Prompt(tokens=tuple(prepared.tokens.tolist()), key=prepared.key, sampling=prepared.sampling)
            known = plain_answer(prompt, prepared.first_sample + number, self.length).tokens
            self.answers[prepared, number] = known
        drawn = int(self.table.filled[slot]) + 1 - len(prepared.tokens)
        tokens = [
            token if self.dice.random() < self.right else self.dice.randrange(VOCABULARY)
            for token in (*known[drawn:], *(self.dice.randrange(VOCABULARY) for _ in range(room)))
        ]
        return Proposal(np.array(tokens[: self.dice.randint(0, max(0, room))], np.int32), self.dice.randrange(5))


def guessing(length: int, right: float = 0.8, seed: int = 0) -> Callable[[SlotTable], Guesser]:
    return lambda table: Guesser(table, length, right, seed)
