"""What lanes and batches count, and what was counted since an earlier moment."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import AtOnce, Doubler
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.engine.engine import Engine
from gpuinfer.stats import Lane, Snapshot, merge_in_turn, merge_snapshots, since


def test_a_lane_counts_the_visits_that_have_ended():
    now = 0.0
    told = Lane("search", clock=lambda: now)
    for station in ("search", "idle", "search", "transfer", "search"):
        told.enter(station)
        now += 1.0
    assert told.to_wire() == {
        "name": "search",
        "stations": {"idle": 1.0, "search": 3.0, "transfer": 1.0},
        "visits": {"idle": 2, "search": 2, "transfer": 1},
        "ran": {},  # a clock of the test's own: nobody runs
    }


SUMS = st.dictionaries(st.integers(1, 50), st.tuples(st.integers(1, 9), st.floats(0.125, 8.0)))
LANES = st.dictionaries(st.sampled_from(["idle", "search"]), st.integers(1, 9))


@given(SUMS, SUMS, LANES, LANES, st.floats(0, 8), st.floats(0, 8))
def test_what_was_timed_and_visited_since_is_what_was_added(early, more, visited, again, cpu_s, added_s):
    def snapshot(batch_s, visits, spent):
        lanes = ({"name": "search", "stations": {}, "visits": visits},)
        return Snapshot(batch_s=batch_s, lanes=lanes, cpu_s=spent, cpu_wait_s=2 * spent)

    then, added = snapshot(early, visited, cpu_s), snapshot(more, again, added_s)
    both = {station: visited.get(station, 0) + again.get(station, 0) for station in {**visited, **again}}
    now = replace(merge_snapshots([then, added]), lanes=snapshot({}, both, 0.0).lanes)
    difference = since(now, then)
    assert {rows: count for rows, (count, _) in difference.batch_s.items()} == {r: n for r, (n, _) in more.items()}
    for rows, (_, seconds) in difference.batch_s.items():
        assert seconds == pytest.approx(more[rows][1])
    assert difference.lanes[0]["visits"] == again
    assert (difference.cpu_s, difference.cpu_wait_s) == pytest.approx((added_s, 2 * added_s), abs=1e-9)


LIVES = st.lists(st.dictionaries(st.sampled_from(["idle", "forward"]), st.integers(1, 9), min_size=1), min_size=1)


@given(LIVES, LIVES)
def test_what_a_server_did_since_holds_over_its_restarts(before, after):
    """Each process that takes another's place begins its lanes anew, under the same names."""

    def life(stations):
        lane = {"name": "forward 0", "stations": stations, "visits": stations, "ran": stations}
        return Snapshot(waiting=len(stations), lanes=(lane,), rss_peak_mb=100.0 + len(stations))

    then, now = (merge_in_turn(map(life, lives)) for lives in (before, [*before, *after]))
    (lane,) = since(now, then).lanes
    ended = {name: sum(each.get(name, 0) for each in after) for name in {name for each in after for name in each}}
    assert lane == {"name": "forward 0", "stations": ended, "visits": ended, "ran": ended}
    assert now.waiting == len(after[-1])
    assert now.rss_peak_mb == 100.0 + max(map(len, [*before, *after]))


async def test_an_engine_times_its_batches_by_their_size():
    engine = Engine(Doubler(), AtOnce())
    await engine.start()
    for payload in "ab":
        await engine.submit(payload, rows=3)
    told = engine.snapshot().batch_s
    await engine.close()
    assert [(rows, count) for rows, (count, _) in told.items()] == [(3, 2)]
    assert all(seconds >= 0 for _, seconds in told.values())
