"""A far side in this very process: a real HTTP server with the routes that the backend asks, and answers by script."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
from msgspec import structs

from gpuinfer.generation import Completion, Generation, Part, Prompt
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.server import HttpServer
from gpuinfer.models import row_format
from gpuinfer.text import answer_frames

Answer = Callable[[Exchange], Awaitable[None]]

ROWS = {"id": "blobnet-small", "kind": "rows", "max_rows": 64, "features": 8, "input_dtype": "float32"}
TEXT = {"id": "tiny", "kind": "text", "max_rows": 8, "slots": 8}


class Far:
    """`next` are answers that come before the usual ones, each once; what was asked is in `seen`."""

    def __init__(self, served: dict, replicas: int = 1) -> None:
        self.served, self.replicas = served, replicas
        self.next: list[Answer] = []
        self.seen: list[Exchange] = []
        self.url = ""

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            exchange.respond(200, json.dumps({"object": "list", "data": [self.served]}).encode())
        elif exchange.path == "/health":
            exchange.respond(200, json.dumps({"healthy_workers": self.replicas}).encode())
        else:
            self.seen.append(exchange)
            await (self.next.pop(0) if self.next else usual)(exchange)


@contextlib.asynccontextmanager
async def far(served: dict, replicas: int = 1) -> AsyncIterator[Far]:
    made = Far(served, replicas)
    server = HttpServer(made)
    made.url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"
    try:
        yield made
    finally:
        await server.close()


async def usual(exchange: Exchange) -> None:
    """Rows are answered with (their doubles, their sums); a prompt with its text, a token for each character."""
    if exchange.path == "/v1/evaluate":
        rows = row_format.rows_from_body(exchange.body)
        answer = (rows * 2, rows.sum(axis=1, keepdims=True, dtype=np.float32))
        exchange.respond(200, row_format.answer_to_body(answer), row_format.MEDIA_TYPE)
        return
    prompt = answer_frames.prompt_from_body(exchange.body)
    if exchange.query.get("parts") == "0":
        exchange.respond(200, answer_frames.to_frame(generation(prompt)), answer_frames.FRAMES_TYPE)
        return
    exchange.begin(200, answer_frames.FRAMES_TYPE)
    for part in parts(prompt):
        await exchange.write(answer_frames.to_frame(part))
    await exchange.write(answer_frames.to_frame(generation(prompt)))
    exchange.end()


def generation(prompt: Prompt) -> Generation:
    completion = Completion(text=prompt.text, tokens=tuple(prompt.text.encode()), finish_reason="stop")
    return Generation(completions=(completion,) * prompt.samples, prompt_tokens=3)


def parts(prompt: Prompt) -> list[Part]:
    """One a character, the first sample's, then the second's, …: those after the tokens that have begun it."""
    pieces = [Part(sample=0, text=one, tokens=tuple(one.encode())) for one in prompt.text]
    pieces[-1] = structs.replace(pieces[-1], finish_reason="stop")
    end = Part(sample=0, text="", tokens=(), finish_reason="stop")
    had = [len(tokens) for tokens in prompt.begun] or [0] * prompt.samples
    return [
        structs.replace(one, sample=number)
        for number in range(prompt.samples)
        for one in pieces[had[number] :] or [end]
    ]


def refusing(status: int, message: str, **headers: str) -> Answer:
    async def refuse(exchange: Exchange) -> None:
        body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}}).encode()
        exchange.respond(status, body, headers=[(name.replace("_", "-"), value) for name, value in headers.items()])

    return refuse


def breaking_off(after: int) -> Answer:
    """So many parts, and then the connection is gone."""

    async def break_off(exchange: Exchange) -> None:
        exchange.begin(200, answer_frames.FRAMES_TYPE)
        for part in parts(answer_frames.prompt_from_body(exchange.body))[:after]:
            await exchange.write(answer_frames.to_frame(part))
        exchange._connection.transport.abort()

    return break_off
