"""The records of self-play on disk: a manifest and shards of finished games, each complete or absent; the symmetries
that records declare, which training uses; and positions of several folders, in the order in which they were played.

A shard is an npz file without objects. One row a searched move:

    observation  [rows, features]  as the network saw it       player  int8 [rows]   seat that moved
    legal        bool [rows, actions]                          game    int64 [rows]  the game's number
    policy       float32 [rows, actions], visits, sum 1        move    int16 [rows]  moves made before, forced ones too
    value        float32 [rows, seats]: the game's returns, column k of the k-th seat after the one that moved

and one row a game: `finished` int64 [games], its number; `returns` float32 [games, seats], by seat; against an opponent
also `sides` bool [games, seats], true where the run's own model sat. Where players may resign also

    resigned  int8 [games]            the seat that resigned, or would have if it had been allowed to; -1: none
    checked   bool [games]            no seat was allowed to resign: the game was played to its end
    lowest    float32 [games, seats]  the least that a position was worth to the seat that moved, by its search, where
                                      no position of the game before it was worth less; inf: nowhere

and of games that were played with weights that changed meanwhile `version` str [games], the name of those with which
the game began. A game is in exactly one shard, with all its rows; moves without a choice have no row.

Where all games of a run are there, shards are merged (`merged_records.py`). What is on its way there is in the folder
`.parts`, whole shards each, which readers do not see. Where a run was killed meanwhile, the next run or the next reader
brings it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shlex
import uuid
import zipfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import machine
from gpuinfer.host.files import TORN, RecordFolder, differences, put_whole, sync_folder, unwritable
from gpuinfer.models.record_shards import UNREADABLE, GameArrays, GameRecord, gathered, mapped_arrays, read_shard


@dataclass(frozen=True, slots=True, eq=False)
class Symmetries:
    """Symmetries of positions, each a permutation of features and one of actions, without the identity.

    The turned row is `row[features[k]]`, its policy `policy[actions[k]]`.
    """

    features: NDArray[np.int64]  # [symmetries, features]
    actions: NDArray[np.int64]  # [symmetries, actions]

    def __len__(self) -> int:
        return len(self.actions)

    def plain(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"features": self.features.tolist(), "actions": self.actions.tolist()}


def checked(pairs: Sequence[Any], features: int, actions: int, who: str) -> Symmetries | None:
    """`Game.symmetries` (pairs of permutations of features and of actions) as `Symmetries`; None if there are none.

    Raises `UsageError`, naming `who` declares them, for anything that is no symmetry of such rows.
    """
    for number, pair in enumerate(pairs):
        try:
            rows, moves = (np.asarray(part) for part in pair)
            fits = _permutes(rows, features) and _permutes(moves, actions) and (rows[:actions] == moves).all()
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise UsageError(
                f"{who}: symmetry {number} is no permutation of {features} features with one of {actions} actions that "
                "has the first features, the mask of legal actions, permuted alike. Mend `symmetries`."
            )
    if not len(pairs):
        return None
    whole = [np.array(parts, np.int64) for parts in zip(*pairs, strict=True)]
    return Symmetries(features=whole[0], actions=whole[1])


def _permutes(places: NDArray[Any], count: int) -> bool:
    return places.shape == (count,) and places.dtype.kind in "iu" and set(places.tolist()) == set(range(count))


SCHEMA = "gpuinfer.records/1"
SYMMETRIES = "symmetries.json"  # of the game, where it declares some
PARTS = ".parts"  # in the folder: shards that are to be merged
RANGES = ".ranges"  # in the folder: what nodes of a divided run write there, nothing of which counts yet

log = logging.getLogger(__name__)


class PositionsFolder(RecordFolder):
    """The folder that `--out` names. Raises `UsageError` when it cannot be used."""

    tells: ClassVar[Sequence[str]] = (SYMMETRIES, RANGES)

    def __init__(self, path: Path) -> None:
        super().__init__(path, SCHEMA, ".npz")
        self._known: dict[str, Sequence[int]] = {}  # the games of shards that have been read

    def open(self, settings: Mapping[str, Any], resume: bool) -> set[int]:
        """Claim the folder for these settings (those that decide how a game goes) until `close` or the end of this
        object; returns the games in it. Raises `UsageError` as `claim` does, `WorkError` where it cannot be written.
        """
        if not self.claim(settings, resume):
            return set()
        seen = self.finished()
        return seen | self.bring_back(seen)

    def close(self, games: int) -> None:
        """Write the manifest and release the folder. Raises `WorkError` when it cannot be written.

        All writers must have ended: half-written files of killed workers are removed.
        """
        try:
            self.remove_torn()
            self.note(games=games, shards=sorted(shard.name for shard in self.shards()))
        finally:
            self.release()

    def declare(self, symmetries: Symmetries) -> None:
        """Declare the positions' symmetries. Raises `WorkError` when they cannot be written."""
        content = json.dumps(symmetries.plain(), separators=(",", ":")).encode()
        self.put(SYMMETRIES, lambda file: file.write(content))

    def symmetries(self, features: int, actions: int) -> Symmetries | None:
        """The declared symmetries; None if there are none. Raises `UsageError` for invalid ones."""
        path = self.path / SYMMETRIES
        try:
            found = json.loads(path.read_bytes())
            pairs = list(zip(found["features"], found["actions"], strict=True))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read ({error}). Delete it, or train with --no-symmetries.") from error
        return checked(pairs, features, actions, str(path))

    def finished(self) -> set[int]:
        """The numbers of all games in intact shards; an unreadable shard is set aside. Each shard is read once."""
        return {game for games in self.games_of_shards().values() for game in games}

    def games_of_shards(self) -> dict[Path, Sequence[int]]:
        """The same of each shard that is there."""
        found: dict[Path, Sequence[int]] = {}
        for shard in self.shards():
            try:
                if shard.name not in self._known:
                    with zipfile.ZipFile(shard) as archive:
                        if (damaged := archive.testzip()) is not None:
                            raise ValueError(f"{damaged} is damaged")
                    self._known[shard.name] = read_shard(shard, ["finished"])["finished"].tolist()
                found[shard] = self._known[shard.name]
            except UNREADABLE as error:
                log.warning("%s cannot be read (%s): set aside as .broken, its games are played again", shard, error)
                shard.rename(shard.with_suffix(".broken"))
        return found

    def write(self, arrays: Mapping[str, np.ndarray]) -> Path:
        """Add one shard, which is on disk under its final name when this returns. Raises `WorkError`."""
        return self.write_as(_new_name(), arrays)

    def write_as(self, name: str, arrays: Mapping[str, np.ndarray]) -> Path:
        """The same under this name, in the place of the shard that had it."""

        def save(file: IO[bytes]) -> None:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its `allow_pickle` comes with NumPy 2.1

        self._known.pop(name, None)
        return self.put(name, save)

    def set_apart(self, shard: bytes | Path) -> Path:
        """Put a whole shard among those that are to be merged, unseen by readers: on disk when this returns. A file is
        moved there. Raises `WorkError`.
        """
        target = self.path / PARTS / _new_name()
        try:
            target.parent.mkdir(exist_ok=True)
            if isinstance(shard, bytes):
                put_whole(target, lambda file: file.write(shard))
            else:
                with shard.open("rb") as file:
                    os.fsync(file.fileno())
                shard.rename(target)
                sync_folder(target.parent)
                sync_folder(shard.parent)
        except OSError as error:
            raise unwritable(self.path, error) from error
        return target

    def bring_back(self, seen: Collection[int]) -> set[int]:
        """Let readers see the games of shards that were set apart, those that are not `seen` already: each game once,
        whenever a run was killed. Returns these games. Raises `WorkError`.
        """
        found = set[int]()
        for part in sorted((self.path / PARTS).glob("shard-*.npz")):
            try:
                games = GameArrays(mapped_arrays(part))
            except UNREADABLE as error:
                log.warning("%s cannot be read (%s): set aside as .broken, its games are played again", part, error)
                part.rename(self.path / part.with_suffix(".broken").name)
                continue
            numbers = games.numbers.tolist()
            missing = [place for place, one in enumerate(numbers) if not (one in seen or one in found)]
            try:
                if len(missing) == len(numbers):
                    part.rename(self.path / part.name)
                elif missing:
                    self.write(gathered([GameRecord(games, place) for place in missing]))
                part.unlink(missing_ok=True)
            except OSError as error:
                raise unwritable(self.path, error) from error
            found.update(numbers[place] for place in missing)
        if found:
            with contextlib.suppress(OSError):
                sync_folder(self.path)  # until then a power failure leaves the names in either place
        with contextlib.suppress(OSError):  # there is none
            for torn in (self.path / PARTS).glob(f"*{TORN}"):
                torn.unlink()
            (self.path / PARTS).rmdir()
        return found

    def recover(self) -> None:
        """Bring back what a killed run had set apart, before the folder is read; not where a run is writing to it, or
        it is read-only.
        """
        if not any((self.path / PARTS).glob("shard-*.npz")):
            return
        try:
            self._lock()
        except (UsageError, OSError):
            return
        try:
            self.bring_back(self.finished())
        except (WorkError, OSError) as error:
            log.warning("%s: games that a killed run has kept are not seen: %s", self.path, error)
        finally:
            self.release()


