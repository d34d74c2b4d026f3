"""Where the time beside the model goes: the input's lane and the output's say it by name."""

from __future__ import annotations

from asking import answered, lines, run

from gpuinfer.api import Limits
from gpuinfer.testing.fakes import FakeInfer


def test_reading_understanding_writing_and_syncing_are_booked_each_by_its_name(tmp_path):
    infer = FakeInfer(answered, Limits(8, slots=8))
    run(tmp_path, lines(*({"prompt": f"p{number}"} for number in range(50))), infer)
    spent = {lane.name: set(lane.visits()) for lane in infer.lanes}
    assert spent == {"input": {"read", "understand", "idle"}, "output": {"write", "sync", "idle"}}
