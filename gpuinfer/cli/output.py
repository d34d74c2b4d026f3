"""Where the JSON report goes: a file that is either whole or not there, or standard output."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import spoken, standard_files


class Destination:
    """Checked when it is made, before any work is done. Raises `UsageError` for a place that cannot be written."""

    def __init__(self, target: str | None) -> None:
        self.stdout = target == "-"
        if self.stdout and "stdout" in standard_files.closed:
            raise UsageError("--json -: standard output is closed. Give a file, such as --json report.json.")
        self.path = Path(target) if target and target != "-" else None
        if self.path is not None:
            _check(self.path)

    def keep(self, report: Mapping[str, Any]) -> None:
        """Write a report whose place another will take: only in a file, since a stream takes one."""
        if self.path is not None and not (self.path.exists() and not self.path.is_file()):
            self.write(report)

    def write(self, report: Mapping[str, Any]) -> None:
        """Write the report; nothing happens when nobody asked for one. Raises `WorkError` when there is no room."""
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


def _encodable(report: Mapping[str, Any], encoding: str) -> str:
    """The report as JSON; where the encoding lacks one of its characters, with escapes, which mean the same."""
    text = json.dumps(report, indent=2, ensure_ascii=False, default=spoken.said)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(report, indent=2, default=spoken.said)
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


def _check(path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"--json {path}: this is a folder. Give a file, such as {path / 'report.json'}.")
    if not path.parent.is_dir():
        raise UsageError(f"--json {path}: there is no folder {path.parent}. Create it (mkdir -p {path.parent}).")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--json {path}: {path.parent} cannot be written to. Give a file in a folder of yours.")
