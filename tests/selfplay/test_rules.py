"""The rules of all built-in games: what each promises, what brute force finds, OpenSpiel's rules, and guesses
at hidden cards.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from counts import counts, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy import stats
from table import Table, blob_table, card, cards, mask, play_out

from gpuinfer.errors import UsageError
from gpuinfer.workloads.selfplay.game import is_won_or_lost
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour

SIZES = [(players, cards) for players in range(3, 8) for cards in range(1, 14) if players * cards < 52]
TRUMPS = ("turned", "hearts", "none")
BLOBS = [Blob(None, players=p, cards=c, trump=TRUMPS[(p + c) % 3]) for p, c in SIZES]
MOVES, NUMBERS = st.randoms(use_true_random=False), st.integers(0, 1 << 40)


def words_of(table: Table, start: int) -> list[int]:
    """One word of a position of Blob for each seat."""
    return table.state[start:][: table.game.seats].tolist()


@given(st.sampled_from(BLOBS) | st.just(ConnectFour()), NUMBERS, MOVES)
def test_a_game_goes_as_its_sizes_say_and_its_mask_is_of_legal_actions(game, number, moves):
    table, made = Table(game, number=number), 0
    for made, _ in enumerate(play_out(table, moves), 1):  # noqa: B007 (counted)
        legal = table.legal()
        assert legal == sorted(set(legal)) == np.flatnonzero(table.observe()[: game.actions]).tolist()
        assert len(legal) <= game.max_legal
    assert made <= game.max_moves
    assert max(map(abs, table.returns())) <= 1
    assert is_won_or_lost(table.returns()) or not game.won_or_lost
    if isinstance(game, Blob):
        bids, tricks = (sum(words_of(table, start)) for start in (table.rules.BIDS, table.rules.TRICKS))
        assert (made, tricks) == (game.max_moves, game.options.cards)
        assert bids != game.options.cards
        assert min(table.returns()) >= 0


@given(st.just(ConnectFour()), MOVES)
def test_a_game_that_is_turned_is_the_turned_game(game, moves):
    for features, actions in game.symmetries():
        table, turned = Table(game), Table(game)
        for move in play_out(table, moves):
            assert [actions[one] for one in reversed(turned.legal())] == table.legal()
            np.testing.assert_array_equal(turned.observe(), table.observe()[features])
            turned.play(actions.index(move))
        assert turned.over
        assert turned.returns() == table.returns()


def lines(stones: set[tuple[int, int]]) -> bool:
    """Whether four stand in a row, looked for square by square."""
    steps = [(1, 0), (0, 1), (1, 1), (1, -1)]
    return any(all((c + i * x, r + i * y) in stones for i in range(4)) for c, r in stones for x, y in steps)


@given(MOVES)
def test_connect_four_ends_with_four_in_a_row_or_a_full_board_and_shows_ones_own_stones_first(moves):
    table, stones = Table(ConnectFour()), (set(), set())
    for column in play_out(table, moves):
        assert not any(map(lines, stones))
        heights = Counter(c for side in stones for c, _ in side)
        assert table.legal() == [c for c in range(7) if heights[c] < 6]
        seen = [
            (c, r) in side
            for side in (stones[table.mover], stones[1 - table.mover])
            for c in range(7)
            for r in range(6)
        ]
        assert table.observe()[7:].tolist() == seen
        stones[table.mover].add((column, heights[column]))
    won = [lines(side) for side in stones]
    assert any(won) or sum(map(len, stones)) == 42
    assert table.returns() == [float(won[0]) - won[1], float(won[1]) - won[0]]


def hands(*names: str) -> list[list[int]]:
    return [[card(name) for name in hand.split()] for hand in names]


@pytest.mark.parametrize(("trump", "winner"), [("none", 2), ("spades", 1), ("clubs", 2), ("hearts", 2)])
def test_a_trick_of_blob_goes_to_the_highest_trump_or_card_of_the_suit_led(trump, winner):
    table = blob_table(hands("5c", "2s", "9c", "Ad"), trump=trump)
    table.play(0, 0, 0, 0, *(card(name) for name in ("5c", "2s", "9c", "Ad")))
    assert words_of(table, table.rules.TRICKS) == [int(seat == winner) for seat in range(4)]


@pytest.mark.parametrize(
    ("bids", "legal"),
    [
        ([], [0, 1, 2, 3]),
        ([1, 1], [0, 1, 2, 3]),
        ([1, 1, 0], [0, 2, 3]),  # the dealer may not make the sum right
        ([0, 0, 0], [0, 1, 2]),
        ([3, 3, 3], [0, 1, 2, 3]),  # where it is too high anyway
        ([3, 0, 0], [1, 2, 3]),
    ],
)
def test_bids_of_blob_may_not_add_up_to_its_tricks(bids, legal):
    table = Table(Blob(None, players=4, cards=3))
    table.play(*bids)
    assert table.legal() == legal


@pytest.mark.parametrize(("scoring", "points"), [("blob", [11, 0, 10, 0]), ("oh-hell", [11, 1, 10, 0])])
def test_scores_of_blob(scoring, points):
    table = blob_table(hands("Ac 2d", "Kd 3c", "4c 3d", "5c 4d"), trump="none", scoring=scoring)
    table.play(1, 2, 0, 2, *(card(name) for name in ("Ac", "3c", "4c", "5c", "2d", "Kd", "3d", "4d")))
    assert [table.rules.points(table.game.config, table.state, seat) for seat in range(4)] == points
    assert table.returns() == pytest.approx([point / 12 for point in points])


def test_each_card_is_dealt_to_each_seat_equally_often():
    dealt = np.zeros((3, 52))
    for number in range(3000):
        table = Table(Blob(None, players=3, cards=13), seed=5, number=number)
        for seat in range(3):
            dealt[seat, cards(table.state[table.rules.HANDS + seat])] += 1
    for seat in range(3):  # 13 cards without replacement: variance n p q / (1 - 1/52) of independent draws
        statistic = ((dealt[seat] - 750) ** 2).sum() / (750 * 0.75) * 51 / 52
        assert stats.chi2.sf(statistic, 51) > 1e-4


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"players": 7, "cards": 8}, 7),
        ({"players": 4, "cards": 13}, 12),  # and a card to turn
        ({"players": 6, "cards": 9}, 8),
        ({"players": 5, "cards": 11, "trump": "none"}, 10),
        *[
            (one, None)
            for one in ({"players": 8}, {"players": 2}, {"cards": 14}, {"cards": 0}, {"trump": "cups"}, {"bids": 3})
        ],
    ],
)
def test_what_no_table_plays_is_refused_with_the_most_that_fits(options, most):
    with pytest.raises(UsageError if most else ValidationError, match=rf"Try --cards {most}\.$" if most else None):
        Blob(None, **options)
    if most:
        Blob(None, **{**options, "cards": most})


# The same rules, written by someone else


def theirs(card: int) -> int:
    """Our card, 13 × suit + rank, as OpenSpiel numbers it."""
    return card % 13 * 4 + card // 13


def dealt_alike(pyspiel, table: Table, dealer: int):
    """OpenSpiel's oh_hell with the cards that lie on our table."""
    players, tricks = int(table.game.config[0]), int(table.game.config[1])
    state = pyspiel.load_game(f"oh_hell(players={players},num_tricks_fixed={tricks})").new_initial_state()
    state.apply_action(tricks)
    state.apply_action(dealer)
    held = [cards(hand) for hand in words_of(table, table.rules.HANDS)]
    for place in range(tricks):
        for player in range(players):
            state.apply_action(theirs(held[(player - dealer - 1) % players][place]))
    state.apply_action(theirs(int(table.state[table.rules.TURNED])))
    return state


