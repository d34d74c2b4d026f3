"""Uniform deals of hidden cards to holders of known hand sizes, some of whom are known to lack certain suits.

Cards of one suit are alike as far as the constraints go, so a deal is drawn in two steps: how many cards of each suit
each holder gets, with the number of deals that realise it as its weight; then which ones. The weights come from a
recursion over the holders with voids only. With c[s] cards of suit s still to be dealt,

    ways(holder, c) = sum over n with |n| = hand size, n[s] = 0 in void suits, of
                      prod_s C(c[s], n[s]) × ways(next holder, c - n),          ways(after the last, c) = 1

since what is left goes to the unconstrained holders in a number of ways that does not depend on c. Every deal has the
same probability by construction: no rejection, no weights left over.
"""

import math

import numpy as np

from gpuinfer.workloads.selfplay.bits import compiled, popcount, random_below, random_unit, trailing_zeros

RADIX = 14  # a suit has 0 to 13 cards left
STATES = RADIX**4
SUIT = np.int64(0x1FFF)
ONE = np.int64(1)
CHOOSE = np.array([[math.comb(n, k) for k in range(RADIX)] for n in range(RADIX)], np.float64)


@compiled
def sample_hands(hidden, sizes, voids, hands, fresh, stream, integers, floats):
    """Draw `hands`, a mask for each holder, from the cards `hidden`. The cards that are left stay undealt.

    `sizes` and `voids` (a bit for each suit) describe the holders. With `fresh` false, the position is that of the call
    before, and its table of ways is used again. Scratch, zero at first: integers [2 × 14⁴ + 53], floats [14⁴].
    """
    cards = integers[:52]
    left = hidden
    if shown_void(hidden, sizes, voids):
        if fresh:
            count_ways(hidden, sizes, voids, integers[52:], floats)
        left = deal_constrained(hidden, sizes, voids, hands, cards, stream, integers[52:], floats)
    total = list_cards(left, cards)
    for holder in range(len(sizes)):
        if is_constrained(hidden, sizes[holder], voids[holder]):
            continue
        hands[holder], total = draw(cards, total, sizes[holder], stream)


@compiled
def is_constrained(hidden, size, void):
    """Whether a void can matter: the holder has cards, and some hidden card is of a suit that it lacks."""
    if size == 0:
        return False
    for suit in range(4):
        if void >> suit & 1 and hidden & (SUIT << (13 * suit)):
            return True
    return False


@compiled
def shown_void(hidden, sizes, voids):
    for holder in range(len(sizes)):
        if is_constrained(hidden, sizes[holder], voids[holder]):
            return True
    return False


@compiled
def list_cards(mask, cards):
    count = 0
    while mask:
        cards[count] = trailing_zeros(mask)
        mask &= mask - 1
        count += 1
    return count


@compiled
def draw(cards, total, size, stream):
    """Take `size` of the first `total` cards at random: a mask, and how many are left (moved to the front)."""
    mask = np.int64(0)
    for _ in range(size):
        i = random_below(stream, total)
        total -= 1
        mask |= ONE << cards[i]
        cards[i] = cards[total]
    return mask, total


@compiled
def key_of(mask):
    key = np.int64(0)
    for suit in range(3, -1, -1):
        key = key * RADIX + popcount(mask & (SUIT << (13 * suit)))
    return key


@compiled
def unpack(key):
    a = key // RADIX
    b = a // RADIX
    c = b // RADIX
    return key - a * RADIX, a - b * RADIX, b - c * RADIX, c


@compiled
def largest(count, void, suit, left):
    """How many cards of a suit a holder can take at most."""
    return 0 if void >> suit & 1 else min(count, left)


