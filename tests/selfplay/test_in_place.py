"""Blocks that are written where the backend reads them, and what a worker need not load when the model is elsewhere."""

from __future__ import annotations

import pytest
from command import records_of
from helpers import AtOnce
from in_place import InPlace, Narrow
from matches import arena_of, played, same

from gpuinfer.api import Setup
from gpuinfer.backends.central import Central
from gpuinfer.errors import WorkError
from gpuinfer.runtime.run import run
from gpuinfer.testing.reference_search import random_linear
from gpuinfer.workloads.selfplay import arrays, workload
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.workload import SelfPlay

SEARCH = {"determinizations": 2, "simulations": 6}


def go(backend, out, **options):
    match = SelfPlay(
        Setup(devices=("cpu",)), **{"out": out, "workers": 1, "model": "blobnet-small", **SEARCH, **options}
    )
    served = backend(Setup(model=match.model(), devices=("cpu",), processes=match.processes))
    return run(match, served, AtOnce(), roofline=False)


@pytest.mark.parametrize("halves", [1, 2], ids=["one block", "two halves"])
def test_answers_may_lie_in_memory_that_the_next_request_overwrites(halves, tmp_path, monkeypatch):
    monkeypatch.setattr(SelfPlay, "halves", halves)
    made = go(InPlace, tmp_path / "games", games=12, games_in_flight=5)
    assert made["status"] == "done"
    copied = played(arena_of(Blob(), 12, evaluator=arrays.NETWORK, seed=0, **SEARCH), range(12), random_linear(Blob()))
    assert same(records_of(tmp_path / "games"), copied)


def test_room_that_does_not_fit_the_game_is_refused(tmp_path):
    with pytest.raises(WorkError, match=r"uint8 \[\d+, 255\] where uint8 \[\d+, 256\] was asked for"):
        go(Narrow, tmp_path, games=5, games_in_flight=5)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", [InPlace, Central])
def test_a_worker_whose_model_is_elsewhere_does_not_load_torch(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(workload, "PLAYER", "in_place:play")
    assert go(backend, tmp_path, games=4)["status"] == "done"
    assert (tmp_path / "torch").read_text() == "False"
