"""Lists between tags inside vLLM's engine: their form in `SamplingParams.extra_args`, the state of each request, and
the masks on its logits, for both interfaces of logits processors. Nothing is opened before the first list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from gpuinfer.text.language.detokenizer import Codec
    from gpuinfer.text.language.list_trie import Tries
    from gpuinfer.text.language.list_walks import ListedMatcher, ListRules, ListWalks

KEY, BEGUN = "gpuinfer_listed", "gpuinfer_listed_begun"


def processor_for(v2: bool) -> str:
    """The entry of `logits_processors`, module:class, for an engine with vLLM's second model runner or the first."""
    return f"gpuinfer.backends.vllm_engine.processor_v{2 if v2 else 1}:ListedProcessor"


def extra_args(listed: Listed, begun: Sequence[int] = ()) -> dict[str, Any]:
    """The list as `SamplingParams.extra_args`: plain values, as in JSON and msgpack.

    `begun`: the answer's first tokens, drawn elsewhere; they are the last of the prompt.

    Once the list ends the answer (`ends`), only the request's stop tokens are allowed; a request without any may draw
    any token. The reader of the answer must end it with the list's last token, as our own engine does, with a matcher
    of its own (`Language.matcher`).
    """
    found: dict[str, Any] = {KEY: msgspec.to_builtins(listed)}
    return found | ({BEGUN: list(begun)} if begun else {})


def begun_in(extra: Mapping[str, Any] | None) -> tuple[int, ...]:
    """The answer's first tokens, drawn elsewhere. Raises `BadPrompt`."""
    try:
        return msgspec.convert((extra or {}).get(BEGUN, ()), tuple[int, ...])
    except msgspec.ValidationError as error:
        raise BadPrompt(f"`{BEGUN}` is no list of tokens: {error}. Give it as `extra_args` makes it.") from None


def listed_in(extra: Mapping[str, Any] | None) -> Listed | None:
    """The list in these arguments, if there is one. Raises `BadPrompt` if it is malformed."""
    given = (extra or {}).get(KEY)
    if given is None:
        return None
    try:
        return msgspec.convert(given, Listed)
    except msgspec.ValidationError as error:
        raise BadPrompt(f"`{KEY}` is no list between tags: {error}. Give it as `extra_args` makes it.") from None


ONLY, REFUSED = 1, 2  # as in cpu_trie, which is not imported before the first list


def mask_logits(logits: Tensor, rows: NDArray[np.int32], rules: ListRules | None) -> Tensor:
    """Set all tokens that `rules` forbid in `rows` of `logits`, float32 [any rows, vocabulary], to minus infinity, in
    place.
    """
    import torch

    if rules is None:
        return logits
    count, kinds, starts = int(rules.starts[len(rows)]), rules.kinds[: len(rows)], rules.starts[: len(rows) + 1]
    lengths = starts[1:] - starts[:-1]
    places = np.repeat(rows * np.int64(logits.stride(0)), lengths)
    places += rules.ids[:count]
    flat = logits.as_strided((logits.shape[0] * logits.stride(0),), (1,), logits.storage_offset())
    at, few = torch.from_numpy(places).to(logits.device), rows
    if kinds.min() != ONLY or kinds.max() != ONLY:
        few = rows[kinds == ONLY]
        only = np.repeat(kinds == ONLY, lengths)
        flat[torch.from_numpy(places[~only]).to(logits.device)] = -torch.inf
        at = torch.from_numpy(places[only]).to(logits.device)
    kept = flat.index_select(0, at)
    if len(few) == len(logits):
        logits.fill_(-torch.inf)
    elif len(few):  # by ranges of adjacent rows
        ordered = np.sort(few)
        breaks = np.flatnonzero(np.diff(ordered) > 1)
        firsts = np.concatenate([ordered[:1], ordered[breaks + 1]])
        ends = np.concatenate([ordered[breaks], ordered[-1:]]) + 1
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            logits[first:end].fill_(-torch.inf)
    flat.index_copy_(0, at, kept)
    return logits


log = logging.getLogger("gpuinfer")


