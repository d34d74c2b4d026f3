"""Lines in order, and those that wait: at any moment each line that was given away lies somewhere on the disk."""

from __future__ import annotations

import asyncio
import json
import os
import random

import asking

from gpuinfer.api import Limits, Setup
from gpuinfer.testing.fakes import FakeInfer
from gpuinfer.workloads.generate import output_writer
from gpuinfer.workloads.generate.output_writer import OrderedOutput, OutputWriter, SpillFile
from gpuinfer.workloads.generate.workload import Generate


def line(number: int) -> bytes:
    return json.dumps({"id": number, "digest": f"{number:024x}", "text": "x" * (number % 50)}).encode() + b"\n"


def test_what_lies_aside_stays_small_and_never_lacks_a_line_that_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(output_writer, "LEAST_ASIDE", 2000)
    (tmp_path / "early").write_bytes(b"".join(map(line, (1997, 1998))) + b'{"torn')
    sizes = asyncio.run(written(tmp_path))
    assert (tmp_path / "out").read_bytes() == b"".join(map(line, range(2000)))
    assert max(sizes) < 10_000, "2000 lines of 100 bytes, of which 20 at most wait"


async def written(folder) -> list[int]:
    """Write 2000 lines out of order, looking at the files again and again; the sizes of that of those that wait."""
    left = [one for one in (folder / "early").read_bytes().splitlines(keepends=True) if one.endswith(b"\n")]
    aside, sizes, given = SpillFile(folder / "early", left), [], set(left)
    with (folder / "out").open("ab", buffering=0) as file:
        outlet = OutputWriter(file.fileno(), "out", aside=aside)
        order = OrderedOutput(outlet, 100, lambda: aside.left)
        for turn, number in enumerate(shuffled(1997)):
            order.add(number, line(number))
            given.add(line(number))
            if turn % 50 == 49:
                await outlet.flush()
                found = (folder / "out").read_bytes() + (folder / "early").read_bytes()
                assert given <= set(found.splitlines(keepends=True))
                sizes.append((folder / "early").stat().st_size)
        for number in (1998, 1997):
            order.add(number, aside.take(f"{number:024x}"), kept=True)
        order.add(1999, line(1999))
        await outlet.close()
    return sizes


def shuffled(count: int) -> list[int]:
    """In blocks of 20, each in any order."""
    dice = random.Random(7)
    blocks = [list(range(begun, min(begun + 20, count))) for begun in range(0, count, 20)]
    return [number for block in blocks for number in dice.sample(block, len(block))]


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
    rows = ["first", *(f"p{number}" for number in range(40))]
    (tmp_path / "in.jsonl").write_bytes(asking.lines(*({"id": n, "prompt": row} for n, row in enumerate(rows))))
    reading, writing = os.pipe()
    options = {"model": "tiny", "input": str(tmp_path / "in.jsonl"), "output": f"/dev/fd/{writing}", "ordered": True}
    asyncio.run(asking.run_all(Generate(Setup(), **options), Held(asking.answered, Limits(64, slots=64))))
    os.close(writing)
    with os.fdopen(reading) as found:
        assert [json.loads(one)["id"] for one in found] == list(range(1, 41))
