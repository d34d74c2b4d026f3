"""An upstream that streams as replicas of ours do, and goes on from what has begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from run_router import EVENTS, Request, chunk, reset

Ending = Callable[[Request, asyncio.StreamWriter], None]


class Resumable:
    """Streams the tokens 0, 1, … of each sample in turn. Breaks off after so many events in all, as often as told."""

    def __init__(self, tokens: int, samples: int = 1, breaks: Sequence[int] = (), partial: bool = False) -> None:
        self.tokens, self.samples, self.breaks, self.partial = tokens, samples, list(breaks), partial
        self.begun: list[dict] = []
        self.bodies: list[bytes] = []
        self.created: list[str] = []
        self.ids: list[str] = []

    def events(self, begun: dict) -> list[bytes]:
        """What is still to come."""
        events = []
        for number in range(self.tokens):
            for sample in range(self.samples):
                known = begun.get(str(sample), {"tokens": [], "ended": False})
                if number >= len(known["tokens"]):
                    events.append(b"id: %d.%d\ndata: {%d: %d}\n\n" % (sample, number, sample, number))
        for sample in range(self.samples):
            if not begun.get(str(sample), {}).get("ended"):
                events.append(b"id: %d.!\ndata: {%d: end}\n\n" % (sample, sample))
        return [*events, b"data: [DONE]\n\n"]

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        size = int(request.headers.get("x-gpuinfer-begun", "0"))
        begun = json.loads(request.body[:size]) if size else {}
        self.begun.append(begun)
        self.bodies.append(request.body[size:])
        self.created.append(request.headers["x-gpuinfer-created"])
        self.ids.append(request.headers["x-request-id"])
        events = self.events(begun)
        limit = self.breaks.pop(0) if self.breaks else None
        writer.write(EVENTS)
        for number, event in enumerate(events):
            if number == limit:
                if self.partial:
                    writer.write(chunk(event[: len(event) // 2]))
                await writer.drain()
                await asyncio.sleep(0.01)  # a reset may overtake what was sent before it
                reset(writer)
                return
            writer.write(chunk(event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
