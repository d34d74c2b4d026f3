"""The load generator: puts a load of requests on a backend that takes rows, to see how backend and strategy bear it.

An open load sends requests at their times whatever happens; a closed one has clients that wait for the answer and
think.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.engine.arrivals import (
    RATES,
    Arrivals,
    ClosedLoop,
    Mix,
    Offer,
    classes_of,
    open_arrivals,
    parse_rows,
    refuse_unused,
    schedule_of,
)
from gpuinfer.errors import BackendDied, BackendError, BadResult, Expired, QueueFull, UnknownName, UsageError, WorkError
from gpuinfer.host.event_loop import follow_task
from gpuinfer.models.row_format import BITS, row_dtype
from gpuinfer.models.row_layout import array_spec, drawn_rows
from gpuinfer.serving.openai.model_options import refuse_several
from gpuinfer.stats import Histogram

LEAST_POOL = 1024  # rows, drawn once: drawing anew for each request would cost more than sending it


class Payloads:
    """Hands out blocks of rows [rows, ...], views of one pool that is walked round and round.

    Features of whole numbers are zeros and ones, others normally distributed. Without a
    model there is nothing to carry.
    """

    def __init__(self, spec: ModelSpec | None, most_rows: int, seed: int) -> None:
        self._pool: NDArray[Any] | None = None
        self._last = max(LEAST_POOL, most_rows)  # where a block may begin
        self._at = 0
        if spec is None:
            return
        random, shape = np.random.default_rng(seed), (most_rows + self._last, spec.inputs)
        if spec.layout is not None:
            self._pool = drawn_rows(spec.layout, shape[0], random)
            return
        if row_dtype(spec).kind == "f":
            self._pool = random.standard_normal(shape).astype(row_dtype(spec))
            return
        drawn = random.integers(0, 2, shape, dtype=np.uint8)
        bits = spec.input_dtype == BITS
        self._pool = np.packbits(drawn, axis=1, bitorder="little") if bits else drawn.astype(row_dtype(spec))

    def take(self, rows: int) -> Any:
        if self._pool is None:
            return None
        begin = self._at
        self._at = (begin + rows) % self._last
        return self._pool[begin : begin + rows]


ODD_LATE_S, ODD_SHARE = 0.5e-3, 0.05  # a generator that is later, and by more than such a share, is not believed


class LoadTally:
    """How many requests there were and how they ended; when they were sent and answered, by when they were due."""

    def __init__(self) -> None:
        self.asked = self.asked_rows = self.answered = 0
        self.lost: Counter[str] = Counter()  # rejected, expired, failed
        self.late, self.latency = Histogram(), Histogram()  # seconds from when a request was due
        self.first_failure: WorkError | None = None

    @property
    def settled(self) -> int:
        return self.answered + sum(self.lost.values())

    @property
    def late_s(self) -> float:
        """How late a request was sent, of all but one in twenty."""
        return self.late.summary().get("p95", 0.0)

    def doubt(self) -> str:
        """Why the latencies are not to be believed, with the cure; empty when they are."""
        late, latency = self.late_s, self.latency.summary().get("p95", 0.0)
        if not latency or late <= max(ODD_LATE_S, ODD_SHARE * latency):
            return ""
        return (
            f"the load was sent up to {late * 1e3:.2f} ms late (p95), for want of a core: latencies count from then. "
            f"From when each request was due, p95 is {latency * 1e3:.2f} ms. "
            "Lower --rate, raise --rows, or leave the generator a core of its own."
        )


class LoadRequester:
    """Sends requests and counts what becomes of them. What only one request suffers is counted; the rest is raised."""

    def __init__(self, infer: Infer, payloads: Payloads, tally: LoadTally) -> None:
        self.tally = tally
        self._infer, self._payloads = infer, payloads
        self._time = asyncio.get_running_loop().time

    async def ask(self, ask: Offer, due: float) -> QueueFull | None:
        """One request that was due at this time of the loop's clock; its deadline counts from then. Whatever `infer`
        raises but for a full queue (returned), an expiry or a batch that failed (counted) is raised.
        """
        tally, now = self.tally, self._time()
        tally.asked += 1
        tally.asked_rows += ask.rows
        tally.late.add(now - due)
        try:
            await self._infer(
                self._payloads.take(ask.rows),
                rows=ask.rows,
                priority=ask.priority,
                timeout=due + ask.timeout - now,
                group=ask.group,
                client=ask.client,
            )
        except QueueFull as error:
            tally.lost["rejected"] += 1
            return error
        except Expired:
            tally.lost["expired"] += 1
            await asyncio.sleep(0)  # it may have expired at once: the next request must not keep out all others
        except BackendDied:
            raise
        except (BackendError, BadResult) as error:
            tally.lost["failed"] += 1
            tally.first_failure = tally.first_failure or error
        else:
            tally.answered += 1
            tally.latency.add(self._time() - due)
        return None


AT_ONCE = 32  # requests that are sent before anything else may run, when the generator is behind
LAST_S = 1.0  # for what is under way when the load is stopped
AGAIN_S = 0.01  # until a client asks a full queue again that does not say when


class LoadDriver(ABC):
    """Sends a load. `over` ends it early; `lasted_s` is how long it has been sent for."""

    def __init__(self, asker: LoadRequester) -> None:
        self._asker = asker
        self._loop = asyncio.get_running_loop()
        self._began = self._ended = self._loop.time()
        self._sending = True

    @property
    def lasted_s(self) -> float:
        return (self._loop.time() if self._sending else self._ended) - self._began

    async def run(self) -> None:
        """Until the load is over and everything is settled. Cancelled, it leaves what is under way a second to end."""
        try:
            await self.send()
            self._stamp()
            await self.settle()
        except asyncio.CancelledError:
            self._stamp()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.settle(), LAST_S)
        finally:
            self.abandon()

    def _stamp(self) -> None:
        if self._sending:
            self._sending, self._ended = False, self._loop.time()

    @abstractmethod
    async def send(self) -> None:
        """Send all of the load."""

    @abstractmethod
    async def settle(self) -> None:
        """Wait until nothing is under way. Raises what a request met that is not for the request alone."""

    @abstractmethod
    def abandon(self) -> None:
        """Want no more answers."""


class OpenLoad(LoadDriver):
    """Each request is sent when it is due, on the loop's clock; a task for each costs less than what else it takes."""

    def __init__(self, asker: LoadRequester, asks: Iterator[Offer]) -> None:
        super().__init__(asker)
        self._asks = asks
        self._tasks: set[asyncio.Task[object]] = set()
        self._fault: BaseException | None = None
        self._idle = asyncio.Event()
        self._pausing: asyncio.Future[None] | None = None

    async def send(self) -> None:
        time, sent = self._loop.time, 0
        for ask in self._asks:
            due = self._began + ask.at
            if due > time():
                await self._pause(due)
                sent = 0
            elif (sent := sent + 1) >= AT_ONCE:
                await asyncio.sleep(0)
                sent = 0
            if self._fault is not None:
                raise self._fault
            task = self._loop.create_task(self._asker.ask(ask, due))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def _pause(self, until: float) -> None:
        """Until this time of the loop's clock, or until all is lost."""
        self._pausing = self._loop.create_future()
        timer = self._loop.call_at(until, _cancel_all, self._pausing)
        try:
            await self._pausing
        finally:
            timer.cancel()
            self._pausing = None

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error
            if self._pausing is not None:
                _cancel_all(self._pausing)
        if not self._tasks or self._fault is not None:
            self._idle.set()

    async def settle(self) -> None:
        while self._tasks and self._fault is None:
            self._idle.clear()
            await self._idle.wait()
        if self._fault is not None:
            raise self._fault

    def abandon(self) -> None:
        for task in self._tasks:
            task.cancel()


