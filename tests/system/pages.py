"""The page of a server that does not exist, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TOOL = Path(__file__).parent.parent / "monitoring" / "serve_page.py"


@contextmanager
def served(*flags: str, port: int = 0) -> Iterator[str]:
    """Its URL. `flags` are those of the tool."""
    command = [sys.executable, str(TOOL), "--port", str(port), *flags]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()
