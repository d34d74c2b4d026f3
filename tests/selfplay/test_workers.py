"""The same seed gives the same games, whatever the workers and the games in flight; a model sees no difference."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from command import records_of, selfplay
from matches import arena_of, same
from table import Table

from gpuinfer.api import Roofline, Setup
from gpuinfer.host import machine
from gpuinfer.models.roofline_measurement import combined
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.workload import SelfPlayWorkload

pytestmark = pytest.mark.usefixtures("children_forked")


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize(
    "words", ["--model uniform", "--model rollout", "--model blobnet-small --deterministic --no-roofline"]
)
def test_the_games_are_the_same_whatever_the_workers(words, tmp_path):
    found = []
    for number, arrangement in enumerate(("--workers 1", "--workers 2", "--workers 2 --games-in-flight 5")):
        command = f"{words} {arrangement} --games 40 --simulations 12 --out {number} --quiet"
        done = selfplay(*command.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(records_of(tmp_path / str(number)))
    assert len(found[0]["finished"]) == 40
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_the_table_deals_what_the_search_deals():
    """What the tests of the rules see is what self-play plays."""
    arena, table = arena_of(Blob(), 1, seed=9), Table(Blob(), seed=9, number=4)
    arena.add_games([4])
    arena.play()
    assert arena._games.state[0].tolist() == table.state.tolist()


@pytest.mark.parametrize(
    ("cores", "asked", "oversubscribe", "started"),
    [(2, 32, False, 4), (1, 3, False, 3), (64, 100, False, 100), (2, 32, True, 32)],
)
def test_as_many_workers_start_as_make_sense_unless_told_to(cores, asked, oversubscribe, started, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: cores)
    assert SelfPlayWorkload(workers=asked, oversubscribe=oversubscribe).processes == started


@pytest.mark.parametrize(
    ("device", "devices", "workers", "block"),
    [
        ("cuda", 1, 1, 32_768),
        ("cuda", 1, 16, 2_048),
        ("cuda", 4, 16, 8_192),
        ("cuda", 1, 1_000, 640),  # no block is smaller than what one costs
        ("cpu", 1, 16, 32_768),  # each computes on cores of its own
    ],
)
def test_workers_on_the_same_devices_share_their_best_batch(device, devices, workers, block, monkeypatch):
    monkeypatch.setattr(machine, "memory_available", lambda: 1 << 50)
    roofline = combined([Roofline(4e7, 32_768, "2 forwards × 1 thread")] * devices)
    play = SelfPlayWorkload(Setup(devices=(device,)), game="connect-four", workers=workers)
    assert play.slots(SimpleNamespace(roofline=roofline), workers, 10**9) == 2 * block


@pytest.mark.sample
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
