"""What the slots of the cache hold: which are free, how their tokens begin, and what is copied between them.

All of it lies in arrays, so that a step's bookkeeping is a handful of array operations for any number of rows.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.generator.prepared import Row
from gpuinfer.text.generator.seams import Ints, Walks
from gpuinfer.text.step import Decoder


class Places:
    """A slot is free with content that a prompt may begin with, or without."""

    def __init__(self, slots: int) -> None:
        self._blank = list(range(slots - 1, -1, -1))  # the lowest is taken first
        self._kept: OrderedDict[int, None] = OrderedDict()  # used longest ago first

    def __len__(self) -> int:
        return len(self._blank) + len(self._kept)

    def holds(self, slot: int) -> bool:
        """Whether this one is free, and its content worth something."""
        return slot in self._kept

    def take(self) -> int:
        """The free slot whose content is missed least."""
        return self._blank.pop() if self._blank else self._kept.popitem(last=False)[0]

    def take_this(self, slot: int) -> None:
        """One that `holds`."""
        del self._kept[slot]

    def scarce(self, slot: int) -> bool:
        """Whether `take` would give this one."""
        return not self._blank and next(iter(self._kept)) == slot

    def give(self, slot: int) -> None:
        """It is free again, and what it holds serves nobody."""
        self._blank.append(slot)

    def keep(self, slot: int) -> None:
        """It is free again, and what it holds may serve others."""
        self._kept[slot] = None

    def forget(self) -> None:
        """Nothing that free slots hold serves anybody any more."""
        self._blank += self._kept
        self._kept.clear()

    def spoil(self, slot: int) -> None:
        """What this one holds serves nobody any more."""
        if slot in self._kept:
            del self._kept[slot]
            self._blank.append(slot)

    def used(self, slot: int) -> None:
        """Something has been copied from it: if it is free, it is worth keeping."""
        if slot in self._kept:
            self._kept.move_to_end(slot)


class SlotTable:
    """`slots` slots of `length` positions. All arrays are indexed by slot.

    A free slot keeps its tokens: a later prompt may begin with them. `tokens` takes memory only where it is written.
    """

    def __init__(self, slots: int, length: int, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self.slots, self.length = slots, length
        self.tokens = np.empty((slots, length), np.int32)  # of prompt and answer
        self.flat = self.tokens.reshape(-1)
        self.filled = np.zeros(slots, np.int32)  # positions that the cache holds
        self.prompt = np.zeros(slots, np.int32)  # tokens of the living row's prompt; 0: free
        self.first = np.zeros(slots, np.int32)  # tokens that it goes through before it draws any
        self.last = np.zeros(slots, np.int32)  # the token drawn last: what the next step takes
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
        sampling, prompt = prepared.sampling, len(prepared.tokens)
        self.tokens[slot, : row.first] = row.known[: row.first]
        self.first[slot] = row.first
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
        """Its row is gone; what the cache holds stays there."""
        row, self.rows[slot] = self.rows[slot], None
        if row is not None and row.walk is not None and self.walks is not None:
            self.walks.leave(slot)
            self.listed -= 1
        self.adapted -= int(self.adapter[slot] > 0)
        self.prompt[slot] = self.first[slot] = 0
        self.decodes[slot] = False
        if self.watched[slot]:
            self.watched[slot] = self.constrained[slot] = False
        if self.read[slot]:
            self.read[slot] = False
            self.readers -= 1

    def walked(self, slots: Ints, tokens: Ints) -> NDArray[np.int8]:
        """These rows have said these tokens: for each 0, 1 when its list is complete, 2 when that cannot be said."""
        if not self.listed or self.walks is None:
            return self._no_lists[: len(slots)]
        return self.walks.advance(slots, tokens)

    def known(self, slots: Ints) -> Ints:
        """How many tokens these slots hold or are about to."""
        return np.maximum(self.filled[slots], self.first[slots])


LEAST = 16  # positions that are worth a copy
CANDIDATES = 64  # slots that begin alike and are looked at, the latest ones


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """`slot` holds the first `shared` tokens, or will when the prefill under way there is through."""

    slot: int
    shared: int
    ready: bool


class Prefixes:
    """Finds slots by their first LEAST tokens, and compares the rest."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._keys: list[bytes | None] = [None] * table.slots
        self._slots: dict[bytes, dict[int, None]] = {}  # the latest last

    def add(self, slot: int) -> None:
        """The slot's content, LEAST tokens or more, can be found from now on, unless it is outdated."""
        if self._keys[slot] is not None or self._table.outdated[slot]:
            return
        key = _key(self._table.tokens[slot], int(self._table.adapter[slot]))
        self._keys[slot] = key
        self._slots.setdefault(key, {})[slot] = None

    def drop(self, slot: int) -> None:
        """Its content is about to be overwritten."""
        if (key := self._keys[slot]) is None:
            return
        self._keys[slot] = None
        alike = self._slots[key]
        del alike[slot]
        if not alike:
            del self._slots[key]

    def clear(self) -> None:
        """Nothing can be found any more."""
        self._keys = [None] * self._table.slots
        self._slots.clear()

    def find(self, tokens: Ints, adapter: int = 0) -> PrefixMatch | None:
        """The longest beginning of `tokens` that is worth taking over, computed with the very same adapter. The last
        token is never part of it: its logits are wanted.

        One that another row is still computing is preferred if it is longer by as much as a copy is worth: that row
        comes before whoever asks, so waiting for it costs nothing.
        """
        most = len(tokens) - 1
        if most < LEAST or (alike := self._slots.get(_key(tokens, adapter))) is None:
            return None
        slots = np.array(list(alike)[-CANDIDATES:], np.int32)
        known = np.minimum(self._table.known(slots), most)
        width = int(known.max())
        differs = self._table.tokens[slots, :width] != tokens[:width]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        shared = np.minimum(first, known)
        ready = np.minimum(shared, self._table.filled[slots])
        now, later = int(ready.argmax()), int(shared.argmax())
        if shared[later] >= ready[now] + LEAST:
            return PrefixMatch(int(slots[later]), int(shared[later]), ready=False)
        if ready[now] < LEAST:
            return None
        now = self._free_one(slots, ready == ready[now], now)
        return PrefixMatch(int(slots[now]), int(ready[now]), ready=True)

    def _free_one(self, slots: Ints, best: NDArray[np.bool_], otherwise: int) -> int:
        """Of equals one that is free: it need not be copied."""
        free = np.flatnonzero(best & (self._table.prompt[slots] == 0))
        return int(free[0]) if len(free) else otherwise


