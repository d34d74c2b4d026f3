"""`gpuinfer serve` as people run it: a process of its own on a port of its own, asked over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forking import Forked, own_environment

if TYPE_CHECKING:
    from openai import OpenAI

SECONDS = 120  # for a server to load its model on a machine that stalls, and for anything to come about


class Server:
    """A running server. `log` is what it wrote. `descriptors`: so many files it may open at once. `certificate`: the
    file that its clients trust, where it serves TLS.
    """

    def __init__(
        self,
        *words: object,
        folder: Path,
        environment: dict[str, str] | None = None,
        descriptors: int | None = None,
        certificate: Path | None = None,
    ) -> None:
        self.certificate = certificate
        self.ready_file, self.log_file = folder / "ready.json", folder / "log"
        command = ["gpuinfer", "serve", "--port", "0", "--ready-file", str(self.ready_file), *map(str, words)]
        given = own_environment(**{"COLUMNS": "200", **(environment or {})})
        self.process: Forked | subprocess.Popen[bytes]
        with self.log_file.open("wb") as log:
            ends = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            if descriptors is None:
                self.process = Forked(command, folder, given, **ends)
            else:
                limited = ["bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash", sys.executable, "-m", *command]
                self.process = subprocess.Popen(limited, cwd=folder, env=given, **ends)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_until_ready(self) -> Server:
        until(lambda: self.ready_file.exists() or self.process.poll() is not None, lambda: self.log)
        assert self.ready_file.exists(), self.log
        told = json.loads(self.ready_file.read_text())
        self.host, self.port = told["host"], told["port"]
        self.url = f"http{'s' * (self.certificate is not None)}://{self.host}:{self.port}"
        return self

    def connect(self) -> http.client.HTTPConnection:
        if self.certificate is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        context = ssl.create_default_context(cafile=self.certificate)
        return http.client.HTTPSConnection(self.host, self.port, timeout=SECONDS, context=context)

    @cached_property
    def openai(self) -> OpenAI:
        """OpenAI's own client. It is closed with the server."""
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=SECONDS, max_retries=0)

    def socket(self) -> socket.socket:
        """A connection for raw bytes."""
        connection = self.connect()
        connection.connect()
        return connection.sock

    def trusted(self) -> bool:
        """Whether the server shows the certificate that its clients trust now."""
        try:
            self.socket().close()
        except ssl.SSLError:
            return False
        return True

    def ask(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> Answer:
        """`body`: bytes as they are, anything else as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(method or ("GET" if data is None else "POST"), path, data, headers or {})
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def begun(self, path: str, body: Any = None, headers: str = "") -> socket.socket:
        """A connection over which this has been sent; POST, if there is a body."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{'POST' if data else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}"
        client = self.socket()
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return client

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code after this signal."""
        self.process.send_signal(number)
        return self.process.wait(SECONDS)

    def kill(self) -> None:
        if "openai" in vars(self):  # else its sockets are closed when the garbage collector comes, in any test
            self.openai.close()
        self.process.kill()
        self.process.wait(SECONDS)


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; [DONE] as None."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [None if line == "[DONE]" else json.loads(line) for line in lines]


@contextlib.contextmanager
def serving(*words: object, folder: Path, **more: Any) -> Iterator[Server]:
    """A server that is ready."""
    server = Server(*words, folder=folder, **more)
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


def write_keys(file: Path, *lines: str) -> None:
    """Put a file of keys in the place of the one before."""
    (draft := file.with_suffix(".next")).touch(mode=0o600)
    draft.write_text("\n".join(lines))
    draft.rename(file)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def until(condition: Callable[[], object], otherwise: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"that did not come about: {otherwise()}"
        time.sleep(0.01)
