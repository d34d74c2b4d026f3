"""Busy is healthy; stuck is one that has work and moves nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gpuinfer.serving.health import COMPUTING, FIRST_S, LOOK_S, STUCK_S, ReplicaHealth


@dataclass
class Engine:
    moved: int = 0
    longest_s: float = 0.1
    waiting_rows: int = 0
    serving: bool = True
    lost: bool = False


def looked(engine: Engine, seconds: float, *, moves: bool = False, cores: float = 0.0) -> ReplicaHealth:
    """A ready replica after so many seconds of looks."""
    spent = [0.0]
    health = ReplicaHealth(engine, "m", "rows", "ready", cpu_s=lambda: spent[0])
    health.look_once()
    for _ in range(round(seconds / LOOK_S)):
        engine.moved += moves
        spent[0] += cores * LOOK_S
        health.look_once()
    return health


def test_a_replica_with_work_that_moves_nothing_is_stuck():
    health = looked(Engine(), STUCK_S + LOOK_S)
    assert (health.status, health.code) == ("stuck", 503)
    assert health.told()["heartbeat_age_s"] > STUCK_S


@pytest.mark.parametrize(
    ("engine", "seconds", "more"),
    [
        pytest.param(Engine(), 1000, {"moves": True}, id="one that is busy"),
        pytest.param(Engine(serving=False), 1000, {}, id="one without work"),
        pytest.param(Engine(), STUCK_S, {}, id="one that is late by little"),
        pytest.param(Engine(longest_s=5), 19, {}, id="one whose steps take long"),
        pytest.param(Engine(longest_s=0), FIRST_S - 1, {}, id="one that has not answered anything yet"),
        pytest.param(Engine(), COMPUTING * STUCK_S - 1, {"cores": 1.0}, id="one that computes all the while"),
    ],
)
def test_it_is_healthy(engine, seconds, more):
    health = looked(engine, seconds, **more)
    assert (health.status, health.code) == ("ready", 200)


@pytest.mark.parametrize(
    ("engine", "seconds", "cores", "alive"),
    [
        pytest.param(Engine(serving=False, lost=True), LOOK_S, 0.0, False, id="a backend that is lost"),
        pytest.param(Engine(), COMPUTING * STUCK_S + 1, 1.0, True, id="one that spins for ever"),
    ],
)
def test_it_is_stuck(engine, seconds, cores, alive):
    health = looked(engine, seconds, cores=cores)
    assert (health.status, health.told()["alive"], health.code) == ("stuck", alive, 503)


def test_one_that_moves_again_is_well_again():
    engine = Engine()
    health = looked(engine, 10)
    assert health.stuck
    engine.moved += 1
    health.look_once()
    assert health.status == "ready"
