"""Stalls of training steps: the arithmetic of the verdict, what is no stall, and stalls planted into whole runs on a
virtual clock: each is named at three sizes, and none where there is none.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from helpers import AtOnce
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))  # the environment is found by its module's name

from virtual_engine import World, lost, run

from gpuinfer.api import Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.report.verdict import to_try
from gpuinfer.rollouts.steps import STALL_CAUSES, StepRecord, stall_of
from gpuinfer.runtime.session import Session
from gpuinfer.workloads.rollouts.workload import Rollouts

LATER = {"step": 3, "version": 3, "at_s": 99.0}
STARVED = StepRecord(
    **LATER, wall_s=8.2, wait_s=5.1, train_s=3.1, step_rollout_s=12.4, groups=4, slots=8, offered=0.4, gated_s=7.0
)
FEW = StepRecord(**LATER, wall_s=10.0, wait_s=6.0, train_s=4.0, slots=16, offered=0.25)
FIRST = StepRecord(step=0, version=0, at_s=10.0, wall_s=10.0, wait_s=9.0, train_s=1.0, slots=4, offered=1.0)


@pytest.mark.parametrize(
    ("step", "changes", "depth", "kind", "said"),
    [
        (STARVED, {}, 2, "starvation", "longer than 2 × 3.10 s = 6.20 s: the trainer waited 5.10 s of 8.20 s"),
        (STARVED, {}, 2, "starvation", "Let 4 batches be played ahead: --buffer-depth 16, and no smaller --max-"),
        (FEW, {"running": 2}, 4, "too little concurrency", "Play more groups at once: --groups-in-flight 8."),
        (FEW, {"tail_s": 2.0}, 4, "healthy", "No more groups were left to be begun: the trainer waited 6 s of 10 s."),
        (FEW, {"tail_s": 2.0, "reference_share": 0.9}, 4, "reference pass", ""),
        (FIRST, {}, 2, "healthy", ""),  # it waits for the first rollouts whatever is done
        (FIRST, {"cold_start_s": 5.0}, 2, "cold start", ""),
    ],
)
def test_the_stall_of_a_step(step, changes, depth, kind, said):
    found = stall_of(msgspec.structs.replace(step, **changes), depth)
    assert found.kind == kind
    assert said in f"{found.why} {found.advice}"
    line = msgspec.json.encode(msgspec.structs.replace(step, verdict=found.plain()))
    assert msgspec.json.decode(line, type=StepRecord).verdict["kind"] == kind


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 100)
OF_NUMBERS = [one.name for one in msgspec.structs.fields(StepRecord) if one.type is float]
OF_COUNTS = [one.name for one in msgspec.structs.fields(StepRecord) if one.type is int]
FIELDS = st.fixed_dictionaries(dict.fromkeys(OF_NUMBERS, numbers) | dict.fromkeys(OF_COUNTS, st.integers(-5, 1 << 40)))


@given(FIELDS, numbers)
def test_whatever_the_numbers_a_verdict_comes_and_its_shares_are_parts_of_the_step(fields, depth):
    found = stall_of(StepRecord(**fields), depth)
    assert all(0 <= share <= 1 for share in found.shares.values())
    assert math.fsum(found.shares.values()) <= 1 + 1e-9
    assert 0 <= found.share <= 1
    assert found.why
    assert bool(found.advice) == (found.kind != "healthy")


WELL = World()
HEALTHY = {
    "as it should be": WELL,
    "a slow trainer": replace(WELL, train=20.0),
    "a reference beside play": replace(WELL, reference="deferred"),
    "a reference in play": replace(WELL, reference="inline"),
    "constraints that cost little": replace(WELL, constrain=0.005),
    "a large engine": replace(WELL, slots=64, depth=4),
}
PLANTS = {  # small, middling, large
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
    assert set(PLANTS) == set(STALL_CAUSES)


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_named_in_a_run_that_is_well(name, tmp_path, monkeypatch):
    steps, facts = run(HEALTHY[name], tmp_path / "steps.jsonl", monkeypatch)
    assert len(steps) == 8
    assert {step.verdict["kind"] for step in steps} == {"healthy"}, [step.verdict["why"] for step in steps]
    assert not [name for name in facts if name.startswith("stall: ")]


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", range(3))
@pytest.mark.parametrize("kind", PLANTS)
def test_what_was_planted_is_named(kind, size, tmp_path, monkeypatch):
    steps, facts = run(PLANTS[kind][size], tmp_path / "steps.jsonl", monkeypatch)
    found = lost(steps)
    assert found.most_common(1)[0][0] == kind, [(step.verdict["kind"], step.verdict["why"]) for step in steps]
    named = [step.verdict["kind"] for step in steps if step.verdict["kind"] != "healthy"]
    assert set(named) == {kind} or named.count(kind) > len(named) / 2
    stalls = {name.removeprefix("stall: "): value for name, value in facts.items() if name.startswith("stall: ")}
    assert stalls == pytest.approx(dict(found))


async def test_the_advice_can_be_tried_on_games_without_end_that_write_nothing(tmp_path):
    played = Rollouts(Setup(), env="arithmetic", model="null", groups=2, samples_per_group=1, out=tmp_path / "record")
    trial = played.trial(Setup(), groups_in_flight=3)
    async with Session(InProcess(Setup(trial.model()), slots=4, context=512), AtOnce()) as infer:
        async for progress in trial.run(infer):
            if progress.done > 8:
                infer.stopping.set()
    assert progress.done > 8
    assert progress.facts["groups_limited"] == 3
    assert not (tmp_path / "record").exists()
    change = {"flag": "--", "name": "groups_in_flight", "value": 8, "without": []}
    report = {"bottleneck": {"change": change, "bounds": {}}, "status": "done"}
    assert to_try(report).words == ["--groups-in-flight", "8"]
