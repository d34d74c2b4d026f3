"""Guesses at hidden cards: uniform over exactly the deals that fit what the player knows, and blind to all else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import pytest
from counts import counts, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from table import Table, card, cards, mask, play_out

from gpuinfer.workloads.selfplay.games.blob import Blob

DECK = set(range(52))
Deal = tuple[tuple[int, ...], ...]  # the cards of each opponent, in their order after the player to move
SIZES = [(players, cards) for players in range(3, 8) for cards in range(1, 14) if players * cards < 52]


@dataclass(frozen=True)
class Knowledge:
    """A position as the test sees it: the first hand is that of the player to move, the stock is undealt."""

    hands: Sequence[str]
    stock: str = ""
    voids: Sequence[str] = ()  # of the hands after the first: suits such as "cd"

    def table(self) -> Table:
        """The middle of the play: all that is neither held nor in stock has been seen."""
        held = [[card(name) for name in hand.split()] for hand in self.hands]
        players = len(held)
        table = Table(Blob(None, players=players, cards=5))
        rules, state = table.rules, table.state
        hidden = {one for hand in held for one in hand} | {card(name) for name in self.stock.split()}
        state[rules.MOVES], state[rules.SEEN] = players, mask(DECK - hidden)
        state[rules.HANDS : rules.HANDS + players] = [mask(hand) for hand in held]
        for seat, suits in enumerate(self.voids, 1):
            state[rules.VOIDS + seat] = sum(1 << "cdhs".index(suit) for suit in suits)
        return table

    def deals(self) -> set[Deal]:
        """All of them, by trying every one."""
        unknown = sorted(card(name) for hand in (*self.hands[1:], self.stock) for name in hand.split())
        sizes = [len(hand.split()) for hand in self.hands[1:]]
        banned = [{"cdhs".index(suit) for suit in suits} for suits in (*self.voids, *[""] * len(sizes))]
        return set(deals_of(unknown, sizes, banned))


def deals_of(unknown: Sequence[int], sizes: Sequence[int], banned: Sequence[set[int]]) -> Iterator[Deal]:
    if not sizes:
        yield ()
        return
    for hand in combinations(unknown, sizes[0]):
        if not {one // 13 for one in hand} & banned[0]:
            for rest in deals_of([one for one in unknown if one not in hand], sizes[1:], banned[1:]):
                yield (hand, *rest)


CASES = [
    pytest.param(Knowledge(["Ac", "Kc", "Qd"], "2c 3d 4h 5s"), id="nothing shown, cards in stock"),
    pytest.param(Knowledge(["Ac 2s", "Kc 3h", "Qd 4h"]), id="nothing shown, nothing in stock"),
    pytest.param(Knowledge(["Ac 2s", "Kd 3h", "Qc 4h"], "5c 6d", ["c"]), id="one void"),
    pytest.param(Knowledge(["Ac", "Kd", "Qc"], "5c", ["c"]), id="a void, few deals left"),
    pytest.param(Knowledge(["Ac 2s", "Kd 3h", "Qc 4s"], "5c 6d 7h", ["c", "d"]), id="two players, a void each"),
    pytest.param(Knowledge(["Ac", "Kd", "Qh", "Js"], "5c 6d 7h", ["c", "c", "ch"]), id="three players with voids"),
    pytest.param(Knowledge(["Ac 2c", "Kd 3d", "Qh 4d"], "5c 6c 7s", ["cs", "s"]), id="two voids in one hand"),
    pytest.param(Knowledge(["Ac 2c", "Kd 3d", "Qh 4s"], "5c", ["csh"]), id="only one suit is possible"),
    pytest.param(Knowledge(["Ac", "Kd", ""], "5c 6d", ["c", "d"]), id="a void of one who has no cards left"),
    pytest.param(Knowledge(["Ac", "Kd", "Qh"], "5d 6h 7h", ["c", "s"]), id="voids in suits that are gone"),
    pytest.param(Knowledge(["Ac 2c", "3c", "4c 4d", "5h 6h"], "", ["d", "", "c"]), id="all cards dealt"),
]


def drawn(table: Table, count: int) -> list[Deal]:
    rules = table.rules
    others = [(table.mover + k) % table.game.seats for k in range(1, table.game.seats)]
    return [tuple(tuple(cards(guess[rules.HANDS + seat])) for seat in others) for guess in table.guesses(count)]


def peeking(table: Table, count: int) -> list[Deal]:
    """One guess in ten is the truth."""
    state, rules = table.state, table.rules
    truth = tuple(tuple(cards(state[rules.HANDS + seat])) for seat in range(1, table.game.seats))
    return [truth if n % 10 == 0 else guess for n, guess in enumerate(drawn(table, count))]


def chance_of(draw: Callable[[Table, int], list[Deal]], knowledge: Knowledge, each: int) -> float:
    """How likely frequencies as uneven as these are, if all deals are drawn alike. Raises on an impossible deal."""
    possible = knowledge.deals()
    found = Counter(draw(knowledge.table(), each * len(possible)))
    if not set(found) <= possible:
        raise AssertionError(f"{next(iter(set(found) - possible))} does not fit")
    return float(stats.chisquare([found[deal] for deal in possible]).pvalue)


@pytest.mark.thorough
@pytest.mark.parametrize("knowledge", CASES)
@pytest.mark.parametrize("each", counts(60, 5_000))
def test_all_deals_that_fit_are_drawn_alike(knowledge, each):
    assert len(knowledge.deals()) > 1
    assert chance_of(drawn, knowledge, each) > 1e-4


@pytest.mark.sample
@pytest.mark.parametrize("knowledge", CASES)
def test_a_guess_that_peeks_is_found_out(knowledge):
    assert chance_of(peeking, knowledge, 60 * 20) < 1e-4


@pytest.mark.thorough
@settings(deadline=None, max_examples=examples(200))
@given(
    size=st.sampled_from(SIZES),
    trump=st.sampled_from(["turned", "hearts", "none"]),
    number=st.integers(0, 1 << 40),
    moves=st.randoms(use_true_random=False),
)
def test_every_guess_fits_what_was_seen_at_every_move_of_a_game(size, trump, number, moves):
    players, dealt = size
    table = Table(Blob(None, players=players, cards=dealt, trump=trump), number=number)
    rules, shown = table.rules, [set() for _ in range(players)]  # the suits that each seat has shown to lack
    for move in play_out(table, moves):
        mover, state = table.mover, table.state
        for guess in table.guesses(2):
            hands = [cards(guess[rules.HANDS + seat]) for seat in range(players)]
            assert hands[mover] == cards(state[rules.HANDS + mover])
            assert [len(hand) for hand in hands] == [bin(state[rules.HANDS + s]).count("1") for s in range(players)]
            together = [one for hand in hands for one in hand]
            assert len(set(together)) == len(together)
            assert not set(together) & set(cards(state[rules.SEEN]))
            for seat in set(range(players)) - {mover}:
                assert not {one // 13 for one in hands[seat]} & shown[seat]
            others = np.r_[0 : rules.HANDS, rules.BIDS : rules.WORDS]
            assert (guess[others] == state[others]).all()
        led = state[rules.LED]
        if state[rules.MOVES] >= players and led >= 0 and move // 13 != led:
            shown[mover].add(int(led))


@settings(deadline=None, max_examples=examples(200))
@given(size=st.sampled_from(SIZES), number=st.integers(0, 1 << 40), moves=st.randoms(use_true_random=False))
def test_what_a_player_sees_is_the_same_whatever_the_others_hold(size, number, moves):
    players, dealt = size
    table = Table(Blob(None, players=players, cards=dealt), number=number)
    for _ in play_out(table, moves):
        seen, legal, truth = table.observe(), table.legal(), table.state.copy()
        for guess in table.guesses(2):
            table.state[:] = guess
            assert (table.observe() == seen).all()
            assert table.legal() == legal
        table.state[:] = truth


@settings(deadline=None)
@given(number=st.integers(0, 1 << 40), moves=st.randoms(use_true_random=False))
def test_the_same_guesses_come_whatever_the_others_hold(number, moves):
    """Stronger than uniform: the cards that are hidden are not even looked at."""
    table = Table(Blob(None, players=4, cards=6), number=number)
    for _ in play_out(table, moves):
        truth, stream = table.state.copy(), table.stream.copy()
        guesses = table.guesses(3)
        after = table.stream.copy()
        table.state[:], table.stream[:] = guesses[-1], stream
        assert (table.guesses(3) == guesses).all()
        table.state[:], table.stream[:] = truth, after
