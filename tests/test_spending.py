"""What the stations of a lane had a core for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from gpuinfer import stats
from gpuinfer.stats import COUNTED, Lane, Snapshot, since

RUN_S = 0.03
NEAR = 1e-6


class Clocks:
    """Time that passes when a test says so: for all, and for a thread that computes."""

    def __init__(self) -> None:
        self._now, self._own = 100.0, threading.local()

    def monotonic(self) -> float:
        return self._now

    def thread_time(self) -> float:
        return getattr(self._own, "ran", 0.0)

    def wait(self, seconds: float) -> None:
        self._now += seconds

    def compute(self, seconds: float) -> None:
        self._now += seconds
        self._own.ran = self.thread_time() + seconds


clocks = Clocks()


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "time", clocks)


def compute(seconds: float = RUN_S) -> None:
    clocks.compute(seconds)


def in_a_thread(what: Callable[[], object]) -> None:
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()


def flush(lane: Lane) -> None:
    """End the last station, and take the clock past the next reading."""
    lane.enter("idle")
    clocks.wait(0.001)
    lane.enter("idle")


def test_on_the_real_clocks_no_more_is_told_than_was_run_and_nothing_of_what_was_slept() -> None:
    with pytest.MonkeyPatch.context() as real:
        real.setattr(stats, "time", time)
        lane, ran = Lane("search"), []

        def work() -> None:
            lane.enter("search")
            ends = time.thread_time() + RUN_S
            while time.thread_time() < ends:
                pass
            lane.enter("asleep")
            time.sleep(RUN_S)
            lane.enter("idle")
            time.sleep(0.001)
            lane.enter("idle")
            ran.append(time.thread_time())

        in_a_thread(work)
    assert 0.99 * RUN_S <= lane.ran["search"] <= sum(lane.ran.values()) <= ran[0]
    assert lane.stations()["asleep"] >= RUN_S


def test_a_station_is_told_what_it_ran_and_not_what_it_waited() -> None:
    lane = Lane("search")

    def work() -> None:
        lane.enter("search")
        compute()
        lane.enter("asleep")
        clocks.wait(RUN_S)
        flush(lane)

    in_a_thread(work)
    assert lane.ran["search"] == pytest.approx(RUN_S, abs=NEAR)
    assert lane.ran["asleep"] < NEAR


def test_what_a_thread_runs_while_the_lane_is_idle_is_not_the_lanes() -> None:
    lane = Lane("search")

    def work() -> None:
        lane.enter("idle")
        compute()
        flush(lane)

    in_a_thread(work)
    assert not lane.ran


def test_lanes_that_share_a_thread_share_its_time() -> None:
    one, other = Lane("one"), Lane("other")

    def work() -> None:
        one.enter("search")
        compute()
        other.enter("search")  # both are in it now, and the thread can do one thing at a time
        compute()
        one.enter("idle")
        flush(other)

    in_a_thread(work)
    assert one.ran["search"] + other.ran.get("search", 0.0) == pytest.approx(2 * RUN_S, abs=2 * NEAR)


def test_a_station_that_another_thread_ends_is_told_nothing_of_what_came_after() -> None:
    lane = Lane("forward 0")

    def loop() -> None:
        lane.enter("forward")
        in_a_thread(serve)
        compute()  # for somebody else
        flush(lane)

    def serve() -> None:
        lane.enter("transfer")
        compute()
        flush(lane)

    in_a_thread(loop)
    assert lane.ran["transfer"] == pytest.approx(RUN_S, abs=NEAR)
    assert lane.ran.get("forward", 0.0) < NEAR


def test_short_stations_share_what_ran_by_their_length() -> None:
    lane = Lane("search")

    def work() -> None:
        for _ in range(2000):
            lane.enter("even")
            compute(1e-5)
            lane.enter("odd")
            compute(2e-5)
            clocks.wait(1e-5)
        flush(lane)

    in_a_thread(work)
    assert lane.ran == pytest.approx({"even": 0.02 * 3 / 4, "odd": 0.06 * 3 / 4}, rel=0.02)


def test_what_ran_before_a_mark_is_not_counted_after_it() -> None:
    wire = {"name": "search", "stations": {"search": 5.0}, "visits": {"search": 2}, "ran": {"search": 3.0}}
    now = {**wire, "ran": {"search": 4.5, "encode": 1.0}}
    told = since(Snapshot(lanes=(now,)), Snapshot(lanes=(wire,)))
    assert told.lanes[0]["ran"] == {"search": 1.5, "encode": 1.0}
    assert set(COUNTED) <= set(Lane("x").to_wire())
