"""A fleet's private folder: its key, the replicas' setup and ready files, the control socket; logs, unless they go
elsewhere.

0700: whoever can write there could take a replica's place, and whoever can read there could ask one. A supervisor that
is killed (`kill -9`) cannot remove it. Each holds a lock on a file in its folder, which ends with it, and the next one
beside it removes what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpuinfer.errors import UsageError

SOCKET_PATH = 100  # characters; the system allows 107
PREFIX, LOCK = "gpuinfer-fleet-", "lock"


class PrivateFolder:
    """A folder of this process's own in `parent`."""

    def __init__(self, parent: str | Path) -> None:
        for left in Path(parent).glob(f"{PREFIX}*"):  # those of this user and host whose lock nobody holds
            with contextlib.suppress(OSError):  # it is held, it is another's, or another process removes it now
                if left.is_symlink() or left.stat().st_uid != os.getuid():
                    continue
                with os.fdopen(os.open(left / LOCK, os.O_RDONLY | os.O_NOFOLLOW)) as lock:
                    if lock.read() == socket.gethostname():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        _empty(left, keep_logs=True)  # which may say what happened
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))  # 0700
        self._needed = [self.path]
        self._lock = os.fdopen(os.open(self.path / f"{LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "w")
        with contextlib.suppress(OSError):  # a file system without locks: nobody else removes it
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._lock.write(socket.gethostname())
            self._lock.flush()
            (self.path / f"{LOCK}.new").rename(self.path / LOCK)  # never there without being held

    def write(self, name: str, contents: bytes) -> Path:
        """A file that its owner alone can read."""
        path = self.path / name
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(contents)
        self._needed.append(path)
        return path

    def touch(self) -> bool:
        """Make all of it look new to what removes old files from /tmp. Whether what a fleet needs is still there."""
        with contextlib.suppress(OSError):  # the folder is gone, or a file that went meanwhile
            for one in self.path.iterdir():
                os.utime(one, follow_symlinks=False)
            os.utime(self.path)
        return all(one.exists() for one in self._needed)

    def remove(self, keep_logs: bool = False) -> bool:
        """All of it, or all but logs that lie in it. Whether there are any that were kept."""
        with self._lock:
            return self.path.exists() and _empty(self.path, keep_logs)


class FleetFolder(PrivateFolder):
    """Made at once. `shared`: where it must lie for other hosts to see it. `logs`: a folder of the user's for logs.
    `keys`: lines of a key file; replicas accept these as well as the router's key.
    """

    def __init__(self, shared: Path | None = None, logs: Path | None = None, keys: Sequence[str] = ()) -> None:
        try:
            for one in (shared, logs):
                if one is not None:
                    one.mkdir(mode=0o700, parents=True, exist_ok=True)
            super().__init__(shared or tempfile.gettempdir())
        except OSError as error:
            raise UsageError(
                f"{error.filename} cannot be written: {error.strerror}. Name another with --log-dir."
            ) from None
        self.logs = logs or self.path
        self.key = secrets.token_urlsafe(32)
        self.key_file = self.write("replica.key", "".join(f"{line}\n" for line in (self.key, *keys)).encode())
        self.admin_key = secrets.token_urlsafe(32)  # the supervisor's alone: the router never has it
        self.admin_key_file = self.write("admin.key", f"{self.admin_key}\n".encode())
        self._near: PrivateFolder | None = None

    def socket(self) -> Path:
        """Where the control socket lies: on this machine, and with a path as short as sockets want."""
        path = self.path / "control.sock"
        if len(str(path)) < SOCKET_PATH and self.path.parent == Path(tempfile.gettempdir()):
            self._needed.append(path)
            return path
        self._near = PrivateFolder("/tmp")
        self._near._needed.append(path := self._near.path / "control.sock")
        return path

    def touch(self) -> bool:
        near = self._near is None or self._near.touch()
        return super().touch() and near

    def remove(self, keep_logs: bool = False) -> bool:
        if self._near is not None:
            self._near.remove()
        return super().remove(keep_logs)


def _empty(path: Path, keep_logs: bool) -> bool:
    for one in path.iterdir():
        if not (keep_logs and one.suffix == ".log" and one.stat().st_size):
            one.unlink(missing_ok=True)
    kept = any(path.iterdir())
    if not kept:
        path.rmdir()
    return kept
