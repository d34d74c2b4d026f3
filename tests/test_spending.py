"""Which share of its stations a lane had a core for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from gpuinfer import stats
from gpuinfer.stats import COUNTED, Lane, Snapshot, since

RUN_S = 0.03


class Clocks:
    """Time that passes when a test says so: for all, and for a thread that computes."""

    def __init__(self) -> None:
        self._now, self._own = 100.0, threading.local()
        self.monotonic = lambda: self._now

    def thread_time(self) -> float:
        return getattr(self._own, "ran", 0.0)

    def wait(self, seconds: float) -> None:
        self._now += seconds

    def compute(self, seconds: float = RUN_S) -> None:
        self._now += seconds
        self._own.ran = self.thread_time() + seconds


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(stats, "time", clocks)
    return clocks


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def flush(lane: Lane, clocks: Clocks) -> None:
    """End the last station, and take the clock past the next reading."""
    lane.enter("idle")
    clocks.wait(0.001)
    lane.enter("idle")


def test_on_the_real_clocks_a_station_counts_what_ran_and_not_what_slept() -> None:
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

    in_thread(work)
    assert 0.99 * RUN_S <= lane.ran["search"] <= sum(lane.ran.values()) <= ran[0]
    assert lane.stations()["asleep"] >= RUN_S


SHORT = [("even", 1e-5, 0.0), ("odd", 2e-5, 1e-5)] * 2000  # station, seconds computed, seconds waited then


@pytest.mark.parametrize(
    ("visits", "ran"),
    [
        pytest.param([("search", RUN_S, 0), ("asleep", 0, RUN_S)], {"search": RUN_S, "asleep": 0}, id="waiting"),
        pytest.param([("idle", RUN_S, 0)], {}, id="an idle lane"),
        pytest.param(SHORT, {"even": 0.02 * 3 / 4, "odd": 0.06 * 3 / 4}, id="short stations share by their length"),
    ],
)
def test_a_station_counts_what_ran(clocks: Clocks, visits: list, ran: dict[str, float]) -> None:
    lane = Lane("search", clock=clocks.monotonic)

    def work() -> None:
        for station, computed_s, waited_s in visits:
            lane.enter(station)
            clocks.compute(computed_s)
            clocks.wait(waited_s)
        flush(lane, clocks)

    in_thread(work)
    assert lane.ran == pytest.approx(ran, rel=0.02, abs=1e-6)


def test_lanes_of_one_thread_share_its_time(clocks: Clocks) -> None:
    first, second = Lane("first", clock=clocks.monotonic), Lane("second", clock=clocks.monotonic)

    def work() -> None:
        first.enter("search")
        clocks.compute()
        second.enter("search")  # both are in it now, and the thread can do one thing at a time
        clocks.compute()
        first.enter("idle")
        flush(second, clocks)

    in_thread(work)
    assert first.ran["search"] + second.ran.get("search", 0.0) == pytest.approx(2 * RUN_S, abs=2e-6)


def test_a_station_that_another_thread_ends_counts_nothing_afterwards(clocks: Clocks) -> None:
    lane = Lane("forward 0", clock=clocks.monotonic)

    def serve() -> None:
        lane.enter("transfer")
        clocks.compute()
        flush(lane, clocks)

    def loop() -> None:
        lane.enter("forward")
        in_thread(serve)
        clocks.compute()  # for somebody else
        flush(lane, clocks)

    in_thread(loop)
    assert lane.ran == pytest.approx({"transfer": RUN_S}, abs=1e-6)


def test_what_ran_before_a_mark_is_not_counted_after_it() -> None:
    wire = {"name": "search", "stations": {"search": 5.0}, "visits": {"search": 2}, "ran": {"search": 3.0}}
    now = {**wire, "ran": {"search": 4.5, "encode": 1.0}}
    counted = since(Snapshot(lanes=(now,)), Snapshot(lanes=(wire,)))
    assert counted.lanes[0]["ran"] == {"search": 1.5, "encode": 1.0}
    assert set(COUNTED) <= set(Lane("x").to_wire())
