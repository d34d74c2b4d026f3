"""The compiled rules of Blob, and uniform deals of hidden cards to holders of known hand sizes, some of whom are known
to lack certain suits. A set of cards is a 64-bit mask: card = 13 × suit + rank.
"""

import math

import numpy as np

from gpuinfer.workloads.selfplay.bits import compiled, inlined, popcount, random_below, random_unit, trailing_zeros

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


# config
PLAYERS, CARDS, TRUMP_RULE, SCORING = 0, 1, 2, 3
# state: one word each, then seven words (one a seat) each
TURN, MOVES, TRUMP, LED, BEST, WINNER, SEEN, TRICK, BID_SUM, TURNED = range(10)
HANDS, BIDS, TRICKS, VOIDS = 10, 17, 24, 31
WORDS = 38

NO_TRUMP = 4
DECK = np.int64((1 << 52) - 1)
# SPREAD[b]: the eight bits of a byte as eight bytes of 0 or 1, lowest first
SPREAD = np.array([sum(((b >> i) & 1) << (8 * i) for i in range(8)) for b in range(256)], np.uint64)


@compiled
def deal(config, state, stream):
    for i in range(WORDS):
        state[i] = 0
    players = config[PLAYERS]
    left, remaining = DECK, 52
    for seat in range(players):
        state[BIDS + seat] = -1
        for _ in range(config[CARDS]):
            card = nth_card(left, random_below(stream, remaining))
            left &= ~(ONE << card)
            remaining -= 1
            state[HANDS + seat] |= ONE << card
    state[TURNED] = -1
    state[TRUMP] = config[TRUMP_RULE] - 1
    if config[TRUMP_RULE] == 0:
        state[TURNED] = nth_card(left, random_below(stream, remaining))
        state[TRUMP] = state[TURNED] // 13
        state[SEEN] = ONE << state[TURNED]
    state[LED] = -1
    state[BEST] = -1
    state[WINNER] = -1


@compiled
def nth_card(mask, n):
    for _ in range(n):
        mask &= mask - 1
    return trailing_zeros(mask)


@inlined
def to_move(config, state):
    return state[TURN]


@compiled
def legal(config, state, actions):
    count = 0
    if state[MOVES] < config[PLAYERS]:
        forbidden = -1
        if state[MOVES] == config[PLAYERS] - 1:  # the dealer: bids must not add up to the tricks there are
            forbidden = config[CARDS] - state[BID_SUM]
        for bid in range(config[CARDS] + 1):
            if bid != forbidden:
                actions[count] = bid
                count += 1
        return count
    cards = state[HANDS + state[TURN]]
    if state[LED] >= 0:
        following = cards & (SUIT << (13 * state[LED]))
        if following:
            cards = following
    return list_cards(cards, actions)


@compiled
def apply(config, state, action):
    players, seat = config[PLAYERS], state[TURN]
    state[MOVES] += 1
    if state[MOVES] <= players:
        state[BIDS + seat] = action
        state[BID_SUM] += action
        state[TURN] = seat + 1 if seat + 1 < players else 0
        return
    card, suit, bit = np.int64(action), np.int64(action) // 13, ONE << np.int64(action)
    state[HANDS + seat] &= ~bit
    state[SEEN] |= bit
    state[TRICK] |= bit
    if state[LED] < 0:
        state[LED], state[BEST], state[WINNER] = suit, card, seat
    else:
        if suit != state[LED]:
            state[VOIDS + seat] |= ONE << state[LED]
        best_suit = state[BEST] // 13
        if (suit == best_suit and card > state[BEST]) or (suit == state[TRUMP] and best_suit != suit):
            state[BEST], state[WINNER] = card, seat
    seat = seat + 1 if seat + 1 < players else 0
    if popcount(state[TRICK]) == players:
        seat = state[WINNER]
        state[TRICKS + seat] += 1
        state[LED] = state[BEST] = state[WINNER] = -1
        state[TRICK] = 0
        if state[MOVES] == players * (config[CARDS] + 1):
            seat = -1
    state[TURN] = seat


@compiled
def points(config, state, seat):
    """The score as players write it down."""
    bid, tricks = state[BIDS + seat], state[TRICKS + seat]
    if config[SCORING] == 0:
        return 10 + bid if bid == tricks else 0
    return tricks + 10 if bid == tricks else tricks


@compiled
def returns(config, state, values):
    """The score as a share of the highest there is: 0 to 1."""
    for seat in range(config[PLAYERS]):
        values[seat] = points(config, state, seat) / np.float32(10 + config[CARDS])


@compiled
def spread(mask, words, start):
    bits = np.uint64(mask)
    for i in range(8):
        words[start + i] = SPREAD[(bits >> np.uint64(8 * i)) & np.uint64(255)]


@compiled
def observe(config, state, actions, count, row):
    """256 features: four sets of 52 cards, and twelve small numbers behind each. Seats count from the player to move.

    | from | set of cards         | then                                                                          |
    |------|----------------------|-------------------------------------------------------------------------------|
    | 0    | legal actions        | bid + 1 of each of 7 seats, trump suit (one of 4, or none)                    |
    | 64   | own hand             | tricks of each of 7 seats, playing?, cards dealt, tricks left, players, place |
    | 128  | seen by all          | who is winning the trick (one of 7), suit led (one of 4), sum of the bids     |
    | 192  | in the present trick | who dealt (one of 7), five unused                                               |
    """
    players, seat = config[PLAYERS], state[TURN]
    legal_mask = np.int64(0)
    for k in range(count):
        legal_mask |= ONE << np.int64(actions[k])
    words = row.view(np.uint64)
    spread(legal_mask, words, 0)
    spread(state[HANDS + seat], words, 8)
    spread(state[SEEN], words, 16)
    spread(state[TRICK], words, 24)
    for k in range(players):
        other = seat + k if seat + k < players else seat + k - players
        row[52 + k] = state[BIDS + other] + 1
        row[116 + k] = state[TRICKS + other]
        row[180 + k] = other == state[WINNER]
        row[244 + k] = other == players - 1
    row[59 + state[TRUMP]] = 1
    row[123] = state[MOVES] >= players
    row[124] = config[CARDS]
    row[125] = popcount(state[HANDS + seat])
    row[126] = players
    row[127] = popcount(state[TRICK])
    if state[LED] >= 0:
        row[187 + state[LED]] = 1
    row[191] = state[BID_SUM]


@compiled
def determinize(config, state, samples, stream, integers, floats):
    """Exactly uniform over the deals consistent with own hand, cards seen and the voids that players have shown."""
    players, seat = config[PLAYERS], state[TURN]
    hidden = DECK & ~state[SEEN] & ~state[HANDS + seat]
    holders = integers[:7]
    voids = integers[7:14]
    hands = integers[14:21]
    count = 0
    for k in range(1, players):
        other = seat + k if seat + k < players else seat + k - players
        holders[count] = popcount(state[HANDS + other])
        voids[count] = state[VOIDS + other]
        count += 1
    for n in range(samples.shape[0]):
        for i in range(WORDS):
            samples[n, i] = state[i]
        sample_hands(hidden, holders[:count], voids[:count], hands, n == 0, stream, integers[21:], floats)
        for k in range(1, players):
            other = seat + k if seat + k < players else seat + k - players
            samples[n, HANDS + other] = hands[k - 1]
