"""`gpuinfer selfplay --backend central` as people run it."""

from __future__ import annotations

import importlib.util
import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from forking import run

pytestmark = pytest.mark.usefixtures("children_forked")

WORK = ["--games", "20", "--simulations", "10", "--model", "blobnet-small", "--no-roofline", "--json", "-", "--quiet"]
SCHEMA = json.loads(files("gpuinfer").joinpath("report.schema.json").read_text())


def selfplay(*words, cwd):
    done = run(["gpuinfer", "selfplay", *WORK, *words], cwd, workers=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return json.loads(done.stdout)


def in_order():
    """`selfplay/matches.py` knows how the records of two runs are compared."""
    spec = importlib.util.spec_from_file_location("matches", Path(__file__).parents[1] / "selfplay" / "matches.py")
    matches = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(matches)
    return matches


def records_of(folder):
    parts = []
    for shard in sorted(folder.glob("shard-*.npz")):
        with np.load(shard, allow_pickle=False) as arrays:
            parts.append(dict(arrays))
    return in_order().in_order(parts)


def test_a_run_with_two_workers_is_served_by_one_server(tmp_path):
    report = selfplay("--backend", "central", "--workers", "2", cwd=tmp_path)
    jsonschema.validate(report, SCHEMA)
    assert (report["status"], report["backend"]) == ("done", "central")
    batches = report["batches"]
    assert batches["count"] > 0
    assert sum(batches["reasons"].values()) == batches["count"]
    assert report["time_s"]["forward"] > 0
    assert report["latency_s"]["p50"] > 0
    assert sum(report["errors"].values()) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("workers", ["2", pytest.param("1", marks=pytest.mark.soak)])
def test_a_deterministic_run_plays_the_same_games_as_without_a_server(tmp_path, workers):
    central = ["--backend", "central", "--workers", workers, "--deterministic", "--out", "central"]
    selfplay(*central, cwd=tmp_path)
    selfplay("--backend", "inprocess", "--workers", "1", "--deterministic", "--out", "inprocess", cwd=tmp_path)
    assert in_order().same(records_of(tmp_path / "central"), records_of(tmp_path / "inprocess"))
