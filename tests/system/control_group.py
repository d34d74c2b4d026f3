"""Processes that are held to a share of the cores and that end together, as those of one machine do.

A control group of Linux (version 1 or 2), which root may make where `/sys/fs/cgroup` can be written. What a member
starts is a member, whatever session it opens: the jobs of a `slurmd`, the workers of a raylet.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
END_S = 30.0


class ControlGroup:
    """A control group with a quota of `cores`; None: as many as there are. Raises `OSError` where none can be made."""

    def __init__(self, name: str, cores: float | None = None) -> None:
        self.cores = cores
        self._version_2 = (ROOT / "cgroup.controllers").exists()
        parent = ROOT if self._version_2 else ROOT / "cpu"
        self._folder = parent / f"gpuinfer-{name}-{secrets.token_hex(4)}"
        if self._version_2 and cores is not None:
            (ROOT / "cgroup.subtree_control").write_text("+cpu")
        elif not parent.exists():
            raise OSError(f"{parent} is not mounted")
        self._folder.mkdir()
        if cores is not None:
            quota = round(cores * PERIOD_US)
            if self._version_2:
                (self._folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self._folder / "cpu.cfs_quota_us").write_text(str(quota))

    def start(self, *command: str, **more: object) -> subprocess.Popen[bytes]:
        """A member, in a session of its own. `more`: as `subprocess.Popen` has it."""
        words = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs"), *command]
        return subprocess.Popen(words, start_new_session=True, **more)  # type: ignore[call-overload]

    def pids(self) -> list[int]:
        return [int(line) for line in (self._folder / "cgroup.procs").read_text().split()]

    def signal(self, number: int, pids: Sequence[int] | None = None) -> None:
        for pid in self.pids() if pids is None else pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """All members, and what they start meanwhile."""
        until = time.monotonic() + END_S
        while any(not _is_zombie(pid) for pid in self.pids()):
            if time.monotonic() > until:
                raise AssertionError(f"processes {self.pids()} do not end")
            self.signal(signal.SIGKILL)
            time.sleep(0.01)

    def close(self) -> None:
        self.kill()
        until = time.monotonic() + END_S
        while True:
            try:
                return self._folder.rmdir()
            except OSError:  # busy: members whose parents have not noticed their end
                if time.monotonic() > until:
                    return None
                time.sleep(0.05)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@contextlib.contextmanager
def control_groups(names: Sequence[str], cores: float | None = None) -> Iterator[dict[str, ControlGroup]]:
    """One for each name, closed at the end."""
    made: dict[str, ControlGroup] = {}
    try:
        for name in names:
            made[name] = ControlGroup(name, cores)
        yield made
    finally:
        for group in made.values():
            group.close()
