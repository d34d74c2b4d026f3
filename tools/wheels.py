"""Builds dist/: source distribution and wheel of gpuinfer and of each package under plugins/, for Python's indexes.

    python -m tools.wheels

The wheel is built from the source distribution, in an environment of its own. share/ has to be there (`make share`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "dist"


def sources() -> list[Path]:
    return [ROOT, *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))]


def build(out: Path, *sources: Path, words: tuple[str, ...] = ()) -> None:
    """Each source into this folder. Raises `SystemExit` with what the builder said."""
    for source in sources:
        command = [sys.executable, ROOT / "tools/uv.py", "build", "--quiet", *words, "--out-dir", out, source]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}{source.name} could not be built.")


def main() -> None:
    if not (ROOT / "share/man/man1").is_dir():
        raise SystemExit("share/ is missing, which the wheel brings along: make share")
    for old in [*OUT.glob("*.whl"), *OUT.glob("*.tar.gz")]:
        old.unlink()
    build(OUT, *sources())
    for made in sorted([*OUT.glob("*.whl"), *OUT.glob("*.tar.gz")]):
        print(f"{made.relative_to(ROOT)}: {made.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
