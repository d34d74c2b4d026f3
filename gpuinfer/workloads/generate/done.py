"""What an output of an earlier run holds: which rows are done, and what of it cannot stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from msgspec import Raw, Struct
from numpy.typing import NDArray

from gpuinfer.host.files import put_whole
from gpuinfer.workloads.generate.lines import BATCH_ANSWER
from gpuinfer.workloads.generate.seen import KEY_BYTES, Seen

BLOCK = 1024


class _DoneLine(Struct):
    id: str | int = ""
    digest: str = ""
    error: Raw = Raw(b"null")


_decode = msgspec.json.Decoder(_DoneLine).decode


def key_of(digest: str) -> bytes:
    """A row's digest as `Seen` keeps it. Raises `ValueError` for what is none."""
    key = bytes.fromhex(digest)
    if len(key) != KEY_BYTES:
        raise ValueError(f"{digest} is no digest")
    return key


def read(line: bytes) -> tuple[bytes, bool] | None:
    """The key of a line's row, and whether the line is an error; None for what no run of ours has written."""
    try:
        found = _decode(line)
        key = key_of(found.digest or str(found.id).removeprefix(BATCH_ANSWER))
    except (ValueError, RecursionError):
        return None
    return (key, bytes(found.error) != b"null") if line.endswith(b"\n") else None


class Done:
    """The rows of an output, by one look at all its lines. `retry`: rows with errors count as not done."""

    def __init__(self, file: IO[bytes], retry: bool) -> None:
        self.rows = Seen()
        self.dropped = 0  # lines that cannot stay: unreadable ones, and errors to be tried again
        self.unreadable = 0  # of them, those that no run has written so
        self.whole_bytes = 0  # up to the end of the last whole line
        self._retry = retry
        block: list[bytes] = []
        for line in file:
            if not line.endswith(b"\n"):
                break  # torn: it is cut off
            self.whole_bytes += len(line)
            if (key := self.keeps(line)) is not None:
                block.append(key)
            if len(block) >= BLOCK:
                self.rows.count(block)
                block = []
        self.rows.count(block)

    def keeps(self, line: bytes) -> bytes | None:
        """The key of a line that stays; None for one that does not, which is counted."""
        found = read(line)
        if found is not None and not (found[1] and self._retry):
            return found[0]
        self.dropped += 1
        self.unreadable += found is None
        return None


def rewrite(path: Path, keeps: Callable[[bytes], object]) -> None:
    """Leave out all lines but those that `keeps` has a key for. A crash leaves the old file or the new one."""
    with path.open("rb") as old:
        put_whole(path, lambda new: new.writelines(line for line in old if keeps(line) is not None))


class Earlier:
    """Answers of an output that was out of order or had errors, to be taken over when their rows come by.

    Keeps 17 bytes a line in memory. The errors among them are not taken over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        keys, offsets, position = [], [], 0
        for line in self._file:
            found = read(line)
            if found is not None and not found[1]:
                keys.append(found[0][:8])
                offsets.append(position)
            position += len(line)
        highs = np.frombuffer(b"".join(keys), np.uint64)
        order = highs.argsort(kind="stable")
        self._keys: NDArray[np.uint64] = highs[order]
        self._offsets: NDArray[np.int64] = np.array(offsets, np.int64)[order]
        self._taken = np.zeros(len(order), bool)

    def take(self, digest: str) -> bytes | None:
        """The line of the row of this digest, which has not been taken before."""
        key = key_of(digest)
        word = np.frombuffer(key[:8], np.uint64)
        left, right = int(self._keys.searchsorted(word, "left")[0]), int(self._keys.searchsorted(word, "right")[0])
        for index in range(left, right):
            line = self._line(index)
            found = read(line)
            if found is not None and found[0] == key and not self._taken[index]:
                self._taken[index] = True
                return line
        return None

    def rest(self) -> Iterator[bytes]:
        """Lines of rows that the input has no more, in their old order."""
        left = np.flatnonzero(~self._taken)
        for index in left[self._offsets[left].argsort(kind="stable")]:
            yield self._line(int(index))

    def _line(self, index: int) -> bytes:
        self._file.seek(int(self._offsets[index]))
        return self._file.readline()

    def close(self) -> None:
        self._file.close()
