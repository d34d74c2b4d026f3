"""Kernels of lists between tags: building a trie, matching its tag, and the next tokens of rows.

A compiled list is one array of int32, the image, which kernels read by its address, as each row has its own. Nodes are
numbered level by level; node 0 is the beginning of a line. The children of a node have consecutive numbers, in the
order of their tokens, so an edge needs no number of its own. The tag before the list may be spelled by any tokens: an
automaton matches the bytes that they add to the text (Knuth, Morris and Pratt 1977, Fast pattern matching in strings).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gpuinfer.models.kernel_cache import called_only, compiler

# mypy: ignore-errors

compiled = compiler(sorted(Path(__file__).parent.glob("cpu_*.py")), nogil=True, _nrt=False, error_model="numpy")
called = called_only(_nrt=False, error_model="numpy")
inlined = called_only(_nrt=False, error_model="numpy", forceinline=True)

# Fields of the image: lengths, then where each part begins.
NODES, WORDS, LENGTH, ENDS, MOST = range(5)  # LENGTH: bytes of the tag; MOST: tokens that any node allows at most
FIRST, TOKEN, NEED, ITEM, SETS, GOTO, BAR_STARTS, BARS = range(5, 13)
HEADER = 16
# FIRST [nodes + 1]: the first child; TOKEN [nodes]: what leads there; SETS [sets, words]: sets of units, a bit for each
# GOTO [length, 256]: the tag's automaton; BAR_STARTS [length + 2], BARS: barred tokens by its state
OPEN = (
    -1
)  # NEED: the end of the list can be reached. Else the one unit of all items below; under -1: -2 - (a set of units)
NO_ITEM, END = -1, -2  # ITEM: else the unit of the item that is complete there; under -2: -3 - (a set of units)


@intrinsic
def peek(typing, address, index):
    """Number `index` of the int32 array at an address, whose owner keeps it alive."""

    def generate(context, builder, signature, values):
        numbers = builder.inttoptr(values[0], ir.PointerType(ir.IntType(32)))
        return builder.load(builder.gep(numbers, [values[1]]))

    return types.int32(types.int64, types.int64), generate


@compiled
def grow_trie(tokens, starts, first, token, line, low, high, depth):
    """Fill `first` [nodes + 1], `token` [nodes] and `line` [nodes], the line that is complete there or -1. The number
    of nodes.

    tokens: int32, of all lines, which are sorted, and of which no two are equal; starts: int64 [lines + 1] low, high,
    depth: int32 [nodes], work space
    """
    count, node = 1, 0
    token[0], low[0], high[0], depth[0] = -1, 0, starts.shape[0] - 1, 0
    while node < count:
        at, end, deep = low[node], high[node], depth[node]
        first[node], line[node] = count, -1
        if at < end and starts[at + 1] - starts[at] == deep:
            line[node] = at
            at += 1
        while at < end:
            same = tokens[starts[at] + deep]
            token[count], low[count], depth[count] = same, at, deep + 1
            while at < end and tokens[starts[at] + deep] == same:
                at += 1
            high[count] = at
            count += 1
        node += 1
    first[count] = count
    return count


@compiled
def gather_units(nodes, first, line, codes, sets, used_sets, need, item):
    """Fill `need` and `item` [nodes] from the lines' `codes`, which are those of `item`. The number of sets.

    sets: int32 [sets, words], of which `used_sets` are filled; a node with a new combination of units gets another
    """
    for node in range(nodes - 1, -1, -1):
        item[node] = codes[line[node]] if line[node] >= 0 else NO_ITEM
        below, mixed = nothing_yet(item[node]), False
        for child in range(first[node], first[node + 1]):
            other = need[child]
            if below == EMPTY or other == OPEN:
                below = other
            elif below != other:
                mixed = True
        if below != OPEN and mixed:
            below = -2 - used_sets
            unite(node, first, need, item[node], sets, used_sets)
            used_sets += 1
        need[node] = below
    return used_sets


EMPTY = -(1 << 30)


@called
def nothing_yet(item):
    """The need of an item that is complete, without that of its children."""
    if item == END:
        return OPEN
    if item == NO_ITEM:
        return EMPTY
    return item if item >= 0 else item + 1


@called
def unite(node, first, need, item, sets, row):
    """The set of all units at and below the node."""
    add_units(sets, row, nothing_yet(item))
    for child in range(first[node], first[node + 1]):
        add_units(sets, row, need[child])


@called
def add_units(sets, row, need):
    if need == EMPTY:
        return
    if need >= 0:
        sets[row, need >> 5] |= 1 << (need & 31)
        return
    for word in range(sets.shape[1]):
        sets[row, word] |= sets[-2 - need, word]


NOTHING, TEXT, BYTE = 0, 1, 2  # kinds of tokens: without text, text, one byte of a run (see `detokenizer`)
BROKEN = 9  # a run of bytes that is no UTF-8: all of them are replacement characters
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
    """Collect the tokens that from this state complete the tag and have more bytes, and where in `data` those begin.

    goto: int32 [length, 256]. Returns the count, which may exceed the room: only those that fit are written.
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
def landing_node(base, data, starts, place, end):
    """The node that `data[place:end]` leads to from the beginning of a line, by the longest token at each step; -1:
    none.
    """
    node, first, token = np.int64(0), peek(base, FIRST), peek(base, TOKEN)
    while place < end:
        best, longest = np.int64(-1), 0
        for child in range(peek(base, first + node), peek(base, first + node + 1)):
            own = peek(base, token + child)
            size = starts[own + 1] - starts[own]
            if size > longest and place + size <= end and same_bytes(data, starts[own], data, place, size):
                best, longest = np.int64(child), size
        if best < 0:
            return np.int64(-1)
        node = best
        place += longest
    return node


