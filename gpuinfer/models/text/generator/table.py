"""What every slot holds, as arrays: a step's bookkeeping is a handful of array operations for any number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuinfer.models.text.generator.parts import Ints
from gpuinfer.models.text.generator.work import Row


class Table:
    """`slots` slots of `length` positions. All arrays are indexed by slot.

    A free slot keeps its tokens: a later prompt may begin with them. `tokens` takes memory only where it is written.
    """

    def __init__(self, slots: int, length: int, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self.slots, self.length = slots, length
        self.tokens = np.empty((slots, length), np.int32)  # of prompt and answer
        self.flat = self.tokens.reshape(-1)
        self.filled = np.zeros(slots, np.int32)  # positions that the cache holds
        self.prompt = np.zeros(slots, np.int32)  # tokens of the living row's prompt; 0: free
        self.last = np.zeros(slots, np.int32)  # the token drawn last: what the next step takes
        self.final = np.zeros(slots, np.int32)  # the position of the last token that the answer may have
        self.decodes = np.zeros(slots, np.bool_)  # past its prompt: one token a step
        self.heeds = np.zeros(slots, np.bool_)  # the end token ends it
        self.watched = np.zeros(slots, np.bool_)  # every token of it is looked at
        self.constrained = np.zeros(slots, np.bool_)
        self.rows: list[Row | None] = [None] * slots
        self.bases = np.arange(slots, dtype=np.int64) * length  # of each slot in `flat`
        self.is_end = np.zeros(vocabulary, np.bool_)
        self.is_end[[token for token in end_tokens if 0 <= token < vocabulary]] = True

    def occupy(self, row: Row) -> None:
        """A row moves in: its prompt's tokens are known, none of them is computed."""
        slot, prepared = row.slot, row.work.prepared
        sampling, tokens = prepared.sampling, prepared.tokens
        prompt = len(tokens)
        self.tokens[slot, :prompt] = tokens
        self.filled[slot] = 0
        self.prompt[slot] = prompt
        self.final[slot] = prompt + prepared.limit - 1
        self.heeds[slot] = not sampling.ignore_eos
        if row.matcher is not None:
            self.constrained[slot] = self.watched[slot] = True
        elif row.growing is not None or row.logprobs is not None or sampling.stop_token_ids:
            self.watched[slot] = True
        self.rows[slot] = row

    def leave(self, slot: int) -> None:
        """Its row is gone; what the cache holds stays there."""
        self.rows[slot] = None
        self.prompt[slot] = 0
        self.decodes[slot] = False
        if self.watched[slot]:
            self.watched[slot] = self.constrained[slot] = False

    def known(self, slots: Ints) -> Ints:
        """How many tokens these slots hold or are about to."""
        return np.maximum(self.filled[slots], self.prompt[slots])
