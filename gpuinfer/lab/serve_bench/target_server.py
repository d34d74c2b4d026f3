"""The server under test: one at a URL, with what it serves and how its tokenizer counts, or one of our own, started for
one run as a child and ended with all its processes.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.http.client import HttpClient, HttpResponse
from gpuinfer.lab.serve_bench.requests import LengthRange, RequestSource, TextRequests, WordsOfTokens, clock, decoded
from gpuinfer.launchers.base import ProcessPlan
from gpuinfer.launchers.local import COMMAND, LocalLauncher
from gpuinfer.models.row_layout import RowLayout

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
class TargetServer:
    """`kind` is text or rows; `ours`: it is a server of gpuinfer's."""

    model: str | None
    kind: str = "text"
    ours: bool = False
    features: int | None = None  # of a row
    several: bool = False  # models there: a request says which
    row: RowLayout | None = None  # of rows that are no flat features


async def look(client: HttpClient, name: str | None = None) -> TargetServer:
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
    try:
        row = None if first.get("row") is None else RowLayout.from_wire(first["row"])
    except ValueError:
        cure = "Let both ends run one version."
        raise UsageError(f"{client.url} describes its rows in a way that is not understood. {cure}") from None
    return TargetServer(
        model if isinstance(model, str) else None,
        "rows" if first.get("kind") == "rows" else "text",
        ours,
        features if isinstance(features, int) else None,
        len(models) > 1,
        row,
    )


async def _once_started(
    client: HttpClient, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
) -> HttpResponse:
    """The answer of a server that may still be loading its model."""
    until = clock() + PATIENCE_S
    while True:
        reply = await client.request(method, path, body, headers, PATIENCE_S)
        if reply.status != LOADING or clock() > until:
            return reply
        await asyncio.sleep(LOOK_S)


async def scale(client: HttpClient, calls: TextRequests) -> WordsOfTokens:
    """How many tokens a word of ours has there, by the usage of two short answers; one, where it tells of none."""
    used = []
    for words in (FEW, MANY):
        given, wanted = LengthRange(words, words), LengthRange(1, 1)
        short = replace(calls, stream=False, given=(), scale=SAME, input_tokens=given, output_tokens=wanted)
        usage = decoded((await ask(client, short, -words)).body).get("usage")
        used.append(usage.get("prompt_tokens") if isinstance(usage, dict) else None)
    few, many = used
    if not isinstance(few, int) or not isinstance(many, int) or many <= few:
        return SAME
    per_word = (many - few) / (MANY - FEW)
    return WordsOfTokens(per_word, few - FEW * per_word)


async def ask(client: HttpClient, calls: RequestSource, number: int = 0) -> HttpResponse:
    """Send one request: what is wrong with every request shows before the load. Raises `WorkError`."""
    headers = (("Content-Type", calls.content_type), ("Accept", calls.content_type))
    reply = await _once_started(client, "POST", calls.path, calls.make(number).body, headers)
    if reply.status != 200:
        error: Any = decoded(reply.body).get("error")
        message = error.get("message") if isinstance(error, Mapping) else error
        text = message if isinstance(message, str) else reply.body.decode("utf-8", "replace")
        why = " ".join(text.split())[:SAID] or "no reason given."
        raise WorkError(
            f"{client.url}{calls.path} answers a first request with HTTP {reply.status}: {why}\n"
            f"{CURES.get(reply.status, CURE)}"
        )
    return reply


START_S, END_S = 300.0, 30.0


@asynccontextmanager
async def serving(
    words: Sequence[str], folder: Path, number: int, command: Sequence[str] = COMMAND
) -> AsyncIterator[str]:
    """Its URL, once it is ready. `words` are the flags of `gpuinfer serve`; its log is in the folder.

    Raises `WorkError`, with its last words, when it does not come up.
    """
    plan = ProcessPlan(f"replica-{number}", number, folder, ())
    ready = ("--port", "0", "--ready-file", str(plan.ready_file))
    for left in (plan.ready_file, plan.log):  # by a run before, in the same folder
        left.unlink(missing_ok=True)
    server = await LocalLauncher(command=(*command, "serve", *words, *ready)).launch(plan)
    try:
        try:
            host, port = await server.ready(START_S)
        except WorkError as error:
            why = str(error).partition("\n")[0].replace(plan.name, "the server", 1)  # its log may be gone by then
            raise WorkError(f"{why}\nTry it by itself: {shlex.join(['gpuinfer', 'serve', *words])}") from None
        yield f"http://{host}:{port}"
    finally:
        await server.terminate(END_S)
        plan.ready_file.unlink(missing_ok=True)
