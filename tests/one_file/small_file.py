"""A one file around a folder of the test's: the same front as the real one's, and little behind it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TOOLS = ROOT / "build/one-file/tools/bin/python"
LOADER = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}[platform.machine()]
PROGRAM = "bin/program"
LIMIT_S = 120.0

PACKING = """
import sys
from pathlib import Path
sys.path.insert(0, "one_file")
import pack
folder, stub, target, loader, major, minor = sys.argv[1:]
about = pack.About("1", "bin/program", loader, (int(major), int(minor)))
print(pack.pack(Path(folder), Path(stub), Path(target), about, 1))
"""


def stub(folder: Path) -> Path:
    """Compile the front."""
    made = folder / "stub"
    code = f"import sys; sys.path.insert(0, 'one_file'); import pack; pack.compile_stub({str(made)!r})"
    subprocess.run([TOOLS, "-c", code], cwd=ROOT, check=True, timeout=LIMIT_S)
    return made


def tree(folder: Path, script: str, noise: int = 0) -> Path:
    """A folder whose interpreter is a script, with so many bytes beside it that nothing makes smaller."""
    (folder / "bin").mkdir(parents=True)
    program = folder / PROGRAM
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    (folder / "empty").mkdir()
    (folder / "link").symlink_to(PROGRAM)
    (folder / ("long/" + "d" * 90)).mkdir(parents=True)
    (folder / ("long/" + "d" * 90) / ("f" * 90)).write_text("far down")
    (folder / "nothing").touch()
    if noise:
        (folder / "noise").write_bytes(os.urandom(noise))
    return folder


def packed(
    folder: Path, front: Path, target: Path, *, loader: str = LOADER, glibc: tuple[int, int] = (2, 2)
) -> tuple[Path, str]:
    """The file, and the name of what it unpacks to."""
    words = [TOOLS, "-c", PACKING, folder, front, target, loader, str(glibc[0]), str(glibc[1])]
    said = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    return target, said.stdout.strip()


def run(file: Path, home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([file, *words], env=told(home, environment), capture_output=True, text=True, timeout=LIMIT_S)


def begin(file: Path, home: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([file, *words], env=told(home, environment), stdout=pipe, stderr=pipe, text=True)


def told(home: Path, more: dict[str, str]) -> dict[str, str]:
    """No more than this: no PATH, no language, no terminal."""
    return {"HOME": str(home), "PATH": "/nonexistent", **more}


def kept(home: Path) -> Path:
    return home / ".cache/gpuinfer/one-file"


def names(home: Path) -> Sequence[str]:
    return sorted(path.name for path in kept(home).iterdir())
