"""The stream of looks: one a second for all, none for nobody, and nobody is waited for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from monitoring.synthetic import Server, worker

from gpuinfer.errors import GpuinferError
from gpuinfer.serving.monitoring.live_page import LiveEvents, LiveState

WITHIN_S = 60.0


class Reader:
    """Stands for an exchange: keeps what was written, and reads as slowly as it is told."""

    def __init__(self, reading: asyncio.Event | None = None) -> None:
        self.status, self.headers, self.events, self.ended = 0, {}, [], False
        self._reading = reading

    def begin(self, status, content_type, headers=()):
        self.status, self.headers = status, {"Content-Type": content_type, **dict(headers)}

    def refuse(self, status, message, headers=()):
        self.status, self.headers = status, dict(headers)

    async def write(self, data: bytes) -> None:
        self.events.append(parsed(data))
        if self._reading is not None:
            await self._reading.wait()

    def end(self):
        self.ended = True


def parsed(data: bytes) -> tuple[str, dict]:
    first, second, *rest = data.decode().split("\n")
    assert rest == ["", ""]
    assert (first[:7], second[:6]) == ("event: ", "data: ")
    return first[7:], json.loads(second[6:])


class Source:
    def __init__(self) -> None:
        self.server, self.taken, self.error = Server(), 0, None

    async def __call__(self) -> LiveState:
        self.taken += 1
        if self.error is not None:
            raise self.error
        return LiveState(self.server.step(), [worker(0)], {"model": "tiny"})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 (of things that tell nobody)
            await asyncio.sleep(0.005)


async def left(task: asyncio.Task) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_all_watchers_share_one_look():
    source, readers = Source(), [Reader() for _ in range(5)]
    watching = LiveEvents(source, every_s=0.01)
    tasks = [asyncio.create_task(watching(reader)) for reader in readers]
    await until(lambda: all(len(reader.events) >= 3 for reader in readers))
    assert readers[0].headers["Content-Type"] == "text/event-stream"
    assert readers[0].headers["Cache-Control"] == "no-store"
    assert source.taken <= max(len(reader.events) for reader in readers) + 2
    numbers = [[look["totals"]["requests"] for _, look in reader.events] for reader in readers]
    assert numbers[0] == sorted(numbers[0])
    assert readers[0].events[0][1]["rates"] == {}, "nothing has been seen to move yet"
    assert readers[0].events[2][1]["rates"]["requests"] > 0
    for task in tasks:
        await left(task)


async def test_nothing_is_taken_while_nobody_watches():
    source = Source()
    watching = LiveEvents(source, every_s=0.01)
    assert source.taken == 0
    reader = Reader()
    task = asyncio.create_task(watching(reader))
    await until(lambda: len(reader.events) > 1)
    await left(task)
    await until(lambda: len(asyncio.all_tasks()) == 1)
    taken = source.taken
    again = Reader()
    task = asyncio.create_task(watching(again))
    await until(lambda: len(again.events) > 1)
    assert again.events[0][1]["rates"] == {}, "what went on unwatched has no rate"
    assert source.taken > taken
    await left(task)
    assert watching.watchers == 0


async def test_one_who_reads_slowly_misses_looks_and_holds_nobody_up():
    reading = asyncio.Event()
    slow, quick, watching = Reader(reading), Reader(), LiveEvents(Source(), every_s=0.01)
    tasks = [asyncio.create_task(watching(reader)) for reader in (slow, quick)]
    await until(lambda: len(quick.events) > 10)
    assert len(slow.events) == 1
    newest = quick.events[-1][1]["totals"]["requests"]
    reading.set()
    await until(lambda: len(slow.events) > 1)
    assert slow.events[1][1]["totals"]["requests"] >= newest
    for task in tasks:
        await left(task)


async def test_more_watchers_than_there_may_be_are_refused():
    watching = LiveEvents(Source(), every_s=0.01, most=2)
    tasks = [asyncio.create_task(watching(Reader())) for _ in range(2)]
    await until(lambda: watching.watchers == 2)
    third = Reader()
    await watching(third)
    assert (third.status, third.headers) == (503, {"Retry-After": "5"})
    await left(tasks[0])
    fourth = Reader()
    tasks.append(asyncio.create_task(watching(fourth)))
    await until(lambda: bool(fourth.events))
    for task in tasks:
        await left(task)


async def test_a_server_that_closes_ends_its_streams():
    watching, reader = LiveEvents(Source(), every_s=3600.0), Reader()
    task = asyncio.create_task(watching(reader))
    await until(lambda: bool(reader.events))
    watching.close()
    await asyncio.wait_for(task, WITHIN_S)
    assert reader.ended
    late = Reader()
    await watching(late)
    assert late.status == 503


async def test_what_cannot_be_seen_is_said_and_watched_again():
    source, reader = Source(), Reader()
    source.error = GpuinferError("replica 2 is gone")
    watching = LiveEvents(source, every_s=0.01)
    task = asyncio.create_task(watching(reader))
    await until(lambda: bool(reader.events))
    assert reader.events[0] == ("trouble", {"message": "replica 2 is gone"})
    source.error = None
    await until(lambda: reader.events[-1][0] == "look")
    await left(task)


async def test_a_fault_in_what_is_seen_ends_the_stream_and_is_not_waited_on():
    source, reader = Source(), Reader()
    watching = LiveEvents(source, every_s=0.01)
    source.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(watching(reader), WITHIN_S)
    source.error = None
    task = asyncio.create_task(watching(reader))
    await until(lambda: bool(reader.events))
    await left(task)
