"""Rows on their way through lists. Where each is lies in arrays: so a step is the same few calls for any number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.language.trie import cpu_walk
from gpuinfer.text.language.trie.tokens import Ints, TokenBytes
from gpuinfer.text.language.trie.trie import Trie

PLACE = np.dtype(
    [
        ("image", np.int64),  # the address of its compiled list; 0: none
        ("node", np.int32),  # -1: in free text
        ("state", np.int32),  # of the tag
        ("run", np.int32),  # of bytes, in free text
        ("strip", np.int32),  # spaces that the text will lose, if it begins with them
        ("first", np.int32),  # the next token is the first, and says something else than further on
        ("done", np.int32),
    ],
    align=True,
)
GOES_ON, COMPLETE, REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """What rows may say next. `kinds` int8 [rows]: 0 anything, 1 one of its ids, 2 anything but its ids; the ids of row
    i are `ids[starts[i]:starts[i + 1]]`, ascending. `starts` int32 [rows + 1], `ids` int32.
    """

    kinds: NDArray[np.int8]
    starts: Ints
    ids: Ints


class Walks:
    """`rows` rows, each in a list or in none. One thread at a time."""

    def __init__(self, said: TokenBytes, rows: int) -> None:
        self.said, self._spelt = said, said.arrays
        self._places: NDArray[Any] = np.zeros(rows, PLACE)
        self._used = np.zeros((rows, 0), np.int32)  # of each row the units that are used up, a bit for each
        self._tries: list[Trie | None] = [None] * rows
        self._most = np.zeros(rows, np.int64)  # ids that each may need
        self._ids: Ints = np.zeros(0, np.int32)
        self._kinds, self._outcomes = np.zeros(rows, np.int8), np.zeros(rows, np.int8)
        self._starts = np.zeros(rows + 1, np.int32)

    def begin(self, row: int, trie: Trie) -> None:
        """The row is at the beginning of an answer."""
        self._seat(row, trie)
        said = self.said
        self._places[row] = (trie.address, -1 if trie.tagged else 0, 0, 0, said.strip, said.differs, 0)
        self._used[row] = 0

    def take(self, row: int, other: Walks, place: int = 0) -> None:
        """The row is where a row of `other` is."""
        trie = other._tries[place]
        if trie is None:
            self.leave(row)
            return
        self._seat(row, trie)
        self._places[row] = other._places[place]
        self._used[row] = 0
        self._used[row, : trie.words] = other._used[place, : trie.words]

    def leave(self, row: int) -> None:
        """Nothing holds the row any more."""
        self._places[row]["image"] = 0
        self._tries[row] = None
        self._most[row] = 0

    def rules(self, rows: Ints) -> Rules | None:
        """What each of these rows may say next, valid up to the next call; None: all may say anything."""
        count = len(rows)
        kinds, starts = self._kinds[:count], self._starts[: count + 1]
        cpu_walk.rules(rows, self._places, self._used, kinds, starts, self._ids)
        return Rules(kinds, starts, self._ids) if kinds.any() else None

    def advance(self, rows: Ints, tokens: Ints) -> NDArray[np.int8]:
        """Each of these rows has said its token, or none where it is below 0: GOES_ON, COMPLETE or REFUSED for each,
        valid up to the next call. A row that has refused is where it was.
        """
        outcomes = self._outcomes[: len(rows)]
        cpu_walk.advance(rows, tokens, self._places, self._used, self._spelt, outcomes)
        return outcomes

    def follow(self, row: int, tokens: Ints) -> tuple[Ints, int]:
        """One row says all these: where it was before each, int32 [tokens], -1 in free text, and how many it could
        say.
        """
        nodes = np.full(len(tokens), -1, np.int32)
        return nodes, int(cpu_walk.walk(row, tokens, self._places, self._used, self._spelt, nodes))

    def trie(self, row: int) -> Trie | None:
        """The list that the row is in."""
        return self._tries[row]

    def done(self, row: int) -> bool:
        return bool(self._places[row]["done"])

    def _seat(self, row: int, trie: Trie) -> None:
        self._tries[row] = trie
        self._most[row] = trie.most
        if trie.words > self._used.shape[1]:
            wider = np.zeros((len(self._used), max(trie.words, 2 * self._used.shape[1])), np.int32)
            wider[:, : self._used.shape[1]] = self._used
            self._used = wider
        if (room := int(self._most.sum()) + 1) > len(self._ids):
            self._ids = np.zeros(max(room, 2 * len(self._ids)), np.int32)