@compiled
def endings(tokens, starts, texts, text_starts, token_starts, data, places):
    """How many leading tokens of each line to drop so that the rest has the bytes of the line's text; -1: impossible.

    tokens: int32, those of line i from `starts[i]`; texts: uint8, from `text_starts[i]`; places: int64 [lines]
    """
    for line in range(starts.shape[0] - 1):
        place, at, sound = starts[line + 1], text_starts[line + 1], True
        while sound and place > starts[line] and at > text_starts[line]:
            place -= 1
            token = tokens[place]
            sound = 0 <= token < token_starts.shape[0] - 1
            if sound:
                size = token_starts[token + 1] - token_starts[token]
                at -= size
                sound = size > 0 and at >= text_starts[line] and same_bytes(data, token_starts[token], texts, at, size)
        places[line] = place - starts[line] if sound and at == text_starts[line] else -1


@called
def same_bytes(data, one, others, other, size):
    place = 0
    while place < size and data[one + place] == others[other + place]:
        place += 1
    return place == size


@compiled
def bar_tokens(base, data, starts, spills, ends, letter, barred):
    """Which tokens that continue after the tag, given by where in `data` they do, lead to no node. All lines begin with
    `letter`.
    """
    for place in range(spills.shape[0]):
        node = landing_node(base, data, starts, spills[place], ends[place])
        barred[place] = data[spills[place]] != letter or node < 0


@called
def next_state(base, state, byte):
    """The automaton's next state; the tag's length: the tag is complete."""
    return peek(base, peek(base, GOTO) + state * 256 + byte)


@called
def length_of(base):
    return peek(base, LENGTH)


FREE, ONLY, ALL_BUT = 0, 1, 2  # kinds of rules: any token; only the row's ids; all but the row's ids
GOES_ON, COMPLETE, REFUSED = 0, 1, 2
ONE = np.int32(1)


@compiled
def next_tokens(rows, places, used, kinds, starts, ids):
    """The next tokens of each row: `kinds` int8 [rows], `starts` int32 [rows + 1], `ids` int32, ascending in a row."""
    count = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        starts[i], kinds[i] = count, FREE
        base, node = places[row].image, np.int64(places[row].node)
        if base == 0 or places[row].done:
            continue
        if node >= 0:
            kinds[i] = ONLY
            count = allowed_tokens(base, node, used[row], ids, count)
        else:
            count = barred_tokens(base, places[row], ids, count)
            kinds[i] = ALL_BUT if count > starts[i] else FREE
    starts[rows.shape[0]] = count


