"""Stalls planted into whole runs, on a virtual clock: each is named at three sizes, and none where there is none."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the environment is found by its module's name

from virtual_engine import World, lost, run

from gpuinfer.rollouts.steps import STALL_TEXTS

WELL = World()
HEALTHY = {
    "as it should be": WELL,
    "a slow trainer": replace(WELL, train=20.0),
    "a reference beside play": replace(WELL, reference="deferred"),
    "a reference in play": replace(WELL, reference="inline"),
    "constraints that cost little": replace(WELL, constrain=0.005),
    "a large engine": replace(WELL, slots=64, depth=4),
}
SIZES = ("small", "middling", "large")
PLANTS = {
    "reference pass": [replace(WELL, reference="inline", slots=32, score=value) for value in (8.0, 12.0, 30.0)],
    "adapter load": [replace(WELL, load=value) for value in (1.0, 3.0, 12.0)],
    "cold start": [replace(WELL, cold=value) for value in (4.0, 12.0, 60.0)],
    "constraint": [replace(WELL, constrain=value) for value in (0.2, 0.5, 2.0)],
    "engine saturated": [replace(WELL, slots=value) for value in (5, 4, 1)],
    "too little concurrency": [replace(WELL, in_flight=1, train=value) for value in (5.0, 4.0, 1.0)],
    "environment slow": [replace(WELL, environment=value) for value in (4.0, 8.0, 30.0)],
    "starvation": [replace(WELL, slots=64, depth=4, train=value) for value in (1.2, 0.8, 0.3)],
}


def test_all_kinds_are_planted():
    assert set(PLANTS) == set(STALL_TEXTS)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_named_in_a_run_that_is_well(name, tmp_path, monkeypatch):
    steps, facts = run(HEALTHY[name], tmp_path / "steps.jsonl", monkeypatch)
    assert len(steps) == 8
    assert {step.verdict["kind"] for step in steps} == {"healthy"}, [step.verdict["why"] for step in steps]
    assert not [name for name in facts if name.startswith("stall: ")]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", PLANTS)
def test_what_was_planted_is_named(kind, size, tmp_path, monkeypatch):
    steps, facts = run(PLANTS[kind][SIZES.index(size)], tmp_path / "steps.jsonl", monkeypatch)
    found = lost(steps)
    assert found.most_common(1)[0][0] == kind, [(step.verdict["kind"], step.verdict["why"]) for step in steps]
    named = [step.verdict["kind"] for step in steps if step.verdict["kind"] != "healthy"]
    assert set(named) == {kind} or named.count(kind) > len(named) / 2
    stalls = {name.removeprefix("stall: "): value for name, value in facts.items() if name.startswith("stall: ")}
    assert stalls == pytest.approx(dict(found))
