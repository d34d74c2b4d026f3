"""The compiled search: what it promises of its trees, and what it does with them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from counts import counts
from matches import arena_of, played, same
from scipy import stats
from table import Table

from gpuinfer.testing.reference_search import ReferenceTree, Thinker, load, random_linear
from gpuinfer.workloads.selfplay import arrays, bits
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour

BLOB, BOARD = Blob(None, players=4, cards=5), ConnectFour()
FULL = Blob(None, players=7, cards=7, scoring="oh-hell")
GAMES = pytest.mark.parametrize("game", [BLOB, FULL, BOARD], ids=["blob", "blob, a full table", "connect four"])
EVALUATORS = pytest.mark.parametrize(
    "evaluator", [arrays.UNIFORM, arrays.ROLLOUT, arrays.NETWORK], ids=["uniform", "rollout", "network"]
)


def positions(game, count, seed=0):
    """Positions with a choice, from random games."""
    moves = random.Random(seed)
    for number in range(count):
        table = Table(game, seed, number)
        for _ in range(moves.randrange(game.max_moves // 2)):
            table.play(moves.choice(table.legal()))
            if table.over:
                break
        while not table.over and len(table.legal()) == 1:
            table.play(*table.legal())
        if not table.over:
            yield table


@pytest.mark.thorough
@pytest.mark.sample
@GAMES
@pytest.mark.parametrize("count", counts(6, 200))
def test_the_search_is_the_one_of_the_textbook(game, count):
    """Same visits as a plain sequential search, tree by tree, on a model whose answers never tie."""
    model = random_linear(game)
    thinker = Thinker(game, evaluator=arrays.NETWORK, determinizations=3, simulations=40)
    for table in positions(game, count):
        thinker.begin(table.state)
        expected = np.zeros(game.actions)
        for root in thinker.roots:
            for action, visits in ReferenceTree(game, root, model, 1.5).visits(40).items():
                expected[action] += visits
        assert np.rint(thinker.finish(model) * 3 * 39).tolist() == expected.tolist()


@GAMES
@EVALUATORS
def test_every_simulation_is_made_and_counted_however_many_games_are_played_at_once(game, evaluator):
    model = random_linear(game) if evaluator == arrays.NETWORK else None
    arena = arena_of(game, 4, evaluator=evaluator, determinizations=3, simulations=10)
    records = played(arena, range(8), model)
    visits = records["policy"] * 3 * 9
    assert visits == pytest.approx(np.rint(visits), abs=1e-4)
    assert np.rint(visits).sum(axis=1).tolist() == [3 * 9] * len(visits)
    assert not records["policy"][~records["legal"]].any()
    assert arena.counters[arrays.SIMULATIONS] == len(visits) * 3 * 10
    assert arena.counters[arrays.EVALUATIONS] <= arena.counters[arrays.SIMULATIONS]
    assert arena.counters[arrays.FINISHED] == 8
    for slots in (1, 7):
        other = arena_of(game, slots, evaluator=evaluator, determinizations=3, simulations=10)
        assert same(records, played(other, range(8), model))

    assert records["legal"].sum(axis=1).min() > 1  # forced moves are not searched, but counted
    for number in range(8 if game.hidden else 0):  # Blob: everyone bids freely, and the last card is always forced
        moves = records["move"][records["game"] == number]
        assert len(set(moves)) == len(moves)
        assert set(range(game.seats - 1)) <= set(moves)
        assert moves.max() < game.max_moves - game.seats
    returns = dict(zip(records["finished"].tolist(), records["returns"], strict=True))
    for number, player, value in zip(records["game"], records["player"], records["value"], strict=True):
        assert np.roll(returns[number], -player).tolist() == value.tolist()


def test_observations_are_those_of_the_game_replayed():
    """A recorded game, replayed by hand: same mover, same features, same legal moves."""
    game = Blob(None, players=4, cards=4)
    arena = arena_of(game, 2, temperature=0.0, determinizations=2)
    records = played(arena, [3])
    table, placed = Table(game, arena.search.seed, 3), 0
    for observation, legal, policy, player, move in zip(
        *(records[name] for name in ("observation", "legal", "policy", "player", "move")), strict=True
    ):
        while placed < move:
            assert len(table.legal()) == 1
            table.play(*table.legal())
            placed += 1
        assert table.mover == player
        assert table.observe().tolist() == observation.tolist()
        assert table.legal() == np.flatnonzero(legal).tolist()
        table.play(int(policy.argmax()))  # without temperature the most visited, and the first among equals
        placed += 1


def test_a_full_log_makes_games_wait_and_loses_none():
    arena = arena_of(Blob(None, players=3, cards=1), 2, simulations=2)
    arena.add_games(range(1000))
    assert arena.play(rounds=1_000_000) == 0
    part = arena.collect()
    assert len(part["finished"]) < 1000
    rest = played(arena, [])
    assert sorted([*part["finished"], *rest["finished"]]) == list(range(1000))


@pytest.mark.thorough
def test_a_model_that_rules_every_move_out_is_taken_to_know_none_better():
    """All logits -inf: a softmax over them is no number."""

    def hopeless(features):
        return np.full((len(features), 7), -np.inf, np.float32), np.zeros((len(features), 2), np.float32)

    policy = Thinker(BOARD, evaluator=arrays.NETWORK, simulations=71).think(Table(BOARD).state, hopeless)
    assert policy == pytest.approx(1 / 7, abs=0.02)


@pytest.mark.parametrize("concentration", [1.0, 10.0, 60.0])
def test_the_roots_noise_is_dirichlet(concentration):
    thinker, drawn = Thinker(BOARD, noise=0.25, concentration=concentration, simulations=2), []
    for _ in range(2000):
        thinker.begin(Table(BOARD).state)
        drawn.append(thinker.arena._games.noise[0].copy())
    noise, alpha = np.array(drawn), concentration / 7
    assert noise.sum(axis=1) == pytest.approx(1, abs=1e-5)
    assert noise.var(axis=0) == pytest.approx((1 / 7) * (6 / 7) / (concentration + 1), rel=0.2)
    for k in range(7):  # each share of a Dirichlet is a Beta
        assert stats.kstest(noise[:, k], stats.beta(alpha, 6 * alpha).cdf).pvalue > 1e-4


def test_noise_is_mixed_into_the_priors_of_the_root_alone():
    thinker = Thinker(BOARD, noise=0.25, evaluator=arrays.UNIFORM, simulations=20, determinizations=3)
    thinker.begin(Table(BOARD).state)
    thinker.arena.play(rounds=10)
    trees, noise = thinker.arena._trees, thinker.arena._games.noise[0]
    for tree in range(3):
        assert trees.edges["prior"][tree, :7] == pytest.approx(0.75 / 7 + 0.25 * noise, abs=1e-6)
        evaluated = trees.nodes["visits"][tree] > 0
        assert evaluated.sum() > 3
        for node in np.flatnonzero(evaluated)[1:]:
            count = trees.nodes["count"][tree, node]
            assert trees.edges["prior"][tree, 7 * node : 7 * node + count] == pytest.approx(1 / count)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_moves_are_drawn_by_their_visits_and_the_temperature(temperature):
    visits, stream = np.array([40, 10, 0, 30, 1, 7], np.float32), np.zeros(2, np.uint64)
    bits.seed_stream(stream, 1, 1)
    draw = load(ConnectFour.rules).draw_by_visits
    drawn = [draw(visits.copy(), np.int64(6), temperature, stream) for _ in range(20_000)]
    weights = visits.astype(float) ** (1 / temperature)
    found, expected = np.bincount(drawn, minlength=6), 20_000 * weights / weights.sum()
    assert found[2] == 0
    often = expected > 5
    assert stats.chisquare(found[often], expected[often] * found[often].sum() / expected[often].sum()).pvalue > 1e-4
