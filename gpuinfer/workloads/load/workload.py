"""The load generator: puts a load of requests on a backend, to see how backend and strategy bear it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.host.following import followed
from gpuinfer.load.arrivals import Arrivals, Closed, Mix, Offer
from gpuinfer.load.options import RATES, classes_of, drawn, refuse_unread, rows_of, schedule_of
from gpuinfer.openai.several import refuse_several
from gpuinfer.workloads.load.asking import LoadTally, Payloads, Requester
from gpuinfer.workloads.load.driving import LoadDriver, Open, ThinkingClients

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
        features: int | None = Field(
            None, ge=1, le=1_000_000, description="of a row, for a module:factory that plays no cards"
        )

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
        refuse_unread(own, source)
        if own.arrivals != "poisson" and source not in RATES:
            raise UsageError(f"--arrivals {own.arrivals} spreads a rate, and --{source} has none. Leave it out.")
        refuse_several(own.model, "load")
        if own.model is not None and own.model not in MODELS and ":" not in own.model:
            raise UnknownName("model", own.model, MODELS, label="Choices")
        if own.features is not None and ":" not in (own.model or ""):
            raise UsageError("--features is for a model of your own. Add --model module:factory, or leave it out.")
        if own.weights is not None and not own.weights.is_file():
            raise UsageError(f"--weights: no file '{own.weights}'. Give the file that holds the weights.")
        self._mix = Mix(
            rows_of(own.rows),
            classes_of(own.classes) if own.classes else {},
            math.inf if own.timeout is None else own.timeout,
            own.sources,
        )
        self.load: Arrivals = self._arrivals()

    def trial(self, setup: Setup, **changes: Any) -> Load | None:
        """Of clients: what comes from outside is answered as fast as it comes, and not faster."""
        if not isinstance(self.load, Closed):
            return None
        return Load(setup, **{**self.options.model_dump(), "duration": ENDLESS_S, "requests": None, **changes})

    def model(self) -> ModelSpec | None:
        """Rows of self-play's default game, whose networks these are; with --features, of any model."""
        own = self.options
        if own.model is None:
            return None
        weights = str(own.weights) if own.weights else None
        if own.features is not None:
            return ModelSpec(own.model, weights, own.features)
        from gpuinfer.workloads.selfplay import games

        game = games.build("blob", {})
        sizes = {"actions": game.actions, "seats": game.seats}
        return ModelSpec(own.model, weights, game.features, game.feature_dtype, sizes)

    @property
    def asks(self) -> bool:
        return True

    def _arrivals(self) -> Arrivals:
        own = self.options
        if own.replay is not None:
            from gpuinfer.simulate.fitting import replayed

            return replayed(own.replay)
        if own.schedule is not None:
            return drawn(own.arrivals, schedule_of(own.schedule), self._mix, own.burst, own.burst_s)
        if own.rate is not None:
            return drawn(own.arrivals, own.rate, self._mix, own.burst, own.burst_s)
        return Closed(own.clients or CLIENTS, own.think, mix=self._mix)

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
        self._refuse_rows(limits.max_rows)
        spec = self.model() if infer.has_model else None
        tally = LoadTally()
        yield self._progress(tally, 0.0)  # the clock starts here, and so does the load
        asker = Requester(infer, Payloads(spec, self.load.most_rows, self.setup.seed), tally)
        driver = self._driver(asker, infer)
        async for _ in followed(asyncio.create_task(driver.run()), infer.stopping):
            yield self._progress(tally, driver.lasted_s)
        if tally.first_failure is not None and not tally.answered:
            raise tally.first_failure
        self._warn(tally)
        yield self._progress(tally, driver.lasted_s)

    def _driver(self, asker: Requester, infer: Infer) -> LoadDriver:
        if not isinstance(self.load, Closed):
            return Open(asker, self.asked())
        count = math.inf if self.options.requests is None else self.options.requests
        return ThinkingClients(asker, infer, self.load, self.seconds, count, self._dice())

    def _refuse_rows(self, most: int) -> None:
        if self.load.most_rows > most:
            raise UsageError(
                f"requests of {self.load.most_rows} rows do not fit into a batch of {most}, and none is split. "
                "Give fewer --rows, or raise the limit (-B max_rows)."
            )

    def _progress(self, tally: LoadTally, lasted_s: float) -> Progress:
        facts: dict[str, float] = {}
        if isinstance(self.load, Closed):
            facts["clients"] = self.load.clients
        else:
            facts["offered_rows_per_s"] = tally.asked_rows / lasted_s if lasted_s > 0 else self.load.rows_per_s or 0.0
            facts["late_s"] = tally.late_s
        return Progress(tally.settled, self.total, "requests", facts=facts)

    def _warn(self, tally: LoadTally) -> None:
        doubt = "" if isinstance(self.load, Closed) else tally.doubt()
        if doubt and not Load._warned:
            Load._warned = True
            log.warning("%s", doubt)