def _new_name() -> str:
    return f"shard-{uuid.uuid4().hex}.npz"


def shards_of(path: Path) -> list[Path]:
    """The shards in order. Raises `UsageError` if there are none."""
    if path.is_file():
        raise UsageError(f"{path} is a file. Give the folder that `gpuinfer selfplay --out` wrote.")
    folder = PositionsFolder(path)
    folder.recover()
    shards = sorted(folder.shards())
    if not shards:
        raise UsageError(
            f"{path} holds no records. Write some with `gpuinfer selfplay --out {shlex.quote(str(path))}`."
        )
    return shards


GAME = ("game", "game_options")  # of a manifest's settings: positions of one game alone go together
MEMORY_SHARE = 0.7  # of what is available now


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a model of these positions must have."""

    features: int
    dtype: str
    actions: int
    seats: int

    def __str__(self) -> str:
        return f"{self.features} features of {self.dtype}, {self.actions} actions and {self.seats} seats"


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Positions, one a row; the module describes the arrays."""

    observation: NDArray[Any]  # [rows, features]
    legal: NDArray[np.bool_]  # [rows, actions]
    policy: NDArray[np.float32]  # [rows, actions]
    value: NDArray[np.float32]  # [rows, seats]
    game: NDArray[np.int64]  # [rows]: numbers are unique across folders

    def __len__(self) -> int:
        return len(self.game)

    def digest(self) -> str:
        """A digest of all positions."""
        made = hashlib.blake2b(digest_size=16)
        for one in fields(self):
            made.update(np.ascontiguousarray(getattr(self, one.name)).data)
        return made.hexdigest()


