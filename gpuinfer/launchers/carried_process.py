"""A process of gpuinfer on a machine that does not see the launcher's files: they travel with the order, lie in a
private folder while it runs, and are removed with it. What runs there uses it: an actor of Ray, the far end of ssh.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from gpuinfer.host import children
from gpuinfer.launchers import base, local

READY = "ready.json"


class ProcessOrder(msgspec.Struct, frozen=True):
    """What is to run, as it travels. `files` are the contents of the files at the paths that the arguments name;
    `words` are put in the place of other words of the arguments. `ready` is where the arguments want the ready file;
    None: the process does not serve.
    """

    arguments: tuple[str, ...]
    files: Mapping[str, bytes] = {}
    words: Mapping[str, str] = {}
    ready: str | None = None
    threads: int | None = None  # cores for its numeric libraries; None: as many as they like
    devices: str | None = None  # CUDA_VISIBLE_DEVICES; None: leave the variable as it is
    command: tuple[str, ...] = ()  # what the arguments follow; empty: gpuinfer of this Python


def process_order(plan: base.ProcessPlan, **more: object) -> ProcessOrder:
    """The order of a plan. Raises `OSError` for a file of it that cannot be read."""
    order = ProcessOrder(
        arguments=plan.arguments,
        files={str(path): path.read_bytes() for path in plan.files},
        ready=str(plan.ready_file) if plan.serves else None,
        threads=plan.threads,
        devices=plan.devices,
    )
    return msgspec.structs.replace(order, **more)


class CarriedProcess:
    """Made with its folder, of mode 0700; files in it have mode 0600."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpuinfer-process-"))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, order: ProcessOrder, log: int, host: str | None) -> int:
        """The process id. `log`: the descriptor to which it writes; `host`: where one that serves listens.

        Raises `OSError` when it cannot be started.
        """
        places = dict(order.words)
        if order.ready is not None:
            places[order.ready] = str(self.folder / READY)
        for number, (path, contents) in enumerate(order.files.items()):
            places[path] = str(self.folder / f"file-{number}")
            with os.fdopen(os.open(places[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(contents)
        words: Sequence[str] = [*(order.command or local.COMMAND), *(places.get(one, one) for one in order.arguments)]
        if order.ready is not None and host is not None:
            words = [*words, "--host", host]
        environment = local.process_environment(os.environ, order.threads)
        if order.threads is not None:  # Ray sets 1 there, whatever was requested
            environment |= dict.fromkeys(children.THREAD_COUNTS, str(order.threads))
        if order.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = order.devices
        self._process = local.start_process(words, log, environment)
        return self._process.pid

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs, or has not been started. Negative: by that signal."""
        return None if self._process is None else self._process.poll()

    @property
    def address(self) -> base.ListenAddress | None:
        """Where it listens, once it serves."""
        return base.read_ready_file(self.folder / READY)

    def terminate(self) -> None:
        """Ask it to finish what is under way and leave."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Now, with all that it has started, and with its folder."""
        if self._process is not None:
            children.kill_program(self._process)
            if self._process.stdin is not None:
                self._process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)
