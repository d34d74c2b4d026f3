"""The lists of the requests inside vLLM's engine: what each has said, and what it may say next.

The same for both of its interfaces. Nothing is opened before there is a first list.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed
from gpuinfer.vllm.applying import force, keep
from gpuinfer.vllm.listed import begun_in, listed_in

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from gpuinfer.text.language.trie.matcher import ListedMatcher, SeatedWalks
    from gpuinfer.text.language.trie.trie import Tries

log = logging.getLogger("gpuinfer")
REFUSED = 2  # outcomes of a walk


def validate(params: Any) -> None:
    """Raises `ValueError`, which vLLM tells whoever asked, for parameters that hold no list that can be read."""
    from gpuinfer.text.language.trie.lines import check

    try:
        listed, _ = listed_in(params.extra_args), begun_in(params.extra_args)
        if listed is not None:
            check(listed)
    except BadPrompt as error:
        raise ValueError(str(error)) from None


class ListedRows:
    """`count` rows, each of a request with a list or of none."""

    def __init__(self, folder: str, family: str, vocabulary: int, count: int) -> None:
        self._folder, self._family, self._vocabulary, self._count = Path(folder), family, vocabulary, count
        self._tries: Tries | None = None
        self._walks: SeatedWalks | None = None
        self._ends: list[Sequence[int]] = [()] * count
        self.listed: set[int] = set()

    @classmethod
    def of(cls, config: Any, count: int) -> ListedRows:
        """From a `VllmConfig`."""
        model = config.model_config
        return cls(str(model.tokenizer), str(model.hf_config.model_type), int(model.get_vocab_size()), count)

    def begin(self, row: int, params: Any) -> bool:
        """A request takes the row. Whether it has a list that can be followed."""
        self.leave(row)
        try:
            listed = listed_in(params.extra_args)
            if listed is None:
                return False
            matcher, begun = self._matcher(listed), begun_in(params.extra_args)
        except BadPrompt as error:  # whoever asked has been told by `validate`, or has compiled it too
            log.error("a list between tags is not followed: %s", error)
            return False
        if self._walks is None:
            self._walks = matcher.many(self._count)
        self._walks.sit(row, matcher)
        self.listed.add(row)
        self._ends[row] = sorted({*(params.stop_token_ids or ()), *getattr(params, "all_stop_token_ids", ())})
        self.say(row, begun)
        return True

    def leave(self, row: int) -> None:
        """Its request is gone, or is followed no more."""
        if row in self.listed:
            self.listed.discard(row)
            if self._walks is not None:
                self._walks.leave(row)

    def say(self, row: int, tokens: Sequence[int]) -> None:
        """The row's request has said these tokens."""
        if self._walks is None or not len(tokens) or row not in self.listed:
            return
        if self._walks.done(row):  # what is said after the end is nobody's
            return
        _, followed = self._walks.follow(row, np.array(tokens, np.int32))
        if followed < len(tokens) and not self._walks.done(row):
            self._lost(row, int(tokens[followed]))

    def say_each(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Each of these rows has said one token."""
        if self._walks is None:
            return
        outcomes = self._walks.advance(rows, tokens)
        for place in np.flatnonzero(outcomes == REFUSED).tolist():
            if not self._walks.done(int(rows[place])):
                self._lost(int(rows[place]), int(tokens[place]))

    def apply(self, logits: Tensor, rows: NDArray[np.int32], places: NDArray[np.int32]) -> Tensor:
        """Leave what each of `rows` may say in its row of the logits, which is `places`, in place."""
        walks = self._walks
        if walks is None or not len(rows):
            return logits
        keep(logits, places, walks.rules(rows))
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            if walks.done(row) and len(self._ends[row]):
                force(logits, place, self._ends[row])
        return logits

    def at(self, row: int) -> ListedMatcher:
        """Another at the row's place, for tokens that are not said yet."""
        from gpuinfer.text.language.trie.matcher import ListedMatcher

        if self._walks is None:
            raise ValueError(f"row {row} has no list.")
        return ListedMatcher.of(self._walks, row)

    def _lost(self, row: int, token: int) -> None:
        log.error("token %d was drawn, which the list of its request does not allow: it is followed no more.", token)
        self.leave(row)

    def _matcher(self, listed: Listed) -> ListedMatcher:
        from gpuinfer.text.language.trie.matcher import ListedMatcher

        tries = self._opened()
        return ListedMatcher(tries.said(), tries.trie(listed))

    def _opened(self) -> Tries:
        if self._tries is None:
            from gpuinfer.text.language.files import read_settings
            from gpuinfer.text.language.subwords import open_subwords
            from gpuinfer.text.language.trie.trie import Tries

            codec = open_subwords(self._folder, self._family, read_settings(self._folder))
            self._tries = Tries(codec, self._vocabulary)
        return self._tries