@pytest.mark.parametrize("games", counts(300, 10_000))
@pytest.mark.parametrize("name", ["blob", "connect_four"])
def test_a_game_has_the_moves_and_results_of_openspiel(name, games):
    pyspiel, moves = pytest.importorskip("pyspiel", exc_type=ImportError), random.Random(7)
    sizes = [(3, 1), (3, 2), (4, 5), (3, 13), (5, 7), (7, 7), (4, 12), (6, 8), (7, 1)]
    for number in range(games):
        if name == "blob":
            seats, tricks = sizes[number % len(sizes)]
            table = Table(Blob(None, players=seats, cards=tricks, scoring="oh-hell"), seed=1, number=number)
            first, most = moves.randrange(seats) + 1, 10 + tricks
            other = dealt_alike(pyspiel, table, first - 1)
        else:
            table, other, first, seats, most = (
                Table(ConnectFour()),
                pyspiel.load_game(name).new_initial_state(),
                0,
                2,
                1,
            )
        for placed, move in enumerate(play_out(table, moves)):
            bids = name == "blob" and placed < seats
            named = {one: 52 + one if bids else theirs(one) if name == "blob" else one for one in table.legal()}
            assert other.current_player() == (table.mover + first) % seats
            assert set(other.legal_actions()) == set(named.values())
            other.apply_action(named[move])
        assert other.is_terminal()
        returns = [other.returns()[(seat + first) % seats] for seat in range(seats)]
        assert [round(share * most, 4) for share in table.returns()] == returns


# Guesses at hidden cards: uniform over exactly the deals that fit what the player knows, and blind to all else

