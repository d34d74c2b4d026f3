"""One event loop's way to a server of ours over HTTP, be it a replica alone or a fleet.

What is asked depends on nothing but the question, so it is asked again when the server was not there, or was gone in
the middle: for a bounded time, and without saying anything twice.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import quote

import msgspec
from msgspec import Struct

from gpuinfer.api import Priority, Request, Result
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
    StreamedResponse,
    Unreachable,
)
from gpuinfer.models import row_format
from gpuinfer.text import answer_frames
from gpuinfer.text.answer_frames import DeliveredAnswer, Unframer

ANSWER_S = 86_400.0  # for one answer: what hangs is found by the watchdog here, and by heartbeats over there
WORD_S = 10.0  # for a few facts
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # between two tries
MOST_WIDTH, MOST_SLOTS = 1 << 24, 1 << 20
LONGEST = 600  # characters of a server's own words
AGAIN = frozenset({502, 503, 504})
KINDS = {400: BadPrompt, 404: BadPrompt, 408: Expired, 413: BadPrompt, 422: BadResult, 429: QueueFull}
CLASSES = {Priority.HIGH: "high", Priority.LOW: "low"}


class ServedModel(Struct, frozen=True):
    """What `GET /v1/models` says of the one model there is."""

    id: str
    kind: str
    max_rows: int  # of one request
    slots: int | None = None  # of one replica
    features: int | None = None
    input_dtype: str | None = None
    parent: str | None = None  # of an adapter: the model


class _Models(Struct):
    data: list[ServedModel]


class _Health(Struct):
    healthy_workers: int = 1


class _Complaint(Struct):
    message: str = ""


class _Refusal(Struct):
    error: _Complaint


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to get to a server. `retry_s`: for how long one that is not there is asked again."""

    url: str
    key: str | None = None
    retry_s: float = 30.0