@called
def allowed_tokens(base, node, used, ids, count):
    """Tokens that lead to an item with an unused unit, or to the end. After a complete item the next line may begin."""
    first, token = peek(base, FIRST), peek(base, TOKEN)
    own, own_end = peek(base, first + node), peek(base, first + node + 1)
    item = peek(base, peek(base, ITEM) + node)
    unit = NO_ITEM if item == NO_ITEM else free_unit(base, item, used)
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
def free_unit(base, item, used):
    """The unit that an item takes: the first of its unused units; -1: all are used."""
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
    """1 if an item below the node has a unit that is neither used nor `taken`, or the end is below; else 0."""
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
def barred_tokens(base, place, ids, count):
    """Tokens that would complete the tag and go on as no list begins."""
    length, state = length_of(base), np.int64(place.state)
    if at_beginning(place):
        state = np.int64(length)
    elif 0 < place.run < BROKEN:
        state = np.int64(0)  # any text token turns the run into replacement characters
    starts, bars = peek(base, BAR_STARTS), peek(base, BARS)
    for at in range(peek(base, starts + state), peek(base, starts + state + 1)):
        ids[count] = peek(base, bars + at)
        count += 1
    return count


@inlined
def at_beginning(place):
    """At the beginning of a text, where tokens may have other bytes, none may complete the tag and go on after it."""
    return place.first or place.strip > 0


@compiled
def advance_rows(rows, tokens, places, used, spelt, outcomes):
    """Append a token to each row, none if negative. `outcomes` int8 [rows]: GOES_ON, COMPLETE or REFUSED."""
    for i in range(rows.shape[0]):
        outcomes[i] = GOES_ON
        if places[rows[i]].image != 0 and tokens[i] >= 0:
            outcomes[i] = advance_row(places[rows[i]], used[rows[i]], np.int64(tokens[i]), spelt)


@compiled
def advance_all(row, tokens, places, used, spelt, nodes):
    """Append all these tokens to one row; `nodes` int32 [tokens] gets its node before each. How many were allowed."""
    for i in range(tokens.shape[0]):
        nodes[i] = places[row].node
        if advance_row(places[row], used[row], np.int64(tokens[i]), spelt) == REFUSED:
            return i
    return tokens.shape[0]


@called
def advance_row(place, used, token, spelt):
    if place.done:
        return REFUSED
    return advance_free(place, used, token, spelt) if place.node < 0 else advance_listed(place, used, token)


@called
def advance_listed(place, used, token):
    base, node = place.image, np.int64(place.node)
    child = child_of(base, node, token)
    if child >= 0 and may_enter(base, child, used, NO_ITEM):
        return arrive(place, used, child)
    item = peek(base, peek(base, ITEM) + node)
    unit = NO_ITEM if item == NO_ITEM else free_unit(base, item, used)
    child = child_of(base, np.int64(0), token)
    if unit < 0 or child < 0 or not may_enter(base, child, used, unit):
        return REFUSED
    used[unit >> 5] |= ONE << np.int32(unit & 31)
    return arrive(place, used, child)


@called
def child_of(base, node, token):
    """The child that a token leads to, by binary search; -1: none."""
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
    """Put the row at a node of the list. After the list's end the text is free again, or over."""
    base = place.image
    place.node = node
    if peek(base, peek(base, ITEM) + node) != END:
        return GOES_ON
    place.node, place.state, place.run = -1, 0, 0
    place.done = peek(base, ENDS)
    return COMPLETE if place.done else GOES_ON


@called
def advance_free(place, used, token, spelt):
    """Append a token of free text. One that completes the tag leads into the list, by its bytes after the tag."""
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
        state = next_state(base, np.int64(state), byte)
    node = np.int64(-1)
    if state == length:
        if at == end:
            node = np.int64(0)
        elif not at_beginning(place):
            node = landing_node(base, data, starts, at, end)
        if node < 0:
            return REFUSED
    place.first, place.strip, place.run, place.state = 0, strip, run, state
    if node < 0:
        return GOES_ON
    for word in range(used.shape[0]):
        used[word] = 0
    return arrive(place, used, node)
