"""Answers that wait for an earlier one, on the disk beside an ordered output: nothing that is finished is ever lost.

Lines are added to `out.jsonl.early` as they come and are of no use once they stand in the output, so the file is
written anew now and then with those that still wait: it stays a few times as large as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpuinfer.workloads.generate.done import key_of, read, sync_folder
from gpuinfer.workloads.generate.seen import Seen

FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class Aside:
    """What waits. `left` are lines of an earlier run, to be taken when their rows come by; they are held in memory.

    `append`, `anew` and `sync` belong to the thread that writes. There is no file before there is a line.
    """

    def __init__(self, path: Path, left: Iterable[bytes] = ()) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._left = {found[0]: line for line in left if (found := read(line)) is not None}
        if self._left or path.exists():
            self.anew(self._left.values())

    @property
    def left(self) -> Iterator[bytes]:
        """Lines that nobody has taken."""
        yield from self._left.values()

    def take(self, digest: str) -> bytes | None:
        """The line of the row of this digest."""
        return self._left.pop(key_of(digest), None) if self._left else None

    def append(self, data: bytes) -> None:
        """Raises `OSError`."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, FLAGS, 0o666)
            sync_folder(self.path.parent)
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def anew(self, lines: Iterable[bytes]) -> None:
        """Only these still wait. A crash leaves the old file or the new one. Raises `OSError`."""
        new = self.path.with_name(f"{self.path.name}.new")
        descriptor = os.open(new, FLAGS | os.O_TRUNC, 0o666)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.writelines(lines)
            os.fsync(descriptor)
            new.replace(self.path)
            sync_folder(self.path.parent)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        self.close()
        self._descriptor = descriptor

    def sync(self) -> None:
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Nothing waits any more."""
        self.close()
        self.path.unlink(missing_ok=True)


def waiting(path: Path, done: Seen, retry: bool) -> list[bytes]:
    """The lines of an earlier run's file that are whole and of rows not done; with `retry` no errors among them."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        found = [(line, one) for line in file if (one := read(line)) is not None and not (retry and one[1])]
    known = done.has([key for _, (key, _) in found]) if found else []
    return [line for (line, _), was_done in zip(found, known, strict=True) if not was_done]
