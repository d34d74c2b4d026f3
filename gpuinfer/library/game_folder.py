"""The records of self-play as a program reads them: one game after another, or all of them as arrays."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import UsageError
from gpuinfer.host.files import MANIFEST, put_whole
from gpuinfer.library.measured import SessionVerdict
from gpuinfer.models.positions import SYMMETRIES, PositionsFolder, readable
from gpuinfer.models.record_shards import OF_GAMES, UNREADABLE

if TYPE_CHECKING:
    from gpuinfer.datasets import SelfPlayDataset
    from gpuinfer.runtime.background_run import BackgroundRun

TEMPORARY = "gpuinfer-games-"
OPEN_SHARDS = 16  # kept in memory: games that lie next to one another by number ended at about the same time
FIGURES = ("wall_s", "status", "progress", "throughput", "batches", "latency_s", "errors", "device")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PlayedGame:
    """One finished game: a row for each move that was searched; moves without a choice have none."""

    number: int
    returns: NDArray[np.float32]  # [seats]: what it brought each seat
    players: NDArray[np.int8]  # [rows]: the seat that moved
    moves: NDArray[np.int16]  # [rows]: moves made before, those without a choice too
    observations: NDArray[Any]  # [rows, features]: what the network saw
    legal: NDArray[np.bool_]  # [rows, actions]
    policies: NDArray[np.float32]  # [rows, actions]: shares of the visits, sum 1
    values: NDArray[np.float32]  # [rows, seats]: the returns, column k of the k-th seat after the one that moved
    more: Mapping[str, Any] = field(default_factory=dict)
    """Against an opponent `sides`, bool [seats], true where the model sat; with `resign` also `resigned`, `checked` and
    `lowest` (`gpuinfer docs records`)."""

    def __len__(self) -> int:
        """The moves that were searched."""
        return len(self.moves)

    def __repr__(self) -> str:
        returns = ", ".join(f"{one:g}" for one in self.returns)
        return f"<PlayedGame {self.number}: {len(self)} searched moves, returns {returns}>"


class GameRecords:
    """The games of one folder, those that `SelfPlay.play` has played: by number, as a sequence of `PlayedGame`.

        len(records), records[7], for game in records: ...
        arrays = records.arrays()              # {"observation": [rows, features], "policy": [rows, actions], ...}
        records.save("folder")                 # as `gpuinfer selfplay --out folder` writes it
        dataset = records.dataset()            # for torch.utils.data.DataLoader
        records.stats(), records.report(), records.verdict()

    Records that were not given a folder lie in a temporary one, which goes with this object.
    """

    def __init__(self, path: str | Path, run: BackgroundRun | None = None, *, new: bool = False) -> None:
        """`path`: a folder that `SelfPlay.play(out=…)`, `save` or `gpuinfer selfplay --out` wrote. Raises `UsageError`
        where there is none, unless it is `new`.
        """
        self.path = Path(path)
        if not new and not self.path.is_dir():
            raise UsageError(f"there is no folder {self.path}. Give one that `SelfPlay.play(out=…)` wrote.")
        self._folder = PositionsFolder(self.path)
        self._folder.recover()
        if not new and not (self.path / MANIFEST).exists() and not any(self._folder.shards()):
            raise UsageError(f"{self.path} holds no records of games. Give a folder that `SelfPlay.play(out=…)` wrote.")
        self._is_temporary = False
        self.run = run  # the one that plays them here, if any
        self._numbers: dict[Path, list[int]] = {}  # the games of each shard; shards never change
        self._shard = functools.lru_cache(OPEN_SHARDS)(_Shard)

    def __reduce__(self) -> tuple[Callable[..., GameRecords], tuple[Any]]:
        """Another process reads the same folder; of a temporary one, which goes with this object, it has a copy."""
        if not self._is_temporary:
            return GameRecords, (self.path,)
        return _temporary_copy, ({one.name: one.read_bytes() for one in self.path.iterdir() if one.is_file()},)

    @classmethod
    def temporary(cls) -> GameRecords:
        """In a folder that goes with the object, or at the end of the program: not with a fork of it."""
        _remove_stale()
        made = cls(tempfile.mkdtemp(prefix=f"{TEMPORARY}{_pid_namespace()}-{os.getpid()}-"), new=True)
        made._is_temporary = True
        weakref.finalize(made, _remove, made.path, os.getpid())
        return made

    def __repr__(self) -> str:
        return f"<GameRecords: {len(self):,} games in {str(self.path)!r}>"

    def __len__(self) -> int:
        return len(self._shard_of())

    def __iter__(self) -> Iterator[PlayedGame]:
        """The games that are there now, by number."""
        places = self._shard_of()
        return (self._shard(places[number]).game(number) for number in sorted(places))

    def __getitem__(self, number: int) -> PlayedGame:
        places = self._shard_of()
        if number not in places:
            raise IndexError(f"there is no game {number} among these {len(places)}")
        return self._shard(places[number]).game(number)

    def _shard_of(self) -> dict[int, Path]:
        """Where each game is. A shard that is new is looked at; one that was merged with others is gone."""
        there = self.shards()
        self._numbers = {shard: numbers for shard, numbers in self._numbers.items() if shard in there}
        for shard in there - self._numbers.keys():
            self._numbers[shard] = readable(shard, ["finished"])["finished"].tolist()
        return {number: shard for shard, numbers in self._numbers.items() for number in numbers}

    def shards(self) -> set[Path]:
        """The files that are there now."""
        return set(self._folder.shards())

    def unseen(self, seen: set[Path]) -> Iterator[PlayedGame]:
        """The games of shards that are not among these, which then are."""
        for shard in sorted(self.shards() - seen):
            seen.add(shard)
            opened = _Shard(shard)
            yield from map(opened.game, opened.numbers)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """All records as the files hold them (`gpuinfer docs records`): arrays with a row for each searched move, by
        game and move, and those with a row for each game, by number. Raises `UsageError` where there are none.
        """
        opened = [_Shard(shard) for shard in dict.fromkeys(self._shard_of().values())]
        if not opened:
            raise UsageError(f"{self.path} holds no games. Play some: games.play(100).")
        whole = {name: np.concatenate([one.arrays[name] for one in opened]) for name in opened[0].arrays}
        moves, games = np.lexsort((whole["move"], whole["game"])), np.argsort(whole["finished"])
        return {name: array[games if name in OF_GAMES else moves] for name, array in whole.items()}

    def positions(self) -> NDArray[Any]:
        """One structured row for each searched move, [rows], with fields such as `observation` and `policy`."""
        columns = {name: array for name, array in self.arrays().items() if name not in OF_GAMES}
        kind = np.dtype([(name, array.dtype, array.shape[1:]) for name, array in columns.items()])
        made = np.empty(len(columns["game"]), kind)
        for name, array in columns.items():
            made[name] = array
        return made

    def dataset(self) -> SelfPlayDataset:
        """A `torch.utils.data.Dataset` of searched moves, each a dict of tensors."""
        from gpuinfer.datasets import SelfPlayDataset

        made = SelfPlayDataset(self.path)
        weakref.finalize(made, lambda records: None, self)  # a temporary folder stays as long as the dataset
        return made

    def save(self, folder: str | Path) -> GameRecords:
        """Copy the records into this folder, as `gpuinfer selfplay --out` writes them: `play(out=folder, resume=True)`
        goes on with them. Returns those. Raises `UsageError` where the folder holds records already.
        """
        target = Path(folder)
        if target.exists() and target.resolve() == self.path.resolve():
            return self
        kept = PositionsFolder(target)
        if kept.manifest() is not None or any(kept.shards()):
            raise UsageError(f"{target} holds records already. Save these to another folder.")
        try:
            target.mkdir(parents=True, exist_ok=True)
            shards = [shard.name for shard in self._folder.shards()]
            for name in (*shards, SYMMETRIES, MANIFEST):  # the manifest last: then all is there
                if (source := self.path / name).is_file():
                    with source.open("rb") as content:
                        put_whole(target / name, lambda file, content=content: shutil.copyfileobj(content, file))  # type: ignore[misc]
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}. Save to another folder.") from error
        return GameRecords(target, self.run)

    def report(self) -> dict[str, Any]:
        """All that was measured while they were played, as `--json` of the command writes it."""
        if self.run is None:
            raise UsageError(f"the records of {self.path} were not played here: there is no report.")
        return self.run.report()

    def stats(self) -> dict[str, Any]:
        """The figures of the run: games and rates, batches, latency in seconds, errors."""
        return main_figures(self.report())

    def verdict(self) -> SessionVerdict:
        """Where the time went, what held the run back, and what to change."""
        return SessionVerdict(self.report())


def main_figures(report: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a report that people ask for first."""
    return {name: report[name] for name in FIGURES}


