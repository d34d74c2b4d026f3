"""What a run of games for training reports, and what is named as holding it back."""

from dataclasses import replace

import jsonschema
import pytest
from helpers import AtOnce
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.api import Progress, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.cli.screen.final_panel import panel_rows
from gpuinfer.report.evidence import Evidence
from gpuinfer.report.report import Run, build, schema
from gpuinfer.report.verdict import judge, to_try
from gpuinfer.rollouts.steps import STALL_TEXTS
from gpuinfer.runtime.session import Session
from gpuinfer.stats import Histogram, Snapshot
from gpuinfer.workloads.rollouts.workload import Rollouts

VALIDATOR = jsonschema.Draft202012Validator(schema())
CLASSES = schema()["properties"]["bottleneck"]["properties"]["class"]["enum"]
PLAYED = {"calls": 800.0, "games_failed": 1.0, "groups_in_flight": 2.0, "environment_share": 0.05}
TRAINED = {
    **PLAYED,
    "steps": 10.0,
    "trained_groups": 40.0,
    "wait_s": 0.2,
    "train_s": 9.5,
    "adapter_load_s": 0.3,
    "step_rollout_s": 20.0,
    "buffer_depth": 4.0,
    "buffer_batch": 4.0,
    "buffer_waiting": 3.0,
    "max_staleness": 1.0,
    "staleness_mean": 0.5,
    "staleness_max": 1.0,
    "policy_version": 10.0,
    "adapter_loads": 10.0,
    "kl": 0.02,
    "kl_coefficient": 0.1,
    "stall: adapter load": 0.3,
}
COMMAND = "gpuinfer rollouts --env arithmetic --model tiny"
OPTIONS = {"groups_in_flight": None, "buffer_depth": 4, "reference": "none", "batch_size": None}


def lane(name, **stations):
    return {"name": name, "stations": {**stations, "idle": 10.0 - sum(stations.values())}, "visits": {}}


def evidence(facts, **more):
    """Ten seconds of a model with 16 slots, a quarter of which were asked for."""
    plain = {
        "wall_s": 10.0,
        "lanes": [lane("forward 0", prefill=1.0, forward=6.0)],
        "slots": 16,
        "requests": 800,
        "rows_per_s": 80.0,
        "batch_s": {4: [700, 7.0]},
        "latency_s": 0.05,
        "facts": facts,
        "cores": 2,
        "cpu_s": 14.0,
        "options": {"--": OPTIONS, "-B": {"slots": 16}},
        "command": COMMAND,
    }
    return Evidence(**{**plain, **more})


LOST = {**TRAINED, "wait_s": 9.0, "train_s": 9.0}
LIMITED = {**PLAYED, "groups_limited": 2.0}
INLINE = {"--": {**OPTIONS, "reference": "inline"}}
LIMIT = {"--": {**OPTIONS, "groups_in_flight": 2}}
CASES = [
    pytest.param(evidence(TRAINED), "trainer-bound", None, id="the trainer is at work all the time"),
    pytest.param(
        evidence({**LOST, "stall: starvation": 8.0}), "starvation", f"{COMMAND} --buffer-depth 12", id="a short buffer"
    ),
    pytest.param(
        evidence({**LOST, "stall: reference pass": 8.0}, options=INLINE),
        "reference pass",
        f"{COMMAND} --reference deferred",
        id="an inline reference",
    ),
    pytest.param(evidence({**LOST, "stall: reference pass": 8.0}), "reference pass", None, id="another reference"),
    pytest.param(evidence({**LOST, "stall: cold start": 8.0}), "cold start", None, id="an engine that began"),
    pytest.param(evidence({**LOST, "stall: constraint": 8.0}), "constraint", None, id="constraints"),
    pytest.param(evidence({**LOST, "stall: engine saturated": 8.0}), "engine saturated", None, id="a busy engine"),
    pytest.param(evidence({**LOST, "stall: environment slow": 8.0}), "environment slow", None, id="a slow environment"),
    pytest.param(
        evidence({**LOST, "adapter_load_s": 8.0, "stall: adapter load": 8.0}), "adapter load", None, id="slow weights"
    ),
    pytest.param(
        evidence({**LOST, "groups_limited": 2.0, "stall: too little concurrency": 8.0}, options=LIMIT, total=100),
        "too little concurrency",
        f"{COMMAND} --groups-in-flight 8",
        id="few groups, and a trainer",
    ),
    pytest.param(
        evidence(LIMITED, options=LIMIT, total=100),
        "too little concurrency",
        f"{COMMAND} --groups-in-flight 8",
        id="few groups at once",
    ),
    pytest.param(
        evidence(LIMITED, options=LIMIT, total=5),
        "too little concurrency",
        f"{COMMAND} --groups-in-flight 5",
        id="and few in all",
    ),
    pytest.param(
        evidence({**LIMITED, "environment_share": 0.7}, options=LIMIT, total=100),
        "environment slow",
        f"{COMMAND} --groups-in-flight 8",
        id="games that are in their environment",
    ),
    pytest.param(
        evidence({**PLAYED, "environment_share": 0.7}), "environment slow", None, id="as many groups as there is room"
    ),
]


