"""One server process with the model for all worker processes: batches form there, rows travel in shared memory. A model
in training is in such a process too, with the trainer as its one client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from gpuinfer.api import Backend, BackendContext, Connector, Event, Limits, ModelKind, ModelSpec, Request, Result, Setup
from gpuinfer.central.async_client import AsyncClient, RemoteTextBackend, TextConnector
from gpuinfer.central.connection import CentralConnection
from gpuinfer.central.protocol import ServerAddress, WeightsChange
from gpuinfer.central.server import ServerProcess
from gpuinfer.central.training_process import TrainingProcess
from gpuinfer.engine.results import CheckedResult
from gpuinfer.errors import BackendDied, GpuinferError, UsageError
from gpuinfer.models import model_options, processor
from gpuinfer.models.model_options import (
    LAYERS,
    PARALLEL,
    WITH_STAGES,
    CheckpointSegments,
    GradientLoss,
    Parallel,
)
from gpuinfer.text import precision
from gpuinfer.text.text_options import TorchModelOptions, changed_arithmetic

OF_GRADIENTS = ("loss", "checkpoint_segments", "layers")  # options without effect on answers
PASSING = 64  # batches that pass through at once; how many run is for the server to say


class CentralRemote(RemoteTextBackend):
    """A way to a server that somebody else started, of rows or of text."""

    serves: ClassVar[Sequence[ModelKind]] = ("rows", "text")

    def __init__(
        self,
        setup: Setup | None = None,
        /,
        address: ServerAddress | None = None,
        restarts_within_s: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(setup, address, restarts_within_s, **options)
        self.limits = Limits(1, PASSING)
        self._rows: AsyncClient | None = None

    async def start(self, context: BackendContext) -> None:
        spec = self.setup.model
        if spec is not None and spec.kind == "text":
            await super().start(context)
            return
        self._rows = AsyncClient(CentralConnection(self._address_or_refuse(), self._restarts_within_s))
        await self._rows.open()
        self.limits = replace(self._rows.limits, in_flight=PASSING)

    def block(self, rows: int) -> Any:
        return None if self._rows is None else self._rows.block(rows)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        if self._link is not None:
            return await super().infer(batch)
        return await asyncio.gather(*map(self._ask, batch), return_exceptions=True)

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Each answer as it comes: requests that passed through together need not share a batch over there."""
        if self._link is not None:
            async for event in super().stream(batch):
                yield event
            return

        async def settled(request: Request) -> Event:
            try:
                return Event(request, await self._ask(request))
            except GpuinferError as error:
                return Event(request, error=error)

        if len(batch) == 1:
            yield await settled(batch[0])
            return
        for answer in asyncio.as_completed([asyncio.ensure_future(settled(request)) for request in batch]):
            yield await answer

    async def _ask(self, request: Request) -> Result:
        if self._rows is None:
            raise self._closed()
        answer = await self._rows.ask(request)
        spec = self.setup.model
        return answer if spec is None or spec.layout is None else CheckedResult(answer)  # it was checked over there

    @property
    def lost(self) -> BackendDied | None:
        return super().lost if self._rows is None else self._rows.lost

    def cancel(self, request: Request) -> None:
        super().cancel(request)
        if self._rows is not None:
            self._rows.cancel(request)

    async def close(self) -> None:
        await super().close()
        if self._rows is not None:
            await self._rows.close()
            self._rows = None


