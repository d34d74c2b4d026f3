"""The tag before a list, as an automaton over bytes, and the tokens that say more than the tag."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.language.trie import cpu_tag
from gpuinfer.text.language.trie.tokens import Ints, TokenBytes

NONE: Ints = np.zeros(0, np.int32)
STATES_AT_ONCE = 1 << 14  # notes of tokens that go on after the tag, doubled until all fit


@dataclass(frozen=True, slots=True, eq=False)
class Tag:
    """`goto` int32 [length, 256]. The other three are one entry for each state and token that completes the tag and
    says something after it: ordered by state, then token; `offsets`: where in the vocabulary's data that begins.

    State `length` stands for the very beginning of a text, where tokens may say something else.
    """

    goto: Ints
    states: Ints
    tokens: Ints
    offsets: NDArray[np.int64]


def tag_of(text: str, said: TokenBytes) -> Tag:
    """Takes some 10 ms for 150,000 tokens."""
    goto = automaton(text.encode())
    if not text:
        return Tag(goto, NONE, NONE, np.zeros(0, np.int64))
    room = STATES_AT_ONCE
    while True:
        states, tokens, offsets = np.zeros(room, np.int32), np.zeros(room, np.int32), np.zeros(room, np.int64)
        count = 0
        for state in range(len(goto) + 1):
            fresh = state == len(goto)
            starts, data = said.lead if fresh else (said.starts, said.data)
            strip = said.strip if fresh else 0
            count = cpu_tag.bordering(goto, data, starts, said.kinds, strip, state, states, tokens, offsets, count)
        if count <= room:
            return Tag(goto, states[:count].copy(), tokens[:count].copy(), offsets[:count].copy())
        room = count


def automaton(text: bytes) -> Ints:
    """int32 [length, 256]: how many bytes of the text the bytes so far end with, after each byte more. Knuth, Morris
    and Pratt (1977).
    """
    goto = np.zeros((len(text), 256), np.int32)
    if not text:
        return goto
    goto[0, text[0]] = 1
    fallback = 0
    for state in range(1, len(text)):
        goto[state] = goto[fallback]
        goto[state, text[state]] = state + 1
        fallback = int(goto[fallback, text[state]])
    return goto