KNOWN = [  # the hands, that of the player to move first; the stock; the voids of the others
    (["Ac", "Kc", "Qd"], "2c 3d 4h 5s", []),
    (["Ac 2s", "Kc 3h", "Qd 4h"], "", []),
    (["Ac 2s", "Kd 3h", "Qc 4h"], "5c 6d", ["c"]),
    (["Ac", "Kd", "Qc"], "5c", ["c"]),
    (["Ac 2s", "Kd 3h", "Qc 4s"], "5c 6d 7h", ["c", "d"]),
    (["Ac", "Kd", "Qh", "Js"], "5c 6d 7h", ["c", "c", "ch"]),
    (["Ac 2c", "Kd 3d", "Qh 4d"], "5c 6c 7s", ["cs", "s"]),
    (["Ac 2c", "Kd 3d", "Qh 4s"], "5c", ["csh"]),
    (["Ac", "Kd", ""], "5c 6d", ["c", "d"]),
    (["Ac", "Kd", "Qh"], "5d 6h 7h", ["c", "s"]),
    (["Ac 2c", "3c", "4c 4d", "5h 6h"], "", ["d", "", "c"]),
]


def table_of(held, stock, voids) -> Table:
    """The middle of the play: all that is neither held nor in stock has been seen."""
    held, players = hands(*held), len(held)
    table = Table(Blob(None, players=players, cards=5))
    rules, state = table.rules, table.state
    hidden = {one for hand in (*held, *hands(stock)) for one in hand}
    state[rules.MOVES], state[rules.SEEN] = players, mask(set(range(52)) - hidden)
    state[rules.HANDS : rules.HANDS + players] = [mask(hand) for hand in held]
    for seat, suits in enumerate(voids, 1):
        state[rules.VOIDS + seat] = sum(1 << "cdhs".index(suit) for suit in suits)
    return table


def deals_of(unknown, sizes, banned):
    """All of them, by trying every one: the cards of each opponent, in their order after the player to move."""
    if not sizes:
        yield ()
        return
    for hand in combinations(unknown, sizes[0]):
        if not {one // 13 for one in hand} & banned[0]:
            for rest in deals_of([one for one in unknown if one not in hand], sizes[1:], banned[1:]):
                yield (hand, *rest)


@pytest.mark.sample
@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("each", counts(1200, 5_000))
def test_all_deals_that_fit_are_drawn_alike_and_a_guess_that_peeks_is_found_out(known, each):
    (held, stock, voids), table = known, table_of(*known)
    unknown = sorted(one for hand in hands(*held[1:], stock) for one in hand)
    banned = [{"cdhs".index(suit) for suit in suits} for suits in (*voids, *[""] * len(held))]
    possible = set(deals_of(unknown, [len(hand.split()) for hand in held[1:]], banned))
    assert len(possible) > 1
    drawn = [
        tuple(tuple(cards(guess[table.rules.HANDS + seat])) for seat in range(1, len(held)))
        for guess in table.guesses(each * len(possible))
    ]
    truth = tuple(tuple(cards(hand)) for hand in words_of(table, table.rules.HANDS)[1:])
    assert set(drawn) <= possible
    peeking = [truth if n % 10 == 0 else guess for n, guess in enumerate(drawn)]
    for found, honest in ((Counter(drawn), True), (Counter(peeking), False)):
        assert (stats.chisquare([found[deal] for deal in possible]).pvalue > 1e-4) == honest


@settings(max_examples=examples(200))
@given(st.sampled_from(BLOBS), NUMBERS, MOVES)
def test_a_guess_fits_what_was_seen_and_looks_at_nothing_that_is_hidden(game, number, moves):
    table, seats = Table(game, number=number), range(game.seats)
    rules, shown = table.rules, [set() for _ in seats]  # the suits that each seat has shown to lack
    others = np.r_[0 : rules.HANDS, rules.BIDS : rules.WORDS]
    for move in play_out(table, moves):
        mover, truth, seen, legal = table.mover, table.state.copy(), table.observe(), table.legal()
        before, guesses, after = table.stream.copy(), table.guesses(2), table.stream.copy()
        for guess in guesses:
            held = [cards(guess[rules.HANDS + seat]) for seat in seats]
            assert held[mover] == cards(truth[rules.HANDS + mover])
            assert [len(hand) for hand in held] == [int(truth[rules.HANDS + seat]).bit_count() for seat in seats]
            together = [one for hand in held for one in hand] + cards(truth[rules.SEEN])
            assert len(set(together)) == len(together)
            assert not any({one // 13 for one in held[seat]} & shown[seat] for seat in seats if seat != mover)
            assert (guess[others] == truth[others]).all()
            table.state[:] = guess
            assert (table.observe() == seen).all()
            assert table.legal() == legal
        table.stream[:] = before
        assert (table.guesses(2) == guesses).all()  # in the last guess as in the truth
        table.state[:], table.stream[:] = truth, after
        led = truth[rules.LED]
        if truth[rules.MOVES] >= game.seats and led >= 0 and move // 13 != led:
            shown[mover].add(int(led))