class Central(CentralRemote):
    """Starts a server process that owns the model; worker processes ask it."""

    class Options(TorchModelOptions):
        threads: int | None = Field(None, ge=1, description="torch threads in one forward; default 1 on a CPU")
        in_flight: int | None = Field(
            None, ge=1, description="batches at once on a device; default one a core, 2 on CUDA"
        )
        parallel: Parallel = Field("data", description=f"of text: {PARALLEL}")
        max_clients: int = Field(256, ge=1, le=4096, description="processes that may be connected at once")
        batch_timeout: float = Field(300.0, gt=0, description="seconds after which a batch is given up, and the server")
        loss: GradientLoss = None
        checkpoint_segments: CheckpointSegments = None
        layers: str | None = Field(None, min_length=1, description=LAYERS, json_schema_extra=WITH_STAGES)
        restart: bool = Field(False, description="bring a server that died back; what was outstanding is asked again")

    options: Options
    serves = ("rows", "text", "gradients")
    several_devices = True

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self._training: TrainingProcess | None = None
        self._trains = self.setup.model is not None and self.setup.model.kind == "gradients"
        if self._trains:  # its one client sends whole batches: the engine here counts them
            self.remote = False  # type: ignore[misc]
            self.limits = Limits(self.options.max_rows or 1)
            self._thread = ThreadPoolExecutor(1, "gpuinfer-training-client")
        self.setup = model_options.with_stage_devices(self.setup, self.options.stages)
        if self.setup.share != 1.0:
            raise UsageError(
                f"a share of {self.setup.share:g}: with the backend 'central' each model has a process of its own, and "
                "nobody divides the device between these. Choose --backend inprocess, or leave --share out."
            )
        self._server: ServerProcess | None = None
        notices = processor.training_notices if self._trains else precision.notices
        self.notices = notices(self.setup, self.options.compute)

    @property
    def arithmetic(self) -> str:
        return changed_arithmetic(self.options)

    @property
    def compute(self) -> str:
        return self.options.compute

    async def check(self) -> None:
        """Devices by their names."""
        if self.setup.model is None:
            return  # of a workload that brings its own answers
        self._refuse_what_does_not_fit()
        model_options.check_names(self.setup.devices)
        if model_options.may_be_missing(self.setup.devices):
            from gpuinfer.models.device import resolve_devices

            await asyncio.to_thread(resolve_devices, self.setup.devices)

    def _refuse_what_does_not_fit(self) -> None:
        if self.setup.model is None:
            raise UsageError(
                "the backend 'central' serves a model, and this workload names none. "
                "Choose another backend with --backend (`gpuinfer plugins list`), or give the workload a model."
            )
        unused = [name for name in OF_GRADIENTS if getattr(self.options, name) is not None]
        if unused and not self._trains:
            raise UsageError(
                f"-B {unused[0]} of the backend 'central' is of models in training, and this one answers. Leave it out."
            )
        if self._trains and self.options.restart:
            raise UsageError(
                "-B restart is of models that answer: training that has lost its server goes on with --resume. Leave "
                "it out."
            )
        if self.options.parallel != "data" and self.setup.model.kind != "text":
            raise UsageError(
                f"parallel={self.options.parallel} of the backend 'central' is of models of text, and this one is of "
                "rows. Use --backend inprocess, or leave -B parallel out."
            )
        if self.options.keep_free is not None and self.setup.model.kind != "text":
            raise UsageError(
                "keep_free of the backend 'central' is of models of text, and this one is of rows. Use --backend "
                "inprocess, or leave -B keep_free out."
            )

    async def free_memory(self) -> Mapping[str, int]:
        raise UsageError(
            "the backend 'central' gives memory back by itself alone, of a model of text with -B keep_free. Use "
            "--backend inprocess to do it by a request."
        )

    async def start(self, context: BackendContext) -> None:
        """Start the server and wait until it serves. Raises `UsageError` when there is no model that fits."""
        self._refuse_what_does_not_fit()
        if self._trains:
            self._training = TrainingProcess(self.setup, self.options)
            self.limits = await asyncio.to_thread(self._training.start)
            return
        if context.strategy is None:
            raise UsageError("the backend 'central' forms batches itself. Give start() a context with a strategy.")
        own = self.options
        self._server = ServerProcess(
            self.setup,
            own,
            context.strategy,
            roofline=context.roofline,
            max_clients=own.max_clients,
            batch_timeout=own.batch_timeout,
            restart=own.restart,
        )
        await asyncio.to_thread(self._server.start)
        self._address, self._restarts_within_s = self._server.address, self._server.restarts_within_s
        await super().start(context)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        """As `CentralRemote`; of a model in training payloads are `gradients.TrainingBatch`."""
        if self._training is None:
            return await super().infer(batch)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._passes, self._training, batch)

    @staticmethod
    def _passes(training: TrainingProcess, batch: Sequence[Request]) -> list[Result]:
        results: list[Result] = []
        for request in batch:
            try:
                results.append(training.passed(request.payload))
            except GpuinferError as error:  # the answer of its request
                results.append(error)
        return results

    @property
    def streams(self) -> bool:
        return not self._trains

    @property
    def lost(self) -> BackendDied | None:
        return super().lost if self._training is None else self._training.lost

    def connect(self) -> Connector:
        if self._trains:
            raise UsageError("a model in training has one client, the process that has started it. Leave workers out.")
        if self._server is None:
            raise UsageError("the backend 'central' has not been started. Await start() before connect().")
        return TextConnector(CentralRemote, self.setup, self._server.address, self._server.restarts_within_s)

    def beside(self, spec: ModelSpec, share: float = 1.0) -> Backend:
        """A server of its own."""
        options = self.options.model_dump(exclude_unset=True, exclude={"adapters"})
        return Central(replace(self.setup, model=spec, share=share), **options)

    @property
    def updates(self) -> bool:
        return self._server is not None

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        """In the server process, for all its clients. One that is brought back begins with them. Of rows, batches under
        way are finished with the old weights.
        """
        if self._server is None or not self.updates:
            await super().update(version, weights, adapter=adapter, drain=drain)
            return
        change = WeightsChange(version=version, weights=weights, adapter=adapter, drain=drain)
        await asyncio.to_thread(self._server.change, change)

    @property
    def adapters(self) -> Sequence[str]:
        return () if self._server is None else self._server.adapters

    async def unload(self, adapter: str) -> None:
        if self._server is None or not self.updates:
            await super().unload(adapter)
        else:
            await asyncio.to_thread(self._server.change, WeightsChange(adapter=adapter))

    async def stats(self) -> Mapping[str, Any] | None:
        return None if self._server is None else (await asyncio.to_thread(self._server.stats)).to_wire()

    def device(self) -> Mapping[str, Any]:
        return {} if self._training is None else self._training.device()  # else in the server's own snapshot

    async def close(self) -> None:
        await super().close()
        if self._server is not None:
            await asyncio.to_thread(self._server.close, quiet=True)
        training, self._training = self._training, None
        if training is not None:
            await asyncio.to_thread(training.close)
            self._thread.shutdown(wait=False)
