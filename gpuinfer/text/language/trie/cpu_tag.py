"""A tag in free text, which tokens may spell in any way: an automaton over the bytes that tokens add to a text.

Knuth, Morris and Pratt (1977, Fast pattern matching in strings), as a table of transitions.
"""

from __future__ import annotations

import numpy as np

from gpuinfer.text.language.trie.cpu_image import FIRST, GOTO, LENGTH, TOKEN, called, compiled, peek

# mypy: ignore-errors

NOTHING, TEXT, BYTE = 0, 1, 2  # what a token is: nothing in a text, a piece of it, one byte of a run (`spelling`)
BROKEN = 9  # a run of bytes that is no UTF-8: each is a replacement character, those before it too
SPACE = 32


@called
def after_byte(run, byte):
    """The state of a run of UTF-8 after one more byte: 0 is between two characters."""
    if run == 0:
        if byte < 0x80:
            return 0
        if byte == 0xE0:
            return 4
        if byte == 0xED:
            return 5
        if byte == 0xF0:
            return 6
        if byte == 0xF4:
            return 7
        if 0xC2 <= byte <= 0xDF:
            return 1
        if 0xE1 <= byte <= 0xEF:
            return 2
        return 3 if 0xF1 <= byte <= 0xF3 else BROKEN
    low = 0xA0 if run == 4 else 0x90 if run == 6 else 0x80
    high = 0x9F if run == 5 else 0x8F if run == 7 else 0xBF
    if not low <= byte <= high:
        return BROKEN
    if run <= 3:
        return run - 1
    return 1 if run <= 5 else 2


@compiled
def bordering(goto, data, starts, kinds, strip, state, states, tokens, offsets, count):
    """Note the tokens that from this state complete the tag and go on after it, and where in `data` that begins.

    goto: int32 [length, 256]; how many notes there are then, also when they do not fit
    """
    length = goto.shape[0]
    for token in range(starts.shape[0] - 1):
        at, place, left = min(state, length) % length, starts[token], strip
        while place < starts[token + 1] and at < length:
            byte = data[place]
            place += 1
            if left > 0:
                if byte == SPACE:
                    left -= 1
                    continue
                left = 0
            at = goto[at, byte]
        if at == length and place < starts[token + 1] and kinds[token] == TEXT:
            if count < tokens.shape[0]:
                states[count], tokens[count], offsets[count] = state, token, place
            count += 1
    return count


@called
def land(base, data, starts, place, end):
    """The node of the list that `data[place:end]` leads to from the beginning of a line, token by token, of several the
    longest; -1 when tokens end elsewhere.
    """
    node, first, token = np.int64(0), peek(base, FIRST), peek(base, TOKEN)
    while place < end:
        best, longest = np.int64(-1), 0
        for child in range(peek(base, first + node), peek(base, first + node + 1)):
            own = peek(base, token + child)
            size = starts[own + 1] - starts[own]
            if size > longest and place + size <= end and alike(data, starts[own], data, place, size):
                best, longest = np.int64(child), size
        if best < 0:
            return np.int64(-1)
        node = best
        place += longest
    return node


@compiled
def endings(tokens, starts, texts, text_starts, said_starts, data, places):
    """Of lines of tokens, how many to leave out at the beginning so that the rest says just the line's text; else -1.

    tokens: int32, those of line i from `starts[i]`; texts: uint8, from `text_starts[i]`; places: int64 [lines]
    """
    for line in range(starts.shape[0] - 1):
        place, at, sound = starts[line + 1], text_starts[line + 1], True
        while sound and place > starts[line] and at > text_starts[line]:
            place -= 1
            token = tokens[place]
            sound = 0 <= token < said_starts.shape[0] - 1
            if sound:
                size = said_starts[token + 1] - said_starts[token]
                at -= size
                sound = size > 0 and at >= text_starts[line] and alike(data, said_starts[token], texts, at, size)
        places[line] = place - starts[line] if sound and at == text_starts[line] else -1


@called
def alike(data, one, others, other, size):
    place = 0
    while place < size and data[one + place] == others[other + place]:
        place += 1
    return place == size


@compiled
def bar(base, data, starts, spills, ends, letter, barred):
    """Which of the borders, given by where in `data` the rest of their token is, lead nowhere in the list. All lines
    begin with `letter`.
    """
    for place in range(spills.shape[0]):
        barred[place] = data[spills[place]] != letter or land(base, data, starts, spills[place], ends[place]) < 0


@called
def step(base, state, byte):
    """The automaton's next state; LENGTH: the tag is complete."""
    return peek(base, peek(base, GOTO) + state * 256 + byte)


@called
def length_of(base):
    return peek(base, LENGTH)
