"""Stalls of training steps: the arithmetic of the verdict, what is no stall, and that it never raises."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.rollouts.steps import StepRecord, stall_of

STARVED = StepRecord(
    step=3, version=3, at_s=99.0, wall_s=8.2, wait_s=5.1, train_s=3.1, step_rollout_s=12.4, groups=4, slots=8,
    offered=0.4, gated_s=7.0,
)  # fmt: skip


def test_starvation_is_told_with_its_arithmetic():
    found = stall_of(STARVED, 2)
    assert found.kind == "starvation"
    assert (
        "starves when rollouts take longer than 2 × 3.10 s = 6.20 s: the trainer waited 5.10 s of 8.20 s" in found.why
    )
    assert found.advice == "Let 4 batches be played ahead: --buffer-depth 16, and no smaller --max-staleness."


def test_too_little_concurrency_says_how_many_groups_would_fill_the_slots():
    step = StepRecord(
        step=3, version=3, at_s=99.0, wall_s=10.0, wait_s=6.0, train_s=4.0, slots=16, offered=0.25, running=2
    )
    assert stall_of(step, 4).advice == "Play more groups at once: --groups-in-flight 8."


def test_the_first_step_waits_for_the_first_rollouts_whatever_is_done():
    step = StepRecord(step=0, version=0, at_s=10.0, wall_s=10.0, wait_s=9.0, train_s=1.0, slots=4, offered=1.0)
    assert stall_of(step, 2).kind == "healthy"
    assert stall_of(msgspec.structs.replace(step, cold_start_s=5.0), 2).kind == "cold start"


def test_the_last_groups_of_a_run_are_alone_and_that_is_no_stall():
    step = StepRecord(step=3, version=3, at_s=99.0, wall_s=10.0, wait_s=6.0, train_s=4.0, slots=16, offered=0.25)
    assert stall_of(step, 4).kind == "too little concurrency"
    found = stall_of(msgspec.structs.replace(step, tail_s=2.0), 4)
    assert (found.kind, found.why) == (
        "healthy",
        "No more groups were left to be begun: the trainer waited 6 s of 10 s.",
    )
    assert stall_of(msgspec.structs.replace(step, tail_s=2.0, reference_share=0.9), 4).kind == "reference pass"


def test_a_verdict_stands_in_the_steps_line():
    line = msgspec.json.encode(msgspec.structs.replace(STARVED, verdict=stall_of(STARVED, 2).plain()))
    assert msgspec.json.decode(line, type=StepRecord).verdict["kind"] == "starvation"


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 100)
OF_NUMBERS = [one.name for one in msgspec.structs.fields(StepRecord) if one.type is float]
OF_COUNTS = [one.name for one in msgspec.structs.fields(StepRecord) if one.type is int]


@given(
    st.fixed_dictionaries(dict.fromkeys(OF_NUMBERS, numbers) | dict.fromkeys(OF_COUNTS, st.integers(-5, 1 << 40))),
    numbers,
)
def test_whatever_the_numbers_a_verdict_comes_and_its_shares_are_parts_of_the_step(fields, depth):
    found = stall_of(StepRecord(**fields), depth)
    assert all(0 <= share <= 1 for share in found.shares.values())
    assert math.fsum(found.shares.values()) <= 1 + 1e-9
    assert 0 <= found.share <= 1
    assert found.why
    assert bool(found.advice) == (found.kind != "healthy")
