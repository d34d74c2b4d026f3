"""`gpuinfer selfplay --opponent-model`: two networks at one table, whose the seats are, and what comes of a match."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from command import SECONDS, played_by, records_of, selfplay, shards, started, until
from hypothesis import given
from hypothesis import strategies as st
from matches import arena_of, in_order, played, same

from gpuinfer.report import report
from gpuinfer.report.game_statistics import ScoreTally, of_strength
from gpuinfer.testing.reference_search import random_linear
from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.evaluator import (
    WITHOUT_NETWORK,
    Pairing,
    network_evaluator,
    one_network,
    points_of_pairing,
    two_sides,
)
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour
from gpuinfer.workloads.selfplay.workload import EVALUATORS

SMALL_SHARDS = str(Path(__file__).with_name("small_shards.py"))
BOARD = "--game connect-four --simulations 8 --no-roofline --quiet --json - --model blobnet-small --opponent-model"
SMALL = {"determinizations": 1, "evaluator": arrays.NETWORK, "games_per_deal": 2}
GAMES = pytest.mark.parametrize("game", [ConnectFour(), Blob(None, players=3)], ids=["connect-four", "three at blob"])


@pytest.mark.thorough
def test_a_match_says_who_is_stronger_and_records_say_whose_the_seats_were(tmp_path):
    def strength():
        records = records_of(tmp_path / "games")
        points = map(points_of_pairing, records["returns"], records["sides"])
        return of_strength(ScoreTally(dict(zip(records["finished"].tolist(), points, strict=True))).facts())

    words = [*BOARD.split(), "uniform", "--workers", 1, "--out", "games"]
    made = played_by(*words, "--games", 11, cwd=tmp_path)
    jsonschema.validate(made, report.schema())
    sides = records_of(tmp_path / "games")["sides"].tolist()
    assert sides == [Pairing(2, 0).of(number).tolist() for number in range(11)]
    assert made["strength"] == strength()
    assert (made["strength"]["games"], made["strength"]["pairs"]) == (11, 5)
    again = played_by(*words, "--games", 14, "--resume", cwd=tmp_path)
    assert again["strength"] == strength()
    assert again["strength"]["games"] == 14


@pytest.mark.thorough
def test_a_match_that_was_killed_is_finished_by_the_next(tmp_path):
    draw, weights = torch.Generator().manual_seed(5), {}
    for name, shape in {"first": (128, 91), "second": (128, 128), "policy": (7, 128), "value": (2, 128)}.items():
        weights[f"{name}.weight"], weights[f"{name}.bias"] = (
            torch.randn(shape, generator=draw) / 8,
            torch.zeros(shape[0]),
        )
    torch.save(weights, tmp_path / "other.pt")
    words = [
        *BOARD.split(),
        "blobnet-small",
        "--opponent-weights",
        "other.pt",
        "--workers",
        2,
        "--games",
        300,
        "--deterministic",
    ]
    whole = played_by(*words, "--out", "whole", cwd=tmp_path)
    with started(*words, "--out", "games", cwd=tmp_path, program=SMALL_SHARDS) as process:
        until(lambda: shards(tmp_path / "games"), process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)
    made = played_by(*words, "--out", "games", "--resume", cwd=tmp_path)
    assert made["progress"]["before"] > 0
    assert made["strength"] == whole["strength"]
    assert same(records_of(tmp_path / "games"), records_of(tmp_path / "whole"))
    other = selfplay(*words, "--opponent-weights", "", "--out", "games", "--resume", cwd=tmp_path)
    assert other.returncode == 2


class Network:
    """A way to a model in this process, which counts the rows that it is asked for."""

    def __init__(self, game, seed):
        self.model, self.rows = random_linear(game, seed), 0

    def block(self, rows):
        return None

    def client(self):
        return contextlib.nullcontext()

    async def __call__(self, payload, *, rows, client):
        assert len(payload) == rows > 0
        self.rows += rows
        return self.model(payload)


def between(arena, sides, *ways):
    """Those that are no name are asked."""

    def by_name(name):
        async def answer(*block):
            WITHOUT_NETWORK[name](arena, *block)

        return contextlib.nullcontext(answer)

    asked = (by_name(one) if isinstance(one, str) else network_evaluator(one, arena) for one in ways)
    return two_sides(arena, sides, *asked)


async def match(arena, asking, games):
    """What the games leave behind, in order."""
    parts, answers = [], (None, None)
    arena.add_games(range(games))
    with asking as ask:
        while rows := arena.play(*answers):
            answers = await ask(rows)
            parts.append(arena.collect())
    return in_order([part for part in [*parts, arena.collect()] if part is not None])


@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(0, 2**63 - 1))
def test_each_seat_is_had_once_by_each_side_in_a_pair(pair, seats, seed):
    first, second = (Pairing(seats, seed).of(number) for number in (2 * pair, 2 * pair + 1))
    assert (first == ~second).all()
    assert first.sum() == seats // 2
    assert (first == Pairing(seats, seed).of(2 * pair)).all()


def test_all_divisions_of_four_seats_come_about_and_games_of_a_pair_are_dealt_alike():
    found = {tuple(np.flatnonzero(Pairing(4, 0).of(number))) for number in range(200)}
    assert found == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    records = played(arena_of(Blob(), 5, evaluator=arrays.UNIFORM, games_per_deal=2), range(8))
    first = [records["observation"][records["game"] == number][0].tobytes() for number in range(8)]
    assert first[::2] == first[1::2]
    assert len(set(first)) == 4


@pytest.mark.parametrize(
    ("returns", "ours", "scored"),
    [
        ([1, -1], [True, False], 1.0),
        ([1, -1], [False, True], 0.0),
        ([0, 0], [False, True], 0.5),
        ([0.2, 0.9, 0.3, 0.1], [True, False, True, False], 0.0),  # by the mean of two seats
        ([0.1, 0.2, 0.3], [False, True, False], 0.5),  # the same but for rounding
        ([0.5, 0.2, 0.7], [True, False, False], 1.0),  # one seat against two
    ],
)
def test_points_go_to_the_side_with_the_higher_mean_return(returns, ours, scored):
    assert points_of_pairing(np.array(returns, np.float32), np.array(ours)) == scored


@GAMES
async def test_each_move_is_thought_of_by_the_network_whose_seat_it_is(game):
    """With one simulation and no noise the policy is the root's priors: those of the one or of the other."""
    sides, ways = Pairing(game.seats, 3), (Network(game, 1), Network(game, 2))
    arena = arena_of(game, 4, **SMALL, simulations=1, noise=0.0)
    records = await match(arena, between(arena, sides, *ways), 12)
    assert records["finished"].tolist() == list(range(12))
    for row in range(len(records["game"])):
        ours = sides.of(int(records["game"][row]))[records["player"][row]]
        logits = ways[not ours].model(records["observation"][row][None])[0][0]
        weights = np.where(records["legal"][row], np.exp(logits), 0.0)
        assert np.allclose(records["policy"][row], weights / weights.sum(), atol=1e-5)
    assert min(way.rows for way in ways) > 0


async def test_a_network_against_itself_plays_as_it_does_alone():
    game = Blob()
    alone, divided = (arena_of(game, slots, **SMALL) for slots in (3, 5))
    records = await match(alone, one_network(Network(game, 1), alone), 10)
    both = between(divided, Pairing(game.seats, 0), Network(game, 1), Network(game, 1))
    assert same(await match(divided, both, 10), records)


@GAMES
@pytest.mark.parametrize("name", WITHOUT_NETWORK)
async def test_an_opponent_without_a_network_thinks_as_the_search_does_by_itself(name, game):
    search = {**SMALL, "determinizations": 1 + game.hidden}
    divided = arena_of(game, 3, **search)
    plain = arena_of(game, 5, **{**search, "evaluator": EVALUATORS.index(name)})
    records = await match(divided, between(divided, Pairing(game.seats, 0), name, name), 8)
    assert same(records, played(plain, range(8)))
