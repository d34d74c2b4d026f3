"""Searched positions of several folders of records, in the order in which they were played."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.errors import UsageError
from gpuinfer.host import machine
from gpuinfer.host.records import differences
from gpuinfer.positions.records import UNREADABLE, Folder, read, shards_of
from gpuinfer.positions.symmetries import Symmetries

GAME = ("game", "game_options")  # of a manifest's settings: positions of one game alone go together
MEMORY_SHARE = 0.7  # of what is available now


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model of these positions must take and answer."""

    features: int
    dtype: str
    actions: int
    seats: int

    def __str__(self) -> str:
        return f"{self.features} features of {self.dtype}, {self.actions} actions and {self.seats} seats"


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """One row a position; see `records` for what is in them."""

    observation: NDArray[Any]  # [rows, features]
    legal: NDArray[np.bool_]  # [rows, actions]
    policy: NDArray[np.float32]  # [rows, actions]
    value: NDArray[np.float32]  # [rows, seats]
    game: NDArray[np.int64]  # [rows]: each game of each folder has a number of its own

    def __len__(self) -> int:
        return len(self.game)

    def digest(self) -> str:
        """Of all that is in them: another one means other positions."""
        made = hashlib.blake2b(digest_size=16)
        for one in fields(self):
            made.update(np.ascontiguousarray(getattr(self, one.name)).data)
        return made.hexdigest()


ARRAYS = ("observation", "legal", "policy", "value")
KEYS = ("game", "move")


def sizes_of(paths: Sequence[Path]) -> Sizes:
    """Of the first shard of each folder, which must agree. Raises `UsageError`, as `positions_of` does."""
    found = {path: _sizes(next(iter(shards_of(path)))) for path in paths}
    _refuse_games_that_differ(paths)
    (first, sizes), *others = found.items()
    for path, other in others:
        if other != sizes:
            raise UsageError(
                f"{first} holds positions with {sizes}, and {path} with {other}. Give records of one game alone."
            )
    return sizes


def symmetries_of(paths: Sequence[Path]) -> Symmetries | None:
    """Those of their game, from the newest folder that says some. Raises `UsageError`, as `positions_of` does."""
    sizes = sizes_of(paths)
    found = (Folder(path).symmetries(sizes.features, sizes.actions) for path in reversed(paths))
    return next((one for one in found if one is not None), None)


def positions_of(paths: Sequence[Path], newest: int | None = None) -> Positions:
    """All positions of these folders, or so many of the newest: of later folders, later games, later moves.

    Raises `UsageError` for folders without records, shards that cannot be read or do not fit, and for more positions
    than there is memory for.
    """
    sizes = sizes_of(paths)
    shards = [(number, shard) for number, path in enumerate(paths) for shard in shards_of(path)]
    keys = [_read(shard, KEYS) for _, shard in shards]
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
        part = _read(shard, ARRAYS)
        _refuse_misfit(shard, part, int(end - start), sizes)
        for name, array in part.items():
            if name not in arrays:
                arrays[name] = np.empty((len(order), array.shape[1]), array.dtype)
            arrays[name][place[start:end][wanted]] = array[wanted]
    _, numbered = np.unique(np.stack([folder[order], game[order]]), axis=1, return_inverse=True)
    return Positions(**arrays, game=numbered.reshape(-1).astype(np.int64))


def _read(shard: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    try:
        return read(shard, names)
    except UNREADABLE as error:
        raise UsageError(
            f"{shard} cannot be read ({error}). Run gpuinfer selfplay with --resume to play its games again."
        ) from error


def _sizes(shard: Path) -> Sizes:
    part = _read(shard, ARRAYS)
    if any(array.ndim != 2 for array in part.values()):
        raise _misfit(shard, part)
    observation, policy, value = part["observation"], part["policy"], part["value"]
    return Sizes(observation.shape[1], str(observation.dtype), policy.shape[1], value.shape[1])


def _refuse_misfit(shard: Path, part: Mapping[str, NDArray[Any]], rows: int, sizes: Sizes) -> None:
    wanted = {
        "observation": ((rows, sizes.features), sizes.dtype),
        "legal": ((rows, sizes.actions), "bool"),
        "policy": ((rows, sizes.actions), "float32"),
        "value": ((rows, sizes.seats), "float32"),
    }
    if any((part[name].shape, str(part[name].dtype)) != told for name, told in wanted.items()):
        raise _misfit(shard, part)
    if not (np.isfinite(part["policy"]).all() and np.isfinite(part["value"]).all()):
        raise UsageError(f"{shard} holds what is no number. Take it out of the folder, and train without it.")


def _misfit(shard: Path, part: Mapping[str, NDArray[Any]]) -> UsageError:
    found = ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in part.items())
    return UsageError(
        f"{shard} does not hold what self-play writes, or not of this game: {found}. "
        "Take it out of the folder, or give another with --records."
    )


def _refuse_games_that_differ(paths: Sequence[Path]) -> None:
    told = list(_games(paths))
    for path, game in told[1:]:
        if shown := differences(told[0][1], game):
            raise UsageError(f"{told[0][0]} and {path} hold different games ({shown}). Give records of one game alone.")


def _games(paths: Sequence[Path]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The folders that say which game they hold, and what they say."""
    for path in paths:
        try:
            manifest = Folder(path).manifest()
        except UsageError as error:
            raise UsageError(str(error).replace("--out", "--records")) from error
        if manifest is not None:
            yield path, {name: manifest["settings"].get(name) for name in GAME}


def _refuse_too_many(rows: int, sizes: Sizes) -> None:
    row = sizes.features * np.dtype(sizes.dtype).itemsize + 5 * sizes.actions + 4 * sizes.seats + 8
    room = int(MEMORY_SHARE * machine.memory_available())
    if rows * row > room:
        raise UsageError(
            f"{rows:,} positions take {rows * row / 2**30:.1f} GiB, and there are {room / 2**30:.1f} GiB for them. "
            f"Train on the newest alone: --window {room // row}."
        )
