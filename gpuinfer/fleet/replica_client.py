"""The client of a server of ours over HTTP, a replica alone or a fleet, for one event loop.

An answer depends on its request alone, so requests are repeated when the server cannot be reached or dies meanwhile:
for a bounded time, and without passing any part on twice.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gpuinfer.api import Priority, Request, Result
from gpuinfer.config.model_names import meant_names
from gpuinfer.errors import (
    BackendDied,
    BackendError,
    BadPrompt,
    BadResult,
    Expired,
    GpuinferError,
    QueueFull,
    RequestError,
    UsageError,
)
from gpuinfer.generation import Generation, Part
from gpuinfer.host.error_text import rebuilt_error
from gpuinfer.http.client import (
    ConnectionBroken,
    HttpClient,
    HttpResponse,
    RequestTimedOut,
    Unreachable,
    error_words,
)
from gpuinfer.models import row_format
from gpuinfer.models.row_layout import RowLayout, unpacked_arrays
from gpuinfer.text import answer_frames
from gpuinfer.text.answer_frames import DeliveredAnswer, Unframer

ANSWER_S = 86_400.0  # for one answer: what hangs is found by the watchdog here, and by heartbeats over there
FACTS_S = 10.0  # timeout of requests for facts
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # between two tries
MOST_WIDTH, MOST_SLOTS = 1 << 24, 1 << 20
AGAIN = frozenset({502, 503, 504})
KINDS = {400: BadPrompt, 404: BadPrompt, 408: Expired, 413: BadPrompt, 422: BadResult, 429: QueueFull}
CLASSES = {Priority.HIGH: "high", Priority.LOW: "low"}


class ServedModel(Struct, frozen=True):
    """A model in the answer of `GET /v1/models`."""

    id: str
    kind: str
    max_rows: int  # of one request
    slots: int | None = None  # of one replica
    features: int | None = None
    input_dtype: str | None = None
    row: Any = None  # of rows of any shape: `RowLayout.to_wire`
    parent: str | None = None  # of an adapter: the model
    alias_of: str | None = None  # of another name of a model: the model's first one
    aliases: tuple[str, ...] = ()  # its other names: entries of their own


class _Models(Struct):
    data: list[ServedModel]


class _Health(Struct):
    healthy_workers: int = 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server's address. `retry_s`: for how long requests to a server that is not there are repeated."""

    url: str
    key: str | None = None
    retry_s: float = 30.0


