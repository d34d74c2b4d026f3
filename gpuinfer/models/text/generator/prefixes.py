"""Slots by how their tokens begin: which of them holds the longest beginning of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.models.text.generator.parts import Ints
from gpuinfer.models.text.generator.table import Table

LEAST = 16  # positions that are worth a copy
CANDIDATES = 64  # slots that begin alike and are looked at, the latest ones


@dataclass(frozen=True, slots=True)
class Match:
    """`slot` holds the first `shared` tokens, or will when the prefill under way there is through."""

    slot: int
    shared: int
    ready: bool


class Prefixes:
    """Finds slots by their first LEAST tokens, and compares the rest."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._keys: list[bytes | None] = [None] * table.slots
        self._slots: dict[bytes, dict[int, None]] = {}  # the latest last

    def add(self, slot: int) -> None:
        """The slot's content, LEAST tokens or more, can be found from now on."""
        if self._keys[slot] is not None:
            return
        key = self._table.tokens[slot, :LEAST].tobytes()
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

    def find(self, tokens: Ints) -> Match | None:
        """The longest beginning of `tokens` that is worth taking over. The last token is never part of it: its logits
        are wanted.

        One that another row is still computing is preferred if it is longer by as much as a copy is worth: that row
        comes before whoever asks, so waiting for it costs nothing.
        """
        most = len(tokens) - 1
        if most < LEAST or (alike := self._slots.get(tokens[:LEAST].tobytes())) is None:
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
            return Match(int(slots[later]), int(shared[later]), ready=False)
        if ready[now] < LEAST:
            return None
        now = self._free_one(slots, ready == ready[now], now)
        return Match(int(slots[now]), int(ready[now]), ready=True)

    def _free_one(self, slots: Ints, best: NDArray[np.bool_], otherwise: int) -> int:
        """Of equals one that is free: it need not be copied."""
        free = np.flatnonzero(best & (self._table.prompt[slots] == 0))
        return int(free[0]) if len(free) else otherwise
