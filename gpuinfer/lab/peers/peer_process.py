"""A child process that generates, ours or another program's: how it is started by name, asked, and ended whatever
happens. No wait is without an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpuinfer.errors import UnknownName, UsageError, WorkError
from gpuinfer.host import children

LOAD_S = 900.0  # vLLM compiles the model first
RUN_S = 900.0
QUIT_S = 10.0
REST_S, LOOK_S, AT_REST = 5.0, 0.2, 0.1  # a child that used under a tenth of a core at a look is at rest
LAST_WORDS = 300  # characters
NO_PATHS_OF_OURS = ("PYTHONPATH", "PYTHONHOME")  # another Python has its own


class PeerFailed(WorkError):
    """A child could not do what it was asked; the others can."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run took."""

    seconds: float
    tokens: int  # new ones


class PeerProcess:
    """One generator in a process of its own. `log` takes all that it prints.

    Raises `PeerFailed` when the command cannot be started.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._log = name, log
        self._heard = b""
        self._busy = False  # with an order that it has not answered
        environment = {key: value for key, value in os.environ.items() if key not in NO_PATHS_OF_OURS}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
        try:
            with log.open("wb") as noise:
                self._process = children.start_program(command, noise, environment)
        except OSError as error:
            raise PeerFailed(
                f"{name}: {command[0]} cannot be started: {error.strerror}. Name another Python."
            ) from error

    def load(self, order: Mapping[str, Any], limit_s: float = LOAD_S) -> str:
        """Make it ready; its version. Raises `PeerFailed`, as all methods but `close` do."""
        return str(self._ask({"do": "load", **order}, "ready", limit_s)["version"])

    def run(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, at_once: int | None = None, limit_s: float = RUN_S
    ) -> Ran:
        """Answer all prompts with so many tokens each; `at_once`: most prompts under way, where it is ours."""
        order = {"do": "run", "prompts": prompts, "new_tokens": new_tokens, "at_once": at_once or len(prompts)}
        answer = self._ask(order, "done", limit_s)
        ran = Ran(float(answer["seconds"]), int(answer["tokens"]))
        if ran.tokens != len(prompts) * new_tokens:
            raise PeerFailed(f"{self.name} made {ran.tokens} tokens where {len(prompts) * new_tokens} were asked for.")
        return ran

    def rest(self) -> None:
        """Wait until it uses no core any more, for a little while at most: some look out for work by spinning."""
        until = time.monotonic() + REST_S
        while time.monotonic() < until:
            before = self._cpu_s()
            time.sleep(LOOK_S)
            if self._cpu_s() - before < AT_REST * LOOK_S:
                return

    def close(self) -> None:
        """End the process and all that it has started; a process with an unanswered order is killed at once."""
        with contextlib.suppress(OSError, PeerFailed):
            self._kill() if self._busy else self._tell({"do": "quit"}, time.monotonic() + 1.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_S)
        self._kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _cpu_s(self) -> float:
        """That it and its own children have used."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self._process.pid)
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def _ask(self, order: Mapping[str, Any], wanted: str, limit_s: float) -> dict[str, Any]:
        until = time.monotonic() + limit_s
        self._busy = True
        self._tell(order, until)
        answer = self._answer(until, limit_s)
        self._busy = False
        if answer.get("is") == "error":
            raise PeerFailed(f"{self.name}: {answer.get('message')}")
        if answer.get("is") != wanted:
            raise self._lost(f"answered {str(answer)[:LAST_WORDS]} where '{wanted}' was due.")
        return answer

    def _tell(self, order: Mapping[str, Any], until: float) -> None:
        """All of it, or as much as the child takes until then."""
        data, pipe = memoryview(json.dumps(order).encode() + b"\n"), self._process.stdin
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        try:
            while data:
                self._wait([], [pipe], until)
                data = data[os.write(pipe.fileno(), data) :]
        except BrokenPipeError:
            raise self._gone() from None

    def _answer(self, until: float, limit_s: float) -> dict[str, Any]:
        """The next line that it says."""
        pipe = self._process.stdout
        assert pipe is not None
        while b"\n" not in self._heard:
            self._wait([pipe], [], until, limit_s)
            if not (part := os.read(pipe.fileno(), 1 << 16)):
                raise self._gone()
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise self._lost(f"said what is no answer: {line[:LAST_WORDS]!r}.")
        return found

    def _wait(self, readable: list[Any], writable: list[Any], until: float, limit_s: float = 0.0) -> None:
        left = until - time.monotonic()
        if left <= 0 or not any(select.select(readable, writable, [], left)):
            waited = f" within {limit_s:.0f} s" if limit_s else " in time"
            raise self._lost(f"gave no answer{waited}.{self._last_words()}")

    def _lost(self, why: str) -> PeerFailed:
        """What it says from now on may belong to an order of before, so it is ended."""
        self._kill()
        return PeerFailed(f"{self.name} {why}")

    def _kill(self) -> None:
        children.kill_program(self._process)

    def _gone(self) -> PeerFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(QUIT_S)
        return PeerFailed(f"{self.name} ended with {self._process.returncode}.{self._last_words()}")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log.read_text("utf-8", "replace").splitlines() if line.strip()]
        return f' Its last words: "{lines[-1][-LAST_WORDS:]}"' if lines else ""


# Our own files are found first, and only while they are imported: no library beside them may hide another Python's own.
START = "import sys; sys.path.insert(0, sys.argv[1]); from gpuinfer.lab.peers.{script} import main; {after}main()"
FORGET = "sys.path.remove(sys.argv[1]); "


@dataclass(frozen=True, slots=True)
class PeerProgram:
    """What one child runs."""

    script: str
    package: str  # that a user installs to have it
    ours: bool = False

    def command(self, python: str) -> list[str]:
        start = START.format(script=self.script, after="" if self.ours else FORGET)
        return [python, "-c", start, str(Path(__file__).parents[3])]


OURS = PeerProgram("with_ours", "gpuinfer", ours=True)
PROGRAMS = {
    "sequential": OURS,
    "batched": OURS,
    "transformers": PeerProgram("with_transformers", "transformers"),
    "vllm": PeerProgram("with_vllm", "vllm"),
}
PEERS = tuple(name for name, program in PROGRAMS.items() if not program.ours)


def pythons(words: Sequence[str]) -> dict[str, str]:
    """`NAME=PATH` words as the Python of each peer. Raises `UsageError` for one that is not there."""
    found = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or not path:
            raise UsageError(f"--python {word}: not of the form NAME=PATH. Write --python vllm=/path/to/python.")
        if name not in PEERS:
            raise UnknownName("peer", name, PEERS, label="Peers")
        program = shutil.which(Path(path).expanduser())
        if program is None:
            raise UsageError(f"--python {name}: {path} is no program. Give the path of a Python that has {name}.")
        found[name] = str(program)
    return found


def python_of(name: str, chosen: Mapping[str, str]) -> str:
    return chosen.get(name, sys.executable)
