"""A scripted server in a thread of this process: OpenAI's shapes, whose every delay is known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpuinfer.http import network
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.server import HttpServer


@dataclass
class Script:
    """Seconds before an answer's first token, and between two; how many batch at once where `batch` is not 0."""

    first_s: float = 0.0
    between_s: float = 0.0
    per_word: float = 1.0  # tokens
    besides: int = 0
    fail: int = 0  # each so many requests one is refused with `status`
    status: int = 429
    cut: bool = False  # streams end without their end
    batch: int = 0  # requests served together, `first_s` for all; 0: each by itself
    route: str = ""
    listed: list[dict] = field(default_factory=lambda: [{"id": "scripted"}])
    key: str = ""  # that each request is to have; "": nobody is asked for one
    seen: list[dict] = field(default_factory=list)
    number: int = 0  # requests that have come


def _event(message: dict) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


class Scripted:
    """Handles requests as the script says."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._waiting: list[asyncio.Future] = []
        self._serving: asyncio.Task | None = None

    async def __call__(self, exchange: Exchange) -> None:
        script = self.script
        if script.key and exchange.headers.get("authorization") != f"Bearer {script.key}":
            exchange.respond(401, b"{}")
            return
        if exchange.method == "GET":
            known = {"/v1/models": {"data": script.listed}}.get(exchange.path)
            exchange.respond(200 if known else 404, json.dumps(known or {}).encode())
            return
        script.number += 1
        if exchange.headers.get("content-type") != "application/json":
            await self._served()
            exchange.respond(200, exchange.body, "application/x-safetensors")
            return
        asked = json.loads(exchange.body)
        script.seen.append(asked)
        if script.fail and script.number % script.fail == 0:
            exchange.respond(script.status, b'{"error": {"message": "too much of this"}}')
            return
        headers = [("X-Gpuinfer-Route", script.route)] if script.route else []
        text = asked.get("prompt") or " ".join(one["content"] for one in asked.get("messages", []))
        given, tokens = round(len(str(text).split()) * script.per_word) + script.besides, asked.get("max_tokens", 1)
        usage = {"prompt_tokens": given, "completion_tokens": tokens}
        if asked.get("stream"):
            await self._stream(exchange, "messages" in asked, tokens, usage, headers)
            return
        await self._served()
        await asyncio.sleep(script.between_s * (tokens - 1))
        body = {"choices": [{"text": " x" * tokens}], "usage": usage}
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
        while self._waiting:
            batch, self._waiting = self._waiting[: self.script.batch], self._waiting[self.script.batch :]
            await asyncio.sleep(self.script.first_s)
            for turn in batch:
                if not turn.done():
                    turn.set_result(None)
            await asyncio.sleep(0.002)  # for those who ask again

    async def _stream(self, exchange: Exchange, chat: bool, tokens: int, usage: dict, headers: list) -> None:
        exchange.begin(200, "text/event-stream", headers)
        if chat:
            await exchange.write(_event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        await self._served()
        for number in range(tokens):
            if number and self.script.between_s:
                await asyncio.sleep(self.script.between_s)
            said = {"delta": {"content": " x"}} if chat else {"text": " x"}
            await exchange.write(_event({"choices": [{"index": 0, **said, "finish_reason": None}]}))
        ending = _event({"choices": [], "usage": usage})
        await exchange.write(ending + (b"" if self.script.cut else b"data: [DONE]\n\n"))
        exchange.end()


@contextlib.asynccontextmanager
async def serving(script: Script):
    server = HttpServer(Scripted(script))
    port = await server.listen("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.close()


@contextlib.contextmanager
def scripted(**options: object) -> Iterator[tuple[str, Script]]:
    """The URL of a server in a thread, and its script."""
    script, begun, over, urls = Script(**options), threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        async with serving(script) as url:
            urls.append(url)
            begun.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: network.run_loop(serve()))
    thread.start()
    try:
        assert begun.wait(60)
        yield urls[0], script
    finally:
        over.set()
        thread.join(60)
