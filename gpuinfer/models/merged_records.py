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
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import WorkError
from gpuinfer.models.positions import PositionsFolder
from gpuinfer.models.record_shards import UNREADABLE, GameArrays, GameRecord, gathered, mapped_arrays

SHARD_BYTES = 32 << 20
NAME = re.compile(r"shard-(\d{12})\.npz")


class _Part:
    """A shard whose games are taken out in the order of their numbers. It is open only while games are read from it."""

    def __init__(self, path: Path, games: GameArrays, merged: bool) -> None:
        self.path, self.merged = path, merged
        self._order = np.argsort(games.numbers)
        self._numbers, self._sizes = games.numbers[self._order], games.sizes()[self._order]
        self._at = 0

    def take(self) -> tuple[int, int]:
        """The next game's place in the shard, and its bytes."""
        self._at += 1
        return int(self._order[self._at - 1]), int(self._sizes[self._at - 1])

    def __len__(self) -> int:
        """Its games."""
        return len(self._numbers)

    @property
    def number(self) -> int | None:
        """Of the next game; None when all have been taken."""
        return int(self._numbers[self._at]) if self._at < len(self._numbers) else None

    def read(self, places: Sequence[int]) -> GameArrays:
        """Copies of these games, in this order. Raises `WorkError`."""
        whole = _opened(self.path, check=False)
        return GameArrays(gathered([GameRecord(whole, place) for place in places]))


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

    def __init__(self, folder: PositionsFolder) -> None:
        """Shards that are not merged are set apart: call `close` in the end. Raises `WorkError`."""
        self._folder = folder
        self._parts: list[tuple[int, int, _Part]] = []  # a heap, by each part's next game
        self._added = 0
        self._filling: list[tuple[_Part, int]] = []  # parts and places of the games of the next shard
        self._bytes = 0
        self._begin = self._next = 0  # the first of these games, and the one that follows them
        self._emptied: list[_Part] = []
        merged, others = _chain(folder.games_of_shards())
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
            place, size = part.take()
            self._push(part)
            if number == self._next:  # else an earlier run has merged it, and was killed before it removed the part
                self._filling.append((part, place))
                self._bytes += size
                self._next += 1
                if self._bytes >= SHARD_BYTES:
                    self._write()

    def close(self) -> None:
        """Write what makes no full shard, and let readers see the games that come after a gap. Raises `WorkError`."""
        if self._filling:
            self._write()
        self._folder.bring_back(range(self._begin))

    def _push(self, part: _Part) -> None:
        if (number := part.number) is None:
            self._emptied.append(part)
        else:
            self._added += 1
            heapq.heappush(self._parts, (number, self._added, part))

    def _write(self) -> None:
        places: dict[_Part, list[int]] = {}
        for part, place in self._filling:
            places.setdefault(part, []).append(place)
        name = f"shard-{self._begin:012}.npz"
        (first, taken), *others = places.items()
        if others or not (first.merged and first.path.name == name and len(taken) == len(first)):
            self._folder.write_as(name, self._read(places))
        for part in self._emptied:  # all of its games are in merged shards now
            if not part.merged:
                with contextlib.suppress(OSError):  # another time
                    part.path.unlink()
        self._begin, self._filling, self._bytes, self._emptied = self._next, [], 0, []

    def _read(self, places: Mapping[_Part, Sequence[int]]) -> dict[str, NDArray[Any]]:
        """The games of the next shard: each part is opened once, one at a time."""
        try:
            copies = {part: part.read(of_part) for part, of_part in places.items()}
            counts = {part: itertools.count() for part in places}
            return gathered([GameRecord(copies[part], next(counts[part])) for part, _ in self._filling])
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


def _chain(shards: Mapping[Path, Sequence[int]]) -> tuple[list[tuple[int, Path]], list[Path]]:
    """Merged shards, with the first game of each, as far as they follow one another without a gap; and all others."""
    chain: list[tuple[int, Path]] = []
    at = 0
    named = {int(found[1]): path for path in shards if (found := NAME.fullmatch(path.name))}
    for begin, path in sorted(named.items()):
        if begin != at or list(shards[path]) != list(range(begin, begin + len(shards[path]))):
            break
        chain.append((begin, path))
        at += len(shards[path])
    followed = {path for _, path in chain}
    return chain, [path for path in shards if path not in followed]
