"""Where the time beside the model goes: the input's lane and the output's say it by name."""

from __future__ import annotations

import asyncio
import os

from asking import answered, lines, run

from gpuinfer.api import Limits
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.workloads.generate.output_writer import OutputWriter


def test_reading_understanding_writing_and_syncing_are_booked_each_by_its_name(tmp_path):
    infer = FakeInfer(answered, Limits(8, slots=8))
    run(tmp_path, lines(*({"prompt": f"p{number}"} for number in range(50))), infer)
    spent = {lane.name: set(lane.visits()) for lane in infer.lanes}
    assert spent == {"input": {"read", "understand", "idle"}, "output": {"write", "sync", "idle"}}


def test_a_stream_that_takes_nothing_keeps_the_outputs_lane_in_write():
    """As long as nobody reads: the pipe holds less than what is written to it."""

    async def written() -> list[str]:
        reader, writer = os.pipe()
        entered = []

        class Noting:
            def enter(self, station):
                entered.append(station)

        outlet = OutputWriter(writer, "a pipe", Noting())
        outlet.add(b"x" * (1 << 20))
        first = await asyncio.to_thread(os.read, reader, 1)  # it is being written
        so_far = list(entered)
        left = (1 << 20) - len(first)
        while left:
            left -= len(await asyncio.to_thread(os.read, reader, left))
        await outlet.close()
        os.close(writer)
        os.close(reader)
        assert so_far == ["write"]
        return entered

    assert asyncio.run(written()) == ["write", "idle"]  # nothing is to be synced in a pipe
