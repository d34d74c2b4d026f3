"""The smaller file, for machines with a Python of the same version and a torch: everything but these two.

Pex builds it, and makes an environment of it in the user's cache at its first start.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import interpreter
import packages


def begin(wheels: Path, target: Path) -> subprocess.Popen[bytes]:
    """Start building; its end is waited for by whoever wants the file."""
    major, minor = sys.version_info[:2]
    command = [str(Path(sys.prefix, "bin/pex")), f"gpuinfer[{','.join(packages.EXTRAS)}]", *packages.BESIDE]
    command += ["--pre-resolved-dists", str(wheels), "--exclude", "torch", "--entry-point", "gpuinfer.__main__:main"]
    command += ["--venv", "prepend", "--venv-site-packages-copies", "--venv-system-site-packages"]
    command += ["--interpreter-constraint", f"CPython=={major}.{minor}.*"]
    command += ["--python-shebang", f"/usr/bin/env {interpreter.VERSION}", "--output-file", str(target)]
    return subprocess.Popen(command, env=packages.clean())
