"""A game on the table: one position, played by hand through the compiled rules that the search uses."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterable, Iterator

import numpy as np

from gpuinfer.workloads.selfplay import bits
from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.games.blob import Blob


class Table:
    """Deals at once; the same `seed` and `number` give the same deal as the search's game of that number."""

    def __init__(self, game: Game, seed: int = 0, number: int = 0) -> None:
        self.game = game
        self.rules = importlib.import_module(game.rules)
        self.state = np.zeros(game.words, np.int64)
        self.stream = np.zeros(2, np.uint64)
        self._actions = np.zeros(game.max_legal, np.int16)
        self._scratch = np.zeros(game.scratch[0], np.int64), np.zeros(game.scratch[1], np.float64)
        bits.seed_stream(self.stream, seed, number)
        self.rules.deal(game.config, self.state, self.stream)

    @property
    def mover(self) -> int:
        return int(self.rules.to_move(self.game.config, self.state))

    @property
    def over(self) -> bool:
        return self.mover < 0

    def legal(self) -> list[int]:
        count = self.rules.legal(self.game.config, self.state, self._actions)
        return self._actions[:count].tolist()

    def play(self, *actions: int) -> None:
        for action in actions:
            self.rules.apply(self.game.config, self.state, np.int16(action))

    def returns(self) -> list[float]:
        values = np.zeros(self.game.seats, np.float32)
        self.rules.returns(self.game.config, self.state, values)
        return values.tolist()

    def observe(self) -> np.ndarray:
        row = np.zeros(self.game.features, self.game.feature_dtype)
        count = self.rules.legal(self.game.config, self.state, self._actions)
        self.rules.observe(self.game.config, self.state, self._actions, count, row)
        return row

    def guesses(self, count: int) -> np.ndarray:
        """Positions that the player to move thinks possible, int64 [count, words]."""
        samples = np.zeros((count, self.game.words), np.int64)
        self.rules.determinize(self.game.config, self.state, samples, self.stream, *self._scratch)
        return samples


def play_out(table: Table, random_moves: random.Random) -> Iterator[int]:
    """Play at random to the end; each move, before it is made."""
    while not table.over:
        move = random_moves.choice(table.legal())
        yield move
        table.play(move)


def blob_table(hands: Iterable[Iterable[int]], turned: int = -1, **options: object) -> Table:
    """A hand of Blob with these cards: `13 × suit + rank`, the first hand that of the player left of the dealer."""
    masks = [mask(hand) for hand in hands]
    table = Table(Blob(None, players=len(masks), cards=bin(masks[0]).count("1"), **options))
    rules = table.rules
    table.state[rules.HANDS : rules.HANDS + len(masks)] = masks
    if turned >= 0:
        table.state[rules.TURNED], table.state[rules.TRUMP] = turned, turned // 13
        table.state[rules.SEEN] = 1 << turned
    return table


def mask(cards: Iterable[int]) -> int:
    return sum(1 << card for card in cards)


def cards(mask: int) -> list[int]:
    return [card for card in range(52) if int(mask) >> card & 1]


def card(name: str) -> int:
    """`"7h"`: rank and suit, as the rules number them."""
    return 13 * "cdhs".index(name[1]) + "23456789TJQKA".index(name[0])
