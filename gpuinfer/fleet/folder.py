"""A fleet's private folder: its key, the replicas' setup and ready files, the control socket; logs, unless they go
elsewhere.

0700: whoever can write there could take a replica's place, and whoever can read there could ask one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

from gpuinfer.errors import UsageError

SOCKET_PATH = 100  # characters; the system allows 107


class Folder:
    """Made at once. `shared`: where it must lie for other hosts to see it. `logs`: a folder of the user's for logs."""

    def __init__(self, shared: Path | None = None, logs: Path | None = None) -> None:
        try:
            if shared is not None:
                shared.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix="gpuinfer-fleet-", dir=shared))  # 0700
            if logs is not None:
                logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{error.filename} cannot be written: {error.strerror}. Name another with --log-dir."
            ) from None
        self.logs = logs or self.path
        self.key = secrets.token_urlsafe(32)
        self.key_file = self.write("replica.key", f"{self.key}\n".encode())
        self.admin_key = secrets.token_urlsafe(32)  # the supervisor's alone: the router never has it
        self.admin_key_file = self.write("admin.key", f"{self.admin_key}\n".encode())
        self._near: Path | None = None

    def write(self, name: str, contents: bytes) -> Path:
        """A file that its owner alone can read."""
        path = self.path / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(contents)
        return path

    def socket(self) -> Path:
        """Where the control socket lies: on this machine, and with a path as short as sockets want."""
        path = self.path / "control.sock"
        if len(str(path)) < SOCKET_PATH and self.path.parent == Path(tempfile.gettempdir()):
            return path
        self._near = Path(tempfile.mkdtemp(prefix="gpuinfer-", dir="/tmp"))
        return self._near / "control.sock"

    def remove(self, keep_logs: bool) -> bool:
        """All of it, or all but logs that lie in it. Whether there are any that were kept."""
        if self._near is not None:
            shutil.rmtree(self._near, ignore_errors=True)
        for one in self.path.iterdir():
            if not (keep_logs and one.suffix == ".log" and one.stat().st_size):
                one.unlink(missing_ok=True)
        kept = any(self.path.iterdir())
        if not kept:
            self.path.rmdir()
        return kept
