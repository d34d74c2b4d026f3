"""The rules of Blob in plain Python: a trick game in which each bids the tricks that it will take.

Cards are 0 to 51, 13 to a suit. Everyone is dealt so many, one more card is turned, and its suit is trump. All bid in
turn; the bids of all must not add up to the tricks there are, which binds the last. Then tricks are played: follow suit
if you can, the highest trump or else the highest card of the suit led takes it, and its player leads. Who took as many
as were bid scores ten and the bid, anyone else nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

DECK = 52
SUIT_CARDS = 13


class Blob:
    """One deal. Seats are 0 up to `players` - 1; seat 0 bids first and leads first."""

    def __init__(self, players: int, cards: int, chance: random.Random) -> None:
        deck = chance.sample(range(DECK), players * cards + 1)
        self.players, self.cards = players, cards
        self.hands = [set(deck[seat * cards : (seat + 1) * cards]) for seat in range(players)]
        self.turned = deck[-1]
        self.bids: list[int] = []
        self.tricks = [0] * players
        self.trick: list[tuple[int, int]] = []  # (seat, card) of the present one
        self.turn = 0

    @property
    def trump(self) -> int:
        return self.turned // SUIT_CARDS

    @property
    def bidding(self) -> bool:
        return len(self.bids) < self.players

    @property
    def over(self) -> bool:
        return sum(self.tricks) == self.cards

    def legal(self) -> Sequence[int]:
        """Bids or cards of the seat whose turn it is, in ascending order; at least one until it is over."""
        if self.bidding:
            last = len(self.bids) == self.players - 1
            return [bid for bid in range(self.cards + 1) if not (last and sum(self.bids) + bid == self.cards)]
        hand = self.hands[self.turn]
        led = [card for card in hand if self.trick and card // SUIT_CARDS == self.trick[0][1] // SUIT_CARDS]
        return sorted(led or hand)

    def play(self, move: int) -> int | None:
        """A legal move. The seat that has taken a trick with it."""
        if self.bidding:
            self.bids.append(move)
            self.turn = (self.turn + 1) % self.players
            return None
        self.hands[self.turn].remove(move)
        self.trick.append((self.turn, move))
        self.turn = (self.turn + 1) % self.players
        if len(self.trick) < self.players:
            return None
        self.turn = max(self.trick, key=lambda one: self._strength(one[1]))[0]
        self.tricks[self.turn] += 1
        self.trick = []
        return self.turn

    def points(self, seat: int) -> int:
        return 10 + self.bids[seat] if self.bids[seat] == self.tricks[seat] else 0

    def _strength(self, card: int) -> tuple[bool, bool, int]:
        suit = card // SUIT_CARDS
        return suit == self.trump, suit == self.trick[0][1] // SUIT_CARDS, card