class ReplicaClient:
    """Sends requests. `connections`: the most that are under way at once; more wait. `model`: the name of the model, of
    several at that server.
    """

    def __init__(
        self, endpoint: Endpoint, connections: int, model: str | None = None, layout: RowLayout | None = None
    ) -> None:
        """`layout`: of rows that are submitted packed."""
        self._endpoint, self._layout = endpoint, layout
        bearer = [("Authorization", f"Bearer {endpoint.key}")] if endpoint.key else []
        self._client = HttpClient(endpoint.url, connections=connections, timeout_s=ANSWER_S, headers=bearer)
        self.model = model

    async def close(self) -> None:
        await self._client.close()

    # Facts

    async def served(self, name: str | None = None) -> ServedModel:
        """The served model; of several the one of this name, which is `model` from then on. A server that still loads
        its model is waited for. Raises `UsageError` for a server that cannot be reached, is none of ours, or has no
        model of that name.
        """
        try:
            await self._ask("GET", "/health")
        except Unreachable as error:
            raise UsageError(f"{error}\nStart one with `gpuinfer serve`, or correct -B endpoint.") from None
        response = await self._retry(lambda: self._ask("GET", "/v1/models"))
        if response.status in (401, 403):
            raise UsageError(
                f"{self._endpoint.url} wants a key, and not this one: {_words(response)}\nGive -B key_file=FILE."
            )
        try:
            listed = [one for one in msgspec.json.decode(response.body, type=_Models).data if one.parent is None]
            all_of_them = [one for one in listed if one.alias_of is None]
            found = all_of_them[0]
        except (IndexError, msgspec.MsgspecError):
            raise UsageError(
                f"{self._endpoint.url} is no server of gpuinfer's: its /v1/models says nothing of rows and slots. "
                "Start one with `gpuinfer serve`."
            ) from None
        if len(all_of_them) > 1:
            models = {one.id: one for one in all_of_them}
            meant = [] if name is None else meant_names(name, models)
            if len(meant) != 1:
                names = ", ".join(models)
                raise UsageError(f"{self._endpoint.url} serves {names}. Say which is this run's model: -B model=NAME.")
            found, self.model = models[meant[0]], meant[0]
        found = replace(found, aliases=tuple(one.id for one in listed if one.alias_of == found.id))
        if not (1 <= found.max_rows <= MOST_WIDTH and 1 <= (found.slots or 1) <= MOST_SLOTS):
            raise UsageError(
                f"{self._endpoint.url} says that it takes {found.max_rows} rows. Let both ends run one version."
            )
        return found

    async def replicas(self) -> int:
        """The healthy replicas behind this address; 1 where that is unknown."""
        response = await self._ask("GET", "/health")
        try:
            return max(1, msgspec.json.decode(response.body, type=_Health).healthy_workers)
        except msgspec.MsgspecError:
            return 1

    async def stats(self) -> dict[str, Any]:
        """The answer of `GET /stats`. Raises `UsageError` without a server of ours, and for a wrong key."""
        try:
            response = await self._ask("GET", "/stats")
        except Unreachable as error:
            raise UsageError(f"{error}\nStart one with `gpuinfer serve --replicas N`, or give its URL.") from None
        if response.status in (401, 403):
            raise UsageError(f"{self._endpoint.url} wants a key: {_words(response)}\nGive --api-key-file FILE.")
        try:
            return msgspec.json.decode(response.body, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise UsageError(f"{self._endpoint.url} is no server of gpuinfer's. Give the URL of one.") from None

    async def counters(self) -> dict[str, Any] | None:
        """`Snapshot.to_wire()` of the server; None where it does not tell."""
        response = await self._ask("GET", self._to("/stats?form=wire"))
        if response.status != 200 or not response.headers.get("content-type", "").startswith("application/msgpack"):
            return None
        return msgspec.msgpack.decode(response.body, type=dict[str, Any])

    def _to(self, path: str) -> str:
        """The path with the name of the model."""
        if self.model is None:
            return path
        return f"{path}{'&' if '?' in path else '?'}model={quote(self.model, safe='')}"

    async def _ask(self, method: str, path: str) -> HttpResponse:
        return await self._client.request(method, path, timeout_s=FACTS_S)

    # Rows

    async def evaluate(self, request: Request) -> Result:
        """The model's answer to a block of rows."""
        try:
            body = self._body_of(request.payload)
        except (row_format.NotTensors, AttributeError) as error:
            raise BackendError(f"these rows cannot travel: {error} Submit a NumPy array [rows, …].") from None
        head = [("Content-Type", row_format.MEDIA_TYPE)]

        async def ask() -> HttpResponse:
            return await self._client.request("POST", self._to("/v1/evaluate"), body, [*head, *_headers(request)])

        response = await self._retry(ask)
        if response.status != 200:
            _refuse(response)
        try:
            return row_format.answer_from_body(response.body)
        except row_format.NotTensors as error:
            raise BackendError(f"{self._endpoint.url} sent no answer: {error} Let both ends run one version.") from None

    def _body_of(self, rows: Any) -> bytes:
        """Raises `NotTensors`."""
        if self._layout is None:
            return row_format.rows_to_body(rows)
        return row_format.to_body(dict(zip(self._layout.names, unpacked_arrays(rows, self._layout), strict=True)))

    async def change(self, path: str, body: Mapping[str, Any]) -> None:
        """Change weights or adapters. Raises `UsageError` for refused changes, and for a key that is no admin's."""
        json = [("Content-Type", "application/json")]
        asked = body if self.model is None else {**body, "model": self.model}
        response = await self._client.request("POST", path, msgspec.json.encode(asked), json)
        if response.status in (401, 403):
            raise UsageError(
                f"{self._endpoint.url} changes its weights for its admin alone: {_words(response)}\n"
                "Give the admin's key: -B key_file=FILE."
            )
        if response.status == 400:
            raise UsageError(_words(response))
        if response.status != 200:
            _refuse(response)

    # Text

    async def generate(self, request: Request, reads: Callable[[Part], None]) -> Generation:
        """The answer to a prompt. `reads` gets its parts as they come, where the request wants parts."""
        body, had = answer_frames.prompt_to_body(request.payload), DeliveredAnswer(request.payload)
        path = self._to("/v1/generations" if request.parts else "/v1/generations?parts=0")

        async def ask() -> HttpResponse | Generation:
            rest, head = had.rest(), [("Content-Type", answer_frames.PROMPT_TYPE), *_headers(request)]
            left = body if rest is request.payload else answer_frames.prompt_to_body(rest)
            async with self._client.stream("POST", path, left, head) as response:
                if response.status != 200:
                    return HttpResponse(response.status, response.headers, await response.read())
                unframer = Unframer()
                async for data in response:
                    for news in unframer.feed(data):
                        if isinstance(news, Generation):
                            return news
                        if isinstance(news, GpuinferError):
                            raise news
                        if (fresh := had.fresh(news)) is not None:
                            reads(fresh)
                raise ConnectionBroken("the answer ended before it was whole.")

        found: HttpResponse | Generation = await self._retry(ask)
        if isinstance(found, HttpResponse):
            _refuse(found)
        return found

    # Retries

    async def _retry(self, ask: Callable[[], Any]) -> Any:
        """Repeat `ask` until it is answered or refused, for `retry_s` at most: then `BackendDied` is raised."""
        until, pause_s = time.monotonic() + self._endpoint.retry_s, FIRST_PAUSE_S
        while True:
            wait_s = pause_s * random.uniform(0.5, 1.5)  # requests refused together are not repeated together
            try:
                found = await ask()
            except (Unreachable, ConnectionBroken) as error:
                why = str(error)
            except RequestTimedOut as error:
                raise BackendError(str(error)) from None
            else:
                if not (isinstance(found, HttpResponse) and found.status in AGAIN):
                    return found
                why = _words(found)
                wait_s = max(wait_s, min(LONGEST_PAUSE_S, _retry_after(found) or 0.0))
            if time.monotonic() + wait_s > until:
                raise BackendDied(
                    f"{self._endpoint.url} has not answered for {self._endpoint.retry_s:g} s: {why} "
                    "See its log, or start it again."
                )
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _headers(request: Request) -> list[tuple[str, str]]:
    """A request's headers. Raises `Expired` for one that is too late, `BackendError` for one of a group."""
    if request.group is not None:
        raise BackendError("requests of groups do not travel to a fleet. Ask without a group, or use another backend.")
    found = []
    if (left_s := request.deadline - time.monotonic()) < math.inf:
        if left_s <= 0:
            raise Expired("its deadline passed before it was sent. Give it more time.")
        found.append(("X-Gpuinfer-Timeout", f"{min(left_s, ANSWER_S):.6f}"))
    if request.priority in CLASSES:
        found.append(("X-Gpuinfer-Priority", CLASSES[request.priority]))
    if isinstance(request.client, str | int):
        found.append(("X-Gpuinfer-Client", str(request.client)[:128]))
    return found


def _refuse(response: HttpResponse) -> NoReturn:
    """Raise the response's error: our own class where a header names one, else the nearest by the status."""
    words = _words(response)
    error = rebuilt_error(response.headers.get("x-gpuinfer-error", ""), words)
    if error is None or not isinstance(error, RequestError | BackendError):
        error = KINDS.get(response.status, BackendError)(words)
    if isinstance(error, QueueFull):
        error.retry_after_s = _retry_after(response)
    raise error


def _words(response: HttpResponse) -> str:
    return error_words(response.status, response.body)


def _retry_after(response: HttpResponse) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 6 else None
