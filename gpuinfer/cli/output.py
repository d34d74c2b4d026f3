"""Where the JSON report goes: a file that is either whole or not there, or standard output. It takes the place of no
file that the same command names for something else.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gpuinfer.errors import GpuinferError, UsageError, WorkError
from gpuinfer.host import error_text, process
from gpuinfer.host.files import MANIFEST, no_folder

BESIDE_OUTPUT = (".run.json", ".early", ".before", ".journal")  # what a run keeps beside the file that it writes
REPLACED = re.compile(rb'\{\s*"(schema": "gpuinfer\.(report|loop|trace)/|host": )')
"""How reports, traces and ready files begin: those that an earlier run has left in its folder are replaced."""

log = logging.getLogger(__name__)

Named = tuple[str, str | Path]  # a flag, and the file or folder that it names


class Destination:
    """Checked when it is made, before any work is done. Raises `UsageError` for a place that cannot be written."""

    def __init__(self, target: str | None) -> None:
        self.stdout = target == "-"
        if self.stdout and "stdout" in process.closed:
            raise UsageError("--json -: standard output is closed. Give a file, such as --json report.json.")
        self.path = Path(target) if target and target != "-" else None
        if self.path is not None:
            if self.path.is_dir():
                raise UsageError(
                    f"--json {self.path}: this is a folder. Give a file, such as {self.path / 'report.json'}."
                )
            if not self.path.parent.is_dir():
                raise no_folder("--json", self.path)
            if not os.access(self.path.parent, os.W_OK):
                raise UsageError(
                    f"--json {self.path}: {self.path.parent} cannot be written to. Give a file in a folder of yours."
                )

    def keep(self, report: Mapping[str, Any]) -> None:
        """Write a report whose place another will take: only in a file, since a stream takes one."""
        if self.path is not None and not (self.path.exists() and not self.path.is_file()):
            self.write(report)

    def write(self, report: Mapping[str, Any]) -> None:
        """Write the report; without a target do nothing. Raises `WorkError` when there is no room."""
        text = _encodable(report, sys.stdout.encoding if self.stdout else "utf-8") + "\n"
        try:
            if self.stdout:
                sys.stdout.write(text)
                sys.stdout.flush()
            elif self.path is not None and self.path.exists() and not self.path.is_file():  # a pipe, a device
                self.path.write_text(text, encoding="utf-8")
            elif self.path is not None:
                replace_file(self.path.resolve(), text)  # of a link, what it leads to
        except BrokenPipeError:
            raise
        except OSError as error:
            place = self.path or "standard output"
            cure = "Make room there, or give --json another place."
            raise WorkError(f"the report could not be written to {place}: {error.strerror}. {cure}") from error

    def write_failed(self, report: Mapping[str, Any], error: BaseException) -> None:
        """Write the report of work that has failed with `error`, which its caller raises. A report that cannot be
        written either takes no error's place: it is said behind it.
        """
        try:
            self.write(report)
        except WorkError as second:
            if isinstance(error, GpuinferError):
                error.args = (f"{error}\n{second}",)
            else:
                log.error("%s", second)


def _encodable(report: Mapping[str, Any], encoding: str) -> str:
    """The report as JSON; where the encoding lacks one of its characters, with escapes, which mean the same."""
    text = json.dumps(report, indent=2, ensure_ascii=False, default=error_text.safe_str)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(report, indent=2, default=error_text.safe_str)
    return text


def replace_file(path: Path, text: str) -> None:
    """Put `text` in `path` at once: a reader, or a crash, sees the old file or the new one, never half of either."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def refuse_shared(written: Mapping[str, str | Path | None], named: Iterable[Named]) -> None:
    """Raises `UsageError` where a file that a command writes is one that it names for something else, by whatever name
    or link: the one would be written over the other. `written`: flag → file. Touches nothing.
    """
    targets = [(flag, Path(place)) for flag, place in written.items() if place is not None and str(place) != "-"]
    others = [(flag, Path(place)) for flag, place in named]
    for number, (flag, target) in enumerate(targets, 1):
        if target.exists() and not target.is_file():  # a pipe or a device takes whatever comes
            continue
        for other, place in (*targets[number:], *others):
            if _is_same(target, place):
                raise UsageError(f"{flag} and {other} are the same file, {target}. Give each a file of its own.")
            if _holds(place, target):
                raise UsageError(f"{flag} {target} is a file of {other} {place}. Give {flag} a file of its own.")


def named_places(options: Any, prefix: str = "--", written: Collection[str] = ()) -> Iterator[Named]:
    """The flag and the place, for whatever in these options may be a file or a folder. `written`: the options that name
    what is written, which need not exist yet.
    """
    for name in type(options).model_fields if isinstance(options, BaseModel) else ():
        flag = f"{prefix}{name.replace('_', '-')}" if prefix == "--" else f"{prefix}{name}"
        value = getattr(options, name)
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str | Path):
                continue
            if str(text) == "-":
                yield flag, "/dev/stdout" if name in written else "/dev/stdin"
            elif name in written:
                yield flag, text
                yield from ((flag, f"{text}{suffix}") for suffix in BESIDE_OUTPUT)
                yield flag, Path(text) / MANIFEST
            else:  # such as name=FILE, or several
                parts = {str(text), *re.split("[,=]", str(text))}
                yield from ((flag, part) for part in sorted(parts) if part and os.path.exists(part))


def _is_same(target: Path, place: Path) -> bool:
    if target.exists() and place.exists():
        return target.samefile(place)
    return os.path.realpath(target) == os.path.realpath(place)


def _holds(folder: Path, target: Path) -> bool:
    """Whether there is such a file in the folder, and it is not one that an earlier run has left for this purpose."""
    if not folder.is_dir() or not target.is_file() or not target.stat().st_size:
        return False
    within = target.resolve().is_relative_to(folder.resolve())
    if not within and target.stat().st_nlink > 1:
        within = any(one.is_file() and one.samefile(target) for one in folder.iterdir())
    return within and REPLACED.match(_beginning(target)) is None


def _beginning(path: Path) -> bytes:
    try:
        with gzip.open(path) as packed:
            return packed.read(64)
    except (OSError, EOFError, zlib.error):
        with path.open("rb") as file:
            return file.read(64)
