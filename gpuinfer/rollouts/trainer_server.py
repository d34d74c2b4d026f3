"""The HTTP server for a trainer in another process or on another machine: the trainer takes batches and hands over
weights, in JSON or, on request, in msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from gpuinfer.errors import BackendError, Closed, UsageError, WorkError
from gpuinfer.http.access import LOOPBACK, Access, Keys
from gpuinfer.http.http_exchange import Exchange, Handler
from gpuinfer.http.route_table import Route, RouteTable
from gpuinfer.http.server import HttpServer
from gpuinfer.rollouts.kl import from_trainer
from gpuinfer.rollouts.record import Group
from gpuinfer.rollouts.trainer import BatchHandoff, HandoffTraining, Trained, UnknownBatch

JSON, MSGPACK = "application/json", "application/msgpack"
MOST_GROUPS = 1 << 16

Logprobs = dict[str, list[list[float]]]
Metrics = Annotated[dict[str, float], Meta(max_length=256)]
Number = Annotated[int, Meta(ge=0, le=1 << 53)]
Seconds = Annotated[float, Meta(ge=0)]


class BatchReport(Struct, forbid_unknown_fields=True, kw_only=True):
    """What each request may say of the batch that is done."""

    version: Number | None = None  # of the trainer's weights now
    logprobs: Logprobs | None = None  # as in `Trained.logprobs`
    metrics: Metrics = {}


class TakeRequest(BatchReport, forbid_unknown_fields=True, kw_only=True):
    """The body of `take`."""

    groups: Annotated[int, Meta(ge=1, le=MOST_GROUPS)] | None = (
        None  # None: as many as the run's batches have, and no more
    )
    wait_s: Seconds = 0.0  # a minute at most counts
    done: Number | None = None  # the batch that was taken before, and is trained on


class AckRequest(BatchReport, forbid_unknown_fields=True, kw_only=True):
    """The body of `ack`."""

    batch: Number


class UpdateRequest(BatchReport, forbid_unknown_fields=True, kw_only=True):
    """The body of `update`, which names a version."""

    weights: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None  # a path, as the run's machine has it
    adapter: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    batch: Number | None = None  # that is done


class TakeResponse(Struct, kw_only=True):
    """The response of `take`. Without a batch the trainer asks again, unless `over` is set."""

    batch: int | None
    version: int
    step: int | None = None
    again: bool = False  # the batch was given before and is not reported as done
    groups: tuple[Group, ...] = ()
    over: bool = False  # nothing more will come
    waits_for: str | None = None  # "rollouts", or "version": no more groups are begun before the weights are newer


RequestT = TypeVar("RequestT", bound=Struct)


def read_request(exchange: Exchange, wanted: type[RequestT]) -> RequestT:
    """The body of a request; an empty body has no fields. Raises `UsageError`."""
    body = exchange.body or b"{}"
    packed = bool(exchange.body) and exchange.headers.get("content-type", "").startswith(MSGPACK)
    try:
        return msgspec.msgpack.decode(body, type=wanted) if packed else msgspec.json.decode(body, type=wanted)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        form = "msgpack" if packed else "one JSON object"
        fields = ", ".join(wanted.__struct_fields__)
        raise UsageError(f"{error}. Send {form} with some of {fields}.") from None


def encode_response(exchange: Exchange, message: Any) -> tuple[bytes, str]:
    """The body and its type, in the form that the request accepts."""
    if MSGPACK in exchange.headers.get("accept", ""):
        return msgspec.msgpack.encode(message), MSGPACK
    return msgspec.json.encode(message), JSON


log = logging.getLogger(__name__)

MOST_WAIT_S = 60.0  # of one request: a trainer asks again
LAST_S = 10.0  # at the end, for the trainer to hear that it is over
HERE = ("127.0.0.1", "::1", "localhost")
LARGE = 64 << 10  # bytes of a body that is not read on the event loop

T = TypeVar("T")
B = TypeVar("B", bound=Struct)


@dataclass(frozen=True)
class TrainerServerPlan:
    """Where to listen, and who may ask."""

    host: str
    port: int
    api: Keys | None = None
    admin: Keys | None = None
    patience_s: float = 3600.0  # without a word from a trainer, before the run is given up

    @classmethod
    def of(
        cls, listen: str, api_key_file: Path | None, admin_key_file: Path | None, insecure: bool, patience_s: float
    ) -> TrainerServerPlan:
        """Of the flags. Raises `UsageError`, also for an address that others reach, without a key."""
        host, colon, port = listen.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
            raise UsageError(f"--listen {listen}: not of the form HOST:PORT. Write --listen 127.0.0.1:9000.")
        if host not in HERE and api_key_file is None and not insecure:
            raise UsageError(
                f"--listen {listen} lets others in. Give --api-key-file FILE with keys (openssl rand -hex 32 > FILE; "
                "chmod 600 FILE), or say --insecure if everybody may."
            )
        api = Keys.read(api_key_file) if api_key_file is not None else None
        admin = Keys.read(admin_key_file) if admin_key_file is not None else None
        return cls(host, int(port), api, admin, patience_s)

    def access(self) -> Access:
        """On loopback only its own names are right: no page in a browser reaches it under another."""
        return Access(self.api, self.admin, LOOPBACK | {self.host} if self.host in HERE else None)


class TrainerServer(BatchHandoff):
    """A consumer whose trainer connects over HTTP, and may die and come back without losing a batch.

    There is one trainer: a request that does not mention the batch that is out comes from a restarted trainer.
    """

    def __init__(self, plan: TrainerServerPlan, batch: int) -> None:
        super().__init__()
        self._plan, self._groups = plan, batch
        self._server: HttpServer | None = None
        self._heard = time.monotonic()  # from a trainer, the last time
        self._asking = 0  # requests under way
        self._taken = False  # by anyone, ever
        self._told_over = asyncio.Event()
        self.port = 0

    async def meet(self, training: HandoffTraining) -> None:
        """Listen from now on. Raises `UsageError` for an address that cannot be had."""
        await super().meet(training)
        paths = RouteTable(self.routes(), self._plan.access())
        self._server = HttpServer(paths, quick=paths.quick)
        self.port = await self._server.listen(self._plan.host, self._plan.port)
        self._heard = time.monotonic()
        log.warning("a trainer can take groups at %s/v1/rollouts", self.url)

    @property
    def url(self) -> str:
        host = f"[{self._plan.host}]" if ":" in self._plan.host else self._plan.host
        return f"http://{host}:{self.port}"

    async def drain(self) -> None:
        """A trainer that has been there has a moment to ask, and be told."""
        self.end()
        if self._taken:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_S):
                    await self._told_over.wait()

    async def close(self) -> None:
        self.end()
        if self._server is not None:
            await self._server.drain(1.0)
            await self._server.close()

    # The run's side, with an end to its patience

    async def wait_for_request(self) -> int | None:
        return await self._patiently(super().wait_for_request())

    async def train(self, groups: Sequence[Group], step: int) -> Trained:
        return await self._patiently(super().train(groups, step))

    async def _patiently(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Raises `WorkError` when no trainer has asked for too long."""
        task = asyncio.create_task(waiting)
        try:
            while not task.done():
                left_s = (
                    self._plan.patience_s if self._asking else self._heard + self._plan.patience_s - time.monotonic()
                )
                if left_s <= 0:
                    raise WorkError(
                        f"no trainer has asked at {self.url} for {self._plan.patience_s:g} s. Start it, and run again "
                        "with --resume; or allow more with --trainer-patience."
                    )
                await asyncio.wait({task}, timeout=left_s)
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    # The trainer's side

    def routes(self) -> list[Route]:
        at = "/v1/rollouts"

        async def ack(message: AckRequest) -> Any:
            await self._apply_report(message, message.batch)
            return {"batch": message.batch, "version": self.training.version}

        async def update(message: UpdateRequest) -> Any:
            if message.version is None:
                raise UsageError(f'which version? Send {{"version": {self.training.version + 1}}}.')
            self._check(message, message.batch)
            await self.training.update(message.version, message.weights, message.adapter)
            if message.batch:
                self.done(message.batch, logprobs=message.logprobs, metrics=message.metrics)
            return {"version": self.training.version}

        return [
            Route("GET", "/health", self._health, "open", "Whether the run goes on."),
            Route("GET", f"{at}/status", self._handler(BatchReport, self._status), "api", "Buffer, version and steps."),
            Route(
                "POST",
                f"{at}/take",
                self._handler(TakeRequest, self._take),
                "api",
                "The next batch, or the same again.",
            ),
            Route("POST", f"{at}/ack", self._handler(AckRequest, ack), "api", "A batch is trained on."),
            Route("POST", f"{at}/update", self._handler(UpdateRequest, update), "admin", "The weights are new."),
        ]

    def _handler(self, body: type[B], work: Callable[[B], Awaitable[Any]]) -> Handler:
        async def handle(exchange: Exchange) -> None:
            self._asking += 1
            try:
                large = len(exchange.body) > LARGE
                request = (
                    await asyncio.to_thread(read_request, exchange, body) if large else read_request(exchange, body)
                )
                message = await work(request)
            except (UsageError, WorkError, UnknownBatch) as error:
                status = 400 if isinstance(error, UsageError) else 500
                if isinstance(error, UnknownBatch):  # the message does not fit the state
                    status = 409
                elif isinstance(error, BackendError | Closed):
                    status = 503
                exchange.refuse(status, str(error))
            else:
                large = isinstance(message, TakeResponse) and bool(message.groups)
                written = (
                    await asyncio.to_thread(encode_response, exchange, message)
                    if large
                    else encode_response(exchange, message)
                )
                exchange.respond(200, *written)
                if isinstance(message, TakeResponse) and message.over:
                    self._told_over.set()
            finally:
                self._asking -= 1
                self._heard = time.monotonic()

        return handle

    async def _health(self, exchange: Exchange) -> None:
        exchange.respond(200, *encode_response(exchange, {"status": "over" if self.over else "ready"}))

    async def _status(self, message: BatchReport) -> Any:
        out = None if self.batch is None else {"batch": self.batch.number, "times_given": self.times}
        return {
            "version": self.training.version,
            "step": self.training.step,
            "over": self.over,
            "out": out,
            "waits_for": self.training.starved_of,
            **self.training.facts(),
        }

    async def _take(self, message: TakeRequest) -> TakeResponse:
        self._taken = True
        if message.groups is not None and message.groups > self._groups:
            raise UsageError(
                f"{message.groups} groups, and the run's batches have {self._groups}: more may never be there at once. "
                f"Ask for fewer, or run with --batch-groups {message.groups}."
            )
        await self._apply_report(message, message.done)
        if self.batch is not None and self.times:
            self.without(self.training.too_old(self.batch.groups))
            if not self.batch.groups:  # all of it has grown too old since it was given
                self.done(self.batch.number)
        self.want(message.groups or self._groups)
        batch = await self.next(min(message.wait_s, MOST_WAIT_S))
        if batch is None:
            waits_for = None if self.over else self.training.starved_of
            return TakeResponse(batch=None, version=self.training.version, over=self.over, waits_for=waits_for)
        return TakeResponse(
            batch=batch.number,
            step=batch.step,
            version=self.training.version,
            groups=batch.groups,
            again=self.times > 1,
        )

    async def _apply_report(self, message: BatchReport, done: int | None) -> None:
        """The version first: it is in force when the step of the finished batch ends."""
        self._check(message, done)
        if message.version is not None:
            await self.training.update(message.version)
        if done:
            self.done(done, logprobs=message.logprobs, metrics=message.metrics)

    def _check(self, message: BatchReport, done: int | None) -> None:
        """Raises `UnknownBatch`, and `UsageError` for log-probabilities of other tokens."""
        if done is not None and done > self.last:
            raise UnknownBatch(f"batch {done} was never given: the newest is {self.last}. Ask without it.")
        if message.logprobs and self.batch is not None:
            try:
                from_trainer(self.batch.groups, message.logprobs)
            except ValueError as error:
                raise UsageError(str(error)) from None
