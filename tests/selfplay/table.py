"""Positions of Blob on the table, and play at random."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from gpuinfer.testing.reference_search import ReferenceTable as Table
from gpuinfer.workloads.selfplay.games.blob import Blob


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