def validate_list(params: Any) -> None:
    """Raises `ValueError`, which vLLM reports to the client, for parameters with a malformed list."""
    from gpuinfer.text.language.list_trie import check_list

    try:
        listed, _ = listed_in(params.extra_args), begun_in(params.extra_args)
        if listed is not None:
            check_list(listed)
    except BadPrompt as error:
        raise ValueError(str(error)) from None


class ListedRows:
    """The states of `count` rows, each of a request with a list, or free. `open_codec` is called for the first list."""

    def __init__(self, open_codec: Callable[[], Codec], vocabulary: int, count: int) -> None:
        self._open_codec, self._vocabulary, self._count = open_codec, vocabulary, count
        self._tries: Tries | None = None
        self._walks: ListWalks | None = None
        self._ends: list[Sequence[int]] = [()] * count
        self.listed: set[int] = set()

    @classmethod
    def of(cls, config: Any, count: int) -> ListedRows:
        """Rows for a `VllmConfig`, with the tokenizer that vLLM has for it."""
        model = config.model_config

        def open_codec() -> Codec:
            from vllm.tokenizers import cached_tokenizer_from_config

            from gpuinfer.text.language.transformers_tokenizer import transformers_codec

            return transformers_codec(cached_tokenizer_from_config(model))

        return cls(open_codec, int(model.get_vocab_size()), count)

    def begin(self, row: int, params: Any) -> bool:
        """Assign the row to a request. Whether the request has a valid list."""
        self.leave(row)
        try:
            listed = listed_in(params.extra_args)
            if listed is None:
                return False
            matcher, begun = self._matcher(listed), begun_in(params.extra_args)
        except BadPrompt as error:  # the client got the error from `validate_list`
            log.error("a list between tags is not followed: %s", error)
            return False
        if self._walks is None:
            self._walks = matcher.new_walks(self._count)
        self._walks.seat(row, matcher)
        self.listed.add(row)
        self._ends[row] = sorted({*(params.stop_token_ids or ()), *getattr(params, "all_stop_token_ids", ())})
        self.advance(row, begun)
        return True

    def leave(self, row: int) -> None:
        """Free the row: its request is gone, or no longer constrained."""
        if row in self.listed:
            self.listed.discard(row)
            if self._walks is not None:
                self._walks.leave(row)

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens to the row's answer."""
        if self._walks is None or not len(tokens) or row not in self.listed:
            return
        if self._walks.done(row):  # tokens after the end are ignored
            return
        _, followed = self._walks.follow(row, np.array(tokens, np.int32))
        if followed < len(tokens) and not self._walks.done(row):
            self._lost(row, int(tokens[followed]))

    def advance_each(self, rows: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Append one token to each of these rows."""
        if self._walks is None:
            return
        outcomes = self._walks.advance(rows, tokens)
        for place in np.flatnonzero(outcomes == REFUSED).tolist():
            if not self._walks.done(int(rows[place])):
                self._lost(int(rows[place]), int(tokens[place]))

    def apply(self, logits: Tensor, rows: NDArray[np.int32], places: NDArray[np.int32]) -> Tensor:
        """Mask the logits of `rows`, which are in the rows `places` of `logits`, in place."""
        walks = self._walks
        if walks is None or not len(rows):
            return logits
        mask_logits(logits, places, walks.rules(rows))
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            if walks.done(row) and len(self._ends[row]):  # these tokens alone, with equal logits
                logits[place].fill_(-float("inf"))
                logits[place, list(self._ends[row])] = 0.0
        return logits

    def at(self, row: int) -> ListedMatcher:
        """A matcher in the row's state, to try proposed tokens."""
        from gpuinfer.text.language.list_walks import ListedMatcher

        if self._walks is None:
            raise ValueError(f"row {row} has no list.")
        return ListedMatcher.of(self._walks, row)

    def _lost(self, row: int, token: int) -> None:
        log.error("token %d was drawn, which the list of its request does not allow: it is followed no more.", token)
        self.leave(row)

    def _matcher(self, listed: Listed) -> ListedMatcher:
        from gpuinfer.text.language.list_trie import Tries
        from gpuinfer.text.language.list_walks import ListedMatcher

        if self._tries is None:
            self._tries = Tries(self._open_codec(), self._vocabulary)
        return ListedMatcher(self._tries.token_bytes(), self._tries.trie(listed))
