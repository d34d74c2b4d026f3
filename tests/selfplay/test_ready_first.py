"""When an earlier run has found what self-play needs to know, the bare model is measured once the workers are ready."""

from __future__ import annotations

import time

import pytest
from helpers import AtOnce
from in_place import InPlace

from gpuinfer.api import Roofline, Setup
from gpuinfer.models.roofline_process import KeptSearch
from gpuinfer.runtime import run_roofline
from gpuinfer.runtime.run import MEASURING, run
from gpuinfer.workloads.selfplay.workload import SelfPlay

pytestmark = pytest.mark.usefixtures("children_forked")


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


@pytest.mark.thorough
def test_workers_that_are_ready_do_nothing_while_the_bare_model_is_measured(monkeypatch):
    monkeypatch.setattr(run_roofline, "BareModel", Bare)
    match = SelfPlay(
        Setup(devices=("cpu",)), games=4, workers=1, model="blobnet-small", determinizations=2, simulations=6
    )
    served = InPlace(Setup(model=match.model(), devices=("cpu",), processes=match.processes))
    seen = []
    made = run(match, served, AtOnce(), update_s=0.02, on_update=seen.append)
    meanwhile = [update for update in seen if update.phase == MEASURING]
    assert meanwhile
    assert seen.index(meanwhile[0]) > 0, "after the workers' start"
    assert all(update.progress.setup and update.elapsed_s == 0 for update in meanwhile)
    assert {update.snapshot.rows for update in meanwhile} == {0}
    assert (made["status"], made["progress"]["done"]) == ("done", 4)
    assert made["roofline"]["measured"] == [2e9, 2e9]
