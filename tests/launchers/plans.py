"""Plans of replicas that are shams."""

from __future__ import annotations

import sys
from pathlib import Path

from gpuinfer.fleet.launchers.base import ReplicaPlan

COMMAND = (sys.executable, str(Path(__file__).with_name("sham.py")))
SECONDS = 60.0  # within which anything comes about, on a machine that has other things to do


def plan(folder: Path, *words: str, index: int = 0, attempt: int = 0) -> ReplicaPlan:
    made = ReplicaPlan(index, folder / "setup.json", folder / "key", folder, None, 1, (), attempt)
    arguments = (*words, "--ready-file", str(made.ready_file), "--host", "0.0.0.0")
    return ReplicaPlan(index, made.setup_file, made.key_file, folder, None, 1, arguments, attempt)
