"""An environment of its own for tests, in which packages can be installed: it sees all that this one has."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass
class Scratch:
    """A virtual environment in `folder`, above which lies the one that runs the tests."""

    folder: Path
    more: Mapping[str, str] = field(default_factory=dict)  # variables of its commands

    def __post_init__(self) -> None:
        venv.create(self.folder, with_pip=False)
        above = sysconfig.get_path("purelib")
        Path(self.site, "above.pth").write_text(f"import site; site.addsitedir({above!r})\n")

    @property
    def site(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def run(self, *words: str, within: Path | None = None, limit_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """`python -m WORDS` in it, with nothing on standard input and nothing of the user's own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GPUINFER_", "PIP_", "UV_"))}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"GPUINFER_PLUGINS": str(self.folder / "plugins"), "PYTHONPATH": path, "COLUMNS": "160"}
        return subprocess.run(
            [str(self.folder / "bin" / "python"), "-m", *words],
            env={**kept, **own, **self.more},
            cwd=within or self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )

    def gpuinfer(self, *words: str, within: Path | None = None) -> subprocess.CompletedProcess[str]:
        return self.run("gpuinfer", *words, within=within)
