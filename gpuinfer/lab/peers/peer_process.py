"""A child process that generates, ours or another program's: how it is started by name and asked. No wait is without
an end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from gpuinfer.errors import UnknownName, UsageError, WorkError
from gpuinfer.host import children
from gpuinfer.host.child import ChildLost, ChildProgram, Conversation, LineChannel

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

    Raises `PeerFailed` when the command cannot be started, as all methods but `close` do when it fails.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._log = name, log
        environment = {key: value for key, value in os.environ.items() if key not in NO_PATHS_OF_OURS}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true"}
        try:
            child = ChildProgram(command, log, environment)
        except OSError as error:
            raise PeerFailed(
                f"{name}: {command[0]} cannot be started: {error.strerror}. Name another Python."
            ) from error
        self._conversation = Conversation(name, child, LineChannel(child.end))

    def load(self, order: Mapping[str, Any], limit_s: float = LOAD_S) -> str:
        """Make it ready; its version."""
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

    def _ask(self, order: Mapping[str, Any], wanted: str, limit_s: float) -> dict[str, Any]:
        try:
            answer = self._conversation.ask(order, limit_s)
        except ChildLost as lost:
            raise PeerFailed(f"{lost}{children.quoted_log_line(self._log)}") from None
        if isinstance(answer, dict) and answer.get("is") == "error":
            raise PeerFailed(f"{self.name}: {answer.get('message')}")
        if not isinstance(answer, dict) or answer.get("is") != wanted:
            self._conversation.child.kill()  # what it says from now on may belong to an order of before
            raise PeerFailed(
                f"{self.name} said what is no answer: {str(answer)[:LAST_WORDS]}, where '{wanted}' was due."
            )
        return answer

    def rest(self) -> None:
        """Wait until it uses no core any more, for a little while at most: some look out for work by spinning."""
        until = time.monotonic() + REST_S
        while time.monotonic() < until:
            before = self._cpu_s()
            time.sleep(LOOK_S)
            if self._cpu_s() - before < AT_REST * LOOK_S:
                return

    def _cpu_s(self) -> float:
        """That it and its own children have used."""
        total = 0.0
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self._conversation.child.pid)
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times = process.cpu_times()
                    total += times.user + times.system
        return total

    def close(self) -> None:
        """End the process and all that it has started."""
        self._conversation.tell({"do": "quit"}, 1.0)
        self._conversation.close(QUIT_S)


# Our own files are found first, and only while they are imported: no library beside them may hide another Python's own.
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from gpuinfer.lab.peers import peer_child; {after}"
    "peer_child.converse(peer_child.{package}, '{package}')"
)
FORGET = "sys.path.remove(sys.argv[1]); "


@dataclass(frozen=True, slots=True)
class PeerProgram:
    """What one child runs: the function of `peer_child` with the name of the package that a user installs for it."""

    package: str

    @property
    def ours(self) -> bool:
        return self.package == "gpuinfer"

    def command(self, python: str) -> list[str]:
        start = START.format(package=self.package, after="" if self.ours else FORGET)
        return [python, "-c", start, str(Path(__file__).parents[3])]


OURS = PeerProgram("gpuinfer")
PROGRAMS = {
    "sequential": OURS,
    "batched": OURS,
    "transformers": PeerProgram("transformers"),
    "vllm": PeerProgram("vllm"),
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