ARRAYS = ("observation", "legal", "policy", "value")
KEYS = ("game", "move")


def sizes_of(paths: Sequence[Path]) -> Sizes:
    """The sizes in each folder's first shard, which must agree. Raises `UsageError`, as `positions_of` does."""
    found: dict[Path, Sizes] = {}
    told: list[tuple[Path, Mapping[str, Any]]] = []  # the folders that name their game, and the game
    for path in paths:
        shard = next(iter(shards_of(path)))
        part = readable(shard, ARRAYS)
        if any(array.ndim != 2 for array in part.values()):
            raise _misfit(shard, part)
        observation, policy, value = part["observation"], part["policy"], part["value"]
        found[path] = Sizes(observation.shape[1], str(observation.dtype), policy.shape[1], value.shape[1])
        try:
            manifest = PositionsFolder(path).manifest()
        except UsageError as error:
            raise UsageError(str(error).replace("--out", "--records")) from error
        if manifest is not None:
            told.append((path, {name: manifest["settings"].get(name) for name in GAME}))
    for path, game in told[1:]:
        if shown := differences(told[0][1], game):
            raise UsageError(f"{told[0][0]} and {path} hold different games ({shown}). Give records of one game alone.")
    (first, sizes), *others = found.items()
    for path, other in others:
        if other != sizes:
            raise UsageError(
                f"{first} holds positions with {sizes}, and {path} with {other}. Give records of one game alone."
            )
    return sizes


