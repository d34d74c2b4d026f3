"""The generators by name, and how the child of each is started."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuinfer.errors import UnknownName, UsageError

# Our own files are found first, and only while they are imported: no library beside them may hide another Python's own.
START = "import sys; sys.path.insert(0, sys.argv[1]); from gpuinfer.peers.{script} import main; {after}main()"
FORGET = "sys.path.remove(sys.argv[1]); "


@dataclass(frozen=True, slots=True)
class Program:
    """What one child runs."""

    script: str
    package: str  # that a user installs to have it
    ours: bool = False

    def command(self, python: str) -> list[str]:
        start = START.format(script=self.script, after="" if self.ours else FORGET)
        return [python, "-c", start, str(Path(__file__).parents[2])]


OURS = Program("with_ours", "gpuinfer", ours=True)
PROGRAMS = {
    "sequential": OURS,
    "batched": OURS,
    "transformers": Program("with_transformers", "transformers"),
    "vllm": Program("with_vllm", "vllm"),
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
