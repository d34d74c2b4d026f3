"""Blob: bids, trumps, following suit, scores, and deals that the deck cannot give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from table import Table, blob_table, card, cards, play_out

from gpuinfer.errors import UsageError
from gpuinfer.workloads.selfplay.games.blob import Blob

SIZES = [(players, cards) for players in range(3, 8) for cards in range(1, 14) if players * cards < 52]


def hands(*names: str) -> list[list[int]]:
    return [[card(name) for name in hand.split()] for hand in names]


def tricks(table: Table) -> list[int]:
    return table.state[table.rules.TRICKS :][: table.game.seats].tolist()


@pytest.mark.parametrize(
    ("trump", "winner"),
    [
        pytest.param("none", 2, id="without trumps the highest of the suit led"),
        pytest.param("spades", 1, id="a trump beats the suit led"),
        pytest.param("clubs", 2, id="the suit led may be trump"),
        pytest.param("hearts", 2, id="a trump that nobody holds changes nothing"),
    ],
)
def test_a_trick_goes_to(trump, winner):
    table = blob_table(hands("5c", "2s", "9c", "Ad"), trump=trump)
    table.play(0, 0, 0, 0)  # bids; the cards are forced
    table.play(*(card(name) for name in ("5c", "2s", "9c", "Ad")))
    assert tricks(table) == [int(seat == winner) for seat in range(4)]


@pytest.mark.parametrize(
    ("bids", "legal"),
    [
        pytest.param([], [0, 1, 2, 3], id="the first bids freely"),
        pytest.param([1, 1], [0, 1, 2, 3], id="so does the last but one"),
        pytest.param([1, 1, 0], [0, 2, 3], id="the dealer may not make the sum right"),
        pytest.param([0, 0, 0], [0, 1, 2], id="not even by bidding all"),
        pytest.param([3, 3, 3], [0, 1, 2, 3], id="but bids freely when the sum is too high anyway"),
        pytest.param([3, 0, 0], [1, 2, 3], id="nor by bidding none"),
    ],
)
def test_bids(bids, legal):
    table = Table(Blob(None, players=4, cards=3))
    table.play(*bids)
    assert table.legal() == legal


@pytest.mark.parametrize(
    ("scoring", "points"),
    [
        pytest.param("blob", [11, 0, 10, 0], id="blob: ten and the bid if exact, else nothing"),
        pytest.param("oh-hell", [11, 1, 10, 0], id="oh-hell: the tricks, and ten if exact"),
    ],
)
def test_scores(scoring, points):
    table = blob_table(hands("Ac 2d", "Kd 3c", "4c 3d", "5c 4d"), trump="none", scoring=scoring)
    table.play(1, 2, 0, 2)
    table.play(*(card(name) for name in ("Ac", "3c", "4c", "5c", "2d", "Kd", "3d", "4d")))
    assert table.over
    assert [table.rules.points(table.game.config, table.state, seat) for seat in range(4)] == points
    assert table.returns() == pytest.approx([point / 12 for point in points])


@settings(deadline=None)
@given(size=st.sampled_from(SIZES), number=st.integers(0, 1 << 40), moves=st.randoms(use_true_random=False))
def test_any_game_ends_after_its_moves_with_all_tricks_taken(size, number, moves):
    players, dealt = size
    table = Table(Blob(None, players=players, cards=dealt), number=number)
    made = 0
    for _ in play_out(table, moves):
        assert table.legal() == sorted(set(table.legal()))
        assert len(table.legal()) <= table.game.max_legal
        made += 1
    assert made == table.game.max_moves
    assert sum(tricks(table)) == dealt
    assert sum(table.state[table.rules.BIDS :][:players]) != dealt
    assert all(0 <= share <= 1 for share in table.returns())


def test_each_card_is_dealt_to_each_seat_equally_often():
    from scipy import stats

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
        pytest.param({"players": 7, "cards": 8}, 7, id="seven times eight cards"),
        pytest.param({"players": 4, "cards": 13}, 12, id="the whole deck and a card to turn"),
        pytest.param({"players": 6, "cards": 9}, 8, id="six times nine cards"),
        pytest.param({"players": 5, "cards": 11, "trump": "none"}, 10, id="five times eleven without trumps"),
    ],
)
def test_an_impossible_deal_is_refused_with_the_most_that_fits(options, most):
    with pytest.raises(UsageError, match=rf"Try --cards {most}\.$"):
        Blob(None, **options)
    Blob(None, **{**options, "cards": most})


@pytest.mark.parametrize(
    "options",
    [{"players": 8, "cards": 7}, {"players": 2}, {"cards": 14}, {"cards": 0}, {"trump": "cups"}, {"bids": 3}],
    ids=str,
)
def test_what_no_table_plays_is_refused(options):
    with pytest.raises(ValidationError):
        Blob(None, **options)
