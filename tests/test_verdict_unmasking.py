"""The verdict on a diffusion model: each of its two causes where it is one, and neither where something else is."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.report.evidence import Evidence
from gpuinfer.report.verdict import judge
from gpuinfer.stats import DiffusionCounters

CANVAS, ANSWER, BLOCK, ROWS = 512, 256, 32, 200
FLAGS = ("decoder", "threshold", "steps", "block_length", "cache")
COMMAND = "gpuinfer generate --input p.jsonl"


def counted(tokens_per_forward, computed_share, useful=1.0, idle=0):
    """Of 200 answers of 256 tokens on canvases of 512, `useful` of them before an end."""
    forwards = ROWS * ANSWER / tokens_per_forward
    positions = forwards * CANVAS
    return {
        "steps": forwards / 16,
        "seconds": 9.0,
        "rows": forwards,
        "positions": positions,
        "tokens": positions * computed_share,
        "committed": ROWS * ANSWER,
        "output_tokens": ROWS * ANSWER * useful,
        "idle": idle,
    }


def a_run(steps, stations=None, /, **given):
    """Ten seconds of a model with 16 slots that were full; `given` as flags, the rest left to the model."""
    stations = stations or {"forward": 9.3, "sample": 0.3, "reply": 0.2}
    lane = {"name": "forward 0", "stations": {**stations, "idle": 10.0 - sum(stations.values())}, "visits": {}}
    each = round(steps["steps"])
    return Evidence(
        wall_s=10.0,
        lanes=[lane],
        slots=16,
        requests=ROWS,
        rows_per_s=ROWS / 10,
        batch_s={8: [each // 10, 0.5], 16: [each, 8.5]},
        steps=steps,
        model={"decoder": "low-confidence", "cache": "none", "block": None, "block_causal": False},
        latency_s=5.0,
        queue_wait_s=3.5,
        cores=2,
        cpu_s=19.0,
        dtype="bfloat16",
        options={"-B": {"slots": 16}, "--": {**dict.fromkeys(FLAGS), "batch_size": 16, "block_length": BLOCK, **given}},
        command=COMMAND,
    )


def test_whole_canvases_for_the_sake_of_a_block_are_named_with_what_a_cache_would_leave():
    told = judge(a_run(counted(4.0, 1.0), decoder="threshold", threshold=0.9))
    assert told["class"] == "recomputation"
    assert "100% of all positions were computed anew in each of 12,800 forwards (cache none)" in told["why"]
    # a block takes 8 forwards: one of 512 positions, 7 of 32
    assert f"with the cache dual it would be {(512 + 7 * 32) / (8 * 512):.0%}" in told["why"]
    assert told["command"] == f"{COMMAND} --cache dual"
    assert "answers may change" in told["advice"]
    assert told["gain"]["expected"] == pytest.approx(1 / (0.07 + 0.93 * 0.1797), rel=0.01)


def test_a_block_causal_model_is_told_of_its_exact_cache():
    run = a_run(counted(4.0, 1.0), decoder="threshold", cache="none")
    told = judge(replace(run, model={**run.model, "block_causal": True, "block": 32}))
    assert (told["class"], told["command"]) == ("recomputation", f"{COMMAND} --cache exact")
    assert "changes no answer" in told["advice"]


@pytest.mark.parametrize(
    ("flags", "in_force", "command"),
    [
        pytest.param({}, "the decoder is low-confidence, and the schedule has a step for each token",
                     "--decoder threshold", id="the model's own schedule"),
        pytest.param({"decoder": "random", "steps": 200}, "random, and the schedule has 200 steps",
                     "--decoder threshold", id="a schedule of many steps"),
        pytest.param({"decoder": "threshold", "threshold": 0.99}, "threshold, and the threshold is 0.99",
                     "--threshold 0.9", id="a threshold that is hardly reached"),
    ],
)  # fmt: skip
def test_few_tokens_a_forward_are_named_with_the_decoder_and_what_to_change(flags, in_force, command):
    told = judge(a_run(counted(1.2, 0.1), cache="dual", **flags))
    assert told["class"] == "few tokens a forward"
    assert "1.20 useful tokens came of each of 42,667 forwards" in told["why"]
    assert in_force in told["why"]
    assert told["command"] == f"{COMMAND} {command}"
    assert "gpuinfer verify" in told["advice"]


def test_forwards_that_committed_nothing_are_told():
    steps = counted(1.2, 0.1, idle=42_667 * 0.1)
    assert "and 10% of them committed none" in judge(a_run(steps, cache="dual"))["why"]


HEALTHY = [
    pytest.param(
        a_run(counted(6.0, 0.2), cache="dual", decoder="threshold", threshold=0.9), id="several tokens, cached"
    ),
    pytest.param(a_run(counted(1.2, 0.1), cache="dual", decoder="threshold", threshold=0.8), id="an unsure model"),
    pytest.param(a_run(counted(1.2, 0.1), cache="vicinity", decoder="someone-elses"), id="a decoder of somebody else"),
    pytest.param(
        replace(a_run(counted(8.0, 1.0), decoder="threshold", block_length=None), requests=ROWS // 16),
        id="blocks as long as canvases: a cache would keep nothing",
    ),
]


@pytest.mark.parametrize("run", HEALTHY)
def test_a_run_that_does_what_it_can_is_left_in_peace(run):
    told = judge(run)
    assert told["class"] == "device-saturated"
    assert told["healthy"]


@pytest.mark.parametrize(
    ("stations", "named"),
    [
        pytest.param({"forward": 5.0, "sample": 0.2, "reply": 0.2}, "host-bound", id="rows come slowly"),
        pytest.param({"forward": 5.0, "sample": 4.5}, "sampling-bound", id="drawing takes long"),
        pytest.param({"forward": 5.0, "reply": 4.5}, "host-bound", id="answers take long"),
    ],
)
def test_where_the_model_is_not_what_takes_the_time_neither_is_named(stations, named):
    assert judge(a_run(counted(1.0, 1.0), stations))["class"] == named


def test_a_model_that_goes_from_left_to_right_has_no_canvas():
    steps = {**counted(1.0, 1.0), "positions": 0}
    assert DiffusionCounters.of(steps) is None
    assert judge(a_run(steps))["class"] == "device-saturated"


@given(
    st.floats(0.05, 32), st.floats(0.01, 1), st.floats(0, 1),
    st.sampled_from([None, "none", "prefix", "dual", "vicinity", "exact"]),
    st.sampled_from([None, "threshold", "random", "dream", "else"]),
    st.sampled_from([None, 0.5, 0.95]),
    st.sampled_from([None, 1, 32, 4096]),
    st.booleans(),
)  # fmt: skip
def test_no_run_is_promised_less_than_it_has(tokens, computed, useful, cache, decoder, threshold, block, causal):
    run = a_run(
        counted(tokens, computed, useful), cache=cache, decoder=decoder, threshold=threshold, block_length=block
    )
    told = judge(replace(run, model={**run.model, "block_causal": causal}))
    gain = told["gain"]
    assert 1 <= gain["low"] <= (gain["expected"] or gain["high"]) <= gain["high"]
    if told["change"] and told["change"]["name"] in FLAGS:
        assert told["change"]["value"] != run.options["--"][told["change"]["name"]]
