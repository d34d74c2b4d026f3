"""What a supervisor decides, without a clock and without a process."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.fleet.managed_replica import MOST_S, MOST_UP_S, WELL_S, Backoff
from gpuinfer.fleet.plan import LOOK_S, UP_LOOKS, Scaler, Scaling
from gpuinfer.fleet.worker import LATE_LOOKS, ProbeHeartbeat


@pytest.mark.parametrize(
    ("steps", "states"),
    [
        pytest.param("." + "." * LATE_LOOKS, ["well"] * LATE_LOOKS + ["late"], id="late after 3 s without an answer"),
        pytest.param("...a" * 5 + ".", ["well"] * 16, id="an answer between two checks is enough"),
        pytest.param("s.s.", ["well", "stuck"], id="stuck is believed when it is said twice"),
        pytest.param("sasasa.", ["well"], id="one that was stuck and goes on is well"),
    ],
)
def test_a_heartbeat(steps, states):
    """Steps: a check (.), an answer (a), an answer that says stuck (s)."""
    heartbeat, found = ProbeHeartbeat(), []
    for step in steps:
        if step == ".":
            found.append(heartbeat.look())
        else:
            heartbeat.answer(stuck=step == "s")
    assert found == states


def test_backoff_of_short_lives_grows_to_seconds_and_is_forgotten_after_a_good_one():
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(6)] == [0.0, 0.5, 1.0, 2.0, MOST_UP_S, MOST_UP_S]
    assert [backoff.after(WELL_S), backoff.after(1.0)] == [0.0, 0.0]


def test_a_replica_that_never_comes_up_is_not_tried_without_rest():
    backoff = Backoff()
    waits = [backoff.after(0.0) for _ in range(100)]
    assert waits[0] > 0
    assert waits == sorted(waits)
    assert waits[-1] == MOST_S


scalings = st.builds(
    lambda least, more, target, delay: Scaling(least, least + more, target, delay),
    st.integers(1, 8),
    st.integers(0, 8),
    st.floats(0.5, 64),
    st.floats(0, 30),
)
loads = st.lists(st.integers(0, 600), max_size=80)


def follow(scaling: Scaling, replicas: int, series: list[int]) -> list[tuple[float, int, int]]:
    """Time, load and replicas after each look."""
    scaler, found = Scaler(scaling), []
    for look, load in enumerate(series):
        if (decision := scaler.look(look * LOOK_S, load, replicas)) is not None:
            assert decision.before == replicas
            assert decision.reason
            replicas = decision.after
        found.append((look * LOOK_S, load, replicas))
    return found


@given(scalings, loads, st.integers(1, 16))
def test_scaling_keeps_within_its_limits(scaling, series, replicas):
    for _, _, now in follow(scaling, replicas, series):
        assert scaling.least <= now <= scaling.most


@given(scalings, loads)
def test_scaling_goes_down_by_one_and_never_before_its_delay(scaling, series):
    found = [(0.0, 0, scaling.least), *follow(scaling, scaling.least, series)]
    changed_at = 0.0
    for (_, _, before), (now, _, after) in itertools.pairwise(found):
        if after < before:
            assert after == before - 1
            assert now - changed_at >= scaling.down_delay_s - 1e-9
        if after != before:
            changed_at = now


@given(scalings, st.integers(0, 600))
def test_a_steady_load_comes_to_rest_within_its_target(scaling, load):
    looks_enough = int((scaling.down_delay_s + UP_LOOKS + 2) * (scaling.most + 1)) + UP_LOOKS
    found = follow(scaling, scaling.least, [load] * looks_enough)
    end = found[-1][2]
    assert load <= scaling.target * end or end == scaling.most
    assert {replicas for _, _, replicas in found[-UP_LOOKS:]} == {end}


@given(scalings, st.integers(0, 600), st.integers(0, 600))
def test_more_load_never_wants_fewer_replicas(scaling, one, other):
    less, more = sorted((one, other))
    few, many = (follow(scaling, scaling.least, [load] * UP_LOOKS)[-1][2] for load in (less, more))
    assert few <= many


def test_a_burst_of_one_look_starts_nothing():
    assert follow(Scaling(1, 8, target=4), 1, [100, 0, 100, 0, 100, 0])[-1][2] == 1


def test_a_load_near_the_border_does_not_go_to_and_fro():
    series = [9, 7] * 50  # of 8 for two replicas of 4 each
    assert {now for _, _, now in follow(Scaling(1, 8, target=4, down_delay_s=5), 2, series)} == {2}
