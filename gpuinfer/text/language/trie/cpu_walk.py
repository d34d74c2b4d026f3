"""Rows on their way through their lists: which tokens each may say next, and what one of them leads to."""

from __future__ import annotations

import numpy as np

from gpuinfer.text.language.trie.cpu_image import (
    BAR_STARTS,
    BARS,
    END,
    ENDS,
    FIRST,
    ITEM,
    NEED,
    NO_ITEM,
    OPEN,
    SETS,
    TOKEN,
    WORDS,
    called,
    compiled,
    inlined,
    peek,
)
from gpuinfer.text.language.trie.cpu_tag import (
    BROKEN,
    BYTE,
    NOTHING,
    SPACE,
    after_byte,
    land,
    length_of,
    step,
)

# mypy: ignore-errors

FREE, ONLY, ALL_BUT = 0, 1, 2  # what a row's ids say: nothing; these alone may come; these may not
GOES_ON, COMPLETE, REFUSED = 0, 1, 2
ONE = np.int32(1)


@compiled
def rules(rows, places, used, kinds, starts, ids):
    """What each row may say next: `kinds` int8 [rows], `starts` int32 [rows + 1], `ids` int32, ascending in a row."""
    count = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        starts[i], kinds[i] = count, FREE
        base, node = places[row].image, np.int64(places[row].node)
        if base == 0 or places[row].done:
            continue
        if node >= 0:
            kinds[i] = ONLY
            count = allowed(base, node, used[row], ids, count)
        else:
            count = barred(base, places[row], ids, count)
            kinds[i] = ALL_BUT if count > starts[i] else FREE
    starts[rows.shape[0]] = count


@called
def allowed(base, node, used, ids, count):
    """Tokens that lead to an item whose unit is not used yet, or to the end. At an item's end the next line begins."""
    first, token = peek(base, FIRST), peek(base, TOKEN)
    own, own_end = peek(base, first + node), peek(base, first + node + 1)
    item = peek(base, peek(base, ITEM) + node)
    unit = NO_ITEM if item == NO_ITEM else unit_of(base, item, used)
    root, root_end = peek(base, first), peek(base, first + 1)
    if unit < 0:
        root = root_end
    while own < own_end or root < root_end:
        if root >= root_end or (own < own_end and peek(base, token + own) < peek(base, token + root)):
            ids[count] = peek(base, token + own)
            count += may_enter(base, own, used, NO_ITEM)
            own += 1
        else:
            ids[count] = peek(base, token + root)
            count += may_enter(base, root, used, unit)
            root += 1
    return count


@called
def unit_of(base, item, used):
    """The unit that an item takes: the first of its units that is not used; -1 when all are."""
    if item >= 0:
        return item if not (used[item >> 5] >> np.int32(item & 31)) & ONE else -1
    words = peek(base, WORDS)
    place = peek(base, SETS) + np.int64(-3 - item) * words
    for word in range(words):
        bits = peek(base, place + word) & ~used[word]
        for bit in range(32):
            if (bits >> np.int32(bit)) & ONE:
                return word * 32 + bit
    return -1


@called
def may_enter(base, node, used, taken):
    """1 when an item there has a unit that is neither used nor `taken`, or the end is there; else 0."""
    need = peek(base, peek(base, NEED) + node)
    if need == OPEN:
        return 1
    if need >= 0:
        return int(need != taken and not (used[need >> 5] >> np.int32(need & 31)) & ONE)
    words = peek(base, WORDS)
    place = peek(base, SETS) + np.int64(-2 - need) * words
    for word in range(words):
        bits = peek(base, place + word) & ~used[word]
        if taken >= 0 and taken >> 5 == word:
            bits &= ~(ONE << np.int32(taken & 31))
        if bits != 0:
            return 1
    return 0


@called
def barred(base, place, ids, count):
    """Tokens that would say the tag and then something that no list begins with."""
    length, state = length_of(base), np.int64(place.state)
    if fresh(place):
        state = np.int64(length)
    elif 0 < place.run < BROKEN:
        state = np.int64(0)  # any text token makes replacement characters of the run
    starts, bars = peek(base, BAR_STARTS), peek(base, BARS)
    for at in range(peek(base, starts + state), peek(base, starts + state + 1)):
        ids[count] = peek(base, bars + at)
        count += 1
    return count


