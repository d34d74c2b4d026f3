"""Small real plugins and worker functions for the tests of the runtime. Child processes import them by name."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

from gpuinfer.api import (
    Backend,
    BackendContext,
    Channel,
    Infer,
    Limits,
    ModelSpec,
    Options,
    Progress,
    QueueView,
    Strategy,
    Workload,
    enter_station,
)
from gpuinfer.errors import QueueFull, UnknownName, UsageError


class Doubler(Backend):
    """Answers each payload with its double, in the thread of the loop."""

    class Options(Options):
        max_rows: int = 64
        ready_file: str = ""  # written when the backend starts, so that a test sees which process started one
        closed_file: str = ""

    async def start(self, context: BackendContext) -> None:
        self.limits = Limits(self.options.max_rows)
        note(self.options.ready_file)

    async def infer(self, batch):
        enter_station("forward")
        return [request.payload * 2 for request in batch]

    async def close(self) -> None:
        note(self.options.closed_file)


class Unreachable(Doubler):
    """Cannot start."""

    async def start(self, context: BackendContext) -> None:
        raise UsageError("there is no such device. Use --device cpu.")


class Unpicklable(Doubler):
    """Its connector cannot travel."""

    def connect(self):
        return lambda: None


class AtOnce(Strategy):
    """Cuts at once."""

    def cut_at(self, queue: QueueView) -> float:
        return queue.now


class Counting(Workload):
    """Asks `total` questions, one after the other, and yields after each; told to stop, it stops."""

    class Options(Options):
        total: int = 10
        prepare: int = 0  # questions asked as setup first
        stop_after: int = -1  # sends this process SIGINT
        stubborn: bool = False  # does not look at `stopping`
        fail_at: int = -1
        pause_at: int = -1  # says that it prepares, in the middle of the work

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        for _ in range(self.options.prepare):
            await infer(1)
            yield Progress(0, note="warming up", setup=True)
        lane = infer.lane("counter")
        for done in range(self.options.total + 1):
            if done == self.options.pause_at:
                yield Progress(done, self.options.total, note="compiling once more", setup=True)
            counts = {"questions": done, "games": done / 2}
            yield Progress(done, self.options.total, "questions", counts, {"workers": 1})
            if done == self.options.fail_at:
                raise UsageError("question 3 makes no sense. Ask another.")
            if done == self.options.stop_after:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(0)
                await asyncio.wait_for(infer.stopping.wait(), 60)
            if infer.stopping.is_set() and not self.options.stubborn:
                return
            if done == self.options.total:
                return
            lane.enter("search")
            assert await infer(done) == 2 * done
            lane.enter("idle")


class Endless(Workload):
    """Never ends by itself and never looks at `stopping`."""

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        yield Progress(0, 1)
        signal.raise_signal(signal.SIGINT)
        await asyncio.Event().wait()


class Modelled(Counting):
    """Says that it needs a model."""

    def model(self) -> ModelSpec:
        return ModelSpec("blobnet-small", inputs=8, arguments={"actions": 4, "seats": 2})


class Spread(Workload):
    """Spreads questions over worker processes."""

    class Options(Options):
        workers: int = 2
        each: int = 5
        target: str = "helpers:ask"

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        total = self.options.workers * self.options.each
        arguments = [{"each": self.options.each}] * self.options.workers
        yield Progress(0, total, "questions", setup=True)
        done = 0
        async with infer.workers(self.options.target, arguments) as workers:
            async for _, message in workers:
                done += message is not None
                yield Progress(done, total, "questions", {"questions": done})


class Prepared(Spread):
    """Its workers ask nothing before all of them are there."""

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        workers, each = self.options.workers, self.options.each
        yield Progress(0, workers * each, "questions", setup=True)
        async with infer.workers("helpers:ask_when_told", [{"each": each}] * workers) as them:
            heard = aiter(them)
            for _ in range(workers):
                await anext(heard)
            yield Progress(0, workers * each, "questions")
            for worker in range(workers):
                await them.send(worker, {"go": "on"})
            done = 0
            async for _, message in heard:
                done += each * (message is not None)
                yield Progress(done, workers * each, "questions")


def note(path: str) -> None:
    if path:
        with Path(path).open("a") as file:
            file.write(f"{os.getpid()}\n")


async def ask(infer: Infer, channel: Channel, arguments) -> None:
    """Asks the backend `each` times and sends every answer."""
    lane = infer.lane("asker")
    lane.enter("search")
    for number in range(arguments["each"]):
        await channel.send({"answer": await infer(number), "pid": os.getpid()})
    lane.enter("idle")


async def echo(infer: Infer, channel: Channel, arguments) -> None:
    """Sends back whatever it receives, with the arguments, until it is told to end."""
    await channel.send({"pid": os.getpid()})
    while (message := await channel.receive()) != {"end": True}:
        await channel.send({"echo": message, "arguments": dict(arguments)})


async def fail(infer: Infer, channel: Channel, arguments) -> None:
    """Raises what it is told to."""
    errors = {
        "usage": UsageError("a bad flag. Use a good one."),
        "unknown": UnknownName("model", "blobnte", ["blobnet"]),
        "queue": QueueFull("no room. Come back."),
        "foreign": ZeroDivisionError("divided by nothing"),
        "group": ExceptionGroup("two", [UsageError("inside a group. Look there."), ValueError("more")]),
        "exit": SystemExit(7),
    }
    raise errors[arguments["which"]]


async def vanish(infer: Infer, channel: Channel, arguments) -> None:
    """Ends its process by a signal, or by an exit that no handler sees."""
    if "signal" in arguments:
        signal.signal(arguments["signal"], signal.SIG_DFL)
        os.kill(os.getpid(), arguments["signal"])
    os._exit(arguments["code"])


async def watch(infer: Infer, channel: Channel, arguments) -> None:
    """Tells how it sees the run: whether it should stop, what the limits are, how many threads it may use."""
    threads = os.environ.get("OMP_NUM_THREADS")
    await channel.send({"max_rows": (await infer.ready()).max_rows, "threads": threads, "client": _client(infer)})
    await infer.stopping.wait()
    await channel.send({"stopping": True})


def _client(infer: Infer) -> str:
    with infer.client() as me:
        return str(me)


async def busy_in_thread(infer: Infer, channel: Channel, arguments) -> None:
    """Computes in a thread that lets go of the interpreter lock and cannot be interrupted."""
    await channel.send({"pid": os.getpid()})
    await asyncio.to_thread(ctypes.CDLL(None).sleep, 600)


async def busy_in_loop(infer: Infer, channel: Channel, arguments) -> None:
    """Blocks its own event loop."""
    await channel.send({"pid": os.getpid()})
    time.sleep(600)  # noqa: ASYNC251


async def ask_when_told(infer: Infer, channel: Channel, arguments) -> None:
    """Says that it is there, waits for a word, asks `each` times, and says so."""
    lane = infer.lane("asker")
    await channel.send({"there": True})
    await channel.receive()
    lane.enter("search")
    for number in range(arguments["each"]):
        await infer(number)
    lane.enter("idle")
    await channel.send({"asked": arguments["each"]})


async def count_after(infer: Infer, channel: Channel, arguments) -> None:
    """Asks three times, waits for a word, asks twice more, waits for another."""
    for times in (3, 2):
        for _ in range(times):
            await infer(1)
        await channel.send({"asked": times})
        await channel.receive()


async def tell_roofline(infer: Infer, channel: Channel, arguments) -> None:
    """Sends what this process knows of the roofline."""
    assert infer.roofline is not None
    await channel.send({"rows_per_s": infer.roofline.rows_per_s, "at_rows": infer.roofline.at_rows})


async def until_stopped(infer: Infer, channel: Channel, arguments) -> None:
    """Sends once when it starts, and once more when the run is to stop."""
    await channel.send({"started": True})
    await infer.stopping.wait()
    await channel.send({"stopped": True})
