"""A stub of the part of Modal's Python client 1.6 that the launcher uses: a sandbox is a process of this machine, its
tunnel a TLS port of loopback with the certificate of `MODAL_STUB_CERT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modal import exception

CREATED: list[Sandbox] = []
KNOWN_IMAGE = "registry.example/gpuinfer"


def blocking_and_aio(function: Any) -> Any:
    """As synchronicity gives them: `f(…)` blocks, `f.aio(…)` is awaited. The launcher uses the second alone."""
    blocking = function if not isinstance(function, staticmethod) else function.__func__

    def call(*args: Any, **given: Any) -> Any:
        raise AssertionError(f"{blocking.__name__} would block the event loop: use .aio")

    call.aio = blocking
    call.__wrapped__ = blocking
    return call


class App:
    def __init__(self, name: str) -> None:
        self.name = name

    async def _lookup(
        name: str, *, client: Any = None, environment_name: str | None = None, create_if_missing: bool = False
    ) -> App:
        if os.environ.get("MODAL_STUB_TOKEN") == "none":
            raise exception.AuthError("Token missing")
        return App(name)

    lookup = staticmethod(blocking_and_aio(_lookup))


@dataclass
class Image:
    tag: str

    @staticmethod
    def from_registry(
        tag: str,
        secret: Any = None,
        *,
        setup_dockerfile_commands: Sequence[str] = (),
        force_build: bool = False,
        add_python: str | None = None,
        **kwargs: Any,
    ) -> Image:
        return Image(tag)


@dataclass
class Volume:
    name: str

    @staticmethod
    def from_name(
        name: str,
        *,
        environment_name: str | None = None,
        create_if_missing: bool = False,
        version: Any = None,
        create_options: Any = None,
        client: Any = None,
    ) -> Volume:
        return Volume(name)


@dataclass
class Secret:
    name: str

    @staticmethod
    def from_name(
        name: str, *, environment_name: str | None = None, required_keys: Sequence[str] = (), client: Any = None
    ) -> Secret:
        return Secret(name)


@dataclass(frozen=True)
class Tunnel:
    host: str
    port: int
    unencrypted_host: str = ""
    unencrypted_port: int = 0

    @property
    def tls_socket(self) -> tuple[str, int]:
        return self.host, self.port


class StreamReader:
    """Text, in whatever pieces it comes."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream

    def __aiter__(self) -> StreamReader:
        return self

    async def __anext__(self) -> str:
        if not (more := await self._stream.read(1000)):
            raise StopAsyncIteration
        return more.decode("utf-8", "replace")


class StreamWriter:
    def __init__(self, stream: asyncio.StreamWriter) -> None:
        self._stream, self._buffer, self._eof = stream, b"", False
        self.drain = blocking_and_aio(self._drain)

    def write(self, data: bytes | str) -> None:
        if self._eof:
            raise ValueError("Stdin is closed. Cannot write to it.")
        self._buffer += data.encode() if isinstance(data, str) else bytes(data)

    def write_eof(self) -> None:
        self._eof = True

    async def _drain(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._stream.write(self._buffer)
            self._buffer = b""
            await self._stream.drain()
            if self._eof:
                self._stream.close()


class Sandbox:
    def __init__(self, process: asyncio.subprocess.Process, given: dict[str, Any]) -> None:
        self.object_id = f"sb-stub-{process.pid}"
        self.given, self._process, self._relay = given, process, None
        self.stdin = StreamWriter(process.stdin)
        self.stdout, self.stderr = StreamReader(process.stdout), StreamReader(process.stderr)
        for name in ("tunnels", "wait", "terminate", "poll"):
            setattr(self, name, blocking_and_aio(getattr(self, f"_{name}")))

    async def _create(
        *args: str, app: App | None = None, image: Image | None = None, secrets: Any = None, timeout: int | None = 300,
        workdir: str | None = None, gpu: str | None = None, region: Any = None, cpu: Any = None, memory: Any = None,
        volumes: Any = None, encrypted_ports: Any = (), client: Any = None,
    ) -> Sandbox:  # fmt: skip
        given = {name: value for name, value in locals().items() if name != "args"}
        if image is None or not image.tag.startswith(KNOWN_IMAGE):
            raise exception.NotFoundError(f"image {image and image.tag} not found")
        words = [sys.executable if args[0] == "python3" else args[0], *args[1:]]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        CREATED.append(Sandbox(process, given))
        return CREATED[-1]

    create = staticmethod(blocking_and_aio(_create))

    async def _tunnels(self, timeout: int = 50) -> dict[int, Tunnel]:
        (port,) = self.given["encrypted_ports"]
        if self._relay is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(os.environ["MODAL_STUB_CERT"])

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                with contextlib.suppress(OSError):
                    there, to_there = await asyncio.open_connection("127.0.0.1", port)
                    ways = [asyncio.ensure_future(carry(*way)) for way in ((reader, to_there), (there, writer))]
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
                    to_there.close()
                writer.close()

            self._relay = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
        return {port: Tunnel(*self._relay.sockets[0].getsockname()[:2])}

    async def _poll(self) -> int | None:
        return self._process.returncode

    async def _wait(self, raise_on_termination: bool = True) -> None:
        await self._process.wait()

    async def _terminate(self, *, wait: bool = False) -> int | None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._relay is not None:
            self._relay.close()
        return self._process.returncode if wait else None


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while more := await reader.read(1 << 16):
            writer.write(more)
            await writer.drain()