@inlined
def fresh(place):
    """At the beginning of a text, where tokens may say something else: none may complete the tag and go on after it."""
    return place.first or place.strip > 0


@compiled
def advance(rows, tokens, places, used, spelt, outcomes):
    """Each row has said its token; one below 0 is none. `outcomes` int8 [rows]: GOES_ON, COMPLETE or REFUSED."""
    for i in range(rows.shape[0]):
        outcomes[i] = GOES_ON
        if places[rows[i]].image != 0 and tokens[i] >= 0:
            outcomes[i] = say(places[rows[i]], used[rows[i]], np.int64(tokens[i]), spelt)


@compiled
def walk(row, tokens, places, used, spelt, nodes):
    """One row says all these tokens; `nodes` int32 [tokens] gets where it was before each. How many were allowed."""
    for i in range(tokens.shape[0]):
        nodes[i] = places[row].node
        if say(places[row], used[row], np.int64(tokens[i]), spelt) == REFUSED:
            return i
    return tokens.shape[0]


@called
def say(place, used, token, spelt):
    if place.done:
        return REFUSED
    return free(place, used, token, spelt) if place.node < 0 else listed(place, used, token)


@called
def listed(place, used, token):
    base, node = place.image, np.int64(place.node)
    child = child_of(base, node, token)
    if child >= 0 and may_enter(base, child, used, NO_ITEM):
        return arrive(place, used, child)
    item = peek(base, peek(base, ITEM) + node)
    unit = NO_ITEM if item == NO_ITEM else unit_of(base, item, used)
    child = child_of(base, np.int64(0), token)
    if unit < 0 or child < 0 or not may_enter(base, child, used, unit):
        return REFUSED
    used[unit >> 5] |= ONE << np.int32(unit & 31)
    return arrive(place, used, child)


@called
def child_of(base, node, token):
    """The child that a token leads to, by halving; -1 for none."""
    first, tokens = peek(base, FIRST), peek(base, TOKEN)
    low, high = np.int64(peek(base, first + node)), np.int64(peek(base, first + node + 1))
    end = high
    while low < high:
        middle = (low + high) >> 1
        if peek(base, tokens + middle) < token:
            low = middle + 1
        else:
            high = middle
    return low if low < end and peek(base, tokens + low) == token else np.int64(-1)


@called
def arrive(place, used, node):
    """At a node of the list; at its end the text is free again, or over."""
    base = place.image
    place.node = node
    if peek(base, peek(base, ITEM) + node) != END:
        return GOES_ON
    place.node, place.state, place.run = -1, 0, 0
    place.done = peek(base, ENDS)
    return COMPLETE if place.done else GOES_ON


@called
def free(place, used, token, spelt):
    """A token of free text. One that completes the tag leads into the list, by what it says after it."""
    starts, data, kinds, lead_starts, lead_data = spelt
    if token >= kinds.shape[0] or kinds[token] == NOTHING:
        return GOES_ON
    if place.first:
        starts, data = lead_starts, lead_data
    state, strip, run = place.state, place.strip, place.run
    if kinds[token] == BYTE:
        run = BROKEN if run == BROKEN else after_byte(run, np.int32(data[starts[token]]))
        if run == BROKEN:
            place.first = place.strip = place.state = 0
            place.run = run
            return GOES_ON
    else:
        if 0 < run < BROKEN:
            state = strip = 0
        run = 0
    base, length = place.image, length_of(place.image)
    at, end = starts[token], starts[token + 1]
    while at < end and state < length:
        byte = np.int64(data[at])
        at += 1
        if strip > 0:
            if byte == SPACE:
                strip -= 1
                continue
            strip = 0
        state = step(base, np.int64(state), byte)
    node = np.int64(-1)
    if state == length:
        if at == end:
            node = np.int64(0)
        elif not fresh(place):
            node = land(base, data, starts, at, end)
        if node < 0:
            return REFUSED
    place.first, place.strip, place.run, place.state = 0, strip, run, state
    if node < 0:
        return GOES_ON
    for word in range(used.shape[0]):
        used[word] = 0
    return arrive(place, used, node)
