"""What a Ray actor does for one replica, on whichever node it was placed: run it, and say how it is.

Nothing is read from a shared folder: the files that a replica needs come with the order, and its log goes back.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuinfer.fleet.launchers import readiness
from gpuinfer.fleet.launchers.local import KEPT, LEAVING, OURS
from gpuinfer.host import children, commands

READY = "ready.json"
CHUNK = 256 << 10  # bytes of log that travel at once


class Host:
    """One replica's. All methods come back at once, but `end`, which waits for the system for a moment."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="gpuinfer-ray-"))  # 0700
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        command: Sequence[str],
        arguments: Sequence[str],
        files: Mapping[str, bytes],
        ready: str,
        threads: int | None,
        host: str | None = None,
    ) -> int:
        """The process id. `files`: what lies at the paths that the arguments name, which lies elsewhere here.

        `ready` is where the arguments want the ready file; `host` where it listens, by default at this node's address.
        """
        places = {path: str(self._write(number, contents)) for number, (path, contents) in enumerate(files.items())}
        places[ready] = str(self._folder / READY)
        words = [places.get(word, word) for word in arguments]
        program = command or (sys.executable, "-m", "gpuinfer")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*program, *words, "--host", host or _address(), LEAVING],
                stdin=subprocess.PIPE,  # its end is ours: the replica leaves when this actor does
                stdout=log,
                stderr=log,
                env=_environment(threads),
                start_new_session=True,
            )
        return self._process.pid

    def poll(self, after: int) -> dict[str, Any]:
        """Whether it runs, its address once it serves, and its log from this byte on."""
        process = self._process
        code = None if process is None else process.poll()
        with (self._folder / "log").open("rb") as log:
            log.seek(after)
            said = log.read(CHUNK)
        address = readiness.read(self._folder / READY)
        told = None if address is None else [address.host, address.port]
        return {"alive": process is not None and code is None, "code": code, "log": said, "address": told}

    def terminate(self) -> None:
        """Ask it to finish what is under way and leave."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Now, with all that it has started."""
        if self._process is not None:
            commands.kill(self._process)
            if self._process.stdin is not None:
                self._process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, number: int, contents: bytes) -> Path:
        path = self._folder / f"file-{number}"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(contents)
        return path


def _address() -> str:
    """Of this node, as the others know it."""
    import ray

    util: Any = ray.util
    return str(util.get_node_ip_address())


def _environment(threads: int | None) -> dict[str, str]:
    """The actor's, devices included, and no settings but by flags."""
    given = {key: value for key, value in os.environ.items() if key in KEPT or not key.startswith(OURS)}
    if threads is not None:
        given |= dict.fromkeys(children.THREAD_COUNTS, str(threads))  # Ray sets 1 there, whatever was asked for
    return given
