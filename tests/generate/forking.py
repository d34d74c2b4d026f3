"""The command as a process of its own, again and again, without importing everything each time.

One process, `python forking.py`, imports all that the command needs and then forks for each run: what it starts is a
real process with its own pipes, signals and end. The other half of this file is how tests talk to it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

MOST_ORDER = 1 << 20  # bytes of a command line with its environment


class Forked:
    """A running command, much as `subprocess.Popen` shows it. `limit`: the most bytes that a file of its may have."""

    def __init__(self, words: list[str], cwd: Path, environment: Mapping[str, str], limit: int | None = None) -> None:
        ours, theirs = zip(_ends(os.pipe(), writes=True), _ends(os.pipe()), _ends(os.pipe()), strict=True)
        self.stdin: BinaryIO = os.fdopen(ours[0], "wb")
        self.stdout: BinaryIO = os.fdopen(ours[1], "rb")
        self.stderr: BinaryIO = os.fdopen(ours[2], "rb")
        self.args, self.returncode = words, None
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(_server())
        order = json.dumps([words, str(cwd), dict(environment), limit]).encode()
        socket.send_fds(self._line, [order], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.pid = int(self._line.recv(100))

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        self.wait(60)
        self._line.close()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._line.recv(100))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, given: bytes = b"", timeout: float = 60) -> tuple[bytes, bytes]:
        """What it says on both, once it has ended."""
        said: dict[str, bytes] = {}
        readers = [threading.Thread(target=self._read, args=(name, said)) for name in ("stdout", "stderr")]
        for reader in readers:
            reader.start()
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.stdin.write(given)
            self.stdin.close()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said["stdout"], said["stderr"]

    def _read(self, name: str, said: dict[str, bytes]) -> None:
        pipe = getattr(self, name)
        said[name] = b"" if pipe.closed else pipe.read()


def _ends(pipe: tuple[int, int], writes: bool = False) -> tuple[int, int]:
    """Ours and theirs."""
    return pipe[::-1] if writes else pipe


@functools.cache
def _server() -> bytes:
    """Where the process listens that forks. It ends with this one, which alone holds the other end of its input."""
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    _kept.append(process)
    return b"\0" + process.stdout.readline().rstrip(b"\n")


_kept: list[subprocess.Popen[bytes]] = []


def serve() -> None:
    """Fork for each order, until nobody is there to give one."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind("")  # a name on no disk, of the system's own choice
    listening.listen(64)
    import instant

    import gpuinfer.text.checkpoint
    import gpuinfer.text.language  # noqa: F401  what a form of answers is checked with

    instant.patch()
    instant.try_out()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, listening.getsockname()[1:] + b"\n")
    while listening in select.select([listening, 0], [], [])[0]:
        line, _ = listening.accept()
        if not os.fork():
            _run(line)
        line.close()


def _run(line: socket.socket) -> None:
    """Start one command, tell its number, wait for it, and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order, descriptors, _, _ = socket.recv_fds(line, MOST_ORDER, 3)
    if not (pid := os.fork()):
        line.close()
        os._exit(_become(*json.loads(order), descriptors))
    for descriptor in descriptors:
        os.close(descriptor)
    line.send(b"%d" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        line.send(b"%d" % code)
    os._exit(0)


def _become(words: list[str], cwd: str, environment: dict[str, str], limit: int | None, descriptors: Any) -> int:
    import gpuinfer.cli

    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.closerange(3, 256)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        gpuinfer.cli.main(words)
    except SystemExit as end:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        return int(end.code or 0)


if __name__ == "__main__":
    serve()
