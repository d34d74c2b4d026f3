"""Rows on their way through lists. Where each is lies in arrays: so a step is the same few calls for any number.

One answer on its way through a list.

Which tokens each token of an answer was drawn from: what a trainer needs to compute its probability again.

A policy is trained on the probabilities of what it was drawn from. With a list these are of few tokens; over the whole
vocabulary they would be others, and their gradients push at tokens that could not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed
from gpuinfer.text.language import cpu_trie
from gpuinfer.text.language.list_trie import Ints, TokenBytes, Trie, Tries

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
class ListRules:
    """What rows may say next. `kinds` int8 [rows]: 0 anything, 1 one of its ids, 2 anything but its ids; the ids of row
    i are `ids[starts[i]:starts[i + 1]]`, ascending. `starts` int32 [rows + 1], `ids` int32.
    """

    kinds: NDArray[np.int8]
    starts: Ints
    ids: Ints


class ListWalks:
    """`rows` rows, each in a list or in none. One thread at a time."""

    def __init__(self, token_bytes: TokenBytes, rows: int) -> None:
        self.token_bytes, self._spelt = token_bytes, token_bytes.arrays
        self._places: NDArray[Any] = np.zeros(rows, PLACE)
        self._used = np.zeros((rows, 0), np.int32)  # of each row the units that are used up, a bit for each
        self._tries: list[Trie | None] = [None] * rows
        self._most = np.zeros(rows, np.int64)  # ids that each may need
        self._ids: Ints = np.zeros(0, np.int32)
        self._kinds, self._outcomes = np.zeros(rows, np.int8), np.zeros(rows, np.int8)
        self._starts = np.zeros(rows + 1, np.int32)

    def begin(self, row: int, trie: Trie) -> None:
        """The row is at the beginning of an answer."""
        self._assign(row, trie)
        token_bytes = self.token_bytes
        self._places[row] = (trie.address, -1 if trie.tagged else 0, 0, 0, token_bytes.strip, token_bytes.differs, 0)
        self._used[row] = 0

    def take(self, row: int, other: ListWalks, place: int = 0) -> None:
        """The row is where a row of `other` is."""
        trie = other._tries[place]
        if trie is None:
            self.leave(row)
            return
        self._assign(row, trie)
        self._places[row] = other._places[place]
        self._used[row] = 0
        self._used[row, : trie.words] = other._used[place, : trie.words]

    def leave(self, row: int) -> None:
        """Nothing holds the row any more."""
        self._places[row]["image"] = 0
        self._tries[row] = None
        self._most[row] = 0

    def rules(self, rows: Ints) -> ListRules | None:
        """What each of these rows may say next, valid up to the next call; None: all may say anything."""
        count = len(rows)
        kinds, starts = self._kinds[:count], self._starts[: count + 1]
        cpu_trie.rules(rows, self._places, self._used, kinds, starts, self._ids)
        return ListRules(kinds, starts, self._ids) if kinds.any() else None

    def advance(self, rows: Ints, tokens: Ints) -> NDArray[np.int8]:
        """Each of these rows has said its token, or none where it is below 0: GOES_ON, COMPLETE or REFUSED for each,
        valid up to the next call. A row that has refused is where it was.
        """
        outcomes = self._outcomes[: len(rows)]
        cpu_trie.advance(rows, tokens, self._places, self._used, self._spelt, outcomes)
        return outcomes

    def follow(self, row: int, tokens: Ints) -> tuple[Ints, int]:
        """One row says all these: where it was before each, int32 [tokens], -1 in free text, and how many it could
        say.
        """
        nodes = np.full(len(tokens), -1, np.int32)
        return nodes, int(cpu_trie.walk(row, tokens, self._places, self._used, self._spelt, nodes))

    def trie(self, row: int) -> Trie | None:
        """The list that the row is in."""
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
ONLY, ALL_BUT = 1, 2  # as in cpu_walk.py


class ListedMatcher:
    """Where one answer is in its list: a `Matcher`, which a generator may also take over into `Walks` of its own."""

    def __init__(self, token_bytes: TokenBytes, trie: Trie) -> None:
        self.token_bytes, self.trie = token_bytes, trie
        self.walks = ListWalks(token_bytes, 1)
        self.walks.begin(0, trie)

    def warmed(self) -> ListedMatcher:
        """Itself, once the code that rows run is there: whoever asks waits for that, and not the generator's thread."""
        self.walks.rules(ROW)
        self.walks.advance(ROW, NO_TOKEN)
        return self

    def mask(self, into: Ints) -> None:
        """Set the bits of the tokens that may come next: int32 [words of 32 tokens], all of it is written."""
        rules = self.walks.rules(ROW)
        flags = np.ones(len(into) * 32, np.uint8)
        if rules is not None:
            ids = rules.ids[rules.starts[0] : rules.starts[1]]
            flags[:] = rules.kinds[0] == ALL_BUT
            flags[ids] = rules.kinds[0] == ONLY
        np.copyto(into, np.packbits(flags, bitorder="little").view("<i4"))

    def advance(self, token: int) -> None:
        """This token has been chosen. Raises `BadPrompt` if it is not allowed."""
        if self.walks.advance(ROW, np.array([token], np.int32))[0] == REFUSED:
            raise BadPrompt(f"token {token} is not allowed here: the list does not go on with it.")

    @property
    def complete(self) -> bool:
        """Whether the list has ended, and the answer with it."""
        return self.walks.done(0)

    def copy(self) -> ListedMatcher:
        """Another at the same place."""
        return ListedMatcher.of(self.walks, 0)

    @classmethod
    def of(cls, walks: ListWalks, row: int) -> ListedMatcher:
        """One at the place of a row that is in a list."""
        if (trie := walks.trie(row)) is None:
            raise ValueError(f"row {row} is in no list.")
        copied = cls.__new__(cls)
        copied.token_bytes, copied.trie, copied.walks = walks.token_bytes, trie, ListWalks(walks.token_bytes, 1)
        copied.walks.take(0, walks, row)
        return copied

    def new_walks(self, rows: int) -> SeatedWalks:
        """Arrays for so many rows of this vocabulary, none of them in a list."""
        return SeatedWalks(self.token_bytes, rows)

    def nodes(self, tokens: Sequence[int] | Ints) -> tuple[int, ...]:
        """Where an answer of these tokens was before each of them; -1 in free text. Whatever was said here so far
        does not matter.
        """
        walks = ListWalks(self.token_bytes, 1)
        walks.begin(0, self.trie)
        return tuple(walks.follow(0, np.array(tokens, np.int32))[0].tolist())


