"""Compiles those kernels of our games and models that are not there yet: tests need not wait for them then.

    .venv/bin/python -m tools.kernels

They are kept in the user's cache.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tools.warm import LIMIT_S, compile_search

GENERATE = ("generate", "--model", "tiny", "--prompt", "Once", "--max-new-tokens", "4", "--quiet", "--no-live")


def compile_text(dtype: str) -> None:
    """The step of a decoder that stores this, and sampling."""
    command = [sys.executable, "-m", "gpuinfer", *GENERATE, "--dtype", dtype]
    own = {**os.environ, "GPUINFER_ROOFLINE": "false"}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} has failed: {done.stderr}")


def main() -> None:
    for name in ("blob", "connect-four"):
        compile_search(name)
    for dtype in ("float32", "bfloat16"):
        compile_text(dtype)


if __name__ == "__main__":
    main()
