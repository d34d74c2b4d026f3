"""A folder becomes one file: the stub, the folder as a compressed archive, and where that begins."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

HERE = Path(__file__).parent
TRAILER = struct.Struct("<16s96s64s64sQQQII")
"""As `stub.c` has it: magic, name, interpreter, loader, offset, size, bytes on the disk, version of glibc."""
MAGIC = b"gpuinfer.onefile"
TIME = 1577836800  # of every file: the same content has the same digest. 2020, after what zip files can say
ON_DISK = 4096  # a file takes whole blocks


@dataclass(frozen=True)
class About:
    """What the stub must know of the folder. `version`: of gpuinfer; the digest is added to it."""

    version: str
    program: str
    loader: str
    glibc: tuple[int, int]


def compile_stub(target: Path) -> None:
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-s"]
    subprocess.run(["cc", *flags, "-o", target, HERE / "stub.c", "-lzstd"], check=True)


def linked() -> list[Path]:
    """What the stub holds of the system's: static libraries."""
    words = ["cc", "-print-file-name=libzstd.a", "-print-file-name=libc.a"]
    found = [
        subprocess.run([words[0], word], capture_output=True, text=True, check=True).stdout.strip()
        for word in words[1:]
    ]
    return [Path(place).resolve() for place in found]


def pack(tree: Path, stub: Path, target: Path, about: About, level: int) -> str:
    """Write the one file; the name of the folder that it unpacks to.

    level: of zstd, 1 to 22. Above 9 a window of 128 MiB finds what is the same in files far apart
    """
    part = target.with_name(f"{target.name}.part")
    with part.open("wb") as out:
        out.write(stub.read_bytes())
        out.write(bytes(-out.tell() % ON_DISK))
        offset = out.tell()
        counted = _Digest(out)
        options = zstandard.ZstdCompressionParameters.from_level(
            level,
            threads=os.cpu_count() or 1,
            write_checksum=1,
            **({"enable_ldm": True, "window_log": 27} if level > 9 else {}),
        )
        compressor = zstandard.ZstdCompressor(compression_params=options)
        with compressor.stream_writer(counted, closefd=False) as stream:
            needed = _archive(tree, stream)
        name = f"{about.version}-{counted.digest.hexdigest()[:16]}"
        words = [word.encode() for word in (name, about.program, about.loader)]
        out.write(TRAILER.pack(MAGIC, *words, offset, out.tell() - offset, needed, *about.glibc))
    part.chmod(0o755)
    part.rename(target)
    return name


def _archive(tree: Path, out: BinaryIO) -> int:
    needed = 0
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.USTAR_FORMAT, bufsize=1 << 20) as archive:
        for path in _in_order(tree):
            archive.inodes.clear()  # type: ignore[attr-defined] # no hard links: the stub knows none
            entry = archive.gettarinfo(str(path), str(path.relative_to(tree)))
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = TIME, 0, 0, "", ""
            entry.mode = 0o755 if path.is_dir() or (os.access(path, os.X_OK) and entry.mode & 0o100) else 0o644
            needed += -(-entry.size // ON_DISK) * ON_DISK + ON_DISK
            if entry.isreg():
                with path.open("rb") as file:
                    archive.addfile(entry, file)
            else:
                archive.addfile(entry)
    return needed


def _in_order(tree: Path) -> Iterator[Path]:
    """Folders before what is in them, always in the same order."""
    for path in sorted(tree.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _in_order(path)


class _Digest(io.RawIOBase):
    """Hands bytes on, and knows the digest of all of them."""

    def __init__(self, out: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:  # type: ignore[override]
        self.digest.update(data)
        return self._out.write(data)
