"""Blob, also known as Oh Hell: bid how many tricks you will take, then take exactly that many."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Setup
from gpuinfer.errors import UsageError
from gpuinfer.workloads.selfplay.game import Game

DECK = 52
TRUMPS = ("turned", "clubs", "diamonds", "hearts", "spades", "none")
SCORINGS = ("blob", "oh-hell")
SUITS, RANKS = "cdhs", "23456789TJQKA"


class Blob(Game):
    """Blob (Oh Hell), a card game of bids and tricks: one hand. Seat 0, left of the dealer, bids and leads first."""

    class Options(api.Options):
        players: int = Field(4, ge=3, le=7, description="players at the table")
        cards: int = Field(5, ge=1, le=13, description="cards dealt to each player")
        trump: Literal["turned", "clubs", "diamonds", "hearts", "spades", "none"] = Field(
            "turned", description="trump suit: that of the card turned after the deal, a fixed one, or none"
        )
        scoring: Literal["blob", "oh-hell"] = Field(
            "blob", description="blob: 10 + bid if exact, else 0; oh-hell: tricks, + 10 if exact"
        )

    rules: ClassVar[str] = "gpuinfer.workloads.selfplay.games.blob_rules"
    options: Options

    def __init__(self, setup: Setup | None = None, /, **options: object) -> None:
        super().__init__(setup, **options)
        players, cards, trump = self.options.players, self.options.cards, self.options.trump
        needed = players * cards + (trump == "turned")
        if needed > DECK:
            turned = " and a card to turn" if trump == "turned" else ""
            raise UsageError(
                f"{players} players × {cards} cards{turned} need {needed} cards, and the deck has {DECK}. "
                f"Try --cards {(DECK - (trump == 'turned')) // players}."
            )
        self.seats = players
        self.actions = DECK
        self.max_legal = cards + 1
        self.max_moves = players * (cards + 1)
        self.features = 256
        self.words = 38
        self.config = np.array([players, cards, TRUMPS.index(trump), SCORINGS.index(self.options.scoring)], np.int64)
        self.scratch = (2 * 14**4 + 128, 14**4)

    def show(self, position: np.ndarray, seat: int) -> str:
        """Bids and tricks of all players, the trick, and this seat's hand."""
        from gpuinfer.workloads.selfplay.games import blob_rules as rules  # needs Numba: half a second

        trump, winner = int(position[rules.TRUMP]), int(position[rules.WINNER])
        lines = [f"trump: {'none' if trump == rules.NO_TRUMP else TRUMPS[1 + trump]}"]
        for other in range(self.seats):
            bid, tricks = int(position[rules.BIDS + other]), int(position[rules.TRICKS + other])
            who = f"player {other + 1}{' (you)' if other == seat else ''}"
            best = ", has the best card of this trick" if other == winner else ""
            lines.append(f"{who}: {f'bid {bid}, has {tricks}' if bid >= 0 else 'has not bid'}{best}")
        trick, hand = _cards(int(position[rules.TRICK])), _cards(int(position[rules.HANDS + seat]))
        return "\n".join([*lines, f"on the table: {trick or 'nothing'}", f"your hand: {hand}"])

    def action_name(self, position: np.ndarray, action: int) -> str:
        """A bid as its number, a card by rank and suit: Th is the ten of hearts."""
        from gpuinfer.workloads.selfplay.games import blob_rules as rules

        return str(action) if position[rules.MOVES] < self.seats else _card(action)


def _cards(mask: int) -> str:
    return " ".join(_card(card) for card in range(DECK) if mask >> card & 1)


def _card(card: int) -> str:
    return f"{RANKS[card % 13]}{SUITS[card // 13]}"
