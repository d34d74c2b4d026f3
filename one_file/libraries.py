"""Shared libraries: what the files of a folder ask for and the C library does not bring is laid beside them.

Where a library is looked for stands in DT_RPATH, not DT_RUNPATH: an LD_LIBRARY_PATH of the user's, as CUDA and clusters
set it, must not put another libssl or libpython in place of ours.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from auditwheel.lddtree import ldd
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

GLIBC = re.compile(
    r"^(ld-linux.*|libc|libm|libdl|libpthread|librt|libutil|libresolv|libanl|libmvec|libnsl|libcrypt|libthread_db)\.so"
)
DRIVER = re.compile(r"^(libcuda|libnvidia-.*)\.so")
"""Of the machine: the C library, and what the NVIDIA driver brings."""


@dataclass(frozen=True)
class Elf:
    """One program or library. `glibc`: the newest version of the C library that it asks for."""

    path: Path
    needed: tuple[str, ...]
    glibc: tuple[int, int]
    loader: str


def scan(tree: Path) -> list[Elf]:
    return [elf for path in sorted(tree.rglob("*")) if (elf := read(path))]


def read(path: Path) -> Elf | None:
    if path.is_symlink() or not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return None
        file.seek(0)
        try:
            elf = ELFFile(file)
            dynamic = elf.get_section_by_name(".dynamic")
            if dynamic is None:
                return None
            needed = tuple(tag.needed for tag in dynamic.iter_tags("DT_NEEDED"))
            interpreter = elf.get_section_by_name(".interp")
            loader = interpreter.data().rstrip(b"\0").decode() if interpreter else ""
            return Elf(path, needed, max(_glibc(elf), default=(0, 0)), loader)
        except ELFError:
            return None


def _glibc(elf: ELFFile) -> Iterator[tuple[int, int]]:
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                for version in versions:
                    if found := re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", version.name):
                        yield int(found[1]), int(found[2])


def gather(tree: Path, program: Path) -> list[Path]:
    """Copy into `tree/lib` what is asked for and not there; where each came from.

    Raises `SystemExit` when what Python itself needs is nowhere to be found. Wheels ask for some libraries in vain, for
    networks and MPI: those of NVIDIA load them where they are.
    """
    elves = scan(tree)
    there = {elf.path.name for elf in elves}
    lacking = {name for elf in elves for name in elf.needed if not _of_machine(name)} - there
    sources = _sources([program, *(tree / "lib").rglob("lib-dynload/*.so")])
    brought: list[Path] = []
    while lacking:
        name = lacking.pop()
        source = sources.get(name) or _system(name)
        if source is None:
            asking = next(elf.path for elf in elves if name in elf.needed).relative_to(tree)
            if not {"site-packages", "dist-packages"} & set(asking.parts):
                raise SystemExit(f"{name}, which {asking} asks for, is not on this machine. Install it.")
            print(f"  {name} is left to the machine: {asking} can do without")  # or its wheel would bring it
            there.add(name)
            continue
        target = tree / "lib" / name
        shutil.copy2(source, target)
        target.chmod(0o644)
        subprocess.run(["strip", "--strip-unneeded", target], check=True)
        brought.append(source.resolve())
        there.add(name)
        elf = read(target)
        assert elf is not None
        elves.append(elf)
        lacking |= {name for name in elf.needed if not _of_machine(name)} - there
    _point(tree, program)
    return brought


def _of_machine(name: str) -> bool:
    return bool(GLIBC.match(name) or DRIVER.match(name))


def _sources(files: list[Path]) -> dict[str, Path]:
    """Where the loader of this machine finds what these files ask for."""
    found: dict[str, Path] = {}
    for file in files:
        for name, library in ldd(file).libraries.items():
            if library.realpath is not None:
                found[name] = Path(library.realpath)
    return found


def _system(name: str) -> Path | None:
    said = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    places = re.findall(rf"^\s+{re.escape(name)} \(libc6,[^)]*\) => (\S+)$", said, re.MULTILINE)
    return Path(places[0]) if places else None


def _point(tree: Path, program: Path) -> None:
    """Have the interpreter, its extensions and what was brought find one another wherever the folder lies.

    The interpreter loads the C++ library itself: wheels expect it of the system, and the first loaded serves all.
    """
    cpp = ["--add-needed", "libstdc++.so.6"] if (tree / "lib/libstdc++.so.6").exists() else []
    patch = ["patchelf", "--force-rpath"]
    subprocess.run([*patch, "--set-rpath", "$ORIGIN/../lib", *cpp, program], check=True)
    for file in [*(tree / "lib").glob("*.so*"), *(tree / "lib").rglob("lib-dynload/*.so")]:
        up = os.path.relpath(tree / "lib", file.parent)
        subprocess.run([*patch, "--set-rpath", "$ORIGIN" if up == "." else f"$ORIGIN/{up}", file], check=True)
