"""The packages inside: gpuinfer and all that it needs, in the versions of the environment that builds it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BESIDE = ("pip", "setuptools")
"""For plugins: `plugins install` is pip's, and a plugin's folder is built by setuptools where there is no network."""
EXTRAS = ("hub", "nvml", "otel", "plots", "plugins", "schemas", "serve", "tune")
"""Optional features of ours whose packages are small beside the rest. Parquet's are not: 170 MB."""

# Of packages, whatever runs without them: their tests, headers for C, static libraries, other programs.
LEFT_OUT = (
    "**/__pycache__",
    "**/*.a",
    "**/*.pyx",
    "**/*.pxd",
    "**/*.cmake",
    "bin",
    "llvmlite/tests",
    "matplotlib/mpl-data/sample_data",
    "matplotlib/tests",
    "mpl_toolkits/*/tests",
    "networkx/**/tests",
    "numba/cuda/tests",
    "numba/tests",
    "numpy/**/tests",
    "psutil/tests",
    "share",
    "sympy/**/tests",
    "torch/bin/*test*",
    "torch/bin/protoc*",
    "torch/include",
    "torch/share",
    "torch/test",
)


def installed(python: Path) -> dict[str, str]:
    """What gpuinfer needs, and what that needs, as it is installed for this interpreter: names and versions."""
    words = [python, "-c", "import sys; print(*sys.path, sep='\\n')"]
    places = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    here: dict[str, Distribution] = {}
    for one in distributions(path=[place for place in places if place]):
        here.setdefault(canonicalize_name(one.metadata["Name"]), one)
    found: dict[str, str] = {}
    waiting = [Requirement(f"gpuinfer[{','.join(EXTRAS)}]"), *map(Requirement, BESIDE)]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        asked = waiting.pop()
        if (asked.name, frozenset(asked.extras)) in seen:
            continue
        seen.add((asked.name, frozenset(asked.extras)))
        one = here.get(canonicalize_name(asked.name))
        if one is None:
            continue  # an extra that the environment lacks: the installer chooses its version
        if asked.name != "gpuinfer":
            found[canonicalize_name(asked.name)] = one.version
        waiting += [
            requirement
            for text in one.requires or ()
            if (requirement := Requirement(text)) and _holds(requirement, asked.extras)
        ]
    return found


def _holds(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""})


def wheels(wheel: Path, like: dict[str, str], torch: str, work: Path) -> Path:
    """Fetch a wheel of everything; the folder with them.

    wheel: ours
    like: versions to take, as `installed` gives them
    torch: a requirement that goes before that, for another build: `torch==2.9.1+cu128`. Empty: none
    """
    constraints, folder = work / "constraints.txt", work / "wheels"
    kept = {name: version for name, version in like.items() if not (torch and _of_torch(name))}
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(kept.items())))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder)]
    command += ["--constraint", str(constraints), f"{wheel}[{','.join(EXTRAS)}]", *BESIDE]
    subprocess.run([*command, torch] if torch else command, check=True, env=clean())
    return folder


def install(program: Path, folder: Path) -> Path:
    """Install the wheels of a folder for this interpreter; where to."""
    command = [sys.executable, "-m", "pip", "--python", str(program), "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-warn-script-location", "--root-user-action=ignore"]
    subprocess.run([*command, *map(str, sorted(folder.glob("*.whl")))], check=True, env=clean())
    words = [program, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())
    for told in site.glob("*.dist-info/direct_url.json"):
        told.unlink()  # where the wheels lay
    return site


def _of_torch(name: str) -> bool:
    return name == "torch" or name == "triton" or name.startswith(("nvidia-", "cuda-"))


def clean() -> dict[str, str]:
    """This environment, without what is meant for another Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def prune(site: Path) -> None:
    for path in _left_out(site):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _left_out(site: Path) -> Iterator[Path]:
    for pattern in LEFT_OUT:
        yield from sorted(site.glob(pattern))


def compile_all(program: Path, *folders: Path) -> None:
    """Each module's code beside it, believed without a look at the source: nobody changes what lies here."""
    command = [program, "-m", "compileall", "-qq", "-j", "0", "--invalidation-mode", "unchecked-hash", *folders]
    subprocess.run(command, check=False, env=clean())  # templates and tests of other versions of Python do not compile