class _Shard:
    """One file in memory, its rows by game and move."""

    def __init__(self, path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as file:
                self.arrays: dict[str, NDArray[Any]] = {name: file[name] for name in file.files}
        except UNREADABLE as error:
            raise UsageError(f"{path} cannot be read ({error}). play(resume=True) plays its games again.") from error
        self.numbers: list[int] = self.arrays["finished"].tolist()
        self._place = {number: place for place, number in enumerate(self.numbers)}
        self._order = np.lexsort((self.arrays["move"], self.arrays["game"]))
        games = self.arrays["game"][self._order]
        self._starts, self._ends = (np.searchsorted(games, self.numbers, side) for side in ("left", "right"))

    def game(self, number: int) -> PlayedGame:
        place = self._place[number]
        rows = self._order[self._starts[place] : self._ends[place]]
        one = {name: array[place if name in OF_GAMES else rows] for name, array in self.arrays.items()}
        more = {name: one[name] for name in OF_GAMES[2:] if name in one}
        return PlayedGame(
            number=number,
            returns=one["returns"],
            players=one["player"],
            moves=one["move"],
            observations=one["observation"],
            legal=one["legal"],
            policies=one["policy"],
            values=one["value"],
            more=more,
        )


def _temporary_copy(files: Mapping[str, bytes]) -> GameRecords:
    """Records that were pickled, in a temporary folder of this process."""
    made = GameRecords.temporary()
    for name, content in files.items():
        (made.path / name).write_bytes(content)
    return made


@functools.cache
def _remove_stale() -> None:
    """Remove temporary folders of this user's processes that are gone without having done so (`kill -9`); once."""
    ours = f"{TEMPORARY}{_pid_namespace()}-"
    for folder in Path(tempfile.gettempdir()).glob(f"{ours}*"):
        process = folder.name.removeprefix(ours).partition("-")[0]
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            with contextlib.suppress(OSError):
                if folder.lstat().st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
        except (OSError, ValueError, OverflowError):
            continue  # it runs, or the folder is of something else


@functools.cache
def _pid_namespace() -> str:
    """Where numbers of processes hold: containers that share a folder of temporary files may each have their own."""
    try:
        return "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid"))) or "0"
    except OSError:  # there are none, such as on a Mac
        return "0"


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
