"""The same seed gives the same games, whatever the workers and the games in flight; a model sees no difference."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from command import records_of, selfplay
from matches import arena_of, same
from table import Table

from gpuinfer.api import BackendContext, ModelSpec, Request, Roofline, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.host import machine
from gpuinfer.models.roofline_measurement import combined
from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.workload import SelfPlay


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--model", "uniform"], id="uniform"),
        pytest.param(["--model", "rollout"], id="rollout"),
        pytest.param(["--model", "blobnet-small", "--deterministic", "--no-roofline"], id="blobnet-small"),
    ],
)
def test_the_games_are_the_same_whatever_the_workers(words, tmp_path):
    arrangements = [["--workers", 1], ["--workers", 2], ["--workers", 2, "--games-in-flight", 5]]
    found = []
    for number, arrangement in enumerate(arrangements):
        done = selfplay(
            *words, *arrangement, "--games", 40, "--simulations", 12, "--out", number, "--quiet", cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        found.append(records_of(tmp_path / str(number)))
    assert len(found[0]["finished"]) == 40
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize("model", ["blobnet", "blobnet-small"])
async def test_a_row_is_answered_alike_alone_and_in_a_block(model):
    """Positions from the search itself, float32, through the real backend: within 1e-5."""
    game = Blob()
    arena = arena_of(game, 40, evaluator=arrays.UNIFORM)
    arena.add_games(range(40))
    block = arena.features[: arena.play(rounds=5)].copy()
    spec = ModelSpec(model, inputs=256, input_dtype="uint8", arguments={"actions": 52, "seats": 4})
    backend = InProcess(Setup(model=spec, devices=("cpu",)))
    await backend.start(BackendContext())
    try:
        (together,) = await backend.infer([Request(block, rows=len(block))])
        alone = [(await backend.infer([Request(row[None], rows=1)]))[0] for row in block]
    finally:
        await backend.close()
    for part in range(2):
        single = np.concatenate([np.asarray(answer[part]) for answer in alone])
        whole = np.asarray(together[part])
        assert np.array_equal(np.isneginf(single), np.isneginf(whole))
        finite = np.isfinite(whole)
        assert np.abs(single[finite] - whole[finite]).max() < 1e-5
    assert (np.isneginf(np.asarray(together[0])) == (block[:, :52] == 0)).all()


def test_the_table_deals_what_the_search_deals():
    """What the tests of the rules see is what self-play plays."""
    arena, table = arena_of(Blob(), 1, seed=9), Table(Blob(), seed=9, number=4)
    arena.add_games([4])
    arena.play()
    assert arena._games.state[0].tolist() == table.state.tolist()


@pytest.mark.parametrize(
    ("cores", "asked", "oversubscribe", "started"),
    [
        pytest.param(2, 32, False, 4, id="many"),
        pytest.param(1, 3, False, 3, id="few, on a single core"),
        pytest.param(64, 100, False, 100, id="less than two a core"),
        pytest.param(2, 32, True, 32, id="all of them"),
    ],
)
def test_as_many_workers_start_as_make_sense_unless_told_to(cores, asked, oversubscribe, started, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: cores)
    assert SelfPlay(workers=asked, oversubscribe=oversubscribe).processes == started


@pytest.mark.parametrize(
    ("device", "devices", "workers", "block"),
    [
        pytest.param("cuda", 1, 1, 32_768, id="one worker has a device's best batch"),
        pytest.param("cuda", 1, 16, 2_048, id="sixteen share it"),
        pytest.param("cuda", 4, 16, 8_192, id="sixteen share those of four devices"),
        pytest.param("cuda", 1, 1_000, 640, id="no block is smaller than what one costs"),
        pytest.param("cpu", 1, 16, 32_768, id="each computes on cores of its own"),
    ],
)
def test_workers_on_the_same_devices_share_their_best_batch(device, devices, workers, block, monkeypatch):
    monkeypatch.setattr(machine, "memory_available", lambda: 1 << 50)
    roofline = combined([Roofline(4e7, 32_768, "2 forwards × 1 thread")] * devices)
    play = SelfPlay(Setup(devices=(device,)), game="connect-four", workers=workers)
    assert play.slots(SimpleNamespace(roofline=roofline), workers, 10**9) == 2 * block


@pytest.mark.usefixtures("children_forked")
@pytest.mark.parametrize("asked", [4, 40])
def test_what_there_is_is_said_before_the_workers_start(asked, gpuinfer, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 2)
    words = ["--model", "uniform", "--games", "40", "--simulations", "2", "--workers", str(asked), "--json", "-"]
    code, out, errors = gpuinfer("selfplay", *words)
    assert code == 0, errors
    assert json.loads(out)["lanes"] == 4
    said, _, _ = errors.partition("starting the workers")
    told = re.search(
        r"--workers 40: there are 2 cores and \S+ GB of free memory. 4 are started, .*--oversubscribe", said
    )
    assert bool(told) == (asked == 40), errors
