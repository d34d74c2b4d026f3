"""Replicas behind a router, asked over HTTP: a fleet that is started for the run, or a server that runs already."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from gpuinfer import api
from gpuinfer.api import Backend, BackendContext, Connector, Event, Limits, ModelSpec, Request, Result, Setup
from gpuinfer.config.model_names import listed_names, meant_names
from gpuinfer.config.setup_file import ServerSetup
from gpuinfer.engine.results import CheckedResult
from gpuinfer.errors import BackendDied, Closed, GpuinferError, UsageError
from gpuinfer.fleet.replica_client import Endpoint, ReplicaClient, ServedModel
from gpuinfer.generation import Part
from gpuinfer.http.access import read_keys
from gpuinfer.models import processor
from gpuinfer.models.model_options import Compile
from gpuinfer.models.row_layout import ANY_MODEL, Leaf, RowLayout
from gpuinfer.text import precision
from gpuinfer.text.text_options import (
    ADAPTERS_HELP,
    DECODER_HELP,
    FIRST_VERSION,
    MAX_ADAPTERS,
    MAX_ADAPTERS_HELP,
    MOST_ADAPTERS,
    SPECULATE_TOKENS,
    AdapterFolders,
    DecoderChoice,
    Draft,
    PagesOption,
    Speculate,
    SpeculateTokens,
    StepTokensOption,
    WeightsOption,
    adapter_folders_given,
    changed_arithmetic,
    refuse_half_a_draft,
)

if TYPE_CHECKING:
    from gpuinfer.fleet.owned_fleet import OwnedFleet

PASSING = 64  # blocks of rows under way at once; how many run is for the replicas to say
AHEAD = 3  # times as many rows of text as there are slots: one that becomes free finds a row waiting there
LEAST_AHEAD = 64  # rows, where there are few slots
OF_A_SERVER = frozenset({"endpoint", "key_file", "model"})  # options of a server that runs already
OF_A_FLEET = frozenset({"replicas", "gpus", "launcher", "launcher_options", "routing", "router_processes", "backend"})
"""Options of a fleet that is started. All others but `retry` are those of each replica's own backend."""


