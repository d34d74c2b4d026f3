"""Packages that travel to a machine without a network, as wheels.

    gpu_wheels.py pack FOLDER      download what gpu-packages.txt lists, for Python 3.12; say how large it is
    gpu_wheels.py unpack FOLDER SITE      there: put what the machine lacks, and nothing else, into a folder of packages

`pack` refuses when wheels and repository together are larger than LIMIT. `unpack` prefers what the machine has: torch,
numba, llvmlite and numpy fit one another there, and never travel. It needs no pip: a wheel is an archive.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LISTED = ROOT / "benchmarks" / "gpu-packages.txt"
LIMIT = 64 << 20  # bytes, of wheels and repository
PYTHON = "3.12"
SYSTEMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux_2_31_x86_64")
OWN = frozenset({"numba", "llvmlite", "numpy", "torch", "triton"})  # the machine's


def pack(folder: Path) -> int:
    """Download the wheels that are listed, in versions that fit one another."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"{folder} is not empty: two versions of a package would hinder one another.", file=sys.stderr)
        return 1
    systems = [word for system in (*SYSTEMS, "manylinux2014_x86_64") for word in ("--platform", system)]
    words = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", *systems]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *words, "-r", str(LISTED)]
    if code := subprocess.run(pip, check=False).returncode:
        return code
    listed = {plain(re.split(r"[<>=!~ ]", line)[0]) for line in LISTED.read_text().splitlines()}
    for file in folder.iterdir():
        if plain(file.name.partition("-")[0]) not in listed:  # what one of them depends on, and is there or not needed
            file.unlink()
    wheels = [file.stat().st_size for file in folder.iterdir()]
    return said(sum(wheels), tree(folder), len(wheels))


def said(wheels: int, repository: int, count: int) -> int:
    """Say how much travels; 1 when it is too much."""
    both = f"{count} wheels of {mib(wheels)} and a repository of {mib(repository)}, {mib(wheels + repository)} in all"
    if wheels + repository > LIMIT:
        print(f"too much: {both}, where {mib(LIMIT)} may travel. Shorten {LISTED.name}.", file=sys.stderr)
        return 1
    print(f"{both}, of the {mib(LIMIT)} that may travel.")
    return 0


def mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def tree(beside: Path) -> int:
    """Bytes of the repository's files that git does not ignore, without those in a folder."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, check=True).stdout.decode().split("\0")
    files = {ROOT / name for name in names if name}
    return sum(file.lstat().st_size for file in files if file.is_file() and not file.is_relative_to(beside.resolve()))


@dataclass(frozen=True)
class Wheel:
    file: Path
    name: str
    version: str
    needs: tuple[str, ...]  # as METADATA has them


def unpack(folder: Path, site: Path) -> int:
    """Install wheels for whose package this Python has no version that all who need it can do with."""
    sys.path += [str(file) for file in folder.glob("packaging-*.whl")]  # an archive that can be imported from
    wheels = {one.name: one for one in map(opened, sorted(folder.glob("*.whl")))}
    chosen = lacking(wheels, LISTED.read_text().splitlines(), installed())
    for one in chosen:
        with zipfile.ZipFile(one.file) as archive:
            archive.extractall(site)
        for part in ("purelib", "platlib"):  # of a wheel that says apart what is for either
            for inner in site.glob(f"{one.file.name.partition('-')[0]}-*.data/{part}/*"):
                inner.rename(site / inner.name)
    print(f"taken from {folder}: {', '.join(sorted(one.name for one in chosen)) or 'nothing'}", file=sys.stderr)
    return 0


def opened(file: Path) -> Wheel:
    with zipfile.ZipFile(file) as archive:
        (name,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        head = Parser().parsestr(archive.read(name).decode("utf-8", "replace"), headersonly=True)
    return Wheel(file, plain(head["Name"]), head["Version"], tuple(head.get_all("Requires-Dist") or ()))


def lacking(wheels: Mapping[str, Wheel], listed: Iterable[str], here: Mapping[str, str]) -> list[Wheel]:
    """The wheels of packages that are not here, or not in a version that the list and other wheels taken allow."""
    from packaging.requirements import Requirement

    pending: list[Any] = [Requirement(line) for line in listed if line and not line.startswith("#")]
    chosen: dict[str, Wheel] = {}
    while pending:
        one = pending.pop()
        name = plain(one.name)
        if name in OWN or name not in wheels or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        fits = name in here and one.specifier.contains(here[name], prereleases=True)
        if not fits and name not in chosen:
            chosen[name] = wheels[name]
            pending += map(Requirement, wheels[name].needs)
    return list(chosen.values())


def installed() -> dict[str, str]:
    """Versions of what this Python can import."""
    found = importlib.metadata.distributions()
    return {plain(one.metadata["Name"]): one.version for one in found if one.metadata["Name"]}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("site", type=Path, nargs="?")
    own = parser.parse_args(arguments)
    if own.what == "pack":
        return pack(own.folder)
    if own.site is None:
        parser.error("into which folder?")
    return unpack(own.folder, own.site)


if __name__ == "__main__":
    sys.exit(main())
