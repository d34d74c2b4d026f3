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
