"""Servers and client processes for the tests of the central server, and looks at what they hold and leave."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from models import FEATURES

from gpuinfer.central.server import CentralServer

SECONDS = 60  # after which something that does not come about has failed


def served(model: str = "models:tagged", **options: Any) -> CentralServer:
    return CentralServer(model, **{"inputs": FEATURES, "in_flight": 2, "threads": 1, **options})


@contextlib.contextmanager
def serving(model: str = "models:tagged", **options: Any) -> Iterator[CentralServer]:
    server = served(model, **options)
    server.start()
    try:
        yield server
    finally:
        server.close(quiet=True)


class Hold:
    """Whether a model `models:held` answers: it does not between `close` and `open`."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder, "hold")

    def close(self) -> None:
        self.path.touch()

    def open(self) -> None:
        self.path.unlink(missing_ok=True)

    def wait_until_reached(self) -> None:
        """Until the model is held in a batch that was begun since `close`."""
        until(self.path.with_suffix(".reached").exists, "a batch in the model")


@contextlib.contextmanager
def serving_held(**options: Any) -> Iterator[tuple[CentralServer, Hold]]:
    """A server whose model is held when a test says so: what is asked then stays unanswered for as long as it wants."""
    folder = tempfile.mkdtemp()
    hold = Hold(folder)
    try:
        with serving("models:held", arguments={"path": str(hold.path)}, **options) as server:
            try:
                yield server, hold
            finally:
                hold.open()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def context(method: str = "forkserver") -> Any:
    if method == "forkserver":
        from preloaded import preload

        preload("programs")
    return multiprocessing.get_context(method)


class Program:
    """A client process and the line to it."""

    def __init__(
        self, target: Callable[..., None], *arguments: Any, method: str = "forkserver", at: int = 2, daemon: bool = True
    ) -> None:
        """The process's end of the line becomes argument number `at`."""
        chosen = context(method)
        self.line, theirs = chosen.Pipe()
        arguments = (*arguments[:at], theirs, *arguments[at:])
        self.process: BaseProcess = chosen.Process(target=target, args=arguments, daemon=daemon)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def hear(self, seconds: float = SECONDS) -> str:
        """Its next word; fails the test when none comes."""
        if not self.line.poll(seconds):
            raise AssertionError("the client said nothing")
        try:
            return self.line.recv_bytes().decode()
        except EOFError:
            self.process.join(5)
            raise AssertionError(f"the client ended with {self.process.exitcode}") from None

    def end(self) -> tuple[str, int]:
        """Tell it to stop: how it ended, and how often it had asked."""
        with contextlib.suppress(OSError):
            self.line.send_bytes(b"stop")
        while (word := self.hear()) == "here":
            pass
        how, _, asked = word.rpartition("|")
        return how, int(asked)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ValueError):
            self.process.kill()
        self.process.join(10)
        self.line.close()


@contextlib.contextmanager
def programs(*them: Program) -> Iterator[tuple[Program, ...]]:
    try:
        yield them
    finally:
        for program in them:
            program.close()


def pid_of(server: CentralServer) -> int:
    assert server._child is not None
    return server._child.pid


def mapped(pid: int) -> int:
    """How many blocks of shared memory a process has mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:gpuinfer")


def listening(server: CentralServer) -> bool:
    """Whether the name of its socket is still known to the system."""
    return server.address.path.lstrip("\0") in Path("/proc/net/unix").read_text()


def until(condition: Callable[[], object], what: str = "that") -> None:
    """Wait, with an end."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come about")
        time.sleep(0.01)
