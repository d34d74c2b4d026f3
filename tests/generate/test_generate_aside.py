"""Lines in order, and those that wait: at any moment each line that was given away is somewhere on the disk."""

from __future__ import annotations

import asyncio
import json
import os
import random

from run_generate import answered, prompts, run_all

from gpuinfer.api import Limits, Setup
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.workloads.generate import output_writer
from gpuinfer.workloads.generate.output_writer import OrderedOutput, OutputWriter, SpillFile
from gpuinfer.workloads.generate.workload import Generate


def line(number: int) -> bytes:
    return json.dumps({"id": number, "digest": f"{number:024x}", "text": "x" * (number % 50)}).encode() + b"\n"


async def test_the_spill_file_stays_small_and_never_lacks_a_line_that_waits(tmp_path, monkeypatch):
    """2000 lines of 100 bytes, in blocks of 20 each in any order, so that 20 at most wait."""
    monkeypatch.setattr(output_writer, "LEAST_ASIDE", 2000)
    early, out, dice = tmp_path / "early", tmp_path / "out", random.Random(7)
    early.write_bytes(b"".join(map(line, (1997, 1998))) + b'{"torn')
    aside = SpillFile(early, left := [line(1997), line(1998)])
    blocks = [list(range(begun, min(begun + 20, 1997))) for begun in range(0, 1997, 20)]
    with out.open("ab", buffering=0) as file:
        given, outlet = set(left), OutputWriter(file.fileno(), "out", aside=aside)
        order = OrderedOutput(outlet, 100, lambda: aside.left)
        for turn, number in enumerate(number for block in blocks for number in dice.sample(block, len(block))):
            order.add(number, line(number))
            given.add(line(number))
            if turn % 50 == 49:
                await outlet.flush()
                assert given <= set((out.read_bytes() + early.read_bytes()).splitlines(keepends=True))
                assert early.stat().st_size < 10_000
        for number in (1998, 1997):
            order.add(number, aside.take(f"{number:024x}"), kept=True)
        order.add(1999, line(1999))
        await outlet.close()
    assert out.read_bytes() == b"".join(map(line, range(2000)))


async def test_lines_of_ranges_are_put_in_order_and_only_those_that_wait_lie_aside(tmp_path):
    out, early = tmp_path / "out", tmp_path / "early"
    with out.open("ab", buffering=0) as file:
        outlet = OutputWriter(file.fileno(), "out", aside=SpillFile(early))
        order = OrderedOutput(outlet, 100)
        for places in ([4, 5, 8], [0, 1, 3], [2, 6, 9]):
            order.add_all(places, list(map(line, places)))
            await outlet.flush()
            assert (order.waiting, order.held_bytes) == (len(order._held), sum(map(len, order._held.values())))
        assert early.read_bytes() == b"".join(map(line, [4, 5, 8, 3, 9]))
        order.add_all([7], [line(7)])
        await outlet.close()
    assert order.waiting == order.held_bytes == 0
    assert out.read_bytes() == b"".join(map(line, range(10)))


class Held(FakeInfer):
    """The first prompt is never answered; once all others are, the run is to stop."""

    async def __call__(self, payload, **more):
        if payload.text == "first":
            await asyncio.Event().wait()
        found = await super().__call__(payload, **more)
        if len(self.requests) == 40:
            asyncio.get_running_loop().call_later(0.01, self.stopping.set)
        return found


def test_a_stream_gets_what_is_answered_in_order_though_an_earlier_answer_is_missing(tmp_path):
    prompts(tmp_path, *({"id": number, "prompt": f"p{number}" if number else "first"} for number in range(41)))
    reading, writing = os.pipe()
    options = {"model": "tiny", "input": str(tmp_path / "in.jsonl"), "output": f"/dev/fd/{writing}", "ordered": True}
    asyncio.run(run_all(Generate(Setup(), **options), Held(answered, Limits(64, slots=64))))
    os.close(writing)
    with os.fdopen(reading) as found:
        assert [json.loads(one)["id"] for one in found] == list(range(1, 41))
