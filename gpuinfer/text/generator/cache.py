"""What is known of the rows under way, by slot: their tokens, and the pages that hold their keys and values.

All of it lies in arrays, so that a step's bookkeeping is a handful of array operations for any number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.generator.pages import pages_for
from gpuinfer.text.generator.prepared import Row
from gpuinfer.text.generator.seams import Ints, Walks


class SlotTable:
    """`slots` slots of `length` positions. All arrays are indexed by slot. `tokens` takes memory only where it is
    written.
    """

    def __init__(self, slots: int, length: int, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self.slots, self.length = slots, length
        self.tokens = np.empty((slots, length), np.int32)  # of prompt and answer
        self.flat = self.tokens.reshape(-1)
        self.pages = np.zeros((slots, pages_for(length)), np.int32)  # which page holds which positions, as in a `Step`
        self.held = np.zeros(slots, np.int32)  # so many columns of `pages` are the row's
        self.filled = np.zeros(slots, np.int32)  # positions that the cache holds
        self.prompt = np.zeros(slots, np.int32)  # tokens of the living row's prompt; 0: free
        self.last = np.zeros(slots, np.int32)  # the token drawn last: what the next step takes; see `Step.drawn`
        self.unread = np.zeros(slots, np.int32)  # tokens that have been drawn for it and that the host has not seen
        self.epoch = np.zeros(slots, np.int64)  # grows when a row moves in, out, or begins anew
        self.final = np.zeros(slots, np.int32)  # the position of the last token that the answer may have
        self.decodes = np.zeros(slots, np.bool_)  # past its prompt: one token a step
        self.ends = np.zeros(slots, np.bool_)  # the end token ends it
        self.watched = np.zeros(slots, np.bool_)  # every token of it is looked at
        self.constrained = np.zeros(slots, np.bool_)
        self.adapter = np.zeros(slots, np.int32)  # the number of that which has computed it; 0: none has
        self.adapted = 0  # living rows that have one
        self.outdated = np.zeros(slots, np.bool_)  # other weights than the present ones have computed some of it
        self.processed: NDArray[np.float64] | None = (
            None  # [slots, length] once a row wants it: what each token was worth
        )
        self.walks: Walks | None = None  # once there is a row with a list
        self.listed = 0  # slots with one
        self.read = np.zeros(slots, np.bool_)  # its answer is given out while it grows
        self.readers = 0  # slots of which it is
        self._no_lists = np.zeros(slots, np.int8)
        self.rows: list[Row | None] = [None] * slots
        self.bases = np.arange(slots, dtype=np.int64) * length  # of each slot in `flat`
        self.is_end = np.zeros(vocabulary, np.bool_)
        self.is_end[[token for token in end_tokens if 0 <= token < vocabulary]] = True

    def occupy(self, row: Row) -> None:
        """A row moves in: the tokens of its prompt, and those it has begun with, are known; none is computed."""
        slot, prepared = row.slot, row.work.prepared
        self.begin_anew(slot)
        sampling, prompt = prepared.sampling, len(prepared.tokens)
        self.tokens[slot, : row.first] = row.known[: row.first]
        self.filled[slot] = 0
        self.outdated[slot] = False
        self.adapter[slot] = number = row.work.adapter_number
        self.adapted += int(number > 0)
        self.prompt[slot] = prompt
        self.final[slot] = prompt + prepared.limit - 1
        self.ends[slot] = not sampling.ignore_eos
        if row.walk is not None:
            self.walks = self.walks or row.walk.many(self.slots)
            self.walks.sit(slot, row.walk)
            self.listed += 1
        if row.matcher is not None:
            self.constrained[slot] = self.watched[slot] = True
        elif row.growing is not None or row.logprobs is not None or sampling.stop_token_ids:
            self.watched[slot] = True
        if sampling.processed_logprobs:
            if self.processed is None:
                self.processed = np.zeros((self.slots, self.length))
            if row.begun is not None:
                self.processed[slot, prompt : prompt + len(row.begun.processed)] = row.begun.processed
        if row.given is not None:
            self.read[slot] = True
            self.readers += 1
        self.rows[slot] = row

    def leave(self, slot: int) -> None:
        """Its row is gone."""
        row, self.rows[slot] = self.rows[slot], None
        self.begin_anew(slot)
        if row is not None and row.walk is not None and self.walks is not None:
            self.walks.leave(slot)
            self.listed -= 1
        self.adapted -= int(self.adapter[slot] > 0)
        self.prompt[slot] = 0
        self.decodes[slot] = False
        if self.watched[slot]:
            self.watched[slot] = self.constrained[slot] = False
        if self.read[slot]:
            self.read[slot] = False
            self.readers -= 1

    def begin_anew(self, slot: int) -> None:
        """What steps under way draw for this slot is no longer wanted."""
        self.unread[slot] = 0
        self.epoch[slot] += 1

    def known(self, slot: int) -> int:
        """Tokens of prompt and answer that the host knows, of a row that is past its prompt."""
        return int(self.filled[slot] + 1 - self.unread[slot])

    def known_filled(self, slot: int) -> int:
        """Positions of the cache of which the host knows the tokens."""
        return int(self.filled[slot] - max(0, self.unread[slot] - 1))

    def walked(self, slots: Ints, tokens: Ints) -> NDArray[np.int8]:
        """These rows have said these tokens: for each 0, 1 when its list is complete, 2 when that cannot be said."""
        if not self.listed or self.walks is None:
            return self._no_lists[: len(slots)]
        return self.walks.advance(slots, tokens)
