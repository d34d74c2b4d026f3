"""Which tokens each token of an answer was drawn from: what a trainer needs to compute its probability again.

A policy is trained on the probabilities of what it was drawn from. With a list these are of few tokens; over the whole
vocabulary they would be others, and their gradients push at tokens that could not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Listed
from gpuinfer.text.language.trie.matcher import ALL_BUT, ONLY, ROW, ListedMatcher
from gpuinfer.text.language.trie.tokens import Ints
from gpuinfer.text.language.trie.trie import Tries
from gpuinfer.text.language.trie.walks import REFUSED

Support = tuple[Ints, bool]  # tokens, ascending; and whether these alone could come, or all but these
ANYTHING: Support = (np.zeros(0, np.int32), False)


def support(listed: Listed, tries: Tries, tokens: Sequence[int], nodes: Sequence[int] | None = None) -> list[Support]:
    """Of each token of an answer what it was drawn from. Where the text was free, that is all but few or none.

    tries: of the model that drew it, such as `Language.tries()`. nodes: `Completion.nodes`, which the answer has if it
    was drawn by the same list and vocabulary. Raises `BadPrompt` for tokens that the list does not allow, and for other
    nodes.
    """
    matcher = ListedMatcher(tries.said(), tries.trie(listed))
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
