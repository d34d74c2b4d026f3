"""The states of rows in their lists, kept in arrays, so that a step takes the same few calls for any number of rows.

`ListedMatcher` is one such row with the interface of a matcher. `list_support` gives the tokens that each token of an
answer was drawn from, which a trainer needs to compute its probability again: over the whole vocabulary, probabilities
would be others, and gradients would push at tokens that were not allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed
from gpuinfer.text.language import cpu_trie
from gpuinfer.text.language.cpu_trie import ALL_BUT, ONLY, REFUSED
from gpuinfer.text.language.list_trie import Ints, TokenBytes, Trie, Tries

PLACE = np.dtype(
    [
        ("image", np.int64),  # the address of the compiled list; 0: none
        ("node", np.int32),  # -1: in free text
        ("state", np.int32),  # of the tag
        ("run", np.int32),  # state of a run of UTF-8 bytes, in free text
        ("strip", np.int32),  # leading spaces that the detokenizer will drop
        ("first", np.int32),  # the next token is the first, and has other bytes than further on
        ("done", np.int32),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True, eq=False)
class ListRules:
    """The next tokens of rows. `kinds` int8 [rows]: FREE: any; ONLY: one of the row's ids; ALL_BUT: none of the row's
    ids. The ids of row i are `ids[starts[i]:starts[i + 1]]`, ascending. `starts` int32 [rows + 1], `ids` int32.
    """

    kinds: NDArray[np.int8]
    starts: Ints
    ids: Ints


class ListWalks:
    """`rows` rows, each with a list or without. Not thread-safe."""

    def __init__(self, token_bytes: TokenBytes, rows: int) -> None:
        self.token_bytes, self._spelt = token_bytes, token_bytes.arrays
        self._places: NDArray[Any] = np.zeros(rows, PLACE)
        self._used = np.zeros((rows, 0), np.int32)  # bit sets of the units that each row has used
        self._tries: list[Trie | None] = [None] * rows
        self._most = np.zeros(rows, np.int64)  # ids that each row may need
        self._ids: Ints = np.zeros(0, np.int32)
        self._kinds, self._outcomes = np.zeros(rows, np.int8), np.zeros(rows, np.int8)
        self._starts = np.zeros(rows + 1, np.int32)

    def begin(self, row: int, trie: Trie) -> None:
        """Put the row at the beginning of an answer."""
        self._assign(row, trie)
        token_bytes = self.token_bytes
        self._places[row] = (trie.address, -1 if trie.tagged else 0, 0, 0, token_bytes.strip, token_bytes.differs, 0)
        self._used[row] = 0

    def take(self, row: int, other: ListWalks, place: int = 0) -> None:
        """Copy the state of a row of `other` into the row."""
        trie = other._tries[place]
        if trie is None:
            self.leave(row)
            return
        self._assign(row, trie)
        self._places[row] = other._places[place]
        self._used[row] = 0
        self._used[row, : trie.words] = other._used[place, : trie.words]

    def leave(self, row: int) -> None:
        self._places[row]["image"] = 0
        self._tries[row] = None
        self._most[row] = 0

    def seat(self, row: int, walk: ListedMatcher) -> None:
        """Copy the matcher's state into the row."""
        self.take(row, walk.walks)

    def rules(self, rows: Ints) -> ListRules | None:
        """The next tokens of these rows, valid until the next call; None: any token for all."""
        count = len(rows)
        kinds, starts = self._kinds[:count], self._starts[: count + 1]
        cpu_trie.next_tokens(rows, self._places, self._used, kinds, starts, self._ids)
        return ListRules(kinds, starts, self._ids) if kinds.any() else None

    def advance(self, rows: Ints, tokens: Ints) -> NDArray[np.int8]:
        """Append a token to each of these rows, none if it is negative. The outcomes, GOES_ON, COMPLETE or REFUSED, are
        valid until the next call. REFUSED leaves a row as it was.
        """
        outcomes = self._outcomes[: len(rows)]
        cpu_trie.advance_rows(rows, tokens, self._places, self._used, self._spelt, outcomes)
        return outcomes

    def follow(self, row: int, tokens: Ints) -> tuple[Ints, int]:
        """Append all these tokens to one row: its node before each, int32 [tokens], -1 in free text, and how many were
        allowed.
        """
        nodes = np.full(len(tokens), -1, np.int32)
        return nodes, int(cpu_trie.advance_all(row, tokens, self._places, self._used, self._spelt, nodes))

    def trie(self, row: int) -> Trie | None:
        return self._tries[row]

    def done(self, row: int) -> bool:
        return bool(self._places[row]["done"])

    def _assign(self, row: int, trie: Trie) -> None:
        self._tries[row] = trie
        self._most[row] = trie.most
        if trie.words > self._used.shape[1]:
            wider = np.zeros((len(self._used), max(trie.words, 2 * self._used.shape[1])), np.int32)
            wider[:, : self._used.shape[1]] = self._used
            self._used = wider
        if (room := int(self._most.sum()) + 1) > len(self._ids):
            self._ids = np.zeros(max(room, 2 * len(self._ids)), np.int32)


