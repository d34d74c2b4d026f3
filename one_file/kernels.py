"""Kernels of our own games and models, compiled for the processor that builds: there a first start need not wait.

Which processor they are for lies beside them; on another one they are passed over, and compiled as everywhere.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import packages

PLACE = "kernels"  # in the folder's top: gpuinfer/host/installation.py
PLAYING = ("selfplay", "--games", "2", "--simulations", "4", "--workers", "1", "--model", "blobnet-small")
COMMANDS = (
    (*PLAYING, "--game", "blob"),
    (*PLAYING, "--game", "connect-four"),
    ("generate", "--model", "tiny", "--prompt", "Once", "--max-new-tokens", "4"),
)
ASKING = "from gpuinfer.models import kernel_cache as kept; print(kept.PROCESSOR, kept.processor(), sep='\\n', end='')"


class Kernels:
    """Being compiled, from here on until they are asked for."""

    def __init__(self, program: Path, work: Path) -> None:
        self._cache = work / "kernels"
        told = {"XDG_CACHE_HOME": str(self._cache), "GPUINFER_ROOFLINE": "false", "PYTHONDONTWRITEBYTECODE": "1"}
        environment = {**packages.clean(), **told}
        starts = [[program, "-m", "gpuinfer", *words, "--quiet", "--no-live"] for words in COMMANDS]
        starts.append([program, "-c", ASKING])
        out = subprocess.PIPE
        self._running = [
            subprocess.Popen(words, env=environment, stdout=out, stderr=out, text=True, cwd=work) for words in starts
        ]

    def put_into(self, tree: Path) -> None:
        """Raises `SystemExit` with the last words of a command that has failed."""
        for one in self._running:
            said, complained = one.communicate()
            if one.returncode:
                raise SystemExit(f"kernels were not compiled: {' '.join(map(str, one.args))}: {complained}")
        name, _, processor = said.partition("\n")
        kept = tree / PLACE
        os.rename(self._cache / "gpuinfer/kernels", kept)
        for lock in kept.rglob("*.lock"):
            lock.unlink()
        (kept / name).write_text(processor)
