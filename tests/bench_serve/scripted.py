"""A scripted server: OpenAI's shapes, whose every delay is known, in this process or as one of its own.

`python -m tests.bench_serve.scripted PORT_FILE key=value …` serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from gpuinfer.http import network
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.server import HttpServer


@dataclass
class Script:
    """Seconds before an answer's first token, and between two; how many batch at once where `batch` is not 0."""

    first_s: float = 0.0
    between_s: float = 0.0
    tokens: int = 0  # of each answer; 0: as many as were asked for
    per_word: float = 1.0  # tokens
    besides: int = 0
    fail: int = 0  # each so many requests one is refused with `status`
    status: int = 429
    cut: bool = False  # streams end without their end
    usage: bool = True
    together: bool = False  # all events of a stream at once, in two halves of bytes
    batch: int = 0  # requests served together, `first_s` for all; 0: each by itself
    route: str = ""
    listed: list[dict] = field(default_factory=lambda: [{"id": "scripted"}])
    key: str = ""  # that each request is to have; "": nobody is asked for one
    notice: str = ""  # a file that is made when 100 requests have come
    seen: list[dict] = field(default_factory=list)
    number: int = 0


class Scripted:
    """Handles requests as the script says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._waiting: list[asyncio.Future] = []
        self._serving: asyncio.Task | None = None

    async def __call__(self, exchange: Exchange) -> None:
        if self.script.key and exchange.headers.get("authorization") != f"Bearer {self.script.key}":
            exchange.respond(401, b"{}")
            return
        if exchange.method == "GET":
            known = {"/v1/models": {"data": self.script.listed}}.get(exchange.path)
            exchange.respond(200 if known else 404, json.dumps(known or {}).encode())
            return
        script, headers = self.script, []
        script.number += 1
        if script.notice and script.number == 100:
            os.close(os.open(script.notice, os.O_CREAT | os.O_WRONLY))
        if exchange.headers.get("content-type") != "application/json":
            await self._served()
            exchange.respond(200, exchange.body, "application/x-safetensors")
            return
        asked = json.loads(exchange.body)
        script.seen.append(asked)
        if script.fail and script.number % script.fail == 0:
            exchange.respond(script.status, b'{"error": {"message": "too much of this"}}')
            return
        if script.route:
            headers.append(("X-Gpuinfer-Route", script.route))
        if asked.get("stream"):
            await self._stream(exchange, asked, headers)
            return
        await self._served()
        tokens = self._tokens(asked)
        await asyncio.sleep(script.between_s * (tokens - 1))
        body = {"choices": [{"text": " x" * tokens}], "usage": self._usage(asked)}
        exchange.respond(200, json.dumps(body).encode(), headers=headers)

    async def _served(self) -> None:
        if not self.script.batch:
            await asyncio.sleep(self.script.first_s)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._batches())
        await turn

    async def _batches(self) -> None:
        await asyncio.sleep(0)
        while self._waiting:
            batch, self._waiting = self._waiting[: self.script.batch], self._waiting[self.script.batch :]
            await asyncio.sleep(self.script.first_s)
            for turn in batch:
                if not turn.done():
                    turn.set_result(None)
            await asyncio.sleep(0)
            await asyncio.sleep(0.002)  # for those who ask again

    def _tokens(self, asked: dict) -> int:
        return self.script.tokens or asked.get("max_tokens", 1)

    def _usage(self, asked: dict) -> dict | None:
        text = asked.get("prompt") or " ".join(one["content"] for one in asked.get("messages", []))
        script = self.script
        given = round(len(str(text).split()) * script.per_word) + script.besides
        return {"prompt_tokens": given, "completion_tokens": self._tokens(asked)} if script.usage else None

    async def _stream(self, exchange: Exchange, asked: dict, headers: list) -> None:
        chat, script = "messages" in asked, self.script

        def event(text: str, reason: str | None = None) -> bytes:
            said = {"delta": {"content": text}} if chat else {"text": text}
            return (
                b"data: " + json.dumps({"choices": [{"index": 0, **said, "finish_reason": reason}]}).encode() + b"\n\n"
            )

        exchange.begin(200, "text/event-stream", headers)
        if chat:
            role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            await exchange.write(b"data: " + json.dumps(role).encode() + b"\n\n")
        await self._served()
        events = [event(" x") for _ in range(self._tokens(asked))]
        ending = event("", "stop")
        if usage := self._usage(asked):
            ending += b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        ending += b"" if script.cut else b"data: [DONE]\n\n"
        if script.together:
            whole = b"".join(events) + ending
            middle = len(events[0]) // 2
            await exchange.write(whole[:middle])
            await asyncio.sleep(0.01)
            await exchange.write(whole[middle:])
        else:
            for number, one in enumerate(events):
                if number and script.between_s:
                    await asyncio.sleep(script.between_s)
                await exchange.write(one)
            await exchange.write(ending)
        exchange.end()


@contextlib.asynccontextmanager
async def serving(script: Script):
    server = HttpServer(Scripted(script))
    port = await server.listen("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.close()


async def main(place: str, words: list[str]) -> None:
    given = {key: json.loads(value) for key, value in (word.split("=", 1) for word in words)}
    async with serving(Script(**given)) as url:
        temporary = Path(place).with_suffix(".part")
        temporary.write_text(json.dumps({"host": "127.0.0.1", "port": int(url.rpartition(":")[2]), "pid": os.getpid()}))
        temporary.replace(place)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    network.run_loop(main(sys.argv[1], sys.argv[2:]))
