"""Groups as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from gpuinfer.errors import UsageError
from gpuinfer.rollouts.record import Group


def require() -> None:
    raise UsageError("--format parquet is not there yet. Use jsonl.")


def write(file: IO[bytes], groups: Iterable[Group]) -> None:
    raise NotImplementedError


def groups_of(journal: Path) -> Iterator[Group]:
    raise NotImplementedError


def numbers(shard: Path) -> set[int]:
    raise NotImplementedError


def read(shard: Path) -> Iterator[Group]:
    raise NotImplementedError
