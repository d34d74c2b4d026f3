"""What an output was made with, in a file beside it; whoever writes to the output holds a lock on that file."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError

SCHEMA = "gpuinfer.generate/1"
NOTE = ".run.json"

log = logging.getLogger(__name__)


class Note:
    """The note of the output at `path`, locked. Raises `UsageError` when another run has it."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + NOTE)
        self._descriptor = _locked(self.path, output)

    def settings(self) -> Mapping[str, Any] | None:
        """Those of the run that began this output; None when nothing legible says them."""
        try:
            note: Any = json.loads(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
            return dict(note["settings"]) if note["schema"] == SCHEMA else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, settings: Mapping[str, Any]) -> None:
        text = json.dumps({"schema": SCHEMA, "settings": settings}, indent=2, ensure_ascii=False) + "\n"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)
        os.fsync(self._descriptor)

    def close(self, remove: bool = False) -> None:
        """Let others have it. A note that says nothing goes."""
        if remove or not os.fstat(self._descriptor).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _locked(note: Path, output: Path) -> int:
    while True:
        lock = os.open(note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            why = f"{output} is being written by another run. Wait for it, or give another --output."
            raise UsageError(why) from None
        except OSError as error:
            log.info("%s: no locks on this file system (%s)", note, error)
        if _is(lock, note):
            return lock
        os.close(lock)  # whoever had it has removed it meanwhile


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """For people; "" when there are none."""
    different = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    return "; ".join(f"{name}: {_short(found.get(name))} there, {_short(wanted.get(name))} here" for name in different)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"