@pytest.mark.parametrize(("run", "kind", "command"), CASES)
def test_the_cause_is_named_with_its_flag(run, kind, command):
    found = judge(run)
    assert (found["class"], found["command"]) == (kind, command), found
    assert kind in CLASSES
    assert found["why"]
    assert found["advice"]


def test_starvation_is_told_with_its_arithmetic():
    found = judge(evidence({**LOST, "stall: starvation": 8.0, "step_rollout_s": 24.0}))
    assert (
        "took 2.4 s and its training 0.9 s: a buffer of depth 1 starves when rollouts take longer than 1 × 0.9 s"
        in (found["why"] + found["advice"])
    )


def test_other_runs_are_not_judged_so():
    assert judge(evidence({}))["class"] == judge(replace(evidence({}), facts={"workers": 1}))["class"]
    assert judge(evidence({}))["class"] not in ("trainer-bound", "environment slow", "too little concurrency")


def histogram(*values):
    filled = Histogram()
    for value in values:
        filled.add(value)
    return filled.to_wire()


def report_of(facts):
    snapshot = Snapshot(
        requests=800,
        rows=800,
        slots=16,
        batches={4: 700},
        batch_s={4: [700, 7.0]},
        latency=histogram(0.05),
        lanes=(lane("forward 0", prefill=1.0, forward=4.0), lane("beside other: forward 0", prefill=2.0)),
        device={"model": {"model": "tiny"}, "beside": {"other": {"model": "other", "slots": 16}}},
    )
    counts = {"games": 40, "output_tokens": 8000, "input_tokens": 20_000}
    run = Run(
        workload="rollouts",
        backend="inprocess",
        strategy="dynamic",
        started_at="2025-01-01T00:00:00+00:00",
        setup_s=1.0,
        wall_s=10.0,
        status="done",
        setup=Setup(),
        snapshot=snapshot,
        progress=Progress(10, 10, "groups", counts=counts, facts=facts),
    )
    return build(run)


@pytest.mark.parametrize("facts", [{}, PLAYED, TRAINED, {**LOST, "stall: starvation": 9.0}])
def test_the_report_fits_its_schema(facts):
    jsonschema.validate(report_of(facts), schema())


def test_the_report_tells_of_play_and_training():
    found = report_of(TRAINED)["rollouts"]
    assert found["tokens_per_game"] == 200
    assert found["tokens_per_call"] == 10
    assert found["inference_s"] == pytest.approx(5.0)
    assert found["output_tokens_per_s"] == {"wall": pytest.approx(800), "inference": pytest.approx(1600)}
    assert found["trainer"]["wait_share"] == pytest.approx(0.02)
    assert found["trainer"]["stalls"] == {"adapter load": pytest.approx(0.03)}
    assert report_of({})["rollouts"] is None
    assert report_of(PLAYED)["rollouts"]["trainer"] is None
    assert report_of(PLAYED)["beside"] == {"other": {"model": "other", "slots": 16}}


def test_the_panel_says_it_in_words():
    said = "\n".join(f"{row.name}: {row.text}" for row in panel_rows(report_of(TRAINED)))
    for words in (
        "200 tokens a game, 10 a call, 2.0 groups at once",
        "10 steps, waited 200 ms, 2% of its time",
        "3 of 4 groups, staleness 0.5, most 1 of 1",
        "of the trainer's time: adapter load 3%",
        "beside: other, 16 slots",
    ):
        assert words in said


async def test_the_advice_can_be_tried_on_games_without_end_that_write_nothing(tmp_path):
    played = Rollouts(Setup(), env="arithmetic", model="null", groups=2, samples_per_group=1, out=tmp_path / "record")
    trial = played.trial(Setup(), groups_in_flight=3)
    backend = InProcess(Setup(trial.model()), slots=4, context=512)
    async with Session(backend, AtOnce()) as infer:
        async for progress in trial.run(infer):
            if progress.done > 8:
                infer.stopping.set()
    assert progress.done > 8
    assert progress.facts["groups_limited"] == 3
    assert not (tmp_path / "record").exists()
    report = {"bottleneck": judge(evidence(LIMITED, options=LIMIT, total=100)), "status": "done"}
    assert to_try(report).words == ["--groups-in-flight", "8"]


told = st.dictionaries(
    st.sampled_from(sorted({*LOST, *LIMITED, *(f"stall: {kind}" for kind in STALL_TEXTS)})), st.floats(0, 1e9)
)


@given(
    told, st.floats(0, 1e3), st.integers(0, 1000), st.none() | st.integers(1, 1000), st.none() | st.integers(0, 1000)
)
def test_whatever_a_run_says_of_itself_a_verdict_and_a_report_come(facts, latency_s, requests, limit, total):
    options = {"--": {**OPTIONS, "groups_in_flight": limit}}
    found = judge(evidence(facts, latency_s=latency_s, requests=requests, options=options, total=total))
    assert found["class"] in CLASSES
    assert found["gain"]["low"] <= found["gain"]["high"]
    VALIDATOR.validate(report_of(facts))