class ReplicaClient:
    """Asks. `connections`: how many questions may be under way at once; more wait for their turn. `model`: which is
    meant, of several over there.
    """

    def __init__(self, way: Endpoint, connections: int, model: str | None = None) -> None:
        self._way = way
        bearer = [("Authorization", f"Bearer {way.key}")] if way.key else []
        self._client = HttpClient(way.url, connections=connections, timeout_s=ANSWER_S, headers=bearer)
        self.model = model

    async def close(self) -> None:
        await self._client.close()

    # What there is

    async def served(self, name: str | None = None) -> ServedModel:
        """The model over there; of several the one of this name, which is `model` from then on. Raises `UsageError` for
        a server that is none of ours or has none of that name, and at once where there is none: one that still loads
        its model is waited for.
        """
        try:
            await self._asked("GET", "/health")
        except Unreachable as error:
            raise UsageError(f"{error}\nStart one with `gpuinfer serve`, or correct -B endpoint.") from None
        response = await self._persist(lambda: self._asked("GET", "/v1/models"))
        if response.status in (401, 403):
            raise UsageError(
                f"{self._way.url} wants a key, and not this one: {_words(response)}\nGive -B key_file=FILE."
            )
        try:
            all_of_them = [one for one in msgspec.json.decode(response.body, type=_Models).data if one.parent is None]
            found = all_of_them[0]
        except (IndexError, msgspec.MsgspecError):
            raise UsageError(
                f"{self._way.url} is no server of gpuinfer's: its /v1/models says nothing of rows and slots. "
                "Start one with `gpuinfer serve`."
            ) from None
        if len(all_of_them) > 1:
            found = self._of_several(all_of_them, name)
        if not (1 <= found.max_rows <= MOST_WIDTH and 1 <= (found.slots or 1) <= MOST_SLOTS):
            raise UsageError(
                f"{self._way.url} says that it takes {found.max_rows} rows. Let both ends run one version."
            )
        return found

    def _of_several(self, found: Sequence[ServedModel], name: str | None) -> ServedModel:
        chosen = next((one for one in found if one.id == name), None)
        if chosen is None:
            names = ", ".join(one.id for one in found)
            raise UsageError(f"{self._way.url} serves {names}. Say which is this run's model: -B model=NAME.")
        self.model = chosen.id
        return chosen

    async def replicas(self) -> int:
        """How many can be asked at once behind this address; 1 where nobody says."""
        response = await self._asked("GET", "/health")
        try:
            return max(1, msgspec.json.decode(response.body, type=_Health).healthy_workers)
        except msgspec.MsgspecError:
            return 1

    async def stats(self) -> dict[str, Any]:
        """What `GET /stats` says. Raises `UsageError` for nobody, a wrong key, and a server that is none of ours."""
        try:
            response = await self._asked("GET", "/stats")
        except Unreachable as error:
            raise UsageError(f"{error}\nStart one with `gpuinfer serve --replicas N`, or give its URL.") from None
        if response.status in (401, 403):
            raise UsageError(f"{self._way.url} wants a key: {_words(response)}\nGive --api-key-file FILE.")
        try:
            return msgspec.json.decode(response.body, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise UsageError(f"{self._way.url} is no server of gpuinfer's. Give the URL of one.") from None

    async def counters(self) -> dict[str, Any] | None:
        """`Snapshot.to_wire()` of all there is; None where nobody tells."""
        response = await self._asked("GET", self._to("/stats?form=wire"))
        if response.status != 200 or not response.headers.get("content-type", "").startswith("application/msgpack"):
            return None
        return msgspec.msgpack.decode(response.body, type=dict[str, Any])

    def _to(self, path: str) -> str:
        """The path, and which model is meant."""
        if self.model is None:
            return path
        return f"{path}{'&' if '?' in path else '?'}model={quote(self.model, safe='')}"

    async def _asked(self, method: str, path: str) -> HttpResponse:
        return await self._client.request(method, path, timeout_s=WORD_S)

    # Rows

    async def evaluate(self, request: Request) -> Result:
        """The model's answer to a block of rows."""
        try:
            body = row_format.rows_to_body(request.payload)
        except (row_format.NotTensors, AttributeError) as error:
            raise BackendError(f"these rows cannot travel: {error} Submit a NumPy array [rows, …].") from None
        head = [("Content-Type", row_format.MEDIA_TYPE)]

        async def ask() -> HttpResponse:
            return await self._client.request("POST", self._to("/v1/evaluate"), body, [*head, *_headers(request)])

        response = await self._persist(ask)
        if response.status != 200:
            _refuse(response)
        try:
            return row_format.answer_from_body(response.body)
        except row_format.NotTensors as error:
            raise BackendError(f"{self._way.url} sent no answer: {error} Let both ends run one version.") from None

    async def change(self, path: str, body: Mapping[str, Any]) -> None:
        """Have it change its weights or adapters. Raises `UsageError` for what it refuses, and a key of no admin."""
        json = [("Content-Type", "application/json")]
        asked = body if self.model is None else {**body, "model": self.model}
        response = await self._client.request("POST", path, msgspec.json.encode(asked), json)
        if response.status in (401, 403):
            raise UsageError(
                f"{self._way.url} changes its weights for its admin alone: {_words(response)}\n"
                "Give the admin's key: -B key_file=FILE."
            )
        if response.status == 400:
            raise UsageError(_words(response))
        if response.status != 200:
            _refuse(response)

    # Text

    async def generate(self, request: Request, reads: Callable[[Part], None]) -> Generation:
        """The answer to a prompt. `reads` is told its parts as they come, where the request wants any."""
        body, had = answer_frames.prompt_to_body(request.payload), DeliveredAnswer(request.payload)
        path = self._to("/v1/generations" if request.parts else "/v1/generations?parts=0")

        def tell(part: Part) -> None:
            if (fresh := had.fresh(part)) is not None:
                reads(fresh)

        async def ask() -> HttpResponse | Generation:
            rest, head = had.rest(), [("Content-Type", answer_frames.PROMPT_TYPE), *_headers(request)]
            left = body if rest is request.payload else answer_frames.prompt_to_body(rest)
            async with self._client.stream("POST", path, left, head) as response:
                if response.status != 200:
                    return HttpResponse(response.status, response.headers, await response.read())
                return await _followed(response, tell)

        found: HttpResponse | Generation = await self._persist(ask)
        if isinstance(found, HttpResponse):
            _refuse(found)
        return found

    # Again

    async def _persist(self, ask: Callable[[], Any]) -> Any:
        """Ask until it is answered or refused, or for `retry_s`: then `BackendDied` is raised."""
        until, pause_s = time.monotonic() + self._way.retry_s, FIRST_PAUSE_S
        while True:
            wait_s = pause_s * random.uniform(0.5, 1.5)  # who was refused together does not come again together
            try:
                found = await ask()
            except (Unreachable, ConnectionBroken) as error:
                why = str(error)
            except RequestTimedOut as error:
                raise BackendError(str(error)) from None
            else:
                if not (isinstance(found, HttpResponse) and found.status in AGAIN):
                    return found
                why, wait_s = _words(found), max(wait_s, min(LONGEST_PAUSE_S, _retry_after(found) or 0.0))
            if time.monotonic() + wait_s > until:
                raise BackendDied(
                    f"{self._way.url} has not answered for {self._way.retry_s:g} s: {why} "
                    "See its log, or start it again."
                )
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def _followed(response: StreamedResponse, tell: Callable[[Part], None]) -> Generation:
    """Raises the error that ends it, and `BrokenOff` when nothing does."""
    unframer = Unframer()
    async for data in response:
        for news in unframer.feed(data):
            if isinstance(news, Generation):
                return news
            if isinstance(news, GpuinferError):
                raise news
            tell(news)
    raise ConnectionBroken("the answer ended before it was whole.")


def _headers(request: Request) -> list[tuple[str, str]]:
    """What a request says beside its payload. Raises `Expired` for one that is too late, `BackendError` for a group."""
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
    """Raise what the response says: our own error where it names one, else the nearest by its status."""
    words = _words(response)
    error = rebuilt_error(response.headers.get("x-gpuinfer-error", ""), words)
    if error is None or not isinstance(error, RequestError | BackendError):
        error = KINDS.get(response.status, BackendError)(words)
    if isinstance(error, QueueFull):
        error.retry_after_s = _retry_after(response)
    raise error


def _words(response: HttpResponse) -> str:
    try:
        said = msgspec.json.decode(response.body, type=_Refusal).error.message
    except msgspec.MsgspecError:
        said = response.body.decode("utf-8", "replace")
    return " ".join(said.split())[:LONGEST] or f"it answered with status {response.status}."


def _retry_after(response: HttpResponse) -> float | None:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdecimal() and len(text) < 6 else None
