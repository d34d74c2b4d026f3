"""Profiles: the ranges of lanes in a Chrome trace, ranges of NVTX, one at a time, and nothing left behind."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from typing import Any

import pytest
import torch

from gpuinfer import stats
from gpuinfer.api import Setup
from gpuinfer.engine import profiler
from gpuinfer.engine.profiler import Profile, ProfileWindow, StationRanges
from gpuinfer.errors import UsageError
from gpuinfer.stats import Lane


class Nvtx:
    """`torch.cuda.nvtx` as far as it is called: ranges that may end on another thread."""

    def __init__(self) -> None:
        self.open: dict[int, str] = {}
        self.said: list[str] = []

    def range_start(self, text: str) -> int:
        self.said.append(text)
        self.open[len(self.said)] = text
        return len(self.said)

    def range_end(self, number: int) -> None:
        del self.open[number]


def test_ranges_lie_one_behind_the_other_and_idle_time_is_a_gap():
    lane, other, nvtx = Lane("forward 0"), Lane("output"), Nvtx()
    ranges = StationRanges(nvtx)
    lane.enter("transfer")  # before it begins
    ranges.start()
    for station in ("forward", "idle", "transfer", "forward"):
        lane.enter(station)
    other.enter("reply")
    ranges.stop()
    lane.enter("transfer")  # behind its end
    events = list(ranges.events(0))
    found = [event for event in events if event["ph"] == "X"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    of_lane = [event for event in found if event["tid"] == rows["gpuinfer: forward 0"]]
    assert [event["name"] for event in of_lane] == ["transfer", "forward", "transfer", "forward"]
    for before, after in pairwise(of_lane):
        assert before["ts"] + before["dur"] <= after["ts"] + 1.0  # of a microsecond, as floats have it
    assert [event["name"] for event in found if event["tid"] == rows["gpuinfer: output"]] == ["reply"]
    assert nvtx.said == [
        "forward 0: forward", "forward 0: idle", "forward 0: transfer", "forward 0: forward", "output: reply",
    ]  # fmt: skip
    assert not nvtx.open, "each range has ended"


def test_one_profile_at_a_time_and_the_next_one_after_it(tmp_path):
    first, second = Profile(), Profile()
    first.start()
    try:
        with pytest.raises(UsageError, match="Wait until it is over"):
            second.start()
    finally:
        first.stop()
    second.start()
    torch.ones(3).sum()
    second.stop()
    second.write(tmp_path / "trace.json")
    trace: Any = json.loads((tmp_path / "trace.json").read_text())
    assert "aten::sum" in {event["name"] for event in trace["traceEvents"]}
    assert os.listdir(tmp_path) == ["trace.json"]
    assert stats._watcher is None


def test_a_window_begins_with_the_first_work_and_ends_with_the_run(tmp_path):
    window = ProfileWindow.of(Setup(profile=str(tmp_path), profile_s=3600.0), "run")
    assert window is not None
    lane = Lane("forward 0")
    lane.enter("idle")
    window.look()
    lane.enter("forward")
    window.look()
    torch.ones(3).sum()
    lane.enter("reply")
    window.end()
    window.join()
    trace: Any = json.loads((tmp_path / "run.trace.json").read_text())
    assert {"forward", "reply", "aten::sum"} <= {event["name"] for event in trace["traceEvents"]}
    assert ProfileWindow.of(Setup(), "run") is None


def test_a_process_that_did_nothing_writes_none_and_a_folder_that_is_gone_ends_no_run(tmp_path, caplog):
    idle = ProfileWindow(str(tmp_path), "idle", 1.0)
    idle.look()
    idle.end()
    idle.join()
    assert os.listdir(tmp_path) == []
    gone = ProfileWindow(str(tmp_path / "gone"), "run", 1.0)
    Lane("forward 0").enter("forward")
    gone.look()
    gone.end()
    gone.join()
    assert "there is no profile" in caplog.text
    assert stats._watcher is None


def test_under_nsight_systems_there_are_the_ranges_alone(tmp_path, monkeypatch):
    monkeypatch.setenv(profiler.NSYS, "1")
    made = Profile()
    made.start()
    Lane("forward 0").enter("forward")
    torch.ones(3).sum()
    made.stop()
    made.write(tmp_path / "trace.json")
    trace: Any = json.loads((tmp_path / "trace.json").read_text())
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"} == {"forward"}