ROW = np.zeros(1, np.int32)
NO_TOKEN = np.full(1, -1, np.int32)


class ListedMatcher:
    """The state of one answer in its list: a matcher, whose state a generator may copy into `ListWalks` of its own."""

    def __init__(self, token_bytes: TokenBytes, trie: Trie) -> None:
        self.token_bytes, self.trie = token_bytes, trie
        self.walks = ListWalks(token_bytes, 1)
        self.walks.begin(0, trie)

    def warmed(self) -> ListedMatcher:
        """Itself, with the kernels of rows compiled, so that the generator's thread need not wait for them."""
        self.walks.rules(ROW)
        self.walks.advance(ROW, NO_TOKEN)
        return self

    def mask(self, into: Ints) -> None:
        """Write the set of tokens that may come next into all of `into`, int32 [words of 32 tokens]."""
        rules = self.walks.rules(ROW)
        flags = np.ones(len(into) * 32, np.uint8)
        if rules is not None:
            ids = rules.ids[rules.starts[0] : rules.starts[1]]
            flags[:] = rules.kinds[0] == ALL_BUT
            flags[ids] = rules.kinds[0] == ONLY
        np.copyto(into, np.packbits(flags, bitorder="little").view("<i4"))

    def advance(self, token: int) -> None:
        """Append a token. Raises `BadPrompt` if it is not allowed."""
        if self.walks.advance(ROW, np.array([token], np.int32))[0] == REFUSED:
            raise BadPrompt(f"token {token} is not allowed here: the list does not go on with it.")

    @property
    def complete(self) -> bool:
        """Whether the list, and the answer with it, has ended."""
        return self.walks.done(0)

    def copy(self) -> ListedMatcher:
        """An independent matcher in the same state."""
        return ListedMatcher.of(self.walks, 0)

    @classmethod
    def of(cls, walks: ListWalks, row: int) -> ListedMatcher:
        """A matcher in the state of a row with a list."""
        if (trie := walks.trie(row)) is None:
            raise ValueError(f"row {row} is in no list.")
        copied = cls.__new__(cls)
        copied.token_bytes, copied.trie, copied.walks = walks.token_bytes, trie, ListWalks(walks.token_bytes, 1)
        copied.walks.take(0, walks, row)
        return copied

    def new_walks(self, rows: int) -> ListWalks:
        """Arrays for `rows` rows of this vocabulary, without lists yet."""
        return ListWalks(self.token_bytes, rows)

    def nodes(self, tokens: Sequence[int] | Ints) -> tuple[int, ...]:
        """The node before each of these tokens of an answer; -1 in free text. Independent of this matcher's state."""
        walks = ListWalks(self.token_bytes, 1)
        walks.begin(0, self.trie)
        return tuple(walks.follow(0, np.array(tokens, np.int32))[0].tolist())


Support = tuple[Ints, bool]  # tokens, ascending; True: only these were allowed, False: all but these
ANYTHING: Support = (np.zeros(0, np.int32), False)


def list_support(
    listed: Listed, tries: Tries, tokens: Sequence[int], nodes: Sequence[int] | None = None
) -> list[Support]:
    """The tokens that each token of an answer was drawn from; in free text, all but few or none.

    tries: `Language.tries()` of the model that drew the answer. nodes: `Completion.nodes` of an answer drawn with this
    list and vocabulary. Raises `BadPrompt` for tokens that the list does not allow, and for other nodes.
    """
    matcher = ListedMatcher(tries.token_bytes(), tries.trie(listed))
    if nodes is not None and list(matcher.nodes(tokens)) != list(nodes):
        raise BadPrompt(
            "the answer's nodes are not those of its tokens in this list: it was drawn with another list, or by a "
            "model with another vocabulary. Give the list of its request."
        )
    supports = []
    for place, token in enumerate(tokens):
        rules = matcher.walks.rules(ROW)
        kind = 0 if rules is None else int(rules.kinds[0])
        if rules is None or kind not in (ONLY, ALL_BUT):
            supports.append(ANYTHING)
        else:
            supports.append((rules.ids[: rules.starts[1]].copy(), kind == ONLY))
        if matcher.walks.advance(ROW, np.array([token], np.int32))[0] == REFUSED:
            raise BadPrompt(
                f"token {place + 1} of the answer, {token}, is not allowed by its list: it was drawn with another. "
                "Give the list of its request."
            )
    return supports
