"""One answer on its way through a list."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuinfer.errors import BadPrompt
from gpuinfer.text.language.trie.tokens import Ints, TokenBytes
from gpuinfer.text.language.trie.trie import Trie
from gpuinfer.text.language.trie.walks import REFUSED, Walks

ROW = np.zeros(1, np.int32)
NO_TOKEN = np.full(1, -1, np.int32)
ONLY, ALL_BUT = 1, 2  # as in cpu_walk.py


class ListedMatcher:
    """Where one answer is in its list: a `Matcher`, which a generator may also take over into `Walks` of its own."""

    def __init__(self, said: TokenBytes, trie: Trie) -> None:
        self.said, self.trie = said, trie
        self.walks = Walks(said, 1)
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
    def of(cls, walks: Walks, row: int) -> ListedMatcher:
        """One at the place of a row that is in a list."""
        if (trie := walks.trie(row)) is None:
            raise ValueError(f"row {row} is in no list.")
        copied = cls.__new__(cls)
        copied.said, copied.trie, copied.walks = walks.said, trie, Walks(walks.said, 1)
        copied.walks.take(0, walks, row)
        return copied

    def many(self, rows: int) -> SeatedWalks:
        """Arrays for so many rows of this vocabulary, none of them in a list."""
        return SeatedWalks(self.said, rows)

    def nodes(self, tokens: Sequence[int] | Ints) -> tuple[int, ...]:
        """Where an answer of these tokens was before each of them; -1 in free text. Whatever was said here so far
        does not matter.
        """
        walks = Walks(self.said, 1)
        walks.begin(0, self.trie)
        return tuple(walks.follow(0, np.array(tokens, np.int32))[0].tolist())


class SeatedWalks(Walks):
    """Walks that take over from matchers."""

    def sit(self, row: int, walk: ListedMatcher) -> None:
        """The row is where the matcher is, which stays there."""
        self.take(row, walk.walks)
