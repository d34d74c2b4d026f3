"""Who is at a URL: what it serves, whether it answers the very requests that are meant, how its tokenizer counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuinfer.bench.serve.answers import decoded
from gpuinfer.bench.serve.calls import Calls, Length, TextCalls, WordsOfTokens
from gpuinfer.bench.serve.record import clock
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.http.client import Client, Response

FEW, MANY = 8, 72  # words of the two prompts that tell how many tokens a word has
PATIENCE_S = 60.0
LOADING, LOOK_S = 503, 0.25  # a server that has not loaded its model yet, and how often it is asked
SAID = 300  # characters of an error that are quoted
CURE = "Change what is asked: --endpoint, --input-tokens, --output-tokens, --features."
CURES = {
    401: "Give --api-key-file FILE.",
    403: "Give --api-key-file FILE.",
    404: "Give another --endpoint (completions, chat, evaluate), or --model NAME.",
}
SAME = WordsOfTokens()


@dataclass(frozen=True)
class Target:
    """`kind` is text or rows; `ours`: it is a server of gpuinfer's."""

    model: str | None
    kind: str = "text"
    ours: bool = False
    features: int | None = None  # of a row
    several: bool = False  # models there: a request says which


async def look(client: Client, name: str | None = None) -> Target:
    """Ask who is there, once it has started: the model of this name, or the first. Raises `WorkError` when nobody is,
    and `UsageError` where a server of ours has none of that name.
    """
    told = decoded((await _once_started(client, "GET", "/v1/models")).body).get("data")
    models: list[dict[str, Any]] = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    ours = bool(models) and models[0].get("owned_by") == "gpuinfer"
    found = next((one for one in models if one.get("id") == name), None)
    if name is not None and found is None and ours:
        names = ", ".join(str(one.get("id")) for one in models)
        raise UsageError(f"{client.url} serves {names}, and no '{name}'. Give one of them as --model, or leave it out.")
    first = found or (models[0] if models else {})
    model, features = first.get("id"), first.get("features")
    return Target(
        model if isinstance(model, str) else None,
        "rows" if first.get("kind") == "rows" else "text",
        ours,
        features if isinstance(features, int) else None,
        len(models) > 1,
    )


async def _once_started(
    client: Client, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
) -> Response:
    """The answer of a server that may still be loading its model."""
    until = clock() + PATIENCE_S
    while True:
        reply = await client.request(method, path, body, headers, PATIENCE_S)
        if reply.status != LOADING or clock() > until:
            return reply
        await asyncio.sleep(LOOK_S)


async def scale(client: Client, calls: TextCalls) -> WordsOfTokens:
    """How many tokens a word of ours has there, by the usage of two short answers; one, where it tells of none."""
    used = []
    for words in (FEW, MANY):
        short = replace(
            calls, stream=False, given=(), input_tokens=Length(words, words), output_tokens=Length(1, 1), scale=SAME
        )
        usage = decoded((await ask(client, short, -words)).body).get("usage")
        used.append(usage.get("prompt_tokens") if isinstance(usage, dict) else None)
    few, many = used
    if not isinstance(few, int) or not isinstance(many, int) or many <= few:
        return SAME
    per_word = (many - few) / (MANY - FEW)
    return WordsOfTokens(per_word, few - FEW * per_word)


async def ask(client: Client, calls: Calls, number: int = 0) -> Response:
    """One request, so that what is wrong with all of them is said before they are sent. Raises `WorkError`."""
    headers = (("Content-Type", calls.content_type), ("Accept", calls.content_type))
    reply = await _once_started(client, "POST", calls.path, calls.make(number).body, headers)
    if reply.status != 200:
        raise WorkError(
            f"{client.url}{calls.path} answers a first request with HTTP {reply.status}: {_said(reply)}\n"
            f"{CURES.get(reply.status, CURE)}"
        )
    return reply


def _said(reply: Response) -> str:
    error: Any = decoded(reply.body).get("error")
    message = error.get("message") if isinstance(error, Mapping) else error
    text = message if isinstance(message, str) else reply.body.decode("utf-8", "replace")
    return " ".join(text.split())[:SAID] or "no reason given."
