"""A package in which each plugin breaks another promise, and one keeps all: what `gpuinfer plugins check` is for."""

import asyncio
import os
import sys

from pydantic import Field

from gpuinfer.api import Backend, Limits, Options, Progress, Strategy, Workload


class Hanging(Backend):
    """Takes a batch and never answers."""

    limits = Limits(8)

    async def infer(self, batch):
        await asyncio.Event().wait()


class Crashing(Backend):
    """Ends the process that it lives in."""

    limits = Limits(8)

    async def start(self, context):
        print("a last word", file=sys.stderr, flush=True)
        os._exit(3)

    async def infer(self, batch):
        return []


class Needy(Workload):
    """Cannot be built without being told something."""

    class Options(Options):
        place: str
        names: list[str] = Field([])

    async def run(self, infer):
        names = self.options.names
        async with infer.workers("broken_plugins:work", [{"place": self.options.place}] * len(names)) as workers:
            done = 0
            async for _, message in workers:
                done += message is not None
                yield Progress(done, len(names), counts={"pages": done})


async def work(infer, channel, arguments):
    answer = await infer([len(arguments["place"])], rows=1)
    await channel.send({"answer": answer})


class Late(Strategy):
    """Cuts in an hour, whenever it is asked."""

    def cut_at(self, queue):
        return queue.now + 3600.0