def _key(tokens: Ints, adapter: int) -> bytes:
    first = tokens[:LEAST].tobytes()
    return first + adapter.to_bytes(4, "little") if adapter else first


logger = logging.getLogger("gpuinfer")


class Copies:
    """Copies that have been promised; they are carried out before the next step computes.

    A target counts as filled from the promise on. Should copying fail, it counts as empty again and is
    computed instead.
    """

    def __init__(self, decoder: Decoder, table: SlotTable) -> None:
        self._decoder, self._table = decoder, table
        self._targets: dict[tuple[int, int], list[int]] = {}  # (source, length), in the order of asking
        self._sources: set[int] = set()

    def promise(self, source: int, target: int, length: int) -> None:
        self._targets.setdefault((source, length), []).append(target)
        self._sources.add(source)
        self._table.filled[target] = length

    def before_overwriting(self, slot: int) -> None:
        """A slot gets a new row: what was to be copied from it is copied now."""
        if slot in self._sources:
            self.carry_out()

    def carry_out(self) -> None:
        if not self._targets:
            return
        promised, self._targets = self._targets, {}
        self._sources.clear()
        try:
            while promised:
                source, length = next(iter(promised))
                self._decoder.copy(source, promised[source, length], length)
                del promised[source, length]
        except Exception as error:  # noqa: BLE001  a copy only saves work
            logger.warning("a shared prefix could not be copied and is computed again: %s", error)
            for targets in promised.values():
                self._table.filled[targets] = 0