class ThinkingClients(LoadDriver):
    """Clients that ask, wait for the answer, think and ask again, for `seconds` or until `count` have been asked."""

    def __init__(
        self, asker: LoadRequester, infer: Infer, load: ClosedLoop, seconds: float, count: float, dice: random.Random
    ) -> None:
        super().__init__(asker)
        self._infer, self._load = infer, load
        self._until, self._left = self._began + seconds, count
        seeds = [dice.random() for _ in range(load.clients)]  # so that none draws what another would have
        self._tasks = [self._loop.create_task(self._client(random.Random(seed))) for seed in seeds]

    async def _client(self, dice: random.Random) -> None:
        draw, time = self._load.mix.draw(dice), self._loop.time
        with self._infer.client() as me:
            while self._left > 0:
                if self._load.think:
                    await self._rest(self._load.think_s(dice))
                if time() >= self._until or not self._sending or self._left <= 0:
                    return
                self._left -= 1
                full = await self._asker.ask(draw(0.0)._replace(client=me), time())
                if full is not None:
                    await self._rest(full.retry_after_s or AGAIN_S)

    async def _rest(self, seconds: float) -> None:
        """For so long, or until the load is over."""
        await asyncio.sleep(min(seconds, max(0.0, self._until - self._loop.time())))

    async def send(self) -> None:
        await self.settle()

    async def settle(self) -> None:
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    def abandon(self) -> None:
        for task in self._tasks:
            task.cancel()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen: the first was raised


