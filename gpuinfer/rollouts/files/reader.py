"""Reads the records of rollouts, also of a run that is on or was killed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.host.files import MANIFEST, RecordFolder
from gpuinfer.rollouts.files import shards
from gpuinfer.rollouts.record import Group


def header(folder: str | Path) -> Mapping[str, Any]:
    """The settings that decided the records, and `format`. Raises `UsageError` where there are none."""
    manifest = RecordFolder(Path(folder), shards.SCHEMA, "").manifest()
    if manifest is None:
        raise UsageError(f"{folder} holds no rollouts: there is no {MANIFEST} in it. Name what --out named.")
    settings: Mapping[str, Any] = manifest["settings"]
    return settings


def read(folder: str | Path) -> Iterator[Group]:
    """All groups, each once, in the order in which they ended; one is in memory at a time.

    Of a run that is on, those that it has written so far. Raises `UsageError` where there are none, and for a shard
    that is damaged.
    """
    header(folder)
    path = Path(folder)
    for number in sorted({*shards.list_shards(path), *shards.list_journals(path)}):
        yield from _groups(path, number)


def _groups(folder: Path, number: int) -> Iterator[Group]:
    """The groups of a shard, or of the journal that will become the shard: the run may seal the journal meanwhile."""
    try:
        journal = (folder / shards.journal_name(number)).open("rb")
    except FileNotFoundError:
        journal = None
    shard = shards.list_shards(folder).get(number)
    if shard is not None:
        if journal is not None:
            journal.close()
        if shard.suffix == ".parquet":
            from gpuinfer.rollouts.files import parquet

            yield from parquet.read_groups(shard)
        else:
            yield from _of_lines(shard)
    elif journal is not None:
        with journal:
            for line in journal:
                if (group := shards.decode(line)) is None:
                    return
                yield group


def _of_lines(shard: Path) -> Iterator[Group]:
    with shard.open("rb") as file:
        for row, line in enumerate(file, 1):
            if (group := shards.decode(line)) is None:
                raise UsageError(
                    f"{shard}, line {row}: this is no group. Go on with the run (--resume): it is played again."
                )
            yield group
