"""A launcher: each process of gpuinfer runs in a sandbox of Modal of its own.

NEVER RUN AGAINST THE REAL SERVICE. It is written after the interface of Modal's Python client 1.6 and tried against a
stub of it (`tests/stub/modal`), whose signatures a test compares with those of the real client where that is installed.

The sandbox runs the far end that gpuinfer's launchers by connection have (`gpuinfer.launchers.remote_end`): it gets
files and arguments over its standard input and leaves when it has heard nothing for a minute, which ends the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.launchers import base, carried_process, remote_end
from gpuinfer.launchers.base import Launcher, ProcessPlan
from gpuinfer.launchers.remote_end import RemoteOrder
from gpuinfer.launchers.remote_process import RemoteProcess
from gpuinfer_modal.tls_bridge import TlsBridge

PORT = 8000  # where one that serves listens in its sandbox; Modal wants to know before it starts
GONE_S = 10.0
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class ModalLauncher(Launcher):
    """Sandboxes of Modal, one for each process (never run against the real service)."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid", frozen=True)

        image: str = Field(min_length=1, description="an image of a registry that has this gpuinfer")
        app: str = Field("gpuinfer", pattern=NAME, description="the app that the sandboxes are of; made where needed")
        python: str = Field("python3", min_length=1, description="the Python of the image that has gpuinfer")
        gpus: str | None = Field(None, pattern=r"^[A-Za-z0-9-]+(:\d+)?$", description="of one process: T4, A100:2")
        cpus: float | None = Field(None, gt=0, le=1024, description="cores of one process")
        memory: int | None = Field(None, ge=128, description="MiB of one process")
        region: str | None = Field(None, pattern=NAME, description="where it runs")
        volume: str | None = Field(None, pattern=r"^[^:]+:/.+$", description="a volume for models, as NAME:/PATH")
        secret: str | None = Field(None, pattern=NAME, description="a secret of Modal, for variables such as HF_TOKEN")
        time: int = Field(86_400, ge=60, le=86_400, description="seconds for which one process may live")
        pending: float = Field(600.0, gt=0, description="seconds for a sandbox to come up: images are large")

    name = "modal"
    bind = "0.0.0.0"  # Modal's tunnel brings in others, who need the key
    options: Options

    def check(self) -> None:
        if importlib.util.find_spec("modal") is None:
            raise UsageError("Modal's client is not installed. Run: pip install modal, and then: modal setup")

    def reserve_one_gpu(self, flag: str) -> None:
        raise UsageError(
            f"{flag} says how many devices, and Modal wants to know which. Give --replicas N with -L gpus=A100 (or T4, "
            "H100:2)."
        )

    def reached_at(self) -> str:
        return base.own_address()

    @property
    def notices(self) -> tuple[str, ...]:
        return ("--launcher modal was never run against the real service: watch `modal app list` for what it leaves.",)

    async def launch(self, plan: ProcessPlan) -> ModalProcess:
        if plan.devices is not None:
            raise UsageError("--gpus names devices of this machine, and Modal has its own. Say -L gpus=A100 instead.")
        import modal

        own = self.options
        given: dict[str, Any] = {
            "gpu": own.gpus,
            "cpu": own.cpus,
            "memory": own.memory,
            "region": own.region,
            "timeout": own.time,
            "encrypted_ports": [PORT] if plan.serves else [],
        }
        try:
            if own.volume is not None:
                name, _, path = own.volume.partition(":")
                given["volumes"] = {path: modal.Volume.from_name(name)}
            if own.secret is not None:
                given["secrets"] = [modal.Secret.from_name(own.secret)]
            app = await modal.App.lookup.aio(own.app, create_if_missing=True)
            sandbox = await modal.Sandbox.create.aio(
                *(own.python, "-m", remote_end.__name__),
                app=app,
                image=modal.Image.from_registry(own.image),
                **{key: value for key, value in given.items() if value is not None},
            )
        except modal.exception.AuthError as error:
            raise WorkError(
                f"{plan.name} cannot be started: Modal does not know you ({error}). Run: modal setup"
            ) from None
        except modal.exception.Error as error:
            raise WorkError(
                f"{plan.name} cannot be started: Modal refuses the sandbox: {error}. Correct what it names (-L image=, "
                "gpus=, …)."
            ) from None
        process = ModalProcess(plan, sandbox)
        try:
            if not (version := await process.greet(own.pending)):
                raise process.failure(
                    f"did not come up: {own.python} of the image {own.image} has no gpuinfer. Build one that has"
                )
            process.refuse_other_version(version, f"the image {own.image}")
            order = carried_process.process_order(plan)
            await process.begin(RemoteOrder(process=_with_port(order), host="0.0.0.0"))
        except BaseException:
            await process.kill()
            raise
        return process


def _with_port(order: carried_process.ProcessOrder) -> carried_process.ProcessOrder:
    """At the port to which Modal's tunnel leads: of two `--port` the last one counts."""
    import msgspec

    if order.ready is None:
        return order
    return msgspec.structs.replace(order, arguments=(*order.arguments, "--port", str(PORT)))


class ModalProcess(RemoteProcess):
    """A process in a sandbox."""

    def __init__(self, plan: ProcessPlan, sandbox: Any) -> None:
        super().__init__(plan)
        self._sandbox = sandbox
        self._output: AsyncIterator[Any] = aiter(sandbox.stdout)
        self._logging: asyncio.Task[None] | None = asyncio.create_task(self._log())
        self._bridge: TlsBridge | None = None

    @property
    def called(self) -> str:
        return f"{self.plan.name} (sandbox {self._sandbox.object_id})"

    async def _log(self) -> None:
        """Bring its log here."""
        with os.fdopen(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
            async for text in self._sandbox.stderr:
                file.write(text.encode() if isinstance(text, str) else text)

    async def _read(self) -> bytes:
        async for text in self._output:
            if text:
                return text.encode() if isinstance(text, str) else bytes(text)
        return b""

    async def _write(self, data: bytes) -> None:
        with contextlib.suppress(*_errors()):  # the sandbox has ended, which is seen where it is read
            self._sandbox.stdin.write(data)
            await self._sandbox.stdin.drain.aio()

    async def _end(self, within_s: float) -> None:
        with contextlib.suppress(*_errors()):
            self._sandbox.stdin.write_eof()
            await self._sandbox.stdin.drain.aio()
        with contextlib.suppress(*_errors(), TimeoutError):
            async with asyncio.timeout(within_s):
                await self._sandbox.wait.aio(raise_on_termination=False)
        with contextlib.suppress(*_errors()):
            await self._sandbox.terminate.aio()
        if self._bridge is not None:
            bridge, self._bridge = self._bridge, None
            await bridge.close()
        if self._logging is not None:
            task, self._logging = self._logging, None
            await asyncio.wait({task}, timeout=GONE_S)
            task.cancel()

    async def _reached(self, there: tuple[str, int]) -> tuple[str, int]:
        """By Modal's tunnel, which is TLS, through a port of this machine."""
        try:
            host, port = (await self._sandbox.tunnels.aio())[PORT].tls_socket
        except _errors() as error:
            raise WorkError(f"Modal has no tunnel for it: {error}") from None
        self._bridge = TlsBridge(host, port)
        return await self._bridge.start()


def _errors() -> tuple[type[BaseException], ...]:
    """What Modal's client raises of a sandbox that has ended, or cannot be asked."""
    import modal

    return modal.exception.Error, ValueError, OSError