@compiled
def count_ways(hidden, sizes, voids, integers, floats):
    """Fill floats[key] with the ways from every reachable count of cards; a level for each constrained holder.

    The number of cards left tells the level, so one table serves all levels.
    """
    seen, keys = integers[:STATES], integers[STATES:]
    # the keys of the last call, from keys[1], are forgotten first: keys[0] says how many
    for i in range(1, keys[0] + 1):
        seen[keys[i]] = 0
    count, start = 1, 1
    keys[1] = key_of(hidden)
    seen[keys[1]] = 1
    for holder in range(len(sizes)):
        if not is_constrained(hidden, sizes[holder], voids[holder]):
            continue
        end = count
        for i in range(start, end + 1):
            count = add_successors(keys, count, seen, keys[i], sizes[holder], voids[holder])
        start = end + 1
    keys[0] = count
    for i in range(start, count + 1):
        floats[keys[i]] = 1.0
    # backwards: levels were appended in order, and a level's ways need only those of the level after it
    position = start - 1
    for holder in range(len(sizes) - 1, -1, -1):
        if not is_constrained(hidden, sizes[holder], voids[holder]):
            continue
        level = cards_in(keys[position])
        while position >= 1 and cards_in(keys[position]) == level:
            floats[keys[position]] = ways_from(keys[position], sizes[holder], voids[holder], floats)
            position -= 1


@compiled
def cards_in(key):
    a, b, c, d = unpack(key)
    return a + b + c + d


@compiled
def add_successors(keys, count, seen, key, size, void):
    a, b, c, d = unpack(key)
    for i in range(largest(a, void, 0, size) + 1):
        for j in range(largest(b, void, 1, size - i) + 1):
            for k in range(largest(c, void, 2, size - i - j) + 1):
                m = size - i - j - k
                if m > largest(d, void, 3, m):
                    continue
                after = key - i - RADIX * (j + RADIX * (k + RADIX * m))
                if not seen[after]:
                    seen[after] = 1
                    count += 1
                    keys[count] = after
    return count


@compiled
def ways_from(key, size, void, floats):
    a, b, c, d = unpack(key)
    total = 0.0
    for i in range(largest(a, void, 0, size) + 1):
        for j in range(largest(b, void, 1, size - i) + 1):
            for k in range(largest(c, void, 2, size - i - j) + 1):
                m = size - i - j - k
                if m > largest(d, void, 3, m):
                    continue
                after = key - i - RADIX * (j + RADIX * (k + RADIX * m))
                total += CHOOSE[a, i] * CHOOSE[b, j] * CHOOSE[c, k] * CHOOSE[d, m] * floats[after]
    return total


@compiled
def choose_counts(key, size, void, stream, floats):
    """Draw how many cards of each suit a holder gets, in proportion to the deals behind it."""
    a, b, c, d = unpack(key)
    threshold = random_unit(stream) * floats[key]
    chosen = (np.int64(0), np.int64(0), np.int64(0), np.int64(0))
    for i in range(largest(a, void, 0, size) + 1):
        for j in range(largest(b, void, 1, size - i) + 1):
            for k in range(largest(c, void, 2, size - i - j) + 1):
                m = size - i - j - k
                if m > largest(d, void, 3, m):
                    continue
                after = key - i - RADIX * (j + RADIX * (k + RADIX * m))
                ways = CHOOSE[a, i] * CHOOSE[b, j] * CHOOSE[c, k] * CHOOSE[d, m] * floats[after]
                if ways > 0.0:
                    chosen = (i, j, k, m)  # kept past the loop: rounding must not leave the last one out
                    threshold -= ways
                    if threshold < 0.0:
                        return chosen
    return chosen


@compiled
def deal_constrained(hidden, sizes, voids, hands, cards, stream, integers, floats):
    """Deal to the holders with voids; the cards that are left."""
    left = hidden
    for holder in range(len(sizes)):
        if not is_constrained(hidden, sizes[holder], voids[holder]):
            continue
        counts = choose_counts(key_of(left), sizes[holder], voids[holder], stream, floats)
        hand = np.int64(0)
        for suit in range(4):
            total = list_cards(left & (SUIT << (13 * suit)), cards)
            taken, total = draw(cards, total, counts[suit], stream)
            hand |= taken
        hands[holder] = hand
        left &= ~hand
    return left
