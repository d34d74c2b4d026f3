"""Empty environments with the wheels of dist/, for each Python that is here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from gpuinfer.host.installation import user_cache_folder


ROOT = Path(__file__).parent.parent.parent
DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
LIMIT_S = 900.0  # of a busy machine
TORCH = f"torch=={version('torch').partition('+')[0]}"
"""Of this environment, whose files the installer has already."""


def wheels() -> list[Path]:
    return sorted(DIST.glob("*.whl"))


def said(*words: object, environment: dict[str, str] | None = None, folder: Path | None = None):
    return subprocess.run(
        list(map(str, words)), env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )


def uv(*words: object, folder: Path = ROOT) -> str:
    done = said(sys.executable, ROOT / "tools/uv.py", *words, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def find_python(wanted: str) -> Path | None:
    """A Python of this version, such as "3.12": this one, one on PATH, pyenv's, or one that uv knows."""
    for candidate in _candidates(wanted):
        done = said(candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        if (done.returncode, done.stdout.strip()) == (0, wanted):
            return Path(candidate)
    return None


def _candidates(wanted: str) -> Iterator[str | Path]:
    if wanted == HERE:
        yield sys.executable
    if named := shutil.which(f"python{wanted}"):
        yield named
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{wanted}.*/bin/python{wanted}"), reverse=True)
    found = said(sys.executable, ROOT / "tools/uv.py", "python", "find", "--no-python-downloads", wanted)
    if found.returncode == 0:
        yield found.stdout.strip()


@dataclass(frozen=True)
class Installed:
    """An environment. `torch`: whether it has one. `home` is empty before. Compiled kernels are this user's: they are
    known by their content and by the versions that made them, and those of the lowest versions are compiled here.
    """

    place: Path
    home: Path
    torch: bool

    @property
    def bin(self) -> Path:
        return self.place / "bin"

    @property
    def environment(self) -> dict[str, str]:
        """Without this process's settings."""
        return {
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(user_cache_folder().parent),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "GPUINFER_ROOFLINE": "false",
            "COLUMNS": "120",
        }

    def run(self, *words: object):
        """A program of the environment, away from the checkout."""
        program, *rest = words
        return said(self.bin / str(program), *rest, environment=self.environment, folder=self.home)


def install_alone(folder: Path, python: Path, wheel: Path) -> Installed:
    """One wheel and what it asks for, in the versions of constraints.txt."""
    place, home = folder / "there", folder / "home"
    home.mkdir()
    uv("venv", "--quiet", "--python", python, place)
    torch = folder / "torch.txt"
    torch.write_text(f"{TORCH}\n")
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    asked = folder / "asked.txt"
    asked.write_text("\n".join(found) + "\n")
    into = ["pip", "install", "--quiet", "--python", place / "bin/python"]
    uv(*into, "--overrides", torch, "-c", ROOT / "constraints.txt", "-r", asked)
    uv(*into, "--no-deps", wheel)
    return Installed(place, home, torch=True)


def install(folder: Path, python: Path, *, lowest: bool) -> Installed:
    """`lowest`: of each package that we ask for ourselves the lowest version that we allow, but for torch, whose lowest
    has builds with CUDA alone. Otherwise as CI is installed: by constraints.txt, hashes checked. Where torch for this
    Python would mean one with CUDA, gigabytes, it is left out.
    """
    place, home = folder / "there", folder / "home"
    home.mkdir()
    uv("venv", "--quiet", "--python", python, place)
    into = ["pip", "install", "--quiet", "--python", place / "bin/python"]
    without, torch = folder / "without.txt", folder / "torch.txt"
    without.write_text("torch\n")
    torch.write_text(f"{TORCH}\n")
    with_torch = _is_small(python, torch)
    more = ["--overrides", torch] if with_torch else ["--excludes", without]
    asked = folder / "asked.txt"
    asked.write_text("\n".join(requirements()) + "\n")
    if lowest:
        uv(*into, *more, "--resolution", "lowest-direct", "-r", asked)
    else:
        uv(*into, *more, "-c", ROOT / "constraints.txt", "-r", asked)
    uv(*into, "--no-deps", *wheels())
    return Installed(place, home, with_torch)


def requirements() -> list[str]:
    """What gpuinfer and the packages under plugins/ ask for, but one another."""
    found = []
    for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]:
        found += tomllib.loads(path.read_text())["project"]["dependencies"]
    return [one for one in found if not one.startswith("gpuinfer")]


def _is_small(python: Path, torch: Path) -> bool:
    """Whether this build of torch comes without CUDA's libraries for that Python, or comes whole all the same."""
    return bool(os.environ.get("DIST_TORCH")) or "nvidia-" not in uv(
        "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python", python, torch
    )