class FleetRemote(Backend):
    """A server that runs already, at the endpoint `way`; `name` is the server's name for the run's model."""

    serves = ("rows", "text")
    remote = True

    def __init__(
        self, setup: Setup | None = None, /, way: Endpoint | None = None, name: str | None = None, **options: Any
    ) -> None:
        super().__init__(setup, **options)
        self.limits = Limits(1, PASSING)
        self._endpoint, self._name = way, name
        self._client: ReplicaClient | None = None
        self._slots = 0  # of one replica
        self._tasks: dict[Request, asyncio.Task[Result]] = {}

    async def start(self, context: BackendContext) -> None:
        if self._endpoint is None:
            raise UsageError("there is no server to connect to. Start one with the backend 'fleet'.")
        async with self._checked_client(self._endpoint) as (looking, served):
            replicas = await looking.replicas()
        self._slots = served.slots or 0
        if served.slots is None:
            connections = PASSING * replicas
            self.limits = Limits(served.max_rows, connections)
        else:
            slots = served.slots * replicas
            connections = max(LEAST_AHEAD, AHEAD * slots)
            self.limits = Limits(served.max_rows, in_flight=slots, slots=connections)
        layout = None if self.setup.model is None else self.setup.model.layout
        self._client = ReplicaClient(self._endpoint, connections, looking.model, layout)

    @contextlib.asynccontextmanager
    async def _checked_client(self, way: Endpoint) -> AsyncIterator[tuple[ReplicaClient, ServedModel]]:
        """A client of the server, and its model. Raises `UsageError` for another model than the run's."""
        looking = ReplicaClient(way, 1)
        try:
            own = None if self.setup.model is None else ServerSetup(setup=self.setup).name
            served = await looking.served(self._name or own)
            if self.setup.model is not None:
                self._refuse_another(self.setup.model, served, way.url)
            yield looking, served
        finally:
            await looking.close()

    def _refuse_another(self, model: ModelSpec, served: ServedModel, url: str) -> None:
        if model.kind != served.kind:
            raise UsageError(
                f"{url} serves a model of {served.kind}, '{served.id}', and this run has one of {model.kind}. "
                f"Name another -B endpoint{', or another -B model of several' if self._name else ''}."
            )
        if model.layout is not None:
            if not takes(served, model.layout):
                raise UsageError(
                    f"{url} serves '{served.id}', whose rows are {row_description(served)}, and these are "
                    f"{model.layout}. Give rows like those, or serve a model that takes these."
                )
        elif model.kind == "rows" and (model.inputs, model.input_dtype) != (served.features, served.input_dtype):
            more = "".join(f" --{name} {value}" for name, value in model.arguments.items())
            raise UsageError(
                f"{url} serves '{served.id}', whose rows are {served.features} features as {served.input_dtype}, and "
                f"this run's are {model.inputs} as {model.input_dtype}.\nServe this run's model: gpuinfer serve "
                f"--model {model.name} --features {model.inputs} --input-dtype {model.input_dtype}{more}"
            )
        name = self._name or ServerSetup(setup=self.setup).name
        names = [served.id, *served.aliases]
        if name != ANY_MODEL and not meant_names(name, names):
            raise UsageError(
                f"{url} serves {listed_names(names)}, and this run has '{name}'. If they are the same model, add "
                f"-B model={served.id}; or else name that --model, or another -B endpoint."
            )

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        return await asyncio.gather(*map(self._ask, batch), return_exceptions=True)

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Each answer as it comes, in parts where they are wanted. What is unanswered is cancelled with the stream."""
        if len(batch) == 1 and not batch[0].parts:
            yield await self._event(batch[0])
            return
        news: asyncio.Queue[Event] = asyncio.Queue()

        async def settle(request: Request) -> None:
            news.put_nowait(await self._event(request, news))

        tasks = [asyncio.ensure_future(settle(request)) for request in batch]
        try:
            left = len(batch)
            while left:
                event = await news.get()
                left -= event.last
                yield event
        finally:
            for task in tasks:
                task.cancel()

    async def _event(self, request: Request, news: asyncio.Queue[Event] | None = None) -> Event:
        try:
            return Event(request, await self._ask(request, news))
        except GpuinferError as error:
            return Event(request, error=error)

    async def _ask(self, request: Request, news: asyncio.Queue[Event] | None = None) -> Result:
        """Answer one request in a task that `cancel` can end. Raises `Closed` then."""
        if self._client is None:
            raise BackendDied("the backend 'fleet' is not running. Await start() first, and not after close().")

        def tell(part: Part) -> None:
            if news is not None:
                news.put_nowait(Event(request, part, last=False))

        text = self.limits.slots is not None
        work = self._client.generate(request, tell) if text else self._client.evaluate(request)
        task = self._tasks[request] = asyncio.ensure_future(work)
        try:
            answer = await task
            spec = self.setup.model
            return answer if spec is None or spec.layout is None else CheckedResult(answer)  # over there
        except asyncio.CancelledError:
            if request not in self._tasks:
                raise Closed("this request was cancelled.") from None
            task.cancel()
            raise
        finally:
            self._tasks.pop(request, None)

    def cancel(self, request: Request) -> None:
        """Close the request's connection, which tells the server."""
        if (task := self._tasks.pop(request, None)) is not None:
            task.cancel()

    async def stats(self) -> Mapping[str, Any] | None:
        counted = None if self._client is None else await self._counters()
        if counted is None or not self._slots:
            return counted
        return {**counted, "slots": self._slots}  # of one replica: steps are those of one

    async def _counters(self) -> Mapping[str, Any] | None:
        return None if self._client is None else await self._client.counters()

    def device(self) -> Mapping[str, Any]:
        return {}  # in the counters of the server

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


def takes(served: ServedModel, layout: RowLayout) -> bool:
    """Whether a server's model takes rows of this layout."""
    if served.row is not None:
        return bool(served.row == layout.to_wire())
    flat = layout.form is None and served.features is not None
    return flat and layout.leaves[0] == Leaf((), (served.features or 0,), served.input_dtype or "")


