"""Plans of processes that are shams."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from gpuinfer.launchers.base import ProcessPlan

COMMAND = (sys.executable, str(Path(__file__).with_name("sham.py")))
SECONDS = 60.0  # within which anything comes about, on a machine that has other things to do


def plan(folder: Path, *words: str, index: int = 0, attempt: int = 0) -> ProcessPlan:
    made = ProcessPlan(f"replica-{index}", index, folder, (), threads=1, attempt=attempt)
    return replace(made, arguments=(*words, "--ready-file", str(made.ready_file)))