def symmetries_of(paths: Sequence[Path]) -> Symmetries | None:
    """The game's symmetries, from the newest folder that declares some. Raises `UsageError`, as `positions_of` does."""
    sizes = sizes_of(paths)
    found = (PositionsFolder(path).symmetries(sizes.features, sizes.actions) for path in reversed(paths))
    return next((one for one in found if one is not None), None)


def positions_of(paths: Sequence[Path], newest: int | None = None) -> Positions:
    """All positions of these folders, or the newest so many: later folders, later games, later moves.

    Raises `UsageError` for folders without records, unreadable shards, shards that do not match, and for more positions
    than memory holds.
    """
    sizes = sizes_of(paths)
    shards = [(number, shard) for number, path in enumerate(paths) for shard in shards_of(path)]
    keys = [readable(shard, KEYS) for _, shard in shards]
    lengths = [len(one["game"]) for one in keys]
    folder = np.repeat([number for number, _ in shards], lengths)
    game, move = (np.concatenate([one[name] for one in keys]) for name in KEYS)
    order = np.lexsort((move, game, folder))[-newest if newest is not None else None :]
    _refuse_too_many(len(order), sizes)
    starts = np.cumsum([0, *lengths])
    place = np.empty(int(starts[-1]), np.int64)  # of each position in the shards, in the result
    place.fill(-1)
    place[order] = np.arange(len(order))
    arrays: dict[str, NDArray[Any]] = {}
    for (_, shard), start, end in zip(shards, starts[:-1], starts[1:], strict=True):
        wanted = place[start:end] >= 0
        if not wanted.any():
            continue
        part = readable(shard, ARRAYS)
        rows = int(end - start)
        shapes = {
            "observation": ((rows, sizes.features), sizes.dtype),
            "legal": ((rows, sizes.actions), "bool"),
            "policy": ((rows, sizes.actions), "float32"),
            "value": ((rows, sizes.seats), "float32"),
        }
        if any((part[name].shape, str(part[name].dtype)) != one for name, one in shapes.items()):
            raise _misfit(shard, part)
        if not (np.isfinite(part["policy"]).all() and np.isfinite(part["value"]).all()):
            raise UsageError(f"{shard} holds what is no number. Take it out of the folder, and train without it.")
        for name, array in part.items():
            if name not in arrays:
                arrays[name] = np.empty((len(order), array.shape[1]), array.dtype)
            arrays[name][place[start:end][wanted]] = array[wanted]
    _, numbered = np.unique(np.stack([folder[order], game[order]]), axis=1, return_inverse=True)
    return Positions(**arrays, game=numbered.reshape(-1).astype(np.int64))


def readable(shard: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """`read_shard`, for users: raises `UsageError` where it cannot be read."""
    try:
        return read_shard(shard, names)
    except UNREADABLE as error:
        raise UsageError(
            f"{shard} cannot be read ({error}). Run gpuinfer selfplay with --resume to play its games again."
        ) from error


def _misfit(shard: Path, part: Mapping[str, NDArray[Any]]) -> UsageError:
    found = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in part.items())
    return UsageError(
        f"{shard} does not hold what self-play writes, or not of this game: {found}. "
        "Take it out of the folder, or give another with --records."
    )


def _refuse_too_many(rows: int, sizes: Sizes) -> None:
    row = sizes.features * np.dtype(sizes.dtype).itemsize + 5 * sizes.actions + 4 * sizes.seats + 8
    room = int(MEMORY_SHARE * machine.memory_available())
    if rows * row > room:
        raise UsageError(
            f"{rows:,} positions take {rows * row / 2**30:.1f} GiB, and there are {room / 2**30:.1f} GiB for them. "
            f"Train on the newest alone: --window {room // row}."
        )
