"""Blocks that are written where the backend reads them, and workers whose model is elsewhere."""

from __future__ import annotations

import time

import pytest
from command import records_of
from helpers import AtOnce
from in_place import InPlace, Narrow
from matches import arena_of, played, same

from gpuinfer.api import Roofline, Setup
from gpuinfer.backends.central import Central
from gpuinfer.errors import WorkError
from gpuinfer.models.roofline_process import KeptSearch
from gpuinfer.runtime import run_roofline
from gpuinfer.runtime.run import MEASURING, run
from gpuinfer.testing.reference_search import random_linear
from gpuinfer.workloads.selfplay import arrays, workload
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.workload import SelfPlayWorkload

SEARCH = {"determinizations": 2, "simulations": 6}


def go(backend, games=4, watched=None, **options):
    told = {"workers": 1, "model": "blobnet-small", "games": games, **SEARCH, **options}
    match = SelfPlayWorkload(Setup(devices=("cpu",)), **told)
    served = backend(Setup(model=match.model(), devices=("cpu",), processes=match.processes))
    return run(match, served, AtOnce(), **(watched or {"roofline": False}))


@pytest.mark.sample
@pytest.mark.parametrize("halves", [1, 2], ids=["one block", "two halves"])
def test_answers_may_lie_in_memory_that_the_next_request_overwrites(halves, tmp_path, monkeypatch):
    monkeypatch.setattr(SelfPlayWorkload, "halves", halves)
    assert go(InPlace, 12, out=tmp_path / "games", games_in_flight=5)["status"] == "done"
    copied = played(arena_of(Blob(), 12, evaluator=arrays.NETWORK, seed=0, **SEARCH), range(12), random_linear(Blob()))
    assert same(records_of(tmp_path / "games"), copied)


def test_room_that_does_not_fit_the_game_is_refused(tmp_path):
    with pytest.raises(WorkError, match=r"uint8 \[\d+, 255\] where uint8 \[\d+, 256\] was asked for"):
        go(Narrow, 5, out=tmp_path, games_in_flight=5)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", [InPlace, Central])
def test_a_worker_whose_model_is_elsewhere_does_not_load_torch(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(workload, "PLAYER", "in_place:play")
    assert go(backend, out=tmp_path)["status"] == "done"
    assert (tmp_path / "torch").read_text() == "False"


@pytest.mark.thorough
def test_workers_that_are_ready_do_nothing_while_the_bare_model_is_measured(monkeypatch):
    class Bare:
        known, fits_beside = KeptSearch(64, "one", 1e6, 300.0), True

        def __init__(self, backend):
            pass

        def before(self, stopped):
            time.sleep(0.3)  # for some looks at the run
            return self.again(None, 0.0, stopped)

        def again(self, before, seconds, stopped):
            return Roofline(2e9, 64, "one", (2e9,))

        def close(self):
            pass

    monkeypatch.setattr(run_roofline, "BareModel", Bare)
    seen = []
    made = go(InPlace, watched={"update_s": 0.02, "on_update": seen.append})
    meanwhile = [update for update in seen if update.phase == MEASURING]
    assert meanwhile
    assert seen.index(meanwhile[0]) > 0, "after the workers' start"
    assert all(update.progress.setup and update.elapsed_s == 0 for update in meanwhile)
    assert {update.snapshot.rows for update in meanwhile} == {0}
    assert (made["status"], made["progress"]["done"]) == ("done", 4)
    assert made["roofline"]["measured"] == [2e9, 2e9]