def _cancel_all(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


log = logging.getLogger(__name__)

MODELS = ("blobnet", "blobnet-small", "module:factory", "none")
SOURCES = ("rate", "clients", "schedule", "replay")  # of which one says what the load is
CLIENTS = 64  # when none does
DURATION_S = 10.0
ENDLESS_S = 1e9


class Load(Workload):
    """Put a load of requests on a backend: at a rate, from clients that wait for their answers, or as recorded."""

    class Options(api.Options):
        rate: float | None = Field(None, gt=0, le=1e9, description="rows per second that arrive, whatever happens")
        clients: int | None = Field(
            None, ge=1, le=100_000, description="clients that ask, wait for the answer, and ask again [64]"
        )
        schedule: list[str] | None = Field(None, description="rates, each for a time: 200:8s,3000:8s,200:8s")
        replay: Path | None = Field(None, description="send what arrived in this trace")
        arrivals: Literal["poisson", "constant", "bursty"] = Field("poisson", description="how a rate is spread")
        burst: float = Field(5.0, gt=1, le=1e6, description="rate in a burst, in mean rates; silence between bursts")
        burst_s: float = Field(0.1, gt=0, le=1e6, description="mean length of a burst, in seconds")
        think: float = Field(0.0, ge=0, le=1e6, description="mean seconds from an answer to the client's next request")
        rows: str = Field("1", description="rows of a request: 8, or drawn evenly from 1-8")
        classes: str | None = Field(None, description="shares of the requests: high=0.2,normal=0.4,low=0.4")
        timeout: float | None = Field(None, gt=0, description="seconds after which a request expires")
        sources: int = Field(0, ge=0, le=1_000_000, description="senders of an open load; 0: nobody says who asks")
        duration: float | None = Field(
            None, gt=0, le=1e9, allow_inf_nan=False, description="seconds of load [10, or as scheduled]"
        )
        requests: int | None = Field(None, ge=1, le=10**12, description="requests, instead of a duration")
        model: str | None = Field(
            "blobnet",
            description="blobnet, blobnet-small, module:factory, or none",
            json_schema_extra={"names": ["blobnet", "blobnet-small", "none"]},
        )
        weights: Path | None = Field(None, description="safetensors, or a torch file of plain tensors")
        features: int | str | None = Field(
            None, description="of a row, or its shape, as 3x32x32; for a module:factory that plays no cards"
        )
        input_dtype: str = Field("float32", description="with features, what rows are made of: float32, int64, bool, …")

    options: Options
    _warned: ClassVar[bool] = False  # of a late generator: once is enough for a comparison of many runs

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        own = self.options
        named = [name for name in SOURCES if getattr(own, name) is not None]
        if len(named) > 1:
            flags = " and ".join(f"--{name}" for name in named)
            raise UsageError(f"{flags} each say what the load is, here or in gpuinfer.toml. Give one of them.")
        source = named[0] if named else "clients"
        refuse_unused(own, source)
        if own.arrivals != "poisson" and source not in RATES:
            raise UsageError(f"--arrivals {own.arrivals} spreads a rate, and --{source} has none. Leave it out.")
        refuse_several(own.model, "load")
        if own.model is not None and own.model not in MODELS and ":" not in own.model:
            raise UnknownName("model", own.model, MODELS, label="Choices")
        if own.features is not None and ":" not in (own.model or ""):
            raise UsageError("--features is for a model of your own. Add --model module:factory, or leave it out.")
        if own.features is None and own.input_dtype != "float32":
            raise UsageError("--input-dtype goes with --features. Add --features N, or leave it out.")
        self.model()  # refuses features that are none
        if own.weights is not None and not own.weights.is_file():
            raise UsageError(f"--weights: no file '{own.weights}'. Give the file that holds the weights.")
        classes = classes_of(own.classes) if own.classes else {}
        mix = Mix(parse_rows(own.rows), classes, math.inf if own.timeout is None else own.timeout, own.sources)
        if own.replay is not None:
            from gpuinfer.lab.simulate.fitting import replayed

            self.load: Arrivals = replayed(own.replay)
        elif (rates := schedule_of(own.schedule) if own.schedule is not None else own.rate) is not None:
            self.load = open_arrivals(own.arrivals, rates, mix, own.burst, own.burst_s)
        else:
            self.load = ClosedLoop(own.clients or CLIENTS, own.think, mix=mix)

    def trial(self, setup: Setup, **changes: Any) -> Load | None:
        """Of clients: what comes from outside is answered as fast as it comes, and not faster."""
        if not isinstance(self.load, ClosedLoop):
            return None
        return Load(setup, **{**self.options.model_dump(), "duration": ENDLESS_S, "requests": None, **changes})

    def model(self) -> ModelSpec | None:
        """Rows of self-play's default game, whose networks these are; with --features, of any model."""
        own = self.options
        if own.model is None:
            return None
        weights = str(own.weights) if own.weights else None
        if own.features is not None:
            return array_spec(own.model, weights, own.features, own.input_dtype)
        from gpuinfer.workloads.selfplay import games

        game = games.build_game("blob", {})
        sizes = {"actions": game.actions, "seats": game.seats}
        return ModelSpec(own.model, weights, game.features, game.feature_dtype, sizes)

    @property
    def asks(self) -> bool:
        return True

    @property
    def seconds(self) -> float:
        """How long the load lasts at most; inf when something else ends it."""
        if self.options.duration is not None:
            return self.options.duration
        if self.load.duration is not None:
            return self.load.duration
        ends_by_itself = self.options.replay is not None or self.options.requests is not None
        return math.inf if ends_by_itself else DURATION_S

    @property
    def total(self) -> int | None:
        """How many requests there will be, when that is known."""
        counts = [count for count in (self.options.requests, self.load.count) if count is not None]
        return min(counts) if counts and self.options.duration is None else None

    def asked(self) -> Iterator[Offer]:
        """The requests of an open load, in the order of their times: for one seed always the same."""
        within = itertools.takewhile(lambda ask: ask.at < self.seconds, self.load.asks(self._dice()))
        for ask in itertools.islice(within, self.options.requests):
            yield ask if ask.client is None else ask._replace(client=f"source {ask.client}")

    def _dice(self) -> random.Random:
        """Those of the simulator: one seed brings the same load there."""
        return random.Random(f"{self.setup.seed}/arrivals")

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        yield Progress(0, self.total, "requests", note="making the backend ready", setup=True)
        limits = await infer.ready()
        if self.load.most_rows > limits.max_rows:
            raise UsageError(
                f"requests of {self.load.most_rows} rows do not fit into a batch of {limits.max_rows}, and none is "
                "split. Give fewer --rows, or raise the limit (-B max_rows)."
            )
        spec = self.model() if infer.has_model else None
        tally = LoadTally()
        yield self._progress(tally, 0.0)  # the clock starts here, and so does the load
        asker = LoadRequester(infer, Payloads(spec, self.load.most_rows, self.setup.seed), tally)
        driver: LoadDriver
        if isinstance(self.load, ClosedLoop):
            count = math.inf if self.options.requests is None else self.options.requests
            driver = ThinkingClients(asker, infer, self.load, self.seconds, count, self._dice())
        else:
            driver = OpenLoad(asker, self.asked())
        async for _ in follow_task(asyncio.create_task(driver.run()), infer.stopping):
            yield self._progress(tally, driver.lasted_s)
        if tally.first_failure is not None and not tally.answered:
            raise tally.first_failure
        doubt = "" if isinstance(self.load, ClosedLoop) else tally.doubt()
        if doubt and not Load._warned:
            Load._warned = True
            log.warning("%s", doubt)
        yield self._progress(tally, driver.lasted_s)

    def _progress(self, tally: LoadTally, lasted_s: float) -> Progress:
        facts: dict[str, float] = {}
        if isinstance(self.load, ClosedLoop):
            facts["clients"] = self.load.clients
        else:
            facts["offered_rows_per_s"] = tally.asked_rows / lasted_s if lasted_s > 0 else self.load.rows_per_s or 0.0
            facts["late_s"] = tally.late_s
        return Progress(tally.settled, self.total, "requests", facts=facts)
