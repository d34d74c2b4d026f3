"""From sorted lines of tokens to a tree, level by level; and what units can still be had below each node."""

from __future__ import annotations

from gpuinfer.text.language.trie.cpu_image import END, NO_ITEM, OPEN, called, compiled

# mypy: ignore-errors


@compiled
def grow(tokens, starts, first, token, line, low, high, depth):
    """Fill `first` [nodes + 1], `token` [nodes] and `line` [nodes], the line that is complete there or -1. How many
    nodes.

    tokens: int32, of all lines, which are sorted, and of which no two are equal; starts: int64 [lines + 1]
    low, high, depth: int32 [nodes], work space
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
def gather(nodes, first, line, codes, sets, used_sets, need, item):
    """Fill `need` and `item` [nodes] from the lines' `codes`, which are those of `item`. How many sets there are then.

    sets: int32 [sets, words], of which `used_sets` are filled; a node with units of its own kind gets another
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
    """What is needed where an item is complete, before its children are looked at."""
    if item == END:
        return OPEN
    if item == NO_ITEM:
        return EMPTY
    return item if item >= 0 else item + 1


@called
def unite(node, first, need, item, sets, row):
    """The set of all units at and below the node."""
    add(sets, row, nothing_yet(item))
    for child in range(first[node], first[node + 1]):
        add(sets, row, need[child])


@called
def add(sets, row, need):
    if need == EMPTY:
        return
    if need >= 0:
        sets[row, need >> 5] |= 1 << (need & 31)
        return
    for word in range(sets.shape[1]):
        sets[row, word] |= sets[-2 - need, word]
