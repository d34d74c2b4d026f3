"""Whose the cores were: a report's `cores`, and what people read of it."""

from __future__ import annotations

from typing import Any

import pytest

from gpuinfer.cli.screen.final_panel import panel_rows
from gpuinfer.cli.screen.live_view import on_cores
from gpuinfer.host import machine
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.report.report_sections import core_shares
from gpuinfer.stats import Snapshot

LANES = ({"name": "search", "stations": {"search": 6.0, "idle": 4.0}, "ran": {"search": 3.0}},
         {"name": "forward 0", "stations": {"forward": 8.0}, "ran": {"forward": 4.0, "transfer": 0.5}})  # fmt: skip


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)


def told(ours: float = 10.0, others: float = 6.0, **more: Any) -> dict[str, Any]:
    """Of ten seconds on two cores."""
    return core_shares(Snapshot(lanes=LANES, **more), 10.0, CoreTime(ours, ours + others, 1.0))


def test_the_cores_are_shared_out_whole() -> None:
    found = told()
    assert (found["busy_s"], found["others_s"], found["stolen_s"], found["idle_s"]) == (10.0, 6.0, 1.0, 3.0)
    assert found["stations"] == {"search": 3.0, "forward": 4.0, "transfer": 0.5}
    assert on_cores(found) == {
        **found["stations"], "around it": 2.5, "other programs": 6.0, "other machines": 1.0, "idle": 3.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "threads", "forward"),
    [
        pytest.param(12.0, 1, 4.0, id="a forward of one thread"),
        pytest.param(12.0, 2, 8.0, id="of two: the other ran as long"),
        pytest.param(10.0, 2, 6.5, id="no longer than anything ran"),
        pytest.param(12.0, 9, 8.5, id="many threads"),
    ],
)
def test_the_threads_of_a_forward_are_one_station(ours: float, threads: int, forward: float) -> None:
    assert told(ours, device={"threads": threads})["stations"]["forward"] == forward


def test_stations_are_no_more_than_what_the_program_ran() -> None:
    found = told(ours=3.0)
    assert sum(found["stations"].values()) == pytest.approx(3.0)
    assert found["stations"]["search"] == pytest.approx(1.2)


def test_a_program_that_keeps_both_cores_busy_is_not_said_to_be_idle() -> None:
    """Its three lanes take turns, so that each waits most of the time."""
    (time,) = (row.text for row in panel_rows({"cores": told(ours=19.0, others=0.0)}) if row.name == "time")
    assert time.startswith("of 2 cores: around it")
    assert "idle" not in time


def test_where_nobody_tells_of_other_programs_only_ours_are_shared_out() -> None:
    found = core_shares(Snapshot(lanes=LANES, cpu_s=7.5), 10.0, None)
    assert found["idle_s"] is None
    assert [row.text for row in panel_rows({"cores": found}) if row.name == "time"] == [
        "forward 53%, search 40%, transfer 7%"
    ]
