"""Commands in processes of their own that need not load torch and Numba first, which takes longer than most of them.

One process, `python forking.py`, imports all that a command needs and then forks for each: what it starts is a real
process with its own session, folder, environment, pipes, signals and end. The other half of this file is how tests talk
to it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing.process
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import preloaded

LOADED = (
    "gpuinfer.backends.inprocess",
    "gpuinfer.cli.building",
    "gpuinfer.cli.workload",
    "gpuinfer.cli.screen.display",
    "gpuinfer.text.checkpoint",
    "gpuinfer.text.generator",
    "gpuinfer.workloads.generate.workload",
    "gpuinfer.workloads.rollouts.workload",
    "gpuinfer.workloads.selfplay.workload",
)
MOST_ORDER = 1 << 20  # bytes of a command line with its environment


class Forked:
    """`python -m WORDS`, or of a file `python WORDS`, much as `subprocess.Popen` shows it, in a session of its own.

    Each of `stdin`, `stdout` and `stderr` is a pipe unless it is a file. `text`: what is read are strings. `limit`: the
    most bytes that a file of its may have. `prepared`: a module whose `prepare` is called before anything is forked.
    `workers`: its worker processes are forked too (`preloaded.py`).
    """

    def __init__(
        self,
        words: Sequence[object],
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        *,
        stdin: IO[Any] | int = subprocess.PIPE,
        stdout: IO[Any] | int = subprocess.PIPE,
        stderr: IO[Any] | int = subprocess.PIPE,
        text: bool = False,
        limit: int | None = None,
        prepared: Path | None = None,
        workers: bool = False,
    ) -> None:
        self.args, self.returncode = [str(word) for word in words], None
        self._text, theirs = text, []
        self.stdin, self.stdout, self.stderr = (
            self._end(given, number == 0, theirs) for number, given in enumerate((stdin, stdout, stderr))
        )
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(_server(prepared))
        given = own_environment() if environment is None else dict(environment)
        order = [self.args, str(cwd), given, limit, workers]
        socket.send_fds(self._line, [json.dumps(order).encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.pid = int(self._line.recv(100))

    def _end(self, given: IO[Any] | int, writes: bool, theirs: list[int]) -> IO[Any] | None:
        """Our end of a pipe, if it is one; the command's is added to `theirs`."""
        if given == subprocess.PIPE:
            pipe = os.pipe()
            theirs.append(pipe[0 if writes else 1])
            mode = ("w" if writes else "r") + ("" if self._text else "b")
            return os.fdopen(pipe[1 if writes else 0], mode, encoding="utf-8" if self._text else None)
        if given == subprocess.DEVNULL:
            theirs.append(os.open(os.devnull, os.O_RDWR))
        elif given == subprocess.STDOUT:
            theirs.append(os.dup(theirs[1]))
        else:
            theirs.append(os.dup(given if isinstance(given, int) else given.fileno()))
        return None

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.wait()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        if self.returncode is None:
            if not select.select([self._line], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._line.recv(100))
            self._line.close()
            with contextlib.suppress(OSError):
                if self.stdin is not None:
                    self.stdin.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, given: Any = None, timeout: float = 60) -> tuple[Any, Any]:
        """What it says on both, once it has ended."""
        said: dict[str, Any] = {}
        readers = [threading.Thread(target=self._read, args=(name, said), daemon=True) for name in ("stdout", "stderr")]
        for reader in readers:
            reader.start()
        with contextlib.suppress(BrokenPipeError, ValueError):
            if self.stdin is not None:
                self.stdin.write(given or ("" if self._text else b""))
                self.stdin.close()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():  # a process that it has started holds the pipe
                raise subprocess.TimeoutExpired(self.args, timeout)
        return said["stdout"], said["stderr"]

    def _read(self, name: str, said: dict[str, Any]) -> None:
        pipe = getattr(self, name)
        said[name] = "" if self._text else b""
        if pipe is not None and not pipe.closed:
            with pipe:
                said[name] = pipe.read()


def run(
    words: Sequence[object], cwd: Path, environment: Mapping[str, str] | None = None, timeout: float = 240, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A command with nothing on its standard input, and what it said. Raises `TimeoutExpired` when it takes longer than
    `timeout` seconds; it is killed, with its session.
    """
    with Forked(words, cwd, environment, stdin=subprocess.DEVNULL, text=True, **more) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def own_environment(**more: str) -> dict[str, str]:
    """What a command inherits in a test: all but the settings of whoever runs the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")} | more


@functools.cache
def _server(prepared: Path | None) -> bytes:
    """Where the process listens that forks. It ends with this one, which alone holds the other end of its input."""
    command = [sys.executable, __file__, *([] if prepared is None else [str(prepared)])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    _kept.append(process)
    assert process.stdout is not None
    return b"\0" + process.stdout.readline().rstrip(b"\n")


_kept: list[subprocess.Popen[bytes]] = []


def serve(prepared: Sequence[str]) -> None:
    """Fork for each order, until nobody is there to give one."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind("")  # a name on no disk, of the system's own choice
    listening.listen(64)
    for name in LOADED:
        importlib.import_module(name)
    for file in map(Path, prepared):
        sys.path.insert(1, str(file.parent))
        importlib.import_module(file.stem).prepare()
    gc.collect()
    gc.freeze()  # nothing of this is looked at again, and so copied, in every child
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, listening.getsockname()[1:] + b"\n")
    while listening in select.select([listening, 0], [], [])[0]:
        line, _ = listening.accept()
        if not os.fork():
            _run(line)
            return
        line.close()


def _run(line: socket.socket) -> None:
    """Start one command, tell its number, wait for it, and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    order, descriptors, _, _ = socket.recv_fds(line, MOST_ORDER, 3)
    if not (pid := os.fork()):
        line.close()
        _become(*json.loads(order), descriptors)
        return
    for descriptor in descriptors:
        os.close(descriptor)
    line.send(b"%d" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        line.send(b"%d" % code)
    os._exit(0)


def _become(
    words: list[str], cwd: str, environment: dict[str, str], limit: int | None, workers: bool, descriptors: Any
) -> None:
    """Be the command, as `python` would have started it, to its end: but what the interpreter then takes apart, module
    by module, is left to the system, which is a second quicker.
    """
    os.setsid()
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
    os.closerange(3, 256)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment has it
    multiprocessing.process.ORIGINAL_DIR = cwd  # where the main module of a worker is looked for
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (for as long as the process lives)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (the server's may think it can be sought)
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    script = words[0].endswith(".py")
    given = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[0:1] = [str(Path(words[0]).parent) if script else cwd, *given]
    sys.argv = words
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if workers:
        preloaded.fork_server_here()
    code: object = 0
    try:
        if script:
            runpy.run_path(words[0], run_name="__main__")
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException as error:  # noqa: BLE001 (as the interpreter does)
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.argv[1:])
