"""Writes constraints.txt: one version of each package that CI installs, with the hashes of its files.

    python -m tools.constraints

Of torch there are builds for each kind of device, with hashes of their own, and the machine chooses: it stands in the
ranges of pyproject.toml alone, with what only some of its builds need.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE = ROOT / "constraints.txt"
EXTRAS = ("dev", "docs", "nvml")
BUILDS = re.compile(r"torch|triton|pytorch-triton.*|nvidia-(?!ml-py).*|cuda-.*")
HEADER = """\
# One version of each package that CI installs, with the hashes of its files. `make constraints` writes it anew.
# Not here: torch and what only some builds of it need. Which build it is, the machine chooses.
"""


def main() -> None:
    plugins = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
    asked = "\n".join([f".[{','.join(EXTRAS)}]", *(f"./plugins/{name}" for name in plugins)])
    words = ["pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes", "--upgrade"]
    words += ["--no-header", "--no-annotate", *(f"--no-emit-package={name}" for name in ("gpuinfer", *plugins)), "-"]
    tool = [sys.executable, ROOT / "tools/uv.py", "--as-it-is"]  # hashes of all files, not of a mirror's few
    done = subprocess.run([*tool, *words], cwd=ROOT, input=asked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stderr}constraints.txt is as it was.")
    FILE.write_text(HEADER + without_builds(done.stdout))


def without_builds(compiled: str) -> str:
    """Without the packages that depend on the build of torch. A package begins at the left, its hashes are indented."""
    kept: list[str] = []
    keeping = True
    for line in compiled.splitlines():
        if line and not line[0].isspace():
            keeping = not BUILDS.fullmatch(re.split(r"[=\s]", line, maxsplit=1)[0])
        if keeping:
            kept.append(line)
    return "\n".join(kept) + "\n"


if __name__ == "__main__":
    main()
