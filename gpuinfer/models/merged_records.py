"""The games of a folder of self-play, merged in the order of their numbers into shards that depend on the games alone.

`shard-000000001000.npz` holds the games from number 1000 on, up to the first with which it has `SHARD_BYTES`, and all
games before it are in such shards, too. So the folder of a run is the same, byte for byte, however many processes and
machines played it and in whatever order their shards came. A shard that is to be merged is set apart first, in
`.parts`, which readers do not see; its games are seen when a merged shard gets its name. Nothing that is killed leaves
a game twice: games in `.parts` that a merged shard has are not looked at any more.
"""

from __future__ import annotations

import contextlib
import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import WorkError
from gpuinfer.models.positions import PositionsFolder
from gpuinfer.models.record_shards import UNREADABLE, GameArrays, join_games, mapped_arrays

SHARD_BYTES = 32 << 20
NAME = re.compile(r"shard-(\d{12})\.npz")


class _Part:
    """A shard whose games are taken out in the order of their numbers. It is open only while games are read from it."""

    def __init__(self, path: Path, games: GameArrays, merged: bool) -> None:
        self.path, self.merged = path, merged
        self.places = np.argsort(games.numbers)  # int64 [games], as the next two, by number
        self.numbers, self.sizes = games.numbers[self.places], games.sizes()[self.places]
        self.rows = (games.ends - games.starts)[self.places]
        self._run_ends = np.append(np.flatnonzero(np.diff(self.numbers) != 1) + 1, len(self.numbers))
        self.at = 0  # so many games have been taken

    def run_end(self) -> int:
        """Up to where the next games have numbers that follow one another."""
        return int(self._run_ends[np.searchsorted(self._run_ends, self.at, "right")])


def _opened(path: Path, check: bool = True) -> GameArrays:
    try:
        return GameArrays(mapped_arrays(path, check=check))
    except UNREADABLE as error:
        raise WorkError(
            f"{path} cannot be read ({error}). Run again with --resume: its games are played again."
        ) from error


class MergedRecords:
    """Merges what is in `folder`, which is claimed, and what is added. Not for two threads at once.

    In memory are one shard, and the numbers and sizes of games that are not merged yet.
    """

    def __init__(self, folder: PositionsFolder, first: int = 0) -> None:
        """`first`: the lowest number that a game of the folder can have. Shards that are not merged are set apart: call
        `close` in the end. Raises `WorkError`.
        """
        self._folder = folder
        self._parts: list[tuple[int, int, _Part]] = []  # a heap, by each part's next game
        self._added = 0
        self._filling: list[tuple[_Part, int, int]] = []  # the games of the next shard: from and to where in a part
        self._bytes = 0
        self._begin = self._next = first  # the first of these games, and the one that follows them
        self._emptied: list[_Part] = []
        merged, others = _chain(folder.games_of_shards(), first)
        for shard in others:
            self.add(folder.set_apart(shard), check=False)
        if merged:
            begin, tail = merged[-1]
            self._begin = self._next = begin
            self._push(_Part(tail, _opened(tail, check=False), merged=True))

    def add(self, part: Path, check: bool = True) -> None:
        """Take up a shard that was set apart. `check`: compare it with its checksums. Raises `WorkError`."""
        self._push(_Part(part, _opened(part, check), merged=False))

    def merge(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Write the shards that can be filled by now, in order, until `stopped`. Raises `WorkError`."""
        while self._parts and self._parts[0][0] <= self._next and not stopped():
            number, _, part = heapq.heappop(self._parts)
            if number < self._next:  # an earlier run has merged it, and was killed before it removed the part
                part.at = int(np.searchsorted(part.numbers, self._next))
            else:
                self._take(part)
            self._push(part)
            if self._bytes >= SHARD_BYTES:
                self._write()

    def close(self) -> None:
        """Write what makes no full shard, and let readers see the games that come after a gap. Raises `WorkError`."""
        if self._filling:
            self._write()
        self._folder.bring_back(range(self._begin))

    def _push(self, part: _Part) -> None:
        if part.at == len(part.numbers):
            self._emptied.append(part)
        else:
            self._added += 1
            heapq.heappush(self._parts, (int(part.numbers[part.at]), self._added, part))

    def _take(self, part: _Part) -> None:
        """The games that come next, up to the one that fills the shard."""
        start, end = part.at, part.run_end()
        filled = self._bytes + np.cumsum(part.sizes[start:end])
        part.at = min(end, start + int(np.searchsorted(filled, SHARD_BYTES)) + 1)
        self._bytes = int(filled[part.at - start - 1])
        self._next += part.at - start
        self._filling.append((part, start, part.at))

    def _write(self) -> None:
        name = f"shard-{self._begin:012}.npz"
        part, start, end = self._filling[0]
        if not (part.merged and part.path.name == name and end - start == self._next - self._begin):
            self._folder.write_as(name, self._read())
        for part in self._emptied:  # all of its games are in merged shards now
            if not part.merged:
                with contextlib.suppress(OSError):  # another time
                    part.path.unlink()
        self._begin, self._filling, self._bytes, self._emptied = self._next, [], 0, []

    def _read(self) -> dict[str, NDArray[Any]]:
        """The games of the next shard: each part is opened once, one at a time."""
        runs: dict[_Part, list[tuple[int, int, int]]] = {}  # with the place of the first game in the new shard
        rows, target = list[NDArray[np.int64]](), 0
        for part, start, end in self._filling:
            runs.setdefault(part, []).append((start, end, target))
            rows.append(part.rows[start:end])
            target += end - start

        def opened() -> Iterator[tuple[GameArrays, NDArray[np.int64], NDArray[np.int64]]]:
            for part, of_part in runs.items():
                places = np.concatenate([part.places[start:end] for start, end, _ in of_part])
                targets = np.concatenate([np.arange(target, target + end - start) for start, end, target in of_part])
                yield _opened(part.path, check=False), places, targets

        try:
            return join_games(opened(), np.concatenate(rows))
        except (KeyError, ValueError) as error:
            raise WorkError(
                f"{self._folder.path} holds records of different games ({error}). Give another folder with --out."
            ) from error


def merge_folder(folder: PositionsFolder, stopped: Callable[[], bool]) -> None:
    """Merge all games of a folder that is claimed, until `stopped`. Raises `WorkError`: readers see all games all the
    same.
    """
    try:
        merged = MergedRecords(folder)
        merged.merge(stopped)
        merged.close()
    except WorkError:
        folder.bring_back(folder.finished())
        raise


def _chain(shards: Mapping[Path, Sequence[int]], first: int) -> tuple[list[tuple[int, Path]], list[Path]]:
    """Merged shards, with the first game of each, as far as they follow one another without a gap; and all others."""
    chain: list[tuple[int, Path]] = []
    at = first
    named = {int(found[1]): path for path in shards if (found := NAME.fullmatch(path.name))}
    for begin, path in sorted(named.items()):
        if begin != at or list(shards[path]) != list(range(begin, begin + len(shards[path]))):
            break
        chain.append((begin, path))
        at += len(shards[path])
    followed = {path for _, path in chain}
    return chain, [path for path in shards if path not in followed]