class SeatedWalks(ListWalks):
    """Walks that take over from matchers."""

    def seat(self, row: int, walk: ListedMatcher) -> None:
        """The row is where the matcher is, which stays there."""
        self.take(row, walk.walks)


Support = tuple[Ints, bool]  # tokens, ascending; and whether these alone could come, or all but these
ANYTHING: Support = (np.zeros(0, np.int32), False)


def list_support(
    listed: Listed, tries: Tries, tokens: Sequence[int], nodes: Sequence[int] | None = None
) -> list[Support]:
    """Of each token of an answer what it was drawn from. Where the text was free, that is all but few or none.

    tries: of the model that drew it, such as `Language.tries()`. nodes: `Completion.nodes`, which the answer has if it
    was drawn by the same list and vocabulary. Raises `BadPrompt` for tokens that the list does not allow, and for other
    nodes.
    """
    matcher = ListedMatcher(tries.token_bytes(), tries.trie(listed))
    if nodes is not None and list(matcher.nodes(tokens)) != list(nodes):
        raise BadPrompt(
            "the answer's nodes are not those of its tokens in this list: it was drawn with another list, or by a "
            "model with another vocabulary. Give the list that it was asked with."
        )
    return list(_supports(matcher, tokens))


def _supports(matcher: ListedMatcher, tokens: Sequence[int]) -> Iterator[Support]:
    for place, token in enumerate(tokens):
        rules = matcher.walks.rules(ROW)
        kind = 0 if rules is None else int(rules.kinds[0])
        if rules is None or kind not in (ONLY, ALL_BUT):
            yield ANYTHING
        else:
            yield rules.ids[: rules.starts[1]].copy(), kind == ONLY
        if matcher.walks.advance(ROW, np.array([token], np.int32))[0] == REFUSED:
            raise BadPrompt(
                f"token {place + 1} of the answer, {token}, is not allowed by its list: it was drawn with another. "
                "Give the list that it was asked with."
            )