def row_description(served: ServedModel) -> str:
    """What the rows of a server's model look like."""
    if served.row is None:
        return f"{served.input_dtype} [{served.features}]"
    try:
        return str(RowLayout.from_wire(served.row))
    except ValueError:
        return "of an unknown kind"


@dataclass(frozen=True)
class FleetConnection:
    """How a worker process connects to the server. The key stays in its file."""

    setup: Setup
    url: str
    key_file: str | None
    retry_s: float
    name: str | None

    def open(self) -> Backend:
        return FleetRemote(self.setup, way=Endpoint(self.url, _key_of(self.key_file), self.retry_s), name=self.name)


class FleetBackend(FleetRemote):
    """Replicas behind a router: started for the run, or a server or fleet that runs already (-B endpoint=URL)."""

    class Options(api.Options):
        endpoint: str | None = Field(None, description="a server that runs, such as http://host:8000, in place of one")
        key_file: Path | None = Field(None, description="with endpoint: a file with its key")
        model: str | None = Field(None, description="with endpoint: what it calls this run's model")
        retry: float = Field(30.0, ge=0, le=3600, description="seconds for which a server that is gone is asked again")
        replicas: int = Field(1, ge=1, le=1024, description="replicas that are started")
        gpus: str | None = Field(None, description="their devices: how many, as 4, all, or which, as 0,2,4,6")
        launcher: str = Field("local", description="where they run: local, ssh, slurm, ray, or a plugin's")
        launcher_options: dict[str, str] = Field({}, description='of the launcher, as {"partition": "long"}')
        routing: str = Field("least-loaded", description="how the router chooses: see gpuinfer serve")
        router_processes: int = Field(1, ge=1, le=64, description="processes of the router")
        backend: str = Field("inprocess", description="what answers in each replica")
        max_rows: int | None = Field(None, ge=1, description="of a replica: rows in one batch")
        slots: int | None = Field(None, ge=1, le=65_536, description="of a replica, of text: rows generated at once")
        pages: PagesOption = None
        context: int | None = Field(None, ge=1, description="of text: most tokens of prompt and answer")
        step_tokens: StepTokensOption = None
        weights: WeightsOption = None
        decoder: DecoderChoice = Field(None, description=DECODER_HELP)
        speculate: Speculate = None
        draft: Draft = None
        speculate_tokens: SpeculateTokens = SPECULATE_TOKENS
        adapters: AdapterFolders = Field(None, description=ADAPTERS_HELP)
        max_adapters: int = Field(MAX_ADAPTERS, ge=1, le=MOST_ADAPTERS, description=MAX_ADAPTERS_HELP)
        in_flight: int | None = Field(None, ge=1, description="of a replica: batches at once")
        threads: int | None = Field(None, ge=1, description="of a replica: torch threads in one forward")
        chunk_rows: int | None = Field(None, ge=1, description="of a replica: rows through the model at once")
        compute: processor.Compute = Field("auto", description=processor.COMPUTE)
        compile: Compile = False

        @model_validator(mode="after")
        def _draft_is_whole(self) -> Self:
            refuse_half_a_draft(self.speculate, self.draft)
            return self

    options: Options

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        given, own = self.options.model_fields_set, self.options
        self._name = own.model
        self._owned: OwnedFleet | None = None
        with_model = {} if self.setup.model is None else self.setup.model.arguments
        names = adapter_folders_given(own.adapters, with_model)
        self._loaded = {text for name in names for text in (name, f"{name}@{FIRST_VERSION}")}
        if own.endpoint is None and (odd := given & (OF_A_SERVER - {"endpoint"})):
            raise UsageError(f"-B {min(odd)} goes with -B endpoint=URL. Give both, or leave it out.")
        if own.endpoint is not None and (odd := given - OF_A_SERVER - {"retry"}):
            raise UsageError(
                f"-B {min(odd)} is said of replicas that are started, and {own.endpoint} runs already. Leave one out."
            )
        if own.endpoint is not None and names:
            raise UsageError(
                f"--adapter is said of replicas that are started, and {own.endpoint} runs already. Leave it out: rows "
                "name the adapters that the server has."
            )
        self.notices = () if own.endpoint else precision.notices(self.setup, own.compute)

    @property
    def arithmetic(self) -> str:
        return changed_arithmetic(self.options)

    @property
    def compute(self) -> str:
        return self.options.compute

    async def check(self) -> None:
        """Check that a server that runs already serves the run's model."""
        if (url := self.options.endpoint) is not None:
            async with self._checked_client(Endpoint(url, _key_of(self.options.key_file), self.options.retry)):
                pass

    async def start(self, context: BackendContext) -> None:
        """Start the fleet, or find the server. Raises `UsageError` for a model that is not the run's."""
        own = self.options
        if own.endpoint is None:
            await self._start_owned(context)
        else:
            self._endpoint = Endpoint(own.endpoint, _key_of(own.key_file), own.retry)
        try:
            await super().start(context)
        except BaseException:
            await self.close()
            raise

    async def _start_owned(self, context: BackendContext) -> None:
        from gpuinfer.fleet.owned_fleet import OwnedFleet

        own = self.options
        if self.setup.model is None:
            raise UsageError(
                "the backend 'fleet' serves a model, and this workload names none. "
                "Choose another backend with --backend (`gpuinfer plugins list`), or give the workload a model."
            )
        if context.strategy is None:
            raise UsageError("in a fleet the replicas form batches. Give start() a context with a strategy.")
        names = sorted(own.model_fields_set - OF_A_SERVER - OF_A_FLEET - {"retry"})
        of_replicas = {name: getattr(own, name) for name in names}
        self._owned = OwnedFleet(own, of_replicas, self.setup, context.strategy)
        try:
            self._endpoint = Endpoint(await self._owned.start(), self._owned.key, own.retry)
        except BaseException:
            await self.close()
            raise

    def connect(self) -> Connector:
        if self._endpoint is None:
            raise UsageError("the backend 'fleet' has not been started. Await start() before connect().")
        file = self._owned.key_file if self._owned else self.options.key_file
        return FleetConnection(
            self.setup, self._endpoint.url, str(file) if file else None, self._endpoint.retry_s, self._name
        )

    def beside(self, spec: ModelSpec, share: float = 1.0) -> Backend:
        """A fleet of its own. Raises `UsageError` for a server that runs already, which has one model."""
        if self.options.endpoint is not None:
            raise UsageError(
                f"{self.options.endpoint} serves one model, and '{spec.name}' would be another beside it. "
                "Leave -B endpoint out, and both are started for the run; or choose --backend inprocess."
            )
        options = self.options.model_dump(exclude_unset=True, exclude={"adapters"})
        return FleetBackend(replace(self.setup, model=spec, share=share), **options)

    @property
    def updates(self) -> bool:
        return self.limits.slots is not None

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        """Update each replica, and those that start later. With an endpoint, its key must be an admin's."""
        if not self.updates or self._client is None:
            await super().update(version, weights, adapter=adapter, drain=drain)
            return
        body = {"version": version, "weights": weights, "adapter": adapter, "drain": drain}
        if self._owned is not None:
            await self._owned.update(body)
        else:
            await self._client.change("/v1/update_weights", body)
        if adapter is not None:
            self._loaded |= {adapter, f"{adapter}@{version}"}

    @property
    def adapters(self) -> Sequence[str]:
        """The adapters loaded through this backend: replicas may have more."""
        return tuple(sorted(self._loaded))

    async def unload(self, adapter: str) -> None:
        if not self.updates or self._client is None:
            await super().unload(adapter)
        elif self._owned is not None:
            await self._owned.unload(adapter)
        else:
            await self._client.change("/v1/unload_lora_adapter", {"lora_name": adapter})
        self._loaded = {one for one in self._loaded if adapter not in (one, one.partition("@")[0])}

    async def _counters(self) -> Mapping[str, Any] | None:
        return await super()._counters() if self._owned is None else (await self._owned.snapshot()).to_wire()

    async def close(self) -> None:
        owned, self._owned = self._owned, None
        await super().close()
        if owned is not None:
            await owned.close()


def _key_of(path: Path | str | None) -> str | None:
    return None if path is None else read_keys(path)[0]
