"""Commands in processes of their own that need not load torch and Numba, which takes longer than most of them: one
process has loaded them and is forked for each.

    python tests/forked_commands.py     takes a JSON object a line, and answers each with the command's exit code
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LOADED = (
    "gpuinfer.backends.inprocess",
    "gpuinfer.cli.building",
    "gpuinfer.cli.workload",
    "gpuinfer.screen.display",
    "gpuinfer.text.checkpoint",
    "gpuinfer.text.generator",
    "gpuinfer.workloads.generate.workload",
    "gpuinfer.workloads.rollouts.workload",
    "gpuinfer.workloads.selfplay.workload",
)
LOOK_S = 0.01
KILLED = -signal.SIGKILL


class ForkedCommands:
    """Runs `python -m WORDS`, each in its folder and all in one environment, with nothing on standard input."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def run(self, words: Sequence[str], folder: Path, limit_s: float) -> subprocess.CompletedProcess[str]:
        """Raises `TimeoutExpired` when it takes longer than `limit_s` seconds; it is killed, with its session."""
        with tempfile.TemporaryDirectory() as said:
            out, err = Path(said, "out"), Path(said, "err")
            order = {"words": list(words), "folder": str(folder), "out": str(out), "err": str(err), "limit_s": limit_s}
            assert self._parent.stdin is not None
            assert self._parent.stdout is not None
            self._parent.stdin.write(f"{json.dumps(order)}\n")
            self._parent.stdin.flush()
            code = json.loads(self._parent.stdout.readline())
            done = subprocess.CompletedProcess(list(words), code, out.read_text(), err.read_text())
        if code == KILLED:
            raise subprocess.TimeoutExpired(done.args, limit_s, done.stdout, done.stderr)
        return done

    def close(self) -> None:
        self._parent.communicate()
        assert self._parent.returncode == 0


def main() -> None:
    for name in LOADED:
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        if (child := os.fork()) == 0:
            _become(order)
        print(json.dumps(_ended(child, order["limit_s"])), flush=True)


def _become(order: Mapping[str, object]) -> None:
    """Never comes back, but by the end of the interpreter."""
    os.setsid()
    os.chdir(str(order["folder"]))
    sys.path[0] = str(order["folder"])  # as `python -m` has it
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, str(order["out"]), os.O_WRONLY | os.O_CREAT),
        (2, str(order["err"]), os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (for as long as the process lives)
    words = order["words"]
    assert isinstance(words, list)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    sys.exit(0)


def _ended(child: int, limit_s: float) -> int:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(LOOK_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return KILLED


if __name__ == "__main__":
    main()
